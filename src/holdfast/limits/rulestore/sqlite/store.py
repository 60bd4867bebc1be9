"""``contract.RuleStore`` on one SQLite file with one writer thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import apsw
from msgspec import structs

from holdfast.clock import Clock
from holdfast.drivers.sqlite.database import Handle, SqliteSettings, open_and_migrate
from holdfast.drivers.sqlite.file_copy import Restored, StateFile
from holdfast.drivers.sqlite.threads import WorkerThreads
from holdfast.drivers.statements import migrations, statements
from holdfast.errors import ServerBusy
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
from holdfast.limits.rules import AnyRule, Rule, RuleName, RuleSnapshot, digest_without, next_digest
from holdfast.limits.rulestore.contract import (
    ABOVE_EVERY_VERSION,
    CHANGES_PER_READ,
    FORGOTTEN_PER_CHANGE,
    ChangeNotification,
    RetentionSettings,
    RuleLogHead,
)
from holdfast.limits.rulestore.notifications import LocalNotifications
from holdfast.limits.rulestore.serialization import (
    change_of,
    readable,
    remembered_of,
    rule_of,
    snapshot_of,
    text_of,
)

PACKAGE = "holdfast.limits.rulestore.sqlite"
SQL = statements(PACKAGE)

T = TypeVar("T")


class SqliteRuleStore:
    """The embedded store, which is also a source of notifications.

    ``async with`` opens and closes the file; the caller holds the state directory's
    lock.
    """

    def __init__(
        self,
        path: Path,
        clock: Clock,
        settings: SqliteSettings | None = None,
        vfs: str | None = None,
        retention: RetentionSettings | None = None,
    ) -> None:
        self._path = path
        self._clock = clock
        self._settings = settings or SqliteSettings(readers=1, cache_bytes=4 * 1024 * 1024)
        self._vfs = vfs
        self._retention = retention or RetentionSettings()
        self._notifications = LocalNotifications()

    async def __aenter__(self) -> Self:
        connection = await asyncio.to_thread(
            open_and_migrate, self._path, self._settings, migrations(PACKAGE), self._vfs
        )
        writer = Handle(self._path, self._settings, self._vfs, write=True)
        writer.adopt(connection)
        reader = Handle(self._path, self._settings, self._vfs, write=False)
        self._writer = WorkerThreads(
            "rules-writer", [writer], self._settings.writes_waiting_max, _busy
        )
        self._reader = WorkerThreads(
            "rules-reader", [reader], self._settings.reads_waiting_max, _busy
        )
        self._store = (await self.head()).store
        return self

    async def __aexit__(self, *_: object) -> None:
        self._notifications.close()
        await self._reader.close()
        await self._writer.close()

    def notifications(self) -> AsyncIterator[ChangeNotification]:
        return self._notifications.notifications()

    async def change(self, change: Change) -> RuleChangeResult:
        changed = await self._writer.do(
            partial(_commit, change=change, now=self._clock.now(), retention=self._retention)
        )
        if not changed.repeated and isinstance(changed.rule, Rule):
            self._notifications.notify(
                ChangeNotification(changed.rule.epoch, changed.seq, changed.rule, self._store)
            )
        return changed

    async def import_rules(
        self, wanted: RuleImport
    ) -> tuple[ImportResult, Sequence[RuleDifference]]:
        plan = await self._writer.do(
            partial(_import, wanted=wanted, now=self._clock.now(), retention=self._retention)
        )
        if isinstance(plan, ImportResult):
            return plan, ()
        if plan.entries and not wanted.dry_run:
            self._notifications.notify(
                ChangeNotification(plan.entries[-1].rule.epoch, plan.result.seq, None, self._store)
            )
        return plan.result, plan.differences

    async def get(self, name: RuleName) -> AnyRule | None:
        return await self._read(lambda db: _one(db, name))

    async def page(
        self, tenant: str | None, after: RuleName | None, limit: int
    ) -> Sequence[AnyRule]:
        values = (tenant, *(after or RuleName("", "")), limit)
        return await self._read(
            lambda db: [rule_of(str(body)) for (body,) in db.execute(SQL["page"], values)]
        )

    async def history(self, name: RuleName, before: int | None, limit: int) -> Sequence[RuleChange]:
        values = (*name, ABOVE_EVERY_VERSION if before is None else before, limit)
        return await self._read(lambda db: _changes(db, "history", values))

    async def head(self) -> RuleLogHead:
        epoch, seq, digest, store = await self._read(_head)
        return RuleLogHead(epoch, seq, digest, 0.0, store)

    async def changes_after(self, seq: int, limit: int = CHANGES_PER_READ) -> Sequence[RuleChange]:
        return await self._read(lambda db: _changes(db, "changes_after", (seq, limit)))

    async def snapshot(self) -> RuleSnapshot:
        def read(db: apsw.Connection) -> RuleSnapshot:
            epoch, seq, _, store = _head(db)
            return snapshot_of(epoch, seq, store, (str(b) for (b,) in db.execute(SQL["all_rules"])))

        return await self._read(read)

    async def _read(self, read: Callable[[apsw.Connection], T]) -> T:
        def work(handle: Handle) -> T:
            with handle.snapshot() as connection:
                return read(connection)

        return await self._reader.do(work)


def _commit(
    handle: Handle, change: Change, now: float, retention: RetentionSettings
) -> RuleChangeResult:
    """One change in one transaction; on return it is on stable storage."""
    with handle.transaction() as db:
        epoch, seq, digest, _ = _head(db)
        current = _one(db, change.name)
        made = decide(
            change,
            current,
            _known_key(db, change.key),
            epoch,
            db.execute(SQL["forgotten_version"]).get,
        )
        if isinstance(made, RuleChangeResult):
            return made
        _refuse_lockout(db, [made])
        entry = RuleChange(seq + 1, change.action, made, change.actor, change.reason, change.at)
        digest = f"{next_digest(int(digest, 16), current, made):032x}"
        _write(db, [entry], digest, retention)
        if change.key is not None:
            _put_key(db, change.key, Remembered(change.fingerprint, made, seq + 1), now, retention)
    return RuleChangeResult(made, seq + 1)


def _import(
    handle: Handle, wanted: RuleImport, now: float, retention: RetentionSettings
) -> ImportPlan | ImportResult:
    """One import in one transaction; a dry run writes nothing."""
    with handle.transaction() as db:
        epoch, seq, digest, _ = _head(db)
        names = text_of([rule.name for rule in wanted.rules])
        there = [rule_of(str(body)) for (body,) in db.execute(SQL["rules_of_names"], (names,))]
        before = RulesBefore(epoch, seq, digest, db.execute(SQL["forgotten_version"]).get, there)
        plan = plan_import(wanted, before, _known_key(db, wanted.key))
        if isinstance(plan, ImportResult):
            return plan
        _refuse_lockout(db, plan.made)
        if not wanted.dry_run:
            _write(db, plan.entries, plan.result.digest, retention)
            if wanted.key is not None:
                remembered = Remembered(
                    wanted.fingerprint, None, plan.result.seq, structs.asdict(plan.result)
                )
                _put_key(db, wanted.key, remembered, now, retention)
    return plan


def _refuse_lockout(db: apsw.Connection, made: Sequence[Rule]) -> None:
    if any(is_admin_rule(rule.name) for rule in made):
        rows = db.execute(SQL["rules_named"], (ADMIN.tenant, text_of(ADMIN_RESOURCES)))
        refuse_lockout(made, readable(rule_of(str(body)) for (body,) in rows))


def _write(
    db: apsw.Connection, entries: Sequence[RuleChange], digest: str, retention: RetentionSettings
) -> None:
    """Write the rules, their log entries, and the new head."""
    rules = [entry.rule for entry in entries]
    db.executemany(SQL["put_rule"], ((*rule.name, rule.deleted, text_of(rule)) for rule in rules))
    lines = ((entry.seq, *entry.rule.name, entry.rule.version, text_of(entry)) for entry in entries)
    db.executemany(SQL["append_change"], lines)
    if entries:
        db.execute(SQL["move_head"], (entries[-1].seq, digest))
        _forget(db, entries[-1].seq - retention.changes_kept, FORGOTTEN_PER_CHANGE + len(entries))


def _put_key(
    db: apsw.Connection, key: str, remembered: Remembered, now: float, retention: RetentionSettings
) -> None:
    db.execute(SQL["forget_keys"], (now - retention.keys_kept_days * 86_400,))
    db.execute(SQL["put_key"], (key, now, text_of(remembered)))


def _forget(db: apsw.Connection, horizon: int, most: int) -> None:
    """Trim the log up to ``horizon``, and tombstones along with their changes."""
    oldest = db.execute(SQL["oldest_changes"], (horizon, most)).fetchall()
    for _, body in oldest:
        past = change_of(str(body))
        if past.rule.deleted and is_over(past, _one(db, past.rule.name)):
            db.execute(SQL["forget_rule"], past.rule.name)
            db.execute(
                SQL["raise_forgotten"], (past.rule.version, digest_without(_head(db)[2], past.rule))
            )
    if oldest:
        db.execute(SQL["forget_changes"], (oldest[-1][0],))


def _head(db: apsw.Connection) -> tuple[int, int, str, str]:
    row: tuple[int, int, str, str] = db.execute(SQL["head"]).get
    return row


def _one(db: apsw.Connection, name: RuleName) -> AnyRule | None:
    row = db.execute(SQL["rule"], name).fetchone()
    return rule_of(row[0]) if row else None


def _changes(
    db: apsw.Connection, statement: str, values: tuple[str | int, ...]
) -> list[RuleChange]:
    return [change_of(str(body)) for (body,) in db.execute(SQL[statement], values)]


def _known_key(db: apsw.Connection, key: str | None) -> Remembered | None:
    row = db.execute(SQL["key"], (key,)).fetchone() if key is not None else None
    return remembered_of(row[0]) if row else None


def _busy() -> ServerBusy:
    return ServerBusy("too many rule changes wait", retry_after_seconds=1.0)


def raise_epoch(db: apsw.Connection, restored: Restored) -> None:
    """After a restore: versions given out since the backup repeat in a newer epoch."""
    db.execute(SQL["raise_epoch"], (restored.epoch_min,))


LIMITS = StateFile(
    name="limits.db",
    migrations=migrations(PACKAGE),
    counts={
        "rules": "SELECT count(*) FROM rules WHERE NOT deleted",
        "changes": "SELECT seq FROM rules_head",
    },
    renew=raise_epoch,
)
"""The file as backups see it."""
