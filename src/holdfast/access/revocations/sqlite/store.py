"""Revocations in one SQLite file, ``access.db`` in the state directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import apsw
from msgspec.structs import asdict, replace

from holdfast.access.revocations.contract import ENTRIES_MAX, Revocation, full, merged, unknown
from holdfast.clock import Clock
from holdfast.drivers.sqlite.database import Handle, SqliteSettings, open_and_migrate
from holdfast.drivers.sqlite.file_copy import StateFile
from holdfast.drivers.sqlite.threads import WorkerThreads
from holdfast.drivers.statements import migrations, statements
from holdfast.errors import ServerBusy

T = TypeVar("T")
SQL = statements("holdfast.access.revocations.sqlite")
ACCESS = StateFile(
    name="access.db",
    migrations=migrations("holdfast.access.revocations.sqlite"),
    counts={"revocations": SQL["count"]},
    kept=True,
)
"""The file as backups see it."""


class SqliteRevocations:
    """See ``contract.Revocations``. One thread owns the file; one process at a time."""

    def __init__(
        self, threads: WorkerThreads, clock: Clock, entries_max: int = ENTRIES_MAX
    ) -> None:
        self.entries_max = entries_max
        self._threads = threads
        self._clock = clock

    @classmethod
    async def open(
        cls, path: Path, clock: Clock, vfs: str | None = None, entries_max: int = ENTRIES_MAX
    ) -> SqliteRevocations:
        """OperatorErrors say why the file cannot be used."""
        settings = SqliteSettings(readers=1, cache_bytes=4 << 20)
        connection = await asyncio.to_thread(
            open_and_migrate, path, settings, ACCESS.migrations, vfs
        )
        handle = Handle(path, settings, vfs, write=True)
        handle.adopt(connection)
        threads = WorkerThreads("access-writer", [handle], settings.writes_waiting_max, _busy)
        return cls(threads, clock, entries_max)

    async def close(self) -> None:
        await self._threads.close()

    async def add(self, entry: Revocation) -> Revocation:
        def work(db: apsw.Connection) -> Revocation:
            self._forget_ended(db)
            row = db.execute(SQL["by_key"], asdict(entry.key)).fetchone()
            db.execute(SQL["changed"])
            if row is not None:
                stored = merged(Revocation(*row), entry)
                db.execute(SQL["replace"], asdict(stored))
                return stored
            if db.execute(SQL["count"]).get >= self.entries_max:
                raise full(self.entries_max)
            number = db.execute(SQL["add"], {**asdict(entry), "about": entry.key.user_id}).get
            return replace(entry, number=number)

        return await self._threads.transact(work)

    async def remove(self, number: int) -> Revocation:
        def work(db: apsw.Connection) -> Revocation:
            self._forget_ended(db)
            row = db.execute(SQL["remove"], {"number": number}).fetchone()
            if row is None:
                raise unknown(number)
            db.execute(SQL["changed"])
            return Revocation(*row)

        return await self._threads.transact(work)

    async def all(self) -> Sequence[Revocation]:
        now = self._clock.now()
        return await self._read(
            lambda db: [Revocation(*row) for row in db.execute(SQL["all"], {"now": now})]
        )

    async def version(self) -> int:
        return await self._read(lambda db: int(db.execute(SQL["version"]).get))

    def _forget_ended(self, db: apsw.Connection) -> None:
        db.execute(SQL["forget_ended"], {"now": self._clock.now()})

    async def _read(self, work: Callable[[apsw.Connection], T]) -> T:
        def snapshot(handle: Handle) -> T:
            with handle.snapshot() as db:
                return work(db)

        return await self._threads.do(snapshot)


def _busy() -> ServerBusy:
    return ServerBusy(
        "too many changes of revocations are waiting; try again", retry_after_seconds=1.0
    )
