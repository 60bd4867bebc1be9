"""Revocations in PostgreSQL: one transaction per change, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import astuple, replace

from holdfast.access.revocations.contract import ENTRIES_MAX, Revocation, full, merged, unknown
from holdfast.clock import Clock
from holdfast.drivers.postgres_database import Database
from holdfast.drivers.postgres_schema import migrate
from holdfast.drivers.statements import statements

PACKAGE = "holdfast.access.revocations.postgres"
SQL = statements(PACKAGE)


class PostgresRevocations:
    """See ``contract.Revocations``. ``open`` makes one."""

    def __init__(self, database: Database, clock: Clock, entries_max: int = ENTRIES_MAX) -> None:
        self.entries_max = entries_max
        self._database = database
        self._clock = clock

    @classmethod
    async def open(
        cls, database: Database, clock: Clock, entries_max: int = ENTRIES_MAX
    ) -> PostgresRevocations:
        await migrate(database, "revocations", PACKAGE)
        return cls(database, clock, entries_max)

    async def add(self, entry: Revocation) -> Revocation:
        async with self._database.committing("be changed") as db:
            await db.execute(SQL["change"])
            await db.execute(SQL["forget_ended"], self._clock.now())
            row = await db.fetchrow(SQL["by_key"], *astuple(entry.key))
            if row is not None:
                stored = merged(Revocation(*row), entry)
                await db.execute(
                    SQL["replace"],
                    stored.number,
                    stored.user_id,
                    stored.issued_before,
                    stored.made_at,
                    stored.ends_at,
                )
                return stored
            if await db.fetchval(SQL["count"]) >= self.entries_max:
                raise full(self.entries_max)
            stored = replace(entry, number=await db.fetchval(SQL["give_number"]))
            await db.execute(SQL["add"], *astuple(stored), stored.key.user_id)
            return stored

    async def remove(self, number: int) -> Revocation:
        async with self._database.committing("be changed") as db:
            await db.execute(SQL["change"])
            await db.execute(SQL["forget_ended"], self._clock.now())
            row = await db.fetchrow(SQL["remove"], number)
            if row is None:
                raise unknown(number)
            return Revocation(*row)

    async def all(self) -> Sequence[Revocation]:
        async with self._database.connection("be read") as db:
            rows = await db.fetch(SQL["all"], self._clock.now())
        return [Revocation(*row) for row in rows]

    async def version(self) -> int:
        async with self._database.connection("be read") as db:
            return int(await db.fetchval(SQL["version"]))
