"""Dead letters in PostgreSQL. An event that several nodes cannot use is there once."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.drivers.postgres_database import Database, storable
from holdfast.drivers.postgres_schema import migrate
from holdfast.drivers.statements import statements
from holdfast.fanout.dead_letters.contract import DeadLetter, DeadLetterAlarm, DeadLetterSettings

PACKAGE = "holdfast.fanout.dead_letters.postgres"
SQL = statements(PACKAGE)


class PostgresDeadLetters:
    """See ``contract.DeadLetters``. ``open`` makes one."""

    def __init__(self, database: Database, settings: DeadLetterSettings | None = None) -> None:
        self._settings = settings or DeadLetterSettings()
        self._database = database
        self._alarm = DeadLetterAlarm(self._settings)

    @classmethod
    async def open(
        cls, database: Database, settings: DeadLetterSettings | None = None
    ) -> PostgresDeadLetters:
        await migrate(database, "dead_letters", PACKAGE)
        return cls(database, settings)

    async def put(self, letter: DeadLetter) -> None:
        texts = storable(letter.reason), storable(letter.message)
        async with self._database.committing("be changed") as db:
            put = await db.fetchval(
                SQL["put"], letter.shard, letter.offset, *texts, letter.data, letter.at
            )
            if put is not None:
                await db.execute(SQL["trim"], self._settings.max_letters)
            kept = await db.fetchval(SQL["count"])
        if put is not None:
            self._alarm.count(letter, kept)

    async def read(self, limit: int) -> Sequence[DeadLetter]:
        async with self._database.connection("be read") as db:
            return [DeadLetter(*row) for row in await db.fetch(SQL["read"], limit)]
