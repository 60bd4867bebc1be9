"""One suite for every rule store: changes, keys, history, log, notifications."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import apsw
import asyncpg
import pytest
from msgspec import structs
from structlog.testing import capture_logs

from engines import Server
from holdfast.clock import SystemClock
from holdfast.drivers.sqlite.database import SqliteSettings, open_and_migrate
from holdfast.drivers.sqlite.file_copy import Restored
from holdfast.drivers.statements import migrations
from holdfast.errors import (
    HoldfastError,
    InvalidRule,
    KeyReused,
    NotFound,
    StateCorrupted,
    Unavailable,
    VersionConflict,
)
from holdfast.limits.entry_rules import ADMIN
from holdfast.limits.rule_changes import Change, _Action, rollback_body
from holdfast.limits.rule_import import RULES_MAX, RuleImport
from holdfast.limits.rules import (
    Rule,
    RuleName,
    RuleSet,
    UnreadableRule,
    digest_without,
    fingerprint,
)
from holdfast.limits.rulestore.contract import (
    NOTIFICATION_BYTES_MAX,
    ChangeNotification,
    RetentionSettings,
    RuleStore,
)
from holdfast.limits.rulestore.postgres import (
    PostgresNotifications,
    PostgresRuleStore,
    PostgresSettings,
)
from holdfast.limits.rulestore.postgres.store import payload
from holdfast.limits.rulestore.serialization import decode_notification
from holdfast.limits.rulestore.sqlite import LIMITS, SqliteRuleStore

OpenStore = Callable[..., AbstractAsyncContextManager[tuple[RuleStore, Any]]]
SEARCH = RuleName("acme", "/api/search")
BODY = {"algorithm": "token_bucket", "limit": 100, "window": "60s"}


async def empty_database(url: str) -> None:
    connection = await asyncpg.connect(url)
    names = ("rules", "rule_changes", "rule_keys", "rules_head", "limits_schema")
    await connection.execute(
        "DROP TABLE IF EXISTS " + ", ".join(f"holdfast_{name}" for name in names)
    )
    await connection.close()


@pytest.fixture(params=["sqlite", "postgres"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """Opens an empty store of one kind, with its notifications."""
    url = request.getfixturevalue("postgres_server").url if request.param == "postgres" else ""

    @asynccontextmanager
    async def fresh(
        retention: RetentionSettings | None = None,
    ) -> AsyncIterator[tuple[RuleStore, Any]]:
        if not url:
            async with SqliteRuleStore(
                tmp_path / "limits.db", SystemClock(), retention=retention
            ) as embedded:
                async with asyncio.timeout(30):
                    yield embedded, embedded
            return
        await empty_database(url)
        # forty writers in line, on a disk that may be slow
        settings = PostgresSettings(url, timeout_seconds=20)
        async with PostgresRuleStore(settings, retention) as store:
            await store.prepare()
            await store.prepare()
            async with asyncio.timeout(30):
                yield store, PostgresNotifications(settings)

    return fresh


def change(action: _Action, name: RuleName = SEARCH, **changes: Any) -> Change:
    given: dict[str, Any] = {"actor": "olga", "at": "2026-01-01T10:00:00.000Z", "reason": "because"}
    if action == "create":
        given["body"] = BODY
    return Change(action, name, **{**given, **changes})


async def refused(store: RuleStore, change: Change, kind: type[HoldfastError]) -> HoldfastError:
    before = await store.snapshot()
    with pytest.raises(kind) as raised:
        await store.change(change)
    assert await store.snapshot() == before, "a refused change changes nothing"
    return raised.value


@pytest.mark.covers("004 `SET limit = …, window = …`")
async def test_rule_lives_from_creation_to_tombstone_and_again(
    stored: OpenStore,
) -> None:
    async with stored() as (store, _):
        created = await store.change(change("create"))
        assert (created.rule.version, created.rule.limit, created.rule.updated_by) == (
            1,
            100,
            "olga",
        )
        updated = await store.change(change("update", body={"limit": 500}, expected_version=1))
        assert (updated.rule.version, updated.rule.limit, updated.rule.window_seconds) == (
            2,
            500,
            60.0,
        )
        deleted = await store.change(change("delete", expected_version=2))
        assert (deleted.rule.version, deleted.rule.deleted) == (3, True)
        assert await store.page(None, None, 10) == []
        again = await store.change(change("create"))
        assert again.rule.version == 4, "versions of a name never restart"
        assert await store.get(SEARCH) == again.rule
        log = await store.changes_after(0)
        assert [(c.seq, c.action, c.rule.version) for c in log] == [
            (1, "create", 1), (2, "update", 2), (3, "delete", 3), (4, "create", 4),
        ]  # fmt: skip
        assert [c.rule.version for c in await store.history(SEARCH, None, 10)] == [4, 3, 2, 1]
        assert [c.rule.version for c in await store.history(SEARCH, 3, 1)] == [2]
        assert {(c.actor, c.reason) for c in log} == {("olga", "because")}


async def test_late_change_gets_the_current_rule(stored: OpenStore) -> None:
    async with stored() as (store, _):
        await refused(store, change("update", body={"limit": 5}), NotFound)
        await refused(store, change("delete"), NotFound)
        await store.change(change("create"))
        await store.change(change("update", body={"limit": 500}, expected_version=1))
        error = await refused(
            store, change("update", body={"limit": 200}, expected_version=1), VersionConflict
        )
        assert error.details["currentVersion"] == 2
        assert error.details["rule"]["limit"] == 500
        await refused(store, change("delete", expected_version=1), VersionConflict)
        await refused(store, change("create"), VersionConflict)
        await refused(store, change("update", body={"limit": -1}), InvalidRule)


@pytest.mark.covers("004 `UPDATE … WHERE version = $6`")
async def test_one_of_two_changes_to_the_same_version_wins(
    stored: OpenStore,
) -> None:
    async with stored() as (store, _):
        await store.change(change("create"))
        outcomes = await asyncio.gather(
            *[
                store.change(change("update", body={"limit": 10 + n}, expected_version=1))
                for n in range(8)
            ],
            return_exceptions=True,
        )
        assert sum(isinstance(outcome, VersionConflict) for outcome in outcomes) == 7
        assert (await store.head()).seq == 2


NEXT_TO_NOTHING = {"algorithm": "fixed_window", "limit": 1, "window": "366d"}


async def test_one_of_two_changes_that_together_lock_operators_out_is_refused(
    stored: OpenStore,
) -> None:
    # one rule that locks out is older than the admin entry point; two rules cover it
    async with stored() as (store, _):
        await store.change(change("create", RuleName("*", "admin:*"), body=NEXT_TO_NOTHING))
        pair = (ADMIN, RuleName("*", "admin:k*"))
        for attempt in range(5):
            living = {rule.name for rule in await store.page("*", None, 10)}
            for name in pair:
                if name not in living:
                    await store.change(change("create", name))
            deleted = (store.change(change("delete", name)) for name in pair)
            outcomes = await asyncio.gather(*deleted, return_exceptions=True)
            kinds = sorted(type(outcome).__name__ for outcome in outcomes)
            assert kinds == ["InvalidRule", "RuleChangeResult"], attempt


async def test_repeated_change_gets_its_answer_even_if_it_now_locks_out(
    stored: OpenStore,
) -> None:
    async with stored() as (store, _):
        first = change("create", RuleName("*", "admin:*"), body=NEXT_TO_NOTHING, key="k1")
        await store.change(first)
        await store.change(change("create", ADMIN))
        await refused(store, change("delete", ADMIN), InvalidRule)
        await store.change(change("delete", RuleName("*", "admin:*")))
        await store.change(change("delete", ADMIN))
        assert (await store.change(first)).repeated
        await refused(
            store, change("create", RuleName("*", "admin:*"), body=NEXT_TO_NOTHING), InvalidRule
        )


async def test_store_without_an_admin_rule_accepts_any_rule(
    stored: OpenStore,
) -> None:
    async with stored() as (store, _):
        made = await store.change(change("create", RuleName("*", "admin:*"), body=NEXT_TO_NOTHING))
        assert made.rule.limit == 1


@pytest.mark.covers("004 `ORDER BY created_at`")
async def test_log_reader_misses_nothing_of_concurrent_writers(
    stored: OpenStore,
) -> None:
    """Whoever begins first may commit last: were the log in the order of beginnings,
    its change would never be read.
    """

    async with stored() as (store, _):
        read: list[int] = []

        async def follow() -> None:
            while len(read) < 40:
                read.extend(each.seq for each in await store.changes_after(read[-1] if read else 0))
                await asyncio.sleep(0)

        following = asyncio.create_task(follow())
        await asyncio.gather(
            *(store.change(change("create", RuleName("acme", f"/r{n}"))) for n in range(40))
        )
        await asyncio.wait_for(following, 20)
        assert read == list(range(1, 41))


@pytest.mark.covers("004 the operator retries by hand")
async def test_same_key_always_gets_the_first_answer(stored: OpenStore) -> None:
    async with stored() as (store, _):
        create = change("create", key="k1")
        first = await store.change(create)
        update = change("update", body={"limit": 7}, expected_version=1, key="k2")
        second = await store.change(update)
        await store.change(change("delete", key="k3"))
        assert await store.change(create) == type(first)(first.rule, first.seq, repeated=True)
        assert (await store.change(update)).rule == second.rule
        assert (await store.change(change("delete", key="k3"))).repeated
        assert (await store.head()).seq == 3
        await refused(
            store, change("update", body={"limit": 8}, expected_version=1, key="k2"), KeyReused
        )


@pytest.mark.covers("004 an `outbox` table with `sent_at`")
async def test_snapshot_and_log_agree(stored: OpenStore) -> None:
    async with stored() as (store, _):
        for n in range(30):
            await store.change(change("create", RuleName("acme", f"/r{n}")))
        for n in range(0, 30, 3):
            await store.change(change("delete", RuleName("acme", f"/r{n}")))
        snapshot, head = await store.snapshot(), await store.head()
        replayed = RuleSet(epoch=snapshot.epoch)
        for each in await store.changes_after(0, 1000):
            replayed = replayed.merge(each.rule)
        assert replayed.digest == head.digest == RuleSet().merge_snapshot(snapshot).digest
        assert (head.seq, snapshot.seq, head.lag_seconds) == (40, 40, 0)
        assert [c.seq for c in await store.changes_after(38)] == [39, 40]
        first = await store.page("acme", None, 15)
        rest = await store.page("acme", first[-1].name, 15)
        assert len({rule.name for rule in (*first, *rest)}) == 20
        assert await store.page("other", None, 10) == []


async def test_rollback_is_a_new_version_and_restores_a_deleted_rule(
    stored: OpenStore,
) -> None:
    async with stored() as (store, _):
        first = await store.change(change("create"))
        await store.change(change("update", body={"limit": 1, "mode": "shadow"}))
        await store.change(change("delete"))
        stale = change("rollback", body=rollback_body(first.rule), expected_version=2)
        error = await refused(store, stale, VersionConflict)
        assert (error.details["currentVersion"], error.details["rule"]["deleted"]) == (3, True)
        back = await store.change(
            change("rollback", body=rollback_body(first.rule), expected_version=3)
        )
        assert (back.rule.version, back.rule.limit, back.rule.mode, back.rule.deleted) == (
            4,
            100,
            "enforce",
            False,
        )


async def test_change_notifies_with_the_rule(stored: OpenStore) -> None:
    async with stored() as (store, source):
        notifications = source.notifications()
        assert (await anext(notifications)).seq == 0
        changed = await store.change(change("create"))
        notification = await asyncio.wait_for(anext(notifications), 20)
        assert (notification.seq, notification.rule, notification.store) == (
            1,
            changed.rule,
            (await store.head()).store,
        )
        longest = RuleName("t" * 64, "/" + "r" * 255)
        await store.change(change("create", longest))
        assert (await asyncio.wait_for(anext(notifications), 20)).seq == 2
        await notifications.aclose()


def test_rule_too_long_for_a_notification_is_left_out() -> None:
    """PostgreSQL aborts a transaction whose NOTIFY is longer than 8,000 bytes."""
    longest = Rule("t" * 64, '"' * 256, "token_bucket", 10**9, 366 * 86_400.0, updated_by="\\" * 64)
    assert (
        decode_notification(payload(ChangeNotification(1, 7, longest, "ours"))).rule == longest
    ), "no rule that there can be is"
    absurd = payload(
        ChangeNotification(
            1, 8, structs.replace(longest, updated_by="u" * NOTIFICATION_BYTES_MAX), "ours"
        )
    )
    assert len(absurd) < NOTIFICATION_BYTES_MAX == 4096
    assert decode_notification(absurd) == ChangeNotification(1, 8, None, "ours")


def remove_files(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


async def test_store_has_its_own_permanent_name(stored: OpenStore, tmp_path: Path) -> None:
    names: set[str] = set()
    for _turn in range(2):
        async with stored() as (store, _):
            before = (await store.head()).store
            await store.change(change("create"))
            assert before and (await store.head()).store == before
            names.add(before)
        remove_files(tmp_path)
    assert len(names) == 2


async def test_store_without_a_name_gets_one_by_migration(
    postgres_server: Server, tmp_path: Path
) -> None:
    file = tmp_path / "limits.db"
    open_and_migrate(
        file, SqliteSettings(), migrations("holdfast.limits.rulestore.sqlite")[:2]
    ).close()
    async with SqliteRuleStore(file, SystemClock()) as embedded:
        assert len((await embedded.head()).store) == 32
    await empty_database(postgres_server.url)
    connection = await asyncpg.connect(postgres_server.url)
    for script in migrations("holdfast.limits.rulestore.postgres")[:2]:
        await connection.execute(script)
    await connection.execute("CREATE TABLE holdfast_limits_schema (version int PRIMARY KEY)")
    await connection.execute("INSERT INTO holdfast_limits_schema VALUES (1), (2)")
    await connection.close()
    async with PostgresRuleStore(PostgresSettings(postgres_server.url)) as store:
        await store.prepare()
        assert len((await store.head()).store) == 32


async def test_restore_raises_the_epoch_and_its_versions_win(tmp_path: Path) -> None:
    async with SqliteRuleStore(tmp_path / "limits.db", SystemClock()) as store:
        old = await store.change(change("create"))
    with closing(apsw.Connection(str(tmp_path / "limits.db"))) as connection:
        LIMITS.renew(connection, Restored("", 0, "", "", ""))
    async with SqliteRuleStore(tmp_path / "limits.db", SystemClock()) as store:
        new = await store.change(change("update", body={"limit": 9}))
        assert new.rule.stamp > old.rule.stamp
        assert new.rule.epoch == old.rule.epoch + 1 == (await store.head()).epoch


@pytest.mark.covers("004 errors carry `dial tcp 10.0.8.45:5432`")
async def test_unreachable_database_is_unavailable_without_its_host_name() -> None:
    settings = PostgresSettings("postgresql://nobody@127.0.0.1:1/none", connect_timeout_seconds=0.5)
    async with PostgresRuleStore(settings) as store:
        for call in (store.change(change("create")), store.head(), store.get(SEARCH)):
            with pytest.raises(Unavailable) as raised:
                await call
            assert "127.0.0.1" not in str(raised.value)
            assert "(Connection refused)" in str(raised.value)
            assert raised.value.retry_after_seconds
        with pytest.raises(Unavailable):
            await anext(PostgresNotifications(settings).notifications())


async def test_schema_of_the_next_release_is_used_and_newer_ones_refused(
    postgres_server: Server,
) -> None:
    await empty_database(postgres_server.url)
    async with PostgresRuleStore(PostgresSettings(postgres_server.url)) as store:
        await store.prepare()
        connection = await asyncpg.connect(postgres_server.url)
        newer = "INSERT INTO holdfast_limits_schema SELECT max(version) + 1"
        await connection.execute(f"{newer} FROM holdfast_limits_schema")
        await store.prepare()
        await connection.execute(f"{newer} FROM holdfast_limits_schema")
        await connection.close()
        with pytest.raises(StateCorrupted, match="upgrade"):
            await store.prepare()
    await empty_database(postgres_server.url)


async def test_trimmed_log_never_restarts_versions(
    stored: OpenStore,
) -> None:
    async with stored(RetentionSettings(changes_kept=100)) as (store, _):
        other, everybodys = RuleName("acme", "/api/other"), RuleName("*", "send:user")
        await store.change(change("create"))
        await store.change(change("delete", expected_version=1))
        await store.change(change("create", other))
        await store.change(change("create", everybodys))
        await store.change(change("delete", everybodys, expected_version=1))
        for version in range(1, 102):
            await store.change(
                change("update", other, body={"limit": version}, expected_version=version)
            )
        log = await store.changes_after(0, 1000)
        assert [c.seq for c in log] == list(range(7, 107)), "the last hundred, without a gap"
        assert await store.get(SEARCH) is None, "its tombstone went with the change that left it"
        snapshot, head = await store.snapshot(), await store.head()
        assert {rule.name for rule in snapshot.rules} == {
            other,
            everybodys,
        }, "a deleted default stays deleted"
        assert RuleSet.of(snapshot.rules).digest == head.digest
        again = await store.change(change("create"))
        assert again.rule.version == 3, "what a name had before is forgotten, its version is not"
        await store.import_rules(wanted(rule_to_import("imported")))
        imported = await store.get(RuleName("acme", "imported"))
        assert imported is not None and imported.version == 3, "an import cannot know either"
        assert (await store.head()).digest == RuleSet.of((await store.snapshot()).rules).digest


async def test_recreated_rule_is_not_dropped_with_its_deletion(
    stored: OpenStore,
) -> None:
    async with stored(RetentionSettings(changes_kept=100)) as (store, _):
        await store.change(change("create"))
        await store.change(change("delete", expected_version=1))
        await store.change(change("create"))
        for version in range(3, 120):
            await store.change(change("update", body={"limit": version}, expected_version=version))
        rule = await store.get(SEARCH)
        assert rule is not None and rule.version == 120
        assert len(await store.changes_after(0, 1000)) == 100


async def test_idempotency_key_expires(stored: OpenStore) -> None:
    async with stored(RetentionSettings(keys_kept_days=1e-9)) as (store, _):
        await store.change(change("create", key="k"))
        await asyncio.sleep(0.002)
        await store.change(change("update", body={"limit": 5}, expected_version=1, key="other"))
        await refused(store, change("create", key="k"), VersionConflict)


async def spoil(store: RuleStore, file: Path, resource: str) -> None:
    """Rewrite a rule, its log entry and the digest as a newer Holdfast would."""
    known, word = "token_bucket", "of_next_year"
    (was,) = [rule for rule in (await store.snapshot()).rules if rule.resource == resource]
    of_others = int(digest_without((await store.head()).digest, was), 16)
    digest = f"{(of_others + fingerprint(structs.replace(was, algorithm=word))) % 2**128:032x}"
    for table, named in (("rules", "resource"), ("rule_changes", "resource"), ("rule_keys", "key")):
        if isinstance(store, PostgresRuleStore):
            async with store.database.committing("be spoilt") as db:
                spoilt = f"SET body = replace(body, $1, $2) WHERE {named} = $3"
                await db.execute(f"UPDATE holdfast_{table} {spoilt}", known, word, resource)
                await db.execute("UPDATE holdfast_rules_head SET digest = $1", digest)
        else:
            with closing(apsw.Connection(str(file))) as db:
                spoilt = f"SET body = replace(body, ?, ?) WHERE {named} = ?"
                db.execute(f"UPDATE {table} {spoilt}", (known, word, resource))
                db.execute("UPDATE rules_head SET digest = ?", (digest,))


async def test_unreadable_rule_is_left_out_and_logged(stored: OpenStore, tmp_path: Path) -> None:
    async with stored() as (store, _):
        newer = RuleName("acme", "newer")
        await store.change(change("create", newer))
        known = await store.change(change("create"))
        assert (await store.snapshot()).whole
        await spoil(store, tmp_path / "limits.db", newer.resource)
        with capture_logs() as logs:
            snapshot = await store.snapshot()
            assert (snapshot.rules, snapshot.whole) == ((known.rule,), False)
            assert [type(each.rule) for each in await store.changes_after(0)] == [
                UnreadableRule,
                Rule,
            ]
        assert {entry["event"] for entry in logs} == {"limits.rule_unreadable"}


async def test_operators_can_see_replace_and_delete_unreadable_rules(
    stored: OpenStore, tmp_path: Path
) -> None:
    async with stored() as (store, _):
        replaced, deleted = RuleName("acme", "replaced"), RuleName("acme", "deleted")
        for name in (replaced, deleted):
            await store.change(change("create", name, key=name.resource))
            await spoil(store, tmp_path / "limits.db", name.resource)
        seen = await store.get(replaced)
        assert isinstance(seen, UnreadableRule) and (seen.name, seen.stamp) == (replaced, (1, 1))
        assert "of_next_year" in seen.why and seen.limit == 100
        assert await store.page("acme", None, 10) == [await store.get(deleted), seen]
        assert [each.rule for each in await store.history(replaced, None, 10)] == [seen]
        assert (await store.change(change("create", replaced, key="replaced"))).repeated
        conflict = await refused(store, change("create", replaced), VersionConflict)
        assert "of_next_year" in conflict.details["rule"]["unreadable"]
        partly = await refused(
            store, change("update", replaced, body={"limit": 5}, expected_version=1), InvalidRule
        )
        assert set(partly.details["fields"]) == {"algorithm", "window"}
        restored = await store.change(change("update", replaced, body=BODY, expected_version=1))
        gone = await store.change(change("delete", deleted, expected_version=1))
        assert (restored.rule.version, gone.rule.version, gone.rule.deleted) == (2, 2, True)
        snapshot, head = await store.snapshot(), await store.head()
        assert snapshot.whole and RuleSet.of(snapshot.rules).digest == head.digest


async def test_changes_continue_when_an_unreadable_one_leaves_the_log(
    stored: OpenStore, tmp_path: Path
) -> None:
    async with stored(RetentionSettings(changes_kept=100)) as (store, _):
        living, dead = RuleName("acme", "living"), RuleName("acme", "dead")
        for name in (living, dead):
            await store.change(change("create", name))
        await store.change(change("delete", dead, expected_version=1))
        for name in (living, dead):
            await spoil(store, tmp_path / "limits.db", name.resource)
        await store.change(change("create"))
        for version in range(1, 102):
            await store.change(change("update", body={"limit": version}, expected_version=version))
        assert isinstance(await store.get(living), UnreadableRule)
        assert await store.get(dead) is None, "its tombstone went with the change that left it"
        await store.change(change("delete", living, expected_version=1))
        assert RuleSet.of((await store.snapshot()).rules).digest == (await store.head()).digest


async def test_writers_are_serialized_under_any_default_isolation(
    postgres_server: Server,
) -> None:
    await empty_database(postgres_server.url)
    connection = await asyncpg.connect(postgres_server.url)
    name = await connection.fetchval("SELECT current_database()")
    await connection.execute(
        f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'"
    )
    try:
        async with PostgresRuleStore(PostgresSettings(postgres_server.url)) as store:
            await store.prepare()
            made = await asyncio.gather(
                *[store.change(change("create", RuleName("a", f"/{n}"))) for n in range(8)]
            )
            assert sorted(each.seq for each in made) == list(range(1, 9))
    finally:
        await connection.execute(f"ALTER DATABASE {name} RESET default_transaction_isolation")
        await connection.close()


async def test_concurrent_first_users_open_the_database_once(postgres_server: Server) -> None:
    await empty_database(postgres_server.url)
    settings = PostgresSettings(postgres_server.url)
    async with PostgresRuleStore(settings) as store:
        await store.prepare()
    async with PostgresRuleStore(settings) as store:
        heads = await asyncio.gather(*[store.head() for _ in range(8)])
    assert {head.seq for head in heads} == {0}


def wanted(*rules: Rule, **given: Any) -> RuleImport:
    return RuleImport(
        rules, **{"actor": "olga", "at": "2026-01-02T10:00:00.000Z", "change_id": "chg_1", **given}
    )


def rule_to_import(resource: str, limit: int = 100, **fields: Any) -> Rule:
    return Rule("acme", resource, "token_bucket", limit, 60.0, **fields)


async def refused_import(
    store: RuleStore, wanted: RuleImport, kind: type[HoldfastError]
) -> HoldfastError:
    before = (await store.snapshot(), await store.head())
    with pytest.raises(kind) as raised:
        await store.import_rules(wanted)
    assert (
        await store.snapshot(),
        await store.head(),
    ) == before, "a refused import changes nothing"
    return raised.value


async def test_import_is_one_change_and_a_dry_run_lists_differences(
    stored: OpenStore,
) -> None:
    async with stored() as (store, _):
        for name in ("same", "other", "gone"):
            await store.change(change("create", RuleName("acme", name)))
        await store.change(change("delete", RuleName("acme", "gone")))
        rules = [
            rule_to_import(name, limit)
            for name, limit in (("same", 100), ("other", 7), ("gone", 8), ("new", 9))
        ]
        before = await store.head()
        plan, differences = await store.import_rules(wanted(*rules, dry_run=True))
        assert (plan.change_id, plan.digest, plan.seq) == ("", before.digest, before.seq)
        assert [(d.resource, d.new, d.changed) for d in differences] == [
            ("other", False, {"limit": (100, 7)}), ("gone", True, {}), ("new", True, {}),
        ]  # fmt: skip
        assert await store.head() == before, "a dry run changes nothing"
        result, again = await store.import_rules(
            wanted(*rules, expected_digest=plan.digest, reason="from git")
        )
        assert again == differences and (result.created, result.updated, result.unchanged) == (
            2,
            1,
            1,
        )
        log = await store.changes_after(before.seq)
        assert [(c.seq - before.seq, c.action, c.rule.resource, c.rule.version) for c in log] == [
            (1, "update", "other", 2),
            (2, "create", "gone", 3),
            (3, "create", "new", 1),
        ]
        assert [c.change_id for c in log] == ["chg_1"] * 3
        assert {(c.actor, c.reason, c.at) for c in log} == {
            ("olga", "from git", "2026-01-02T10:00:00.000Z")
        }
        head, snapshot = await store.head(), await store.snapshot()
        assert (
            (result.digest, result.seq)
            == (head.digest, head.seq)
            == (RuleSet.of(snapshot.rules).digest, log[-1].seq)
        )
        nothing, _ = await store.import_rules(wanted(*rules, change_id="chg_2"))
        assert (nothing.change_id, nothing.unchanged) == ("", 4) and await store.head() == head


async def test_import_over_changed_rules_is_refused_and_imports_never_mix(
    stored: OpenStore,
) -> None:
    async with stored() as (store, _):
        sets = [wanted(*(rule_to_import(f"/{n}", limit) for n in range(50))) for limit in (1, 2)]
        digest = (await store.import_rules(structs.replace(sets[0], dry_run=True)))[0].digest
        outcomes = await asyncio.gather(
            *(store.import_rules(structs.replace(each, expected_digest=digest)) for each in sets),
            return_exceptions=True,
        )
        assert sorted(type(outcome).__name__ for outcome in outcomes) == [
            "VersionConflict",
            "tuple",
        ]
        assert len({rule.limit for rule in await store.page("acme", None, 100)}) == 1
        for each in (sets[0], sets[1]):  # without a digest the later one wins, whole
            await store.import_rules(each)
            assert {rule.limit for rule in await store.page("acme", None, 100)} == {
                each.rules[0].limit
            }
        seen = (await store.head()).digest
        await store.change(change("create", RuleName("acme", "beside")))
        error = await refused_import(
            store, structs.replace(sets[0], expected_digest=seen), VersionConflict
        )
        assert error.details["digest"] == (await store.head()).digest


async def test_import_that_locks_operators_out_changes_nothing(
    stored: OpenStore,
) -> None:
    async with stored() as (store, _):
        await store.change(change("create", ADMIN))
        few = Rule(*ADMIN, "token_bucket", 1, 60.0)
        for dry_run in (True, False):
            await refused_import(
                store, wanted(rule_to_import("a"), few, dry_run=dry_run), InvalidRule
            )
        await store.import_rules(wanted(rule_to_import("a"), structs.replace(few, mode="shadow")))


async def test_repeated_import_gets_its_first_answer_and_owns_its_key(
    stored: OpenStore,
) -> None:
    async with stored() as (store, _):
        first = wanted(rule_to_import("a"), key="k1")
        result, _differences = await store.import_rules(first)
        await store.change(change("update", RuleName("acme", "a"), body={"limit": 5}))
        head = await store.head()
        again, nothing = await store.import_rules(
            structs.replace(first, change_id="chg_2", at="later")
        )
        assert (
            again == structs.replace(result, repeated=True)
            and not nothing
            and await store.head() == head
        )
        await refused_import(store, wanted(rule_to_import("b"), key="k1"), KeyReused)
        await refused(store, change("create", RuleName("acme", "b"), key="k1"), KeyReused)
        await store.change(change("create", RuleName("acme", "b"), key="k2"))
        await refused_import(store, wanted(rule_to_import("b"), key="k2"), KeyReused)


async def test_import_of_ten_thousand_rules_takes_seconds_and_trims_the_log(
    stored: OpenStore,
) -> None:
    async with stored(RetentionSettings(changes_kept=1_000)) as (store, source):
        notifications = source.notifications()
        await anext(notifications)
        for limit in (1, 2):
            began = time.monotonic()
            result, _ = await store.import_rules(
                wanted(*(rule_to_import(f"/{n}", limit) for n in range(RULES_MAX)))
            )
            assert time.monotonic() - began < 10, "800 one by one took a minute"
            notification = await anext(notifications)
            assert (notification.seq, notification.rule) == (result.seq, None), (
                "one notification for all"
            )
        assert len(await store.changes_after(0, RULES_MAX * 2)) <= RULES_MAX
        assert RuleSet.of((await store.snapshot()).rules).digest == (await store.head()).digest
