"""The database of the rules: its statements and locks, and the rule reader.

``PostgresRuleReader`` is what a node follows: the primary, or a replica that may lag.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from holdfast.drivers.postgres_database import Database, DatabaseUse, PostgresSettings
from holdfast.drivers.statements import statements
from holdfast.errors import Unavailable
from holdfast.limits.rule_changes import RuleChange
from holdfast.limits.rules import RuleSnapshot
from holdfast.limits.rulestore.contract import CHANGES_PER_READ, RuleLogHead
from holdfast.limits.rulestore.serialization import change_of, snapshot_of

SQL = statements("holdfast.limits.rulestore.postgres")
WRITERS_LOCK = 0x686F6C64_6C696D01
HEARTBEAT_LOCK = 0x686F6C64_6C696D02
SCHEMA_LOCK = 0x686F6C64_6C696D03
RULES = DatabaseUse("limits", "rules")


class PostgresRuleReader:
    """``contract.RuleReader`` on any PostgreSQL that has the tables.

    ``async with`` closes its connections.
    """

    def __init__(self, settings: PostgresSettings) -> None:
        self.database = Database(settings, RULES)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.database.close()

    async def check(self) -> None:
        """BadSetting if it is reachable and cannot store rules."""
        with suppress(Unavailable):
            async with self.database.connection("be reached"):
                pass

    async def head(self) -> RuleLogHead:
        async with self.database.connection("be read") as db:
            return RuleLogHead(*await db.fetchrow(SQL["head"]))

    async def changes_after(self, seq: int, limit: int = CHANGES_PER_READ) -> Sequence[RuleChange]:
        return [change_of(row[0]) for row in await self.fetch("changes_after", seq, limit)]

    async def snapshot(self) -> RuleSnapshot:
        async with (
            self.database.connection("be read") as db,
            db.transaction(isolation="repeatable_read", readonly=True),
        ):
            head = RuleLogHead(*await db.fetchrow(SQL["head"]))
            return snapshot_of(
                head.epoch,
                head.seq,
                head.store,
                (row[0] for row in await db.fetch(SQL["all_rules"])),
            )

    async def fetch(self, statement: str, *values: Any) -> list[Any]:
        async with self.database.connection("be read") as db:
            rows: list[Any] = await db.fetch(SQL[statement], *values)
            return rows
