"""Dead letters in PostgreSQL. An event that several nodes cannot use is there once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast import telemetry
from holdfast.drivers.postgres_database import Database, storable
from holdfast.drivers.postgres_schema import migrate
from holdfast.drivers.statements import statements
from holdfast.fanout.dead_letters.contract import DeadLetter, DeadLetterAlarm, DeadLetterSettings
from holdfast.message import SEQUENCE_MAX

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
        letters = cls(database, settings)
        telemetry.dead_letters_kept(sum((await letters.counts()).values()))
        return letters

    async def put(self, letter: DeadLetter) -> None:
        texts = storable(letter.reason), storable(letter.message)
        whose = storable(letter.tenant), storable(letter.chat_id)
        async with self._database.committing("be changed") as db:
            put = await db.fetchval(
                SQL["put"], letter.shard, letter.offset, *texts, letter.data, letter.at, *whose
            )
            if put is not None:
                await db.execute(SQL["trim"], self._settings.max_letters)
            kept = await db.fetchval(SQL["count"])
        if put is not None:
            self._alarm.count(letter, kept)

    async def read(self, limit: int, before: int | None = None) -> Sequence[DeadLetter]:
        below = SEQUENCE_MAX if before is None else before
        async with self._database.connection("be read") as db:
            return [DeadLetter(*row) for row in await db.fetch(SQL["read"], limit, below)]

    async def get(self, number: int) -> DeadLetter | None:
        async with self._database.connection("be read") as db:
            row = await db.fetchrow(SQL["get"], number)
        return DeadLetter(*row) if row is not None else None

    async def counts(self) -> Mapping[str, int]:
        async with self._database.connection("be read") as db:
            return dict(await db.fetch(SQL["counts"]))

    async def remove(self, numbers: Sequence[int]) -> int:
        async with self._database.committing("be changed") as db:
            removed = await db.fetchval(SQL["remove"], list(numbers))
            kept = await db.fetchval(SQL["count"])
        telemetry.dead_letters_kept(kept)
        return int(removed)

    async def forget_user(self, user_id: str) -> None:
        async with self._database.committing("be changed") as db:
            await db.execute(SQL["forget_user"], user_id.encode())
