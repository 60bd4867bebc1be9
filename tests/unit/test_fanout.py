"""The feed on virtual time: reads, waits, losses, dead letters, clear failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from scripted_durability import ANNA, BELA, CHAT, create_chat
from store_rigs import act
from structlog.testing import capture_logs

from holdfast import telemetry
from holdfast.errors import Unauthorized, Unavailable, UnreadableEvent
from holdfast.eventlog.contract import START, LogLost, Position
from holdfast.eventlog.memory import MemoryEventLog
from holdfast.fanout.dead_letters import (
    DeadLetter,
    DeadLetterSettings,
    RecentDeadLetters,
    overview,
)
from holdfast.fanout.feed import FeedDeps, LogFeed
from holdfast.fanout.members import Members
from holdfast.message import AllEpochsRaised, Draft, LogEntry, Member, Message
from holdfast.store.commands import AddMember, RemoveMember
from holdfast.store.memory import MemoryStore
from proof.virtual_loop import LoopClock


def metric(name: str, **labels: str) -> float:
    return telemetry.REGISTRY.get_sample_value(f"holdfast_{name}", labels) or 0.0


class Log(MemoryEventLog):
    """A log that can be unavailable or lost, or hold an entry that cannot be decoded."""

    error: Exception | None = None
    wait_error: Exception | None = None
    bad: int | None = None
    lags = 0

    async def lag(self, after: Position) -> int:
        self.lags += 1
        return await super().lag(after)

    async def wait(self, after: Position) -> None:
        error, self.wait_error = self.wait_error, None
        if error is not None:
            raise error
        await super().wait(after)

    async def read(self, after: Position, limit: int) -> tuple[Sequence[LogEntry], Position]:
        if self.error is not None:
            error = self.error
            if isinstance(error, LogLost):
                self.error = None
            raise error
        if self.bad is not None and after.offset(0) < self.bad:
            before = [e for e in (await super().read(after, limit))[0] if e.offset < self.bad]
            if not before:
                raise UnreadableEvent("not JSON", 0, self.bad, b"\xff")
            return before, Position((before[-1].offset,))
        return await super().read(after, limit)


class Receiver:
    """A gateway that notes what it is handed, and fails as scripted."""

    def __init__(self) -> None:
        self.got: list[tuple[str, int]] = []
        self.tries: list[int] = []
        self.losses = 0
        self.seconds_for_a_loss = 0.0
        self.trips_over: str | None = None
        self.error: Exception | None = None
        self.unreadable: str | None = None

    def deliver(self, entries: Sequence[LogEntry]) -> Sequence[LogEntry]:
        self.tries.append(len(entries))
        if self.error is not None:
            raise self.error
        if self.trips_over in {entry.chat_id for entry in entries}:
            raise ZeroDivisionError("a defect")
        messages = [entry.what for entry in entries if isinstance(entry.what, Message)]
        self.got += [(message.chat_id, message.sequence) for message in messages]
        return [entry for entry in entries if entry.chat_id == self.unreadable]

    async def on_log_lost(self) -> None:
        self.losses += 1
        await asyncio.sleep(self.seconds_for_a_loss)


class Bench:
    """A memory store with its log, and a feed."""

    def __init__(self, **settings: int) -> None:
        self.store, self.log = MemoryStore(), Log()
        self.store.on_commit(self.log.committed)
        self.letters, self.receiver = RecentDeadLetters(), Receiver()
        self.members = Members(self.store.members)
        deps = FeedDeps(self.log, self.receiver, self.members, self.letters)
        self.feed = LogFeed(deps, LoopClock(), **settings)

    async def send(self, *keys: str, chat_id: str = CHAT) -> None:
        at = "2027-01-15T08:00:00.000Z"
        await self.store.append(
            [Draft(ANNA, chat_id, key, "hi", "text/plain", f"msg_{key}", at) for key in keys]
        )


@asynccontextmanager
async def running(**settings: int) -> AsyncIterator[Bench]:
    bench = Bench(**settings)
    await create_chat(bench.store, ANNA, BELA)
    task = asyncio.create_task(bench.feed.run())
    await asyncio.sleep(0.01)
    yield bench
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_is_committed_is_handed_over_once_and_in_order() -> None:
    async with running() as bench:
        await bench.send("a", "b")
        await bench.send("c")
        await asyncio.sleep(0.01)
        assert bench.receiver.got == [(CHAT, 1), (CHAT, 2), (CHAT, 3)]
        assert bench.feed.position == await bench.log.end() == Position((4,))


async def test_members_in_memory_follow_the_log() -> None:
    async with running() as bench:
        assert len(await bench.members.of("default", CHAT)) == 2
        await bench.send("a")
        await asyncio.sleep(0.01)
        assert CHAT in bench.members, "a text changes nobody's membership"
        for change in (RemoveMember, AddMember):
            await bench.store.change(change(act(ANNA), CHAT, "bela"))
            await asyncio.sleep(0.01)
            members = await bench.members.of("default", CHAT)
            assert (BELA in members) == (change is AddMember)


@pytest.mark.covers("000 3.1 poison pill: send to DLQ, continue")
async def test_undecodable_entry_becomes_a_dead_letter_and_reading_continues() -> None:
    async with running() as bench:
        bench.log.bad = 3
        await bench.send("a", "b", "c")
        await asyncio.sleep(0.01)
        assert bench.receiver.got == [(CHAT, 1), (CHAT, 3)]
        (letter,) = await bench.letters.read(10)
        assert (letter.offset, letter.reason, letter.data) == (3, "undecodable", b"\xff")


async def test_text_of_a_message_that_could_be_decoded_is_not_kept() -> None:
    async with running() as bench:
        bench.receiver.trips_over = CHAT
        await bench.send("a")
        await asyncio.sleep(0.01)
        (letter,) = await bench.letters.read(10)
        assert (letter.reason, letter.tenant, letter.chat_id) == ("defect", "default", CHAT)
        assert b'"message_id":"msg_a"' in letter.data and b'"content":""' in letter.data


async def test_overview_counts_all_letters_and_shows_the_newest() -> None:
    letters = RecentDeadLetters()
    for offset in range(30):
        await letters.put(DeadLetter(0, offset, "undecodable", "", b"", "2026-01-01T00:00:00Z"))
    counts, newest = await overview(letters)
    assert counts == {"undecodable": 30}
    assert [letter.offset for letter in newest] == list(range(29, 19, -1))


async def test_event_that_does_not_say_what_it_changes_becomes_a_dead_letter() -> None:
    async with running() as bench:
        bench.receiver.unreadable = CHAT
        await bench.send("a")
        await asyncio.sleep(0.01)
        (letter,) = await bench.letters.read(10)
        assert (letter.offset, letter.reason) == (2, "event")


async def test_dead_letters_are_bounded_and_the_newest_stay() -> None:
    letters = RecentDeadLetters(DeadLetterSettings(max_letters=2))
    for position in range(5):
        await letters.put(DeadLetter(0, position, "undecodable", "", b"", "now"))
    assert [letter.offset for letter in await letters.read(10)] == [4, 3]


@pytest.mark.covers("000 3.1 transient: retry, at most 3")
async def test_feed_waits_for_an_unavailable_log() -> None:
    async with running() as bench:
        bench.log.error = Unavailable("kafka is unavailable")
        await bench.send("a")
        await asyncio.sleep(60)
        assert bench.receiver.got == []
        assert metric("dependency_up", dependency="eventlog") == 0
        bench.log.error = None
        await asyncio.sleep(1.1)
        assert bench.receiver.got == [(CHAT, 1)]


async def test_log_that_is_restarted_while_the_feed_waits_ends_nothing() -> None:
    async with running() as bench:
        restarts = metric("fanout_consumer_restarts_total")
        bench.log.wait_error = Unavailable("PostgreSQL restarts")
        await bench.send("a")
        await asyncio.sleep(0.01)
        assert metric("dependency_up", dependency="eventlog") == 0
        await asyncio.sleep(1)
        assert metric("dependency_up", dependency="eventlog") == 1
        await bench.send("b")
        await asyncio.sleep(0.01)
        assert bench.receiver.got == [(CHAT, 1), (CHAT, 2)]
        assert metric("fanout_consumer_restarts_total") == restarts


@pytest.mark.parametrize(
    ("error", "level"),
    [(Unavailable("no dead letter can be kept"), "warning"), (Unauthorized("no"), "critical")],
)
async def test_feed_that_ends_is_critical_unless_something_is_unavailable(
    error: Exception, level: str
) -> None:
    bench = Bench()
    await create_chat(bench.store, ANNA)
    bench.receiver.error = error
    with capture_logs() as lines, pytest.raises(type(error)):
        await bench.feed.run(after=START)
    [ended] = [line for line in lines if line["event"] == "fanout.reader_ended"]
    assert ended["log_level"] == level


async def test_lost_log_is_read_on_at_its_end_after_the_gateway_was_notified() -> None:
    async with running() as bench:
        lost, began = metric("log_losses_total", part="fanout"), bench.receiver.losses
        await bench.members.of("default", CHAT)
        bench.log.error, bench.receiver.seconds_for_a_loss = LogLost(), 1.0
        await bench.send("skipped")
        await asyncio.sleep(0.01)
        assert bench.receiver.losses == began + 1 and CHAT not in bench.members
        await bench.send("b")
        await asyncio.sleep(0.5)
        assert bench.receiver.got == [], "the gateway is not ready yet"
        await asyncio.sleep(1)
        assert bench.receiver.got == [(CHAT, 2)], "the first one is in the store"
        assert metric("log_losses_total", part="fanout") == lost + 1


async def test_raise_of_all_epochs_counts_as_a_loss_once() -> None:
    """Every shard has the entry."""
    async with running() as bench:
        began, raised = bench.receiver.losses, metric("epochs_raised_total")
        for offset, base in ((2, 7), (3, 7), (4, 9)):
            bench.log.committed([LogEntry(0, offset, "", "", base, AllEpochsRaised(base))])
            await asyncio.sleep(0.01)
        assert bench.receiver.losses == began + 2
        assert metric("epochs_raised_total") == raised + 2
        assert bench.receiver.tries == [1], "an entry that is known is delivered to nobody"
        assert bench.feed.position == Position((4,))


@pytest.mark.covers("000 3.1 fatal: let Kubernetes restart")
@pytest.mark.parametrize("where", ["log", "gateway"])
async def test_a_fatal_error_ends_the_feed_clearly_and_is_counted(where: str) -> None:
    bench = Bench()
    await create_chat(bench.store, ANNA)
    fatal = Unauthorized("the credentials were revoked")
    if where == "log":
        bench.log.error = fatal
    else:
        bench.receiver.error = fatal
    await bench.send("a")
    restarts = metric("fanout_consumer_restarts_total")
    with pytest.raises(Unauthorized):
        await bench.feed.run(after=START)
    assert metric("fanout_consumer_restarts_total") == restarts + 1
    assert bench.feed.position == START, "what was not attempted is read again after the restart"


@pytest.mark.covers("000 3.1 fatal: let Kubernetes restart")
async def test_restarted_feed_continues_where_it_ended() -> None:
    bench = Bench()
    await create_chat(bench.store, ANNA)
    bench.receiver.error = Unauthorized("the credentials were revoked")
    first = asyncio.create_task(bench.feed.run())
    await asyncio.sleep(1)
    await bench.send("a")
    with pytest.raises(Unauthorized):
        await first
    bench.receiver.error = None
    again = asyncio.create_task(bench.feed.run())
    await asyncio.sleep(1)
    assert bench.receiver.got == [(CHAT, 1)]
    again.cancel()


async def test_an_event_that_trips_a_defect_of_ours_is_put_aside_alone() -> None:
    async with running() as bench:
        await create_chat(bench.store, ANNA, chat_id="poison")
        await asyncio.sleep(0.01)
        bench.receiver.trips_over = "poison"
        bench.log.error = Unavailable("wait until all are in one batch")
        await bench.send("a")
        await bench.send("b", chat_id="poison")
        await bench.send("c")
        bench.log.error, bench.receiver.tries = None, []
        await asyncio.sleep(2)
        assert bench.receiver.got == [(CHAT, 1), (CHAT, 2)]
        assert bench.receiver.tries == [3, 1, 1, 1], "each entry is tried at most twice"
        (letter,) = await bench.letters.read(10)
        assert (letter.offset, letter.reason) == (4, "defect")
        assert bench.feed.position == Position((5,))


async def test_reader_that_is_behind_asks_the_log_for_entries_only() -> None:
    """How far behind it is costs a count of the whole backlog: the node asks for it, now
    and then, not the reader with each batch.
    """
    async with running(read_entries_max=10) as bench:
        bench.log.error = Unavailable("wait until all are there")
        await bench.send(*(str(n) for n in range(25)))
        bench.log.error, bench.receiver.tries = None, []
        await asyncio.sleep(2)
        assert bench.receiver.tries == [10, 10, 5]
        assert bench.log.lags == 0 and metric("fanout_lag") == 0


@pytest.mark.covers("001 `messages_per_chat_per_minute`, > 100")
async def test_hot_chats_are_those_above_a_hundred_messages_a_minute() -> None:
    async with running() as bench:
        for chat_id, many in (("hot", 101), ("warm", 100)):
            await create_chat(bench.store, ANNA, chat_id=chat_id)
            await bench.send(*(f"{chat_id}-{n}" for n in range(many)), chat_id=chat_id)
        await asyncio.sleep(1)
        assert bench.feed.hot_chats() == {}
        await asyncio.sleep(60)
        assert bench.feed.hot_chats() == {"hot": 101}
        await asyncio.sleep(60)
        assert bench.feed.hot_chats() == {}


async def test_an_operator_says_from_how_many_messages_a_minute_on_a_chat_is_hot() -> None:
    async with running(hot_messages_per_minute=2) as bench:
        await bench.send("1", "2", "3")
        await asyncio.sleep(61)
        assert bench.feed.hot_chats() == {CHAT: 3}


async def test_members_learned_during_a_load_are_not_overwritten_by_it() -> None:
    gate = asyncio.Event()
    states = [
        [Member("anna", "owner", "now")],
        [Member("anna", "owner", "now"), Member("bela", "member", "now")],
    ]

    async def load(chat_id: str) -> Sequence[Member]:
        state = states.pop(0)
        await gate.wait()
        return state

    members = Members(load)
    loading = asyncio.create_task(members.of("default", CHAT))
    await asyncio.sleep(0.01)
    members.forget(CHAT)
    gate.set()
    assert await loading == {ANNA, BELA}, "the load began before the change and was done again"


async def test_the_members_kept_are_bounded_and_the_least_used_go_first() -> None:
    async def load(chat_id: str) -> Sequence[Member]:
        return [Member(f"user-{n}", "member", "now") for n in range(4)]

    members = Members(load, max_members=10)
    for chat_id in ("a", "b"):
        await members.of("default", chat_id)
    await members.of("default", "a")
    await members.of("default", "c")
    assert ("a" in members, "b" in members, "c" in members) == (True, False, True)
    assert members.count == 8
    members.forget_all()
    assert (members.count, len(members)) == (0, 0)
