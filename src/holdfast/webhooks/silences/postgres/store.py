"""Silences in PostgreSQL: a row for each alert."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.drivers.postgres_database import Database, storable
from holdfast.drivers.postgres_schema import migrate
from holdfast.drivers.statements import statements
from holdfast.telemetry.notices import Silence

PACKAGE = "holdfast.webhooks.silences.postgres"
SQL = statements(PACKAGE)


class PostgresSilences:
    """See ``contract.SharedSilences``. ``open`` makes one."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    async def open(cls, database: Database) -> PostgresSilences:
        await migrate(database, "silences", PACKAGE)
        return cls(database)

    async def read(self) -> Sequence[Silence]:
        async with self._database.connection("be read") as db:
            return [Silence(*row) for row in await db.fetch(SQL["read"])]

    async def put(self, silence: Silence) -> None:
        reason, by = storable(silence.reason), storable(silence.by)
        async with self._database.committing("be changed") as db:
            await db.execute(SQL["put"], silence.alert, silence.until, reason, by)

    async def remove(self, alert: str) -> None:
        async with self._database.committing("be changed") as db:
            await db.execute(SQL["remove"], alert)
