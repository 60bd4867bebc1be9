"""What only the store for many nodes promises: writers beside each other, locks that no
lost node holds, a server that is checked before it is used.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace
from store_rigs import (
    ANN,
    BOB,
    PAGE,
    PostgresRig,
    acked,
    act,
    create,
    draft,
    operator,
    send,
    without_triggers,
)
from work_rigs import until

from engines import Server, postgres
from engines.fixtures import had
from holdfast.clock import timestamp
from holdfast.errors import (
    BadSetting,
    Forbidden,
    HoldfastError,
    InvalidMessage,
    NotAMember,
    OutcomeUnknown,
    ServerBusy,
    Unavailable,
)
from holdfast.eventlog.contract import START, LogLost, Position
from holdfast.eventlog.postgres import PostgresEventLog
from holdfast.message import AllEpochsRaised, Watermark
from holdfast.store.commands import (
    AddMember,
    CommandResult,
    RaiseEpoch,
    RemoveMember,
    RenameChat,
    Retain,
)
from holdfast.store.plan import ChatSettings
from holdfast.store.postgres import PostgresStore, PostgresStoreSettings
from holdfast.store.postgres.append import arguments, sorted_group
from holdfast.store.postgres.server import check_server


@pytest.fixture
def rig(postgres_server: Server) -> PostgresRig:
    return PostgresRig(postgres_server.url)


def quick(rig: PostgresRig, **changes: Any) -> PostgresStoreSettings:
    return PostgresStoreSettings(rig.url, **changes)


@asynccontextmanager
async def transaction(url: str) -> AsyncIterator[Any]:
    """Another program's open transaction."""
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            yield connection
    finally:
        await connection.close()


_LOCKS = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"


async def waits_for_a_lock(url: str) -> None:
    """Return when a call of the store waits behind a lock."""
    connection = await asyncpg.connect(url)
    try:
        await until(lambda: connection.fetchval(_LOCKS))
    finally:
        await connection.close()


async def test_three_nodes_write_one_chat_and_every_number_is_given_once(rig: PostgresRig) -> None:
    async with (
        rig.open() as one,
        PostgresStore(rig.settings) as two,
        PostgresStore(rig.settings) as three,
    ):
        await create(one, "bob")
        groups = [[draft(f"{n}-{k}") for k in range(4)] for n in range(30)]
        answers = await asyncio.gather(
            *((one, two, three)[n % 3].append(group) for n, group in enumerate(groups))
        )
        sequences = [acked(outcome).sequence for answer in answers for outcome in answer]
        assert sorted(sequences) == list(range(1, 121))
        again = await two.append([group[0] for group in groups])
        assert all(outcome.deduplicated for outcome in again)
        entries, _ = await PostgresEventLog(three).read(START, 1_000)
        assert [e.what.sequence for e in entries[1:]] == list(range(1, 121))


async def test_commands_of_two_nodes_at_once_are_decided_one_after_the_other(
    rig: PostgresRig,
) -> None:
    rig.limits = ChatSettings(members_max=4, members_at_creation_max=4)
    async with rig.open() as one, PostgresStore(rig.settings, rig.limits) as two:
        await create(one)
        adding = [
            (one, two)[n % 2].change(AddMember(act(), "chat_a", f"user-{n}")) for n in range(8)
        ]
        results = await asyncio.gather(*adding, return_exceptions=True)
        joined = [r.event.sequence for r in results if isinstance(r, CommandResult) and r.event]
        assert sorted(joined) == [1, 2, 3], "the chat is full with them"
        assert all(isinstance(r, CommandResult | Forbidden | ServerBusy) for r in results)
        assert (await two.chats_of(ANN, 1)).chats[0].members == 4


async def test_command_of_two_nodes_under_one_key_is_done_once(rig: PostgresRig) -> None:
    async with rig.open() as one, PostgresStore(rig.settings) as two:
        await create(one)
        same = RenameChat(act(key="k", fingerprint="f"), "chat_a", "New")
        first, second = await asyncio.gather(one.change(same), two.change(same))
        assert sorted([first.repeated, second.repeated]) == [False, True]
        assert first.event == second.event


async def test_member_removed_while_a_send_waits_for_the_chat_cannot_post(
    rig: PostgresRig,
) -> None:
    """Members read with the snapshot of the statement that waited would be old."""
    async with rig.open() as store:
        await create(store, "bob")
        async with transaction(rig.url) as other:
            await other.execute("SELECT FROM holdfast_chats.chat FOR NO KEY UPDATE")
            sending = asyncio.ensure_future(send(store, "k", sender=BOB))
            await waits_for_a_lock(rig.url)
            await other.execute("DELETE FROM holdfast_chats.member WHERE user_id = 'bob'")
        assert isinstance(await sending, NotAMember)


async def test_no_reader_steps_over_a_commit_that_is_late(rig: PostgresRig) -> None:
    """The second group of a shard gets its positions after the first has committed."""
    async with rig.open() as store:
        chats = [f"chat_{n}" for n in range(40)]
        late, early = [c for c in chats if store.lane(c) == store.lane(chats[0])][:2]
        for chat_id in (late, early):
            await create(store, chat_id=chat_id)
        log = PostgresEventLog(store)
        before = await log.end()
        async with transaction(rig.url) as other:
            values = arguments(sorted_group([draft("late", chat_id=late)]))
            await other.fetchrow(
                "SELECT * FROM holdfast_chats.append_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10,"
                " $11)",
                *values,
            )
            sending = asyncio.ensure_future(send(store, "early", chat_id=early))
            await waits_for_a_lock(rig.url)
            assert (await log.read(before, 10))[0] == []
        acked(await sending)
        entries, _ = await log.read(before, 10)
        assert [e.what.client_message_id for e in entries] == ["late", "early"]


async def test_two_nodes_that_mark_the_same_devices_do_not_deadlock(rig: PostgresRig) -> None:
    async with rig.open() as one, PostgresStore(rig.settings) as two:
        await create(one, "bob")
        await send(one, "k")
        marks = [
            Watermark(user, f"d{n}", "chat_a", 1, 1, 1) for user in (ANN, BOB) for n in range(10)
        ]
        for _ in range(10):
            await asyncio.gather(one.mark(marks), two.mark(marks[::-1]))
        assert len(await one.watermarks("chat_a")) == 20


async def test_counter_never_falls_and_no_chat_is_deleted(rig: PostgresRig) -> None:
    async with rig.open() as store:
        await create(store)
        await send(store, "k")
        other = await asyncpg.connect(rig.url)
        for statement in (
            "UPDATE holdfast_chats.chat SET counter = 0",
            "UPDATE holdfast_chats.chat SET counter = NULL",
            "DELETE FROM holdfast_chats.chat",
            "TRUNCATE holdfast_chats.chat",
        ):
            with pytest.raises(asyncpg.CheckViolationError, match="a counter"):
                await other.execute(statement)
        await other.close()


async def test_messages_are_stamped_by_the_database_and_never_before_the_last(
    rig: PostgresRig,
) -> None:
    async with rig.open() as store:
        await create(store)
        first = acked(await send(store, "a"))
        assert first.created_at > "2026-01-01T00:00:00.000Z", "not the time of the draft"
        await without_triggers(
            rig.url, "UPDATE holdfast_chats.chat SET active_at = now() + interval '1 hour'"
        )
        ahead = acked(await send(store, "b"))
        last = acked(await send(store, "c"))
        assert first.created_at < timestamp(time.time() + 3_000) < ahead.created_at
        assert ahead.created_at <= last.created_at
        assert (await store.read_after("chat_a", 0, *PAGE)).messages == [first, ahead, last]


async def test_field_that_cannot_be_stored_fails_alone(rig: PostgresRig) -> None:
    async with rig.open() as store:
        await create(store)
        wrong = replace(draft("2"), message_id="msg_\0")
        outcomes = await store.append([draft("1"), wrong, draft("3")])
        assert isinstance(outcomes[1], InvalidMessage)
        assert [acked(outcomes[n]).sequence for n in (0, 2)] == [1, 2]


async def test_chat_that_is_locked_too_long_is_busy_and_nothing_happened(
    rig: PostgresRig,
) -> None:
    async with rig.open() as first:
        await create(first)
    async with PostgresStore(quick(rig, lock_timeout_seconds=0.1)) as store:
        async with transaction(rig.url) as other:
            await other.execute("SELECT FROM holdfast_chats.chat FOR NO KEY UPDATE")
            with pytest.raises(ServerBusy):
                await send(store, "k")
        assert not (await send(store, "k")).deduplicated


class _Wire:
    """A client that speaks the protocol itself, to stop where no library does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> _Wire:
        wire = cls(*await asyncio.open_connection("127.0.0.1", port))
        hello = b"\0\3\0\0user\0postgres\0database\0postgres\0\0"
        wire._writer.write(struct.pack("!i", len(hello) + 4) + hello)
        await wire.until(b"Z")
        return wire

    async def execute(self, statement: str) -> None:
        """Parse, Bind, Execute, Flush; and no Sync."""
        parse = b"\0" + statement.encode() + b"\0\0\0"
        for kind, body in (
            (b"P", parse),
            (b"B", b"\0\0" + struct.pack("!hhh", 0, 0, 0)),
            (b"E", b"\0" + struct.pack("!i", 0)),
            (b"H", b""),
        ):
            self._writer.write(kind + struct.pack("!i", len(body) + 4) + body)
        await self.until(b"C")

    async def until(self, kind: bytes) -> None:
        while True:
            head = await self._reader.readexactly(5)
            body = await self._reader.readexactly(struct.unpack("!i", head[1:])[0] - 4)
            assert head[:1] != b"E", body
            if head[:1] == kind:
                return

    def close(self) -> None:
        self._writer.close()


SEND = (
    "ARRAY['chat_a'], ARRAY['default'], ARRAY[1], ARRAY['ann'], ARRAY['k'], ARRAY[1::bigint],"
    " ARRAY['\\x00'::bytea], ARRAY['hi'], ARRAY['text/plain'], ARRAY['msg_0'], ARRAY[false]"
)


async def test_node_cut_off_between_execute_and_sync_holds_no_lock(
    rig: PostgresRig, postgres_server: Server
) -> None:
    async with rig.open() as store, PostgresStore(quick(rig, lock_timeout_seconds=0.1)) as hasty:
        await create(store)
        wire = await _Wire.connect(postgres_server.port)
        await wire.execute(
            f"CALL holdfast_chats.append_and_commit_1({SEND}, false, NULL, NULL, NULL, NULL)"
        )
        assert acked(await send(hasty, "next")).sequence == 2
        wire.close()
        wire = await _Wire.connect(postgres_server.port)
        await wire.execute(f"SELECT holdfast_chats.append_1({SEND})")
        with pytest.raises(ServerBusy):  # a function called by SELECT does hold them
            await send(hasty, "after")
        wire.close()


@asynccontextmanager
async def server_set(url: str, **settings: str) -> AsyncIterator[None]:
    """Another setting of the whole server, for a while."""
    connection = await asyncpg.connect(url)

    async def reloaded(name: str, value: str) -> None:
        await connection.execute("SELECT pg_reload_conf()")
        wanted = f"SELECT current_setting('{name}') = '{value}'"
        await until(lambda: connection.fetchval(wanted))

    before = {name: await connection.fetchval(f"SHOW {name}") for name in settings}
    try:
        for name, value in settings.items():
            await connection.execute(f"ALTER SYSTEM SET {name} = '{value}'")
            await reloaded(name, value)
        yield
    finally:
        await connection.execute("SET synchronous_commit = local")
        for name, value in before.items():
            await connection.execute(f"ALTER SYSTEM RESET {name}")
            await reloaded(name, value)
        await connection.close()


async def test_standby_that_does_not_answer_makes_the_outcome_unknown(rig: PostgresRig) -> None:
    """The commit is there, but perhaps nowhere else; a retry finds it."""
    async with rig.open() as first:
        await create(first)
    settings = quick(rig, statement_timeout_seconds=0.3)
    async with PostgresStore(settings) as store:
        async with server_set(rig.url, synchronous_standby_names="nobody"):
            with pytest.raises(OutcomeUnknown):
                await send(store, "k")
            with pytest.raises(OutcomeUnknown):
                await store.change(RenameChat(act(), "chat_a", "New"))
            with pytest.raises(OutcomeUnknown):
                await store.touch()
        again = await send(store, "k")
        assert again.deduplicated and acked(again).sequence == 1


async def test_write_whose_caller_is_gone_ends_and_keeps_its_connection_until_then(
    rig: PostgresRig,
) -> None:
    async with rig.open() as first:
        await create(first)
        await create(first, chat_id="chat_b")
    async with PostgresStore(quick(rig, groups_at_once=1)) as store:
        async with transaction(rig.url) as other:
            await other.execute(
                "SELECT FROM holdfast_chats.chat WHERE chat_id = 'chat_a' FOR UPDATE"
            )
            sending = asyncio.ensure_future(send(store, "k"))
            await waits_for_a_lock(rig.url)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            behind = asyncio.ensure_future(send(store, "k", chat_id="chat_b"))
            await asyncio.wait((behind,), timeout=0.2)
            assert not behind.done()
        acked(await behind)
        assert (await send(store, "k")).deduplicated


async def test_server_that_may_lose_commits_is_refused() -> None:
    server = had("postgres", lambda: postgres.start(fsync="off"))
    try:
        with pytest.raises(BadSetting, match="fsync = off"):
            async with PostgresStore(PostgresStoreSettings(server.url)):
                raise AssertionError("it is open")
    finally:
        server.stop()


FACTS = {
    "in_recovery": False,
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "transaction_isolation": "read committed",
    "lock_timeout": 2_000,
    "statement_timeout": 4_000,
    "plan_cache_mode": "force_generic_plan",
}


@pytest.mark.parametrize(
    ("name", "value", "refusal"),
    [
        ("in_recovery", True, Unavailable),
        ("full_page_writes", "off", BadSetting),
        ("synchronous_commit", "local", BadSetting),
        ("transaction_isolation", "serializable", BadSetting),
        ("lock_timeout", 0, BadSetting),
        ("statement_timeout", 60_000, BadSetting),
        ("plan_cache_mode", "auto", BadSetting),
    ],
)
def test_connection_whose_settings_are_not_kept_is_refused(
    name: str, value: object, refusal: type[Exception]
) -> None:
    settings = PostgresStoreSettings("postgresql://nowhere")
    check_server(FACTS, settings)
    with pytest.raises(refusal):
        check_server({**FACTS, name: value}, settings)


async def test_promise_of_lossless_failover_needs_a_named_standby(rig: PostgresRig) -> None:
    settings = quick(rig, lossless=True, statement_timeout_seconds=0.5)
    with pytest.raises(BadSetting, match="synchronous_standby_names"):
        async with PostgresStore(settings):
            raise AssertionError("it is open")
    async with rig.open() as first:
        await create(first)
    async with server_set(rig.url, synchronous_standby_names="nobody"):
        store = await PostgresStore(settings).__aenter__()
    with pytest.raises(Unavailable, match="no standby"):
        await send(store, "k")
    await store.__aexit__(None, None, None)


@pytest.mark.parametrize("pool_mode", ["transaction", "session"])
async def test_pooler_is_accepted_only_if_it_keeps_sessions(
    pool_mode: str, rig: PostgresRig, pooler: Callable[..., Server]
) -> None:
    settings = PostgresStoreSettings(pooler(pool_mode).url)
    if pool_mode == "transaction":
        with pytest.raises(BadSetting, match="pooler in transaction mode"):
            async with PostgresStore(settings):
                raise AssertionError("it is open")
        return
    async with rig.open(), PostgresStore(settings) as store:
        await create(store)
        acked(await send(store, "k"))


async def test_nodes_that_start_at_once_on_an_empty_database_create_it_once(
    postgres_server: Server,
) -> None:
    other = await asyncpg.connect(postgres_server.url)
    await other.execute("DROP DATABASE IF EXISTS empty")
    await other.execute("CREATE DATABASE empty")
    settings = PostgresStoreSettings(postgres_server.url.removesuffix("postgres") + "empty")
    async with AsyncExitStack() as stack:
        stores = await asyncio.gather(
            *(stack.enter_async_context(PostgresStore(settings)) for _ in range(3))
        )
        await create(stores[0])
        assert [acked(await send(s, f"k{n}")).sequence for n, s in enumerate(stores)] == [1, 2, 3]
    await other.execute("DROP DATABASE empty WITH (FORCE)")
    await other.close()


async def test_schema_of_a_much_newer_release_is_refused(rig: PostgresRig) -> None:
    async with rig.open():
        pass
    await without_triggers(rig.url, "INSERT INTO holdfast_chats.schema_version VALUES (99)")
    try:
        with pytest.raises(HoldfastError, match="upgrade"):
            async with PostgresStore(rig.settings):
                raise AssertionError("it is open")
    finally:
        await without_triggers(
            rig.url, "DELETE FROM holdfast_chats.schema_version WHERE version = 99"
        )


async def of_another_server(rig: PostgresRig) -> None:
    """The database says that it was last used on another server: a backup of it."""
    await without_triggers(rig.url, "UPDATE holdfast_chats.cluster SET system = 'another'")


async def test_database_on_another_server_raises_all_epochs_once(rig: PostgresRig) -> None:
    async with rig.open() as store:
        await create(store, "bob")
        acked(await send(store, "k"))
        await store.mark([Watermark(BOB, "phone", "chat_a", 1, 1, 1)])
        before = await PostgresEventLog(store).end()
    await of_another_server(rig)
    async with PostgresStore(rig.settings) as one, PostgresStore(rig.settings) as two:
        head = (await one.heads(["chat_a"]))["chat_a"]
        assert head.epoch > 1_000_000_000 and head.sequence == 1, "at least the time in seconds"
        assert (await two.heads(["chat_a"]))["chat_a"] == head
        assert [w.epoch for w in await one.watermarks("chat_a")] == [head.epoch]
        log = PostgresEventLog(one)
        with pytest.raises(LogLost):
            await log.read(before, 10)
        end = await log.end()
        entries, reached = await log.read(replace(before, base=end.base), 100)
        assert {e.shard for e in entries} == set(range(one.grouping.at_once * 2))
        assert {e.what for e in entries} == {AllEpochsRaised(end.base)}
        assert reached == end
        record = (await one.audit(None, 10)).records[-1]
        assert record.action == "store.raise_epochs"
        message = acked(await send(two, "l"))
        assert (await log.read(reached, 10))[0][0].epoch == head.epoch
        assert message.sequence == 2


async def test_epochs_stay_if_the_operator_promises_that_nothing_is_lost(
    rig: PostgresRig,
) -> None:
    async with rig.open() as store:
        await create(store)
        before = await PostgresEventLog(store).end()
    await of_another_server(rig)
    async with server_set(rig.url, synchronous_standby_names="nobody"):
        settings = quick(rig, lossless=True, statement_timeout_seconds=0.3)
        with pytest.raises(Unavailable):  # nobody confirms that the server was adopted
            async with PostgresStore(settings):
                pass
        async with PostgresStore(settings) as store:
            assert (await store.heads(["chat_a"]))["chat_a"].epoch == 1
            log = PostgresEventLog(store)
            assert not (await log.end()).is_beyond(before)
            assert (await log.read(before, 10))[0] == []


async def test_loss_is_found_before_a_promoted_server_is_used(rig: PostgresRig) -> None:
    """A send that came first could draw a position past those that were lost: then no
    reader would notice.
    """
    async with rig.open() as first:
        await create(first)
        acked(await send(first, "k"))
    async with server_set(rig.url, synchronous_standby_names="nobody"):
        settings = quick(rig, lossless=True, statement_timeout_seconds=0.3)
        async with PostgresStore(settings) as store:
            await PostgresEventLog(store).read(START, 10)
            await without_triggers(
                rig.url,
                "SET synchronous_commit = local",
                "DELETE FROM holdfast_chats.message",
                "UPDATE holdfast_chats.cluster SET system = 'another'",
            )
            await cut_connections(rig.url)
            # Nobody confirms that the server was adopted: Unavailable, unless the
            # connection for notifications adopted it first.
            with suppress(Unavailable):
                await store.heads(["chat_a"])
            assert (await store.heads(["chat_a"]))["chat_a"].epoch > 1_000_000_000


async def cut_connections(url: str) -> None:
    """Those of stores."""
    connection = await asyncpg.connect(url)
    await connection.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE application_name LIKE 'holdfast%'"
    )
    await connection.close()


async def test_position_beyond_the_end_proves_a_loss_and_raises_all_epochs(
    rig: PostgresRig,
) -> None:
    async with rig.open() as store:
        await create(store)
        log = PostgresEventLog(store)
        end = await log.end()
        beyond = end.moved(3, end.offset(3) + 1)
        reading = [log.read(beyond, 10), PostgresEventLog(store).read(beyond, 10)]
        answers = await asyncio.gather(*reading, return_exceptions=True)
        assert [type(answer) for answer in answers] == [LogLost, LogLost]
        records = (await store.audit(None, 10)).records
        assert [r.action for r in records] == ["store.raise_epochs"], "once, by two readers"
        after = await log.end()
        assert after.base > end.base == 0
        assert (await store.heads(["chat_a"]))["chat_a"].epoch == after.base + 1
        with pytest.raises(LogLost):
            await log.read(end, 10)
        assert (await log.end()).base == after.base, "a position of another base proves nothing"


async def test_position_before_the_first_kept_event_is_lost(rig: PostgresRig) -> None:
    async with rig.open() as store:
        await create(store)
        log = PostgresEventLog(store)
        shard = store.lane("chat_a")
        end = await log.end()
        await without_triggers(
            rig.url,
            f"UPDATE holdfast_chats.shard SET first_position = {end.offset(shard)}"
            f" WHERE shard = {shard}",
        )
        with pytest.raises(LogLost):
            await log.read(START, 10)
        (entry,) = (await log.read(START.moved(shard, end.offset(shard) - 1), 10))[0]
        assert entry.offset == end.offset(shard)


async def test_old_events_are_forgotten_behind_all_readers_but_the_last_entry(
    rig: PostgresRig,
) -> None:
    async with rig.open() as store:
        await create(store)
        log = PostgresEventLog(store)
        created = await log.end()
        acked(await send(store, "k"))
        shard, soon = store.lane("chat_a"), timestamp(time.time() + 60)
        nowhere = [0] * len(created.offsets)
        assert await store.forget_log_events("2026-01-01T00:00:00Z", created.offsets, 10) == 0
        assert await store.forget_log_events(soon, nowhere, 10) == 0, "a reader has it to read"
        assert await store.forget_log_events(soon, created.offsets, 10) == 1
        with pytest.raises(LogLost):
            await log.read(START, 10)
        assert len((await log.read(created, 10))[0]) == 1
        await store.change(RaiseEpoch(operator(), "chat_a", 1))
        end = await log.end()
        assert await store.forget_log_events(soon, end.offsets, 10) == 0
        assert end.offset(shard) == (await log.end()).offset(shard)


async def test_end_stays_when_the_newest_messages_are_deleted(rig: PostgresRig) -> None:
    """Else a reader would seem to be beyond it, and all epochs would be raised."""
    async with rig.open() as store:
        await create(store)
        acked(await send(store, "k"))
        log = PostgresEventLog(store)
        read, position = await log.read(START, 10)
        assert len(read) == 2
        await store.change(Retain(operator(), "chat_a", 2))
        assert not position.is_beyond(await log.end())
        entries, reached = await log.read(position, 10)
        end = await log.end()
        assert list(entries) == [] and not end.is_beyond(reached) and end.base == 0


@pytest.mark.parametrize("poll_seconds", [0.05, 60.0])
async def test_waiting_ends_by_the_notification_of_another_node_or_by_looking(
    poll_seconds: float, rig: PostgresRig
) -> None:
    """By looking: a transaction of another program notifies nobody."""
    settings = quick(rig, poll_seconds=poll_seconds)
    async with rig.open() as other, PostgresStore(settings) as store:
        await create(other)
        log = PostgresEventLog(store)
        position: Position = await log.end()
        waiting = asyncio.ensure_future(log.wait(position))
        if poll_seconds < 1:
            async with transaction(rig.url) as program:
                await program.fetchrow(f"SELECT * FROM holdfast_chats.append_1({SEND})")
        else:
            await listening(rig.url)
            acked(await send(other, "k"))
        async with asyncio.timeout(10):
            await waiting
        assert len((await log.read(position, 10))[0]) == 1


async def listening(url: str) -> None:
    """Return when a node listens for notifications."""
    connection = await asyncpg.connect(url)
    listeners = "SELECT count(*) > 0 FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
    await until(lambda: connection.fetchval(listeners))
    await connection.close()


async def test_removed_member_who_comes_back_has_no_old_watermark(rig: PostgresRig) -> None:
    """One that a device sent while its user was being removed."""
    async with rig.open() as store:
        await create(store, "bob")
        await store.change(RemoveMember(act(), "chat_a", "bob"))
        await without_triggers(
            rig.url,
            "INSERT INTO holdfast_chats.watermark SELECT chat, 'bob', 'phone', 1, 1, 1"
            " FROM holdfast_chats.chat",
        )
        assert await store.watermarks("chat_a") == []
        await store.change(AddMember(act(), "chat_a", "bob"))
        assert await store.watermarks("chat_a") == []
