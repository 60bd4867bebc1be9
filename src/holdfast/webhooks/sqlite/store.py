"""Webhook endpoints in a SQLite file, ``webhooks.db`` in the state directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import apsw
import msgspec

from holdfast.drivers.sqlite.database import Handle, SqliteSettings, open_and_migrate
from holdfast.drivers.sqlite.file_copy import StateFile
from holdfast.drivers.sqlite.threads import WorkerThreads
from holdfast.drivers.statements import migrations, statements
from holdfast.errors import NotFound, ServerBusy
from holdfast.webhooks.contract import DELIVERIES_KEPT_PER_ENDPOINT, Delivery, WebhookEndpoint

T = TypeVar("T")
SQL = statements("holdfast.webhooks.sqlite")
WEBHOOKS = StateFile(
    name="webhooks.db",
    migrations=migrations("holdfast.webhooks.sqlite"),
    counts={"endpoints": "SELECT count(*) FROM endpoint"},
)
"""The file in a state directory and in its backups."""


class SqliteEndpoints:
    """See ``contract.WebhookEndpoints``. One thread owns the file.

    ``server`` is the permanent name of the server that the file belongs to.
    """

    def __init__(self, threads: WorkerThreads, server: str) -> None:
        self._threads = threads
        self.server = server
        self._version = 1
        self._changed = asyncio.Event()

    @classmethod
    async def open(
        cls, path: Path, settings: SqliteSettings | None = None, vfs: str | None = None
    ) -> SqliteEndpoints:
        settings = settings or SqliteSettings(readers=1, cache_bytes=4 << 20)
        connection = await asyncio.to_thread(
            open_and_migrate, path, settings, WEBHOOKS.migrations, vfs
        )
        handle = Handle(path, settings, vfs, write=True)
        handle.adopt(connection)
        server = str(connection.execute(SQL["server"]).get)
        return cls(
            WorkerThreads("webhooks-writer", [handle], settings.writes_waiting_max, _busy), server
        )

    @property
    def version(self) -> int:
        return self._version

    async def stored_version(self) -> int:
        return self._version

    async def add(self, endpoint: WebhookEndpoint) -> None:
        await self._transact(
            lambda db: db.execute(SQL["add"], msgspec.structs.astuple(endpoint)).fetchall()
        )
        self._has_changed()

    async def get(self, endpoint_id: str) -> WebhookEndpoint:
        def read(db: apsw.Connection) -> WebhookEndpoint:
            row = db.execute(SQL["get"], (endpoint_id,)).fetchone()
            if row is None:
                raise NotFound(f"no webhook endpoint {endpoint_id}")
            return WebhookEndpoint(*row)

        return await self._transact(read)

    async def all(self) -> Sequence[WebhookEndpoint]:
        return await self._transact(
            lambda db: [WebhookEndpoint(*row) for row in db.execute(SQL["all"])]
        )

    async def disable(self, endpoint_id: str, why: str, at: str) -> None:
        def disable(db: apsw.Connection) -> None:
            db.execute(SQL["disable"], (endpoint_id, why, at))

        await self._change(endpoint_id, disable)

    async def enable(self, endpoint_id: str) -> None:
        def enable(db: apsw.Connection) -> None:
            db.execute(SQL["enable"], (endpoint_id,))

        await self._change(endpoint_id, enable)

    async def changed(self, version: int) -> None:
        while self._version == version:
            await self._changed.wait()

    async def remove(self, endpoint_id: str) -> None:
        def remove(db: apsw.Connection) -> None:
            db.execute(SQL["forget"], (endpoint_id,))
            db.execute(SQL["bury"], (endpoint_id,))
            db.execute(SQL["remove"], (endpoint_id,))

        await self._change(endpoint_id, remove)

    async def removed(self, endpoint_id: str) -> bool:
        return bool(await self._transact(lambda db: db.execute(SQL["removed"], (endpoint_id,)).get))

    async def log(self, delivery: Delivery) -> None:
        def write(db: apsw.Connection) -> None:
            db.execute(SQL["log"], msgspec.structs.astuple(delivery))
            db.execute(SQL["trim"], (delivery.endpoint_id, DELIVERIES_KEPT_PER_ENDPOINT))

        await self._transact(write)

    async def deliveries(self, endpoint_id: str, limit: int = 100) -> Sequence[Delivery]:
        values = (endpoint_id, limit)
        return await self._transact(
            lambda db: [Delivery(*row) for row in db.execute(SQL["deliveries"], values)]
        )

    async def last_seconds(self) -> dict[str, float]:
        return await self._transact(lambda db: dict(db.execute(SQL["last_seconds"])))

    async def close(self) -> None:
        await self._threads.close()

    async def _change(self, endpoint_id: str, change: Callable[[apsw.Connection], None]) -> None:
        def work(db: apsw.Connection) -> None:
            change(db)
            if not db.changes():
                raise NotFound(f"no webhook endpoint {endpoint_id}")

        await self._transact(work)
        self._has_changed()

    def _has_changed(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _transact(self, work: Callable[[apsw.Connection], T]) -> T:
        return await self._threads.transact(work)


def _busy() -> ServerBusy:
    return ServerBusy("too many writes wait for the webhooks' file", retry_after_seconds=1.0)
