"""What every store forgets: idempotency keys with time, a person on request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import apsw
import pytest
from msgspec.structs import replace
from store_rigs import AT, BOB, PAGE, Rig, SqliteRig, acked, act, create, draft, operator, send

from holdfast.clock import timestamp
from holdfast.errors import Forbidden, InvalidMessage, KeyReused, ServerBusy
from holdfast.ingest.expiry import (
    DAY_SECONDS,
    FORGOTTEN_AT_ONCE,
    SWEEP_SECONDS,
    KeyExpiry,
    KeySettings,
)
from holdfast.message import User, Watermark
from holdfast.store.commands import ERASE_AT_ONCE, AddMember, CreateChat, Erase, RenameChat, Retain
from holdfast.store.contract import LOOKED_AT_ONCE
from holdfast.store.memory import MemoryStore
from holdfast.store.sqlite import database
from proof.virtual_loop import LoopClock

LATER = "2026-01-08T00:00:00.000Z"


async def rename(store: Any, name: str, key: str, at: str = AT) -> Any:
    return await store.change(RenameChat(act(at=at, key=key, fingerprint=name), "chat_a", name))


async def test_an_answer_is_remembered_until_it_is_too_old_and_then_the_key_is_new(
    rig: Rig,
) -> None:
    async with rig.open() as store:
        await create(store)
        await rename(store, "one", "k1")
        await rename(store, "two", "k2", at=LATER)
        assert await store.forget_answers(AT, 10) == 0, "not older than itself"
        with pytest.raises(KeyReused):
            await rename(store, "three", "k1")
        assert await store.forget_answers(LATER, 10) == 1
        assert not (await rename(store, "three", "k1", at=LATER)).repeated
        assert (await rename(store, "two", "k2")).repeated, "the younger one stays"


async def test_answers_go_in_bounded_batches_the_oldest_first(rig: Rig) -> None:
    async with rig.open() as store:
        await create(store)
        for n in range(7):
            await rename(store, f"name {n}", f"k{n}", at=f"2026-01-01T00:00:0{n}.000Z")
        assert [await store.forget_answers(LATER, 3) for _ in range(4)] == [3, 3, 1, 0]
        for n in range(7):
            await rename(store, f"name {n}", f"k{n}", at=f"2026-01-01T00:00:0{n}.000Z")
        assert await store.forget_answers(LATER, 3) == 3
        assert not (await rename(store, "other", "k0")).repeated
        assert (await rename(store, "name 3", "k3")).repeated


async def test_the_key_of_a_message_stays_unless_a_bound_is_set_and_passed(rig: Rig) -> None:
    async with rig.open() as store:
        await create(store, "bob")
        first = acked(await send(store, "k1", "same"))
        await store.change(AddMember(operator(), "chat_a", "carl"))  # an entry without a key
        second = acked(await send(store, "k2", "same"))
        rig.date("chat_a", AT)
        assert await store.forget_answers(LATER, 10) == 0
        assert acked(await send(store, "k1", "same")).sequence == first.sequence
        assert [await store.forget_send_keys(LATER, 2) for _ in range(3)] == [2, 1, 0]
        again = acked(await send(store, "k1", "same"))
        assert again.sequence == 4 and again.client_message_id == "k1"
        assert acked(await send(store, "k2", "same")).sequence != second.sequence
        assert acked(await send(store, "k1", "same")).sequence == again.sequence, (
            "the new one has a key of its own"
        )


async def test_a_younger_message_keeps_its_key_and_those_behind_it(rig: Rig) -> None:
    """The order is the log's: a clock that was wrong once removes no younger key."""
    async with rig.open() as store:
        await create(store)
        for key, at in (("k1", AT), ("k2", LATER), ("k3", AT)):
            [outcome] = await store.append([_at(draft(key), at)])
            rig.date("chat_a", at, acked(outcome).sequence)
        assert await store.forget_send_keys(LATER, 10) == 1
        assert acked(await send(store, "k1")).sequence == 4
        assert (
            acked(await send(store, "k2")).sequence == 2
            and acked(await send(store, "k3")).sequence == 3
        )


def _at(sent: Any, at: str) -> Any:
    return replace(sent, created_at=at)


async def test_what_retention_removed_does_not_stop_the_rest(rig: Rig) -> None:
    async with rig.open() as store:
        await create(store)
        for n in range(6):
            acked(await send(store, f"k{n}"))
        rig.date("chat_a", AT)
        await store.change(Retain(operator(), "chat_a", 5))
        assert [await store.forget_send_keys(LATER, 2) for _ in range(2)] == [2, 0]
        assert acked(await send(store, "k5")).sequence == 7


@pytest.mark.virtual_time
async def test_housekeeping_sweeps_on_time_in_batches_and_forgets_no_message_by_default() -> None:
    clock = LoopClock()
    store = MemoryStore()
    keeping = KeyExpiry(store, store, clock, KeySettings(answers_ttl_days=7))
    at = timestamp(clock.now())
    await store.change(CreateChat(act(at=at), "chat_a", "group", "Team", []))
    acked(await send(store, "k", "same"))
    for n in range(FORGOTTEN_AT_ONCE + 5):
        await rename(store, f"name {n}", f"k{n}", at=at)
    running = asyncio.create_task(keeping.run())
    await asyncio.sleep(7 * DAY_SECONDS - SWEEP_SECONDS)
    assert (await rename(store, "name 3", "k3")).repeated, "seven days are not over"
    await asyncio.sleep(3 * SWEEP_SECONDS)
    assert len(store._answers) == 0
    assert acked(await send(store, "k", "same")).sequence == 1
    running.cancel()


@pytest.mark.covers("001 keys kept 7 days (`IDEMPOTENCY_KEY_TTL_SECONDS`)")
@pytest.mark.virtual_time
async def test_housekeeping_bounds_the_keys_of_messages_where_that_is_set() -> None:
    clock = LoopClock()
    store = MemoryStore()
    await store.change(CreateChat(act(), "chat_a", "group", "Team", []))
    acked((await store.append([_at(draft("k"), timestamp(clock.now()))]))[0])
    running = asyncio.create_task(
        KeyExpiry(store, store, clock, KeySettings(idempotency_ttl_days=7)).run()
    )
    await asyncio.sleep(7 * DAY_SECONDS - SWEEP_SECONDS)
    assert acked(await send(store, "k")).sequence == 1
    await asyncio.sleep(3 * SWEEP_SECONDS)
    assert acked(await send(store, "k")).sequence == 2, "the document's rule, with what it costs"
    running.cancel()


@pytest.mark.parametrize(
    "wrong", [{"idempotency_ttl_days": -1}, {"answers_ttl_days": 0}, {"answers_ttl_days": -7}]
)
def test_a_bound_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        KeySettings(**wrong)


async def test_a_file_of_the_first_version_keeps_its_answers_and_gets_their_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = SqliteRig(tmp_path)
    connection = apsw.Connection(str(rig.path))
    connection.execute("CREATE TABLE schema_version (version INTEGER NOT NULL) STRICT")
    connection.execute(database.MIGRATIONS[0])
    connection.execute("INSERT INTO schema_version VALUES (1)")
    connection.execute("INSERT INTO answers VALUES ('default', 'ann', 'k1', 'one', '{}')")
    connection.close()

    async with rig.open() as store:
        assert await store.forget_answers("2026-01-01", 10) == 0, "it is as old as the upgrade"
        assert await store.forget_answers("2099-01-01", 10) == 1


async def test_what_older_versions_redacted_loses_its_hash_and_nothing_else_does(
    tmp_path: Path,
) -> None:
    rig = SqliteRig(tmp_path)
    async with rig.open() as store:
        await create(store)
        acked(await send(store, "kept", "hello"))
        acked(await send(store, "gone", "secret"))
    connection = apsw.Connection(str(rig.path))
    connection.execute(
        "UPDATE messages SET content = '' WHERE sequence = 2; DELETE FROM schema_version WHERE"
        " version > 2;DROP VIEW log_values; DROP TABLE log_events;DROP TABLE bans; DROP VIEW"
        " member_values; DROP TABLE mutes;DROP INDEX"
        " members_by_invitation; ALTER TABLE members DROP COLUMN invited;"
        "ALTER TABLE answers DROP COLUMN node; ALTER TABLE answers DROP COLUMN until;"
        "DROP INDEX chats_halted; DROP TABLE dead_letters;"
        "DROP INDEX audit_by_node; ALTER TABLE audit DROP COLUMN record_id;"
        "ALTER TABLE audit DROP COLUMN node; ALTER TABLE audit DROP COLUMN hash"
    )
    connection.close()
    async with rig.open() as store:
        assert (await send(store, "gone", "a guess")).deduplicated
        assert isinstance(await send(store, "kept", "other"), KeyReused)


async def test_a_users_texts_are_found_in_every_chat_of_the_tenant_and_erased_for_good(
    rig: Rig,
) -> None:
    async with rig.open() as store:
        await create(store, "bob")
        await create(store, "bob", chat_id="chat_b")
        await store.change(CreateChat(act(User("other", "bob")), "chat_o", "group", "Other", []))
        acked(await send(store, "k", "another tenant's bob", User("other", "bob"), "chat_o"))
        acked(await send(store, "a1", "ann's own"))
        acked(await send(store, "b1", "secret", BOB))
        acked(await send(store, "b2", "secret too", BOB, "chat_b"))
        found = await store.texts_of(BOB)
        assert sorted(found.texts) == [("chat_a", 2), ("chat_b", 1)] and found.next is not None
        assert (await store.texts_of(BOB, found.next)).next is None
        heard: list[object] = []
        if hasattr(store, "on_commit"):
            store.on_commit(heard.append)
        await store.change(Erase(operator(reason="asked to"), "chat_a", "bob", [1, 2, 99]))
        assert heard == [[]] * hasattr(store, "on_commit"), "copies of it are out of date"
        page = await store.read_after("chat_a", 0, *PAGE)
        assert [m.content for m in page.messages] == ["ann's own", ""], "only the user's own"
        assert list((await store.texts_of(BOB)).texts) == [("chat_b", 1)]
        assert acked(await send(store, "b1", "secret", BOB)).sequence == 2, "the key stays"
        assert acked(await send(store, "b1", "a guess", BOB)).sequence == 2, (
            "and does not show what it was for"
        )
        record = (await store.audit(None, 10)).records[-1]
        assert (record.action, record.target, record.reason) == ("user.erase", "chat_a", "asked to")
        assert record.details == '{"user_id":"bob","sequences":[1,2,99]}'


async def test_only_an_operator_erases_and_only_so_much_at_once(rig: Rig) -> None:
    async with rig.open() as store:
        await create(store, "bob")
        with pytest.raises(Forbidden):
            await store.change(Erase(act(), "chat_a", "bob", [1]))
        with pytest.raises(InvalidMessage, match=str(ERASE_AT_ONCE)):
            await store.change(Erase(operator(), "chat_a", "bob", range(ERASE_AT_ONCE + 1)))


async def test_the_log_is_looked_through_in_bounded_steps(rig: Rig) -> None:
    async with rig.open() as store:
        await create(store, "bob")
        await store.append([draft(f"a{n}") for n in range(LOOKED_AT_ONCE)])
        acked(await send(store, "b", "late", BOB))
        first = await store.texts_of(BOB)
        assert list(first.texts) == []
        assert list((await store.texts_of(BOB, first.next)).texts) == [
            ("chat_a", LOOKED_AT_ONCE + 1)
        ]


async def test_devices_and_answers_of_one_user_are_forgotten_alone(rig: Rig) -> None:
    async with rig.open() as store:
        await create(store, "bob")
        acked(await send(store, "k"))
        for user in (BOB, User("default", "ann")):
            await store.mark([Watermark(user, "phone", "chat_a", 1, 1, 1)])
        await store.change(
            CreateChat(act(BOB, key="c", fingerprint="x"), "chat_bob", "group", "Bob's", [])
        )
        await rename(store, "renamed", "c")
        await store.forget_devices(BOB)
        await store.forget_answers_of(BOB)
        assert [mark.user.user_id for mark in await store.watermarks("chat_a")] == ["ann"]
        changed = await store.change(
            CreateChat(act(BOB, key="c", fingerprint="y"), "chat_bob2", "group", "B", [])
        )
        assert not changed.repeated and (await rename(store, "renamed", "c")).repeated


HERE = ("here", 60.0)


async def test_request_key_is_taken_once_repeats_its_answer_and_expires(
    rig: Rig,
) -> None:
    async with rig.open() as store:
        once = operator(key="k1", fingerprint="f")
        assert await store.begin(once, *HERE) is None
        assert await store.begin(once, *HERE) == "", "begun, and nobody knows"
        await store.keep(once, '{"count":1}')
        assert await store.begin(once, *HERE) == '{"count":1}'
        with pytest.raises(KeyReused):
            await store.begin(replace(once, fingerprint="g"), *HERE)
        assert await store.begin(operator(key="k2", fingerprint="f"), *HERE) is None
        await store.keep(operator(key="k2", fingerprint="f"), None)
        assert await store.begin(operator(key="k2", fingerprint="f"), *HERE) is None, (
            "it did nothing: the key is new again"
        )
        assert await store.forget_answers(LATER, 10) == 2
        assert await store.begin(once, *HERE) is None


async def test_request_that_runs_on_another_node_is_busy_until_its_time_has_passed(
    rig: Rig,
) -> None:
    async with rig.open() as store:
        once = operator(key="k1", fingerprint="f")
        assert await store.begin(once, *HERE) is None
        with pytest.raises(ServerBusy) as busy:
            await store.begin(once, "there", 60.0)
        assert busy.value.retry_after_seconds == 1
        with pytest.raises(KeyReused):
            await store.begin(replace(once, fingerprint="g"), "there", 60.0)
        assert await store.begin(once, *HERE) == "", "a node knows what it runs itself"
        await store.keep(once, '{"count":1}')
        assert await store.begin(once, "there", 60.0) == '{"count":1}'
        late = operator(key="k2", fingerprint="f")
        assert await store.begin(late, "here", 0.0) is None
        assert await store.begin(late, "there", 60.0) == "", "its time has passed"
