"""The primary: one transaction per change, and everything an operator reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import structs

from holdfast.drivers.postgres_database import PostgresSettings
from holdfast.drivers.postgres_schema import VERSIONS_AHEAD_MAX
from holdfast.drivers.statements import migrations
from holdfast.errors import StateCorrupted
from holdfast.limits.entry_rules import ADMIN, ADMIN_RESOURCES, is_admin_rule, refuse_lockout
from holdfast.limits.rule_changes import (
    Change,
    Remembered,
    RuleChange,
    RuleChangeResult,
    decide,
    is_over,
)
from holdfast.limits.rule_import import (
    ImportPlan,
    ImportResult,
    RuleDifference,
    RuleImport,
    RulesBefore,
    plan_import,
)
from holdfast.limits.rules import AnyRule, Rule, RuleName, digest_without, next_digest
from holdfast.limits.rulestore.contract import (
    ABOVE_EVERY_VERSION,
    FORGOTTEN_PER_CHANGE,
    NOTIFICATION_BYTES_MAX,
    ChangeNotification,
    RetentionSettings,
    RuleLogHead,
)
from holdfast.limits.rulestore.postgres.connection import (
    SCHEMA_LOCK,
    SQL,
    WRITERS_LOCK,
    PostgresRuleReader,
)
from holdfast.limits.rulestore.serialization import (
    change_of,
    readable,
    remembered_of,
    rule_of,
    text_of,
)


class PostgresRuleStore(PostgresRuleReader):
    """``contract.RuleStore``. An admin node calls ``prepare`` to create the tables."""

    def __init__(
        self, settings: PostgresSettings, retention: RetentionSettings | None = None
    ) -> None:
        super().__init__(settings)
        self._retention = retention or RetentionSettings()

    async def prepare(self) -> None:
        """Migrate the schema to this version. StateCorrupted if it is too new."""
        scripts = migrations("holdfast.limits.rulestore.postgres")
        async with self.database.committing("be prepared") as db:
            await db.execute(SQL["lock_writers"].replace("$1", str(SCHEMA_LOCK)))
            present = 0
            if await db.fetchval(SQL["schema_version"]):
                present = await db.fetchval(SQL["present_version"])
            else:
                await db.execute("CREATE TABLE holdfast_limits_schema (version int PRIMARY KEY)")
            if present > len(scripts) + VERSIONS_AHEAD_MAX:
                raise StateCorrupted(
                    f"the rules have schema version {present}; this program knows up to"
                    f" {len(scripts)}: upgrade it"
                )
            for version, script in list(enumerate(scripts, 1))[present:]:
                await db.execute(script)
                await db.execute("INSERT INTO holdfast_limits_schema VALUES ($1)", version)

    async def change(self, change: Change) -> RuleChangeResult:
        async with self.database.committing("be changed") as db:
            await db.execute(SQL["lock_writers"], WRITERS_LOCK)
            epoch = await db.fetchval(SQL["epoch"])
            head = RuleLogHead(*await db.fetchrow(SQL["head"]))
            current = await _one(db, change.name)
            forgotten = await db.fetchval(SQL["forgotten_version"])
            made = decide(change, current, await _known_key(db, change.key), epoch, forgotten)
            if isinstance(made, RuleChangeResult):
                return made
            await _refuse_lockout(db, [made])
            digest = f"{next_digest(int(head.digest, 16), current, made):032x}"
            entry = RuleChange(
                head.seq + 1, change.action, made, change.actor, change.reason, change.at
            )
            await self._write(db, epoch, _rows([entry]), digest)
            await db.execute(
                SQL["notify"], payload(ChangeNotification(epoch, entry.seq, made, head.store))
            )
            await self._put_key(db, change.key, Remembered(change.fingerprint, made, entry.seq))
        return RuleChangeResult(made, head.seq + 1)

    async def import_rules(
        self, wanted: RuleImport
    ) -> tuple[ImportResult, Sequence[RuleDifference]]:
        """Plan the import in a thread: a large one would block the event loop."""
        async with self.database.committing("be changed") as db:
            await db.execute(SQL["lock_writers"], WRITERS_LOCK)
            epoch = await db.fetchval(SQL["epoch"])
            head = RuleLogHead(*await db.fetchrow(SQL["head"]))
            names = (
                zip(*(rule.name for rule in wanted.rules), strict=True)
                if wanted.rules
                else ((), ())
            )
            there = [row[0] for row in await db.fetch(SQL["rules_of_names"], *names)]
            forgotten, key = (
                await db.fetchval(SQL["forgotten_version"]),
                await _known_key(db, wanted.key),
            )

            def decided() -> tuple[ImportPlan | ImportResult, _Rows]:
                before = RulesBefore(
                    epoch, head.seq, head.digest, forgotten, [rule_of(body) for body in there]
                )
                plan = plan_import(wanted, before, key)
                return plan, _rows(plan.entries if isinstance(plan, ImportPlan) else ())

            plan, rows = await asyncio.to_thread(decided)
            if isinstance(plan, ImportResult):
                return plan, ()
            await _refuse_lockout(db, plan.made)
            result = plan.result
            if plan.entries and not wanted.dry_run:
                await self._write(db, epoch, rows, result.digest)
                await db.execute(
                    SQL["notify"], payload(ChangeNotification(epoch, result.seq, None, head.store))
                )
            if not wanted.dry_run:
                remembered = Remembered(
                    wanted.fingerprint, None, result.seq, structs.asdict(result)
                )
                await self._put_key(db, wanted.key, remembered)
        return result, plan.differences

    async def _write(self, db: Any, epoch: int, rows: _Rows, digest: str) -> None:
        """Write the rules, their log entries, and the new head."""
        await db.executemany(SQL["put_rule"], rows.rules)
        await db.executemany(SQL["append_change"], rows.lines)
        await db.execute(SQL["move_head"], epoch, rows.last_seq, digest)
        await _forget(
            db, rows.last_seq - self._retention.changes_kept, FORGOTTEN_PER_CHANGE + len(rows.lines)
        )

    async def _put_key(self, db: Any, key: str | None, remembered: Remembered) -> None:
        if key is not None:
            await db.execute(SQL["forget_keys"], self._retention.keys_kept_days)
            await db.execute(SQL["put_key"], key, text_of(remembered))

    async def raise_epoch(self, epoch_min: int) -> int:
        """After a restore: restored versions win over those given out since the backup.

        ``epoch_min`` must be above every epoch ever used.
        """
        async with self.database.committing("be changed") as db:
            await db.execute(SQL["lock_writers"], WRITERS_LOCK)
            epoch: int = await db.fetchval(SQL["raise_epoch"], epoch_min)
        return epoch

    async def get(self, name: RuleName) -> AnyRule | None:
        async with self.database.connection("be read") as db:
            return await _one(db, name)

    async def page(
        self, tenant: str | None, after: RuleName | None, limit: int
    ) -> Sequence[AnyRule]:
        place = after or RuleName("", "")
        return [rule_of(row[0]) for row in await self.fetch("page", tenant, *place, limit)]

    async def history(self, name: RuleName, before: int | None, limit: int) -> Sequence[RuleChange]:
        rows = await self.fetch(
            "history", *name, ABOVE_EVERY_VERSION if before is None else before, limit
        )
        return [change_of(row[0]) for row in rows]


class _Rows(NamedTuple):
    """What a change writes: the rules and the log entries."""

    rules: list[tuple[str, str, bool, str]]
    lines: list[tuple[int, str, str, int, str]]

    @property
    def last_seq(self) -> int:
        return self.lines[-1][0]


def _rows(entries: Sequence[RuleChange]) -> _Rows:
    changed = [(entry, entry.rule) for entry in entries]
    return _Rows(
        [(*rule.name, rule.deleted, text_of(rule)) for _, rule in changed],
        [(entry.seq, *rule.name, rule.version, text_of(entry)) for entry, rule in changed],
    )


async def _refuse_lockout(db: Any, made: Sequence[Rule]) -> None:
    if any(is_admin_rule(rule.name) for rule in made):
        rows = await db.fetch(SQL["rules_named"], ADMIN.tenant, ADMIN_RESOURCES)
        refuse_lockout(made, readable(rule_of(row[0]) for row in rows))


async def _forget(db: Any, horizon: int, most: int) -> None:
    """Trim the log up to ``horizon``, and tombstones along with their changes."""
    oldest = await db.fetch(SQL["oldest_changes"], horizon, most)
    for _, body in oldest:
        past = change_of(body)
        if past.rule.deleted and is_over(past, await _one(db, past.rule.name)):
            head = RuleLogHead(*await db.fetchrow(SQL["head"]))
            await db.execute(SQL["forget_rule"], *past.rule.name)
            await db.execute(
                SQL["raise_forgotten"], past.rule.version, digest_without(head.digest, past.rule)
            )
    if oldest:
        await db.execute(SQL["forget_changes"], oldest[-1][0])


def payload(notification: ChangeNotification) -> str:
    """A notification as text; a rule that is too long is left out."""
    text = text_of(notification)
    return (
        text
        if len(text.encode()) <= NOTIFICATION_BYTES_MAX
        else text_of(structs.replace(notification, rule=None))
    )


async def _known_key(db: Any, key: str | None) -> Remembered | None:
    body = await db.fetchval(SQL["key"], key) if key is not None else None
    return remembered_of(body) if body is not None else None


async def _one(db: Any, name: RuleName) -> AnyRule | None:
    body = await db.fetchval(SQL["rule"], *name)
    return rule_of(body) if body is not None else None
