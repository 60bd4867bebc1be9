"""Dead letters in a table of ``chats.db``, written by the store's own writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import apsw
from msgspec import structs
from msgspec.json import encode

from holdfast import telemetry
from holdfast.drivers.statements import statements
from holdfast.fanout.dead_letters.contract import DeadLetter, DeadLetterAlarm, DeadLetterSettings
from holdfast.message import SEQUENCE_MAX
from holdfast.store.sqlite import SqliteStore
from holdfast.store.sqlite.append import WriteResult
from holdfast.store.sqlite.database import Handle

T = TypeVar("T")
SQL = statements("holdfast.fanout.dead_letters.sqlite")


class SqliteDeadLetters:
    """See ``contract.DeadLetters``. ``open`` makes one; it needs the store open."""

    def __init__(self, store: SqliteStore, settings: DeadLetterSettings | None = None) -> None:
        self._store = store
        self._settings = settings or DeadLetterSettings()
        self._alarm = DeadLetterAlarm(self._settings)

    @classmethod
    async def open(
        cls, store: SqliteStore, settings: DeadLetterSettings | None = None
    ) -> SqliteDeadLetters:
        letters = cls(store, settings)
        telemetry.dead_letters_kept(sum((await letters.counts()).values()))
        return letters

    async def put(self, letter: DeadLetter) -> None:
        row = structs.asdict(letter)
        for name in ("reason", "message", "tenant", "chat_id"):
            row[name] = row[name].encode("utf-8", "replace").decode()

        def put(db: apsw.Connection) -> int | None:
            if db.execute(SQL["put"], row).get is None:
                return None
            db.execute(SQL["trim"], {"kept": self._settings.max_letters})
            return int(db.execute(SQL["count"]).get)

        if (kept := await self._change(put)) is not None:
            self._alarm.count(letter, kept)

    async def read(self, limit: int, before: int | None = None) -> Sequence[DeadLetter]:
        asked = {"limit": limit, "before": SEQUENCE_MAX if before is None else before}
        rows = await self._read(lambda db: db.execute(SQL["read"], asked).fetchall())
        return [_letter(row) for row in rows]

    async def get(self, number: int) -> DeadLetter | None:
        rows = await self._read(lambda db: db.execute(SQL["get"], {"number": number}).fetchall())
        return _letter(rows[0]) if rows else None

    async def counts(self) -> Mapping[str, int]:
        rows: list[tuple[Any, ...]]
        rows = await self._read(lambda db: db.execute(SQL["counts"]).fetchall())
        return {reason: count for reason, count in rows}  # noqa: C416

    async def remove(self, numbers: Sequence[int]) -> int:
        def remove(db: apsw.Connection) -> tuple[int, int]:
            named = {"numbers": encode(numbers).decode()}
            removed = len(db.execute(SQL["remove"], named).fetchall())
            return removed, db.execute(SQL["count"]).get

        removed, kept = await self._change(remove, forgets=True)
        telemetry.dead_letters_kept(kept)
        return removed

    async def forget_user(self, user_id: str) -> None:
        name = {"name": user_id.encode()}
        await self._change(lambda db: db.execute(SQL["forget_user"], name).fetchall(), forgets=True)

    async def _change(self, work: Callable[[apsw.Connection], T], *, forgets: bool = False) -> T:
        def change(handle: Handle) -> WriteResult[T]:
            with handle.transaction() as connection:
                return WriteResult(work(connection), forgets=forgets)

        return await self._store.write(change)

    async def _read(self, work: Callable[[apsw.Connection], T]) -> T:
        return await self._store.read(work)


def _letter(row: tuple[Any, ...]) -> DeadLetter:
    return DeadLetter(*row)
