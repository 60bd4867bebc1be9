"""Who is in which chat, on this gateway: entries of the log against the store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from gateway_rig import PROOFS, Bench, FakeSocket, bench, entries, entry, message, settle
from store_rigs import draft, operator

from holdfast import telemetry
from holdfast.errors import Unavailable
from holdfast.message import ChatCreated, Cursor, EpochRaised, LogEntry, User
from holdfast.store.commands import RaiseEpoch
from holdfast.store.memory import MemoryStore

ALICE, BOB = User("default", "alice"), User("default", "bob")


class SlowStore(MemoryStore):
    """Memberships are read at once and given when ``gate`` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.single_reads: list[tuple[User, str]] = []
        self.fails = 0

    async def memberships(self, *asked: Any) -> Mapping[User, Mapping[str, Cursor]]:
        found = await super().memberships(*asked)
        await self.gate.wait()
        return found

    async def memberships_in(
        self, asked: Sequence[tuple[User, str]]
    ) -> Mapping[tuple[User, str], Cursor]:
        self.single_reads += asked
        if self.fails:
            self.fails -= 1
            raise Unavailable("injected")
        found = await super().memberships_in(asked)
        await self.gate.wait()
        return found


async def live(parts: Bench, user_id: str) -> FakeSocket:
    socket = parts.connect(user_id)
    await settle()
    socket.say("resume", "r", cursors={})
    await settle()
    socket.take()
    return socket


async def soon() -> None:
    """Longer than a read of joined chats takes."""
    await asyncio.sleep(0.1)


def pushed(socket: FakeSocket) -> list[int]:
    frames = socket.take()
    return [frame["payload"]["sequence"] for frame in frames if frame["type"] == "message"]


def resyncs(socket: FakeSocket) -> list[str]:
    frames = [frame for frame in socket.take() if frame["type"] == "resync"]
    return [chat["chat_id"] for frame in frames for chat in frame["payload"]["chats"]]


def is_in(parts: Bench, socket: FakeSocket, chat_id: str) -> bool:
    listed = socket.connection in parts.gateway.roster.in_chat(chat_id)
    assert listed == (chat_id in socket.connection.chats)
    return listed


def raised(chat_id: str, epoch: int, head: int) -> LogEntry:
    return LogEntry(0, 0, "default", chat_id, epoch, EpochRaised(head))


def metric(name: str, **labels: str) -> float:
    return telemetry.REGISTRY.get_sample_value(f"holdfast_{name}", labels) or 0.0


async def test_events_from_before_the_membership_was_read_are_skipped() -> None:
    store = SlowStore()
    async with bench(store=store) as parts:
        chat_id = await parts.chat("alice", "bob")
        old = [await parts.remove(chat_id, "bob"), await parts.add(chat_id, "bob")]
        bob = await live(parts, "bob")
        created = LogEntry(0, 0, "default", chat_id, 1, ChatCreated(("alice", "bob")))
        parts.gateway.deliver([created, *old])
        await soon()
        assert is_in(parts, bob, chat_id) and bob.take() == []
        assert store.single_reads == []
        parts.gateway.deliver(entries(chat_id, 3))
        assert pushed(bob) == [3]


async def test_nobody_joins_by_an_entry_that_is_repeated() -> None:
    store = SlowStore()
    async with bench(store=store) as parts:
        chat_id = await parts.chat("alice")
        bob = await live(parts, "bob")
        joined = await parts.add(chat_id, "bob")
        parts.gateway.deliver([joined, await parts.remove(chat_id, "bob")])
        await soon()
        parts.gateway.deliver([joined])
        await soon()
        assert (BOB, chat_id) in store.single_reads
        assert not is_in(parts, bob, chat_id) and resyncs(bob) == []


async def test_removal_during_the_read_of_a_join_counts() -> None:
    store = SlowStore()
    async with bench(store=store) as parts:
        chat_id = await parts.chat("alice")
        bob = await live(parts, "bob")
        await soon()
        store.gate.clear()
        parts.gateway.deliver([await parts.add(chat_id, "bob")])
        await settle()
        assert store.single_reads == [(BOB, chat_id)]
        parts.gateway.deliver([await parts.remove(chat_id, "bob")])
        store.gate.set()
        await soon()
        assert not is_in(parts, bob, chat_id)


async def test_join_during_the_read_of_an_earlier_one_is_read_again() -> None:
    store = SlowStore()
    async with bench(store=store) as parts:
        chat_id = await parts.chat("alice")
        bob = await live(parts, "bob")
        await soon()
        store.gate.clear()
        parts.gateway.deliver([await parts.add(chat_id, "bob")])
        await settle()
        parts.gateway.deliver([await parts.remove(chat_id, "bob"), await parts.add(chat_id, "bob")])
        await settle()
        assert not is_in(parts, bob, chat_id), "what was read is older"
        store.gate.set()
        await soon()
        assert store.single_reads == [(BOB, chat_id)] * 2
        assert bob.connection.session.chats[chat_id].known == Cursor(1, 3)


@pytest.mark.parametrize("what", ["member_removed", "member_added", "created"])
async def test_entries_about_a_connecting_user_are_kept_and_applied_afterwards(what: str) -> None:
    store = SlowStore()
    async with bench(store=store) as parts:
        chat_id = await parts.chat("alice", *["bob"] * (what == "member_removed"))
        store.gate.clear()
        bob = parts.connect("bob")
        await soon()
        match what:
            case "member_removed":
                news = await parts.remove(chat_id, "bob")
            case "member_added":
                news = await parts.add(chat_id, "bob")
            case _:
                chat_id = await parts.chat("alice", "bob")
                news = LogEntry(0, 0, "default", chat_id, 1, ChatCreated(("alice", "bob")))
        parts.gateway.deliver([news])
        assert bob.take() == []
        store.gate.set()
        await soon()
        assert is_in(parts, bob, chat_id) == (what != "member_removed")


async def test_message_of_an_older_epoch_is_not_delivered_nor_heard_of() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        await parts.store.change(RaiseEpoch(operator(), chat_id, 1))
        bob = await live(parts, "bob")
        parts.gateway.deliver([entry(message(chat_id, 1), epoch=1)])
        parts.gateway.deliver([entry(message(chat_id, 1), epoch=2)])
        parts.gateway.deliver([entry(message(chat_id, 2), epoch=1)])
        await settle()
        assert pushed(bob) == [1]
        assert bob.connection.session.chats[chat_id].head == 1


async def test_only_a_raise_of_the_epoch_moves_where_a_membership_was_read() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        await parts.store.append([draft(f"k{n}", sender=ALICE, chat_id=chat_id) for n in range(5)])
        bob = await live(parts, "bob")
        left = message(
            chat_id, 3, kind="event", content='{"event":"member_removed","user_id":"bob"}'
        )
        parts.gateway.deliver([entry(left, epoch=2)])
        assert is_in(parts, bob, chat_id), "an old event that is read late has the present epoch"
        parts.gateway.deliver([raised(chat_id, 1, 2), entry(left)])
        assert is_in(parts, bob, chat_id), "the epoch in which it was read"
        parts.gateway.deliver([raised(chat_id, 2, 2)])
        await settle()
        assert resyncs(bob) == [chat_id]
        parts.gateway.deliver([entry(left, epoch=2)])
        assert not is_in(parts, bob, chat_id)


async def test_epoch_raised_while_a_user_connects_counts() -> None:
    store = SlowStore()
    async with bench(store=store) as parts:
        chat_id = await parts.chat("alice", "bob")
        await parts.store.append([draft(f"k{n}", sender=ALICE, chat_id=chat_id) for n in range(5)])
        store.gate.clear()
        bob = parts.connect("bob")
        await soon()
        parts.gateway.deliver([raised(chat_id, 2, 2)])
        store.gate.set()
        await soon()
        progress = bob.connection.session.chats[chat_id]
        assert (progress.known, progress.epoch, progress.head) == (Cursor(2, 2), 2, 2)


async def test_session_is_live_again_after_a_loss_when_nothing_was_missed() -> None:
    store = SlowStore()
    async with bench(store=store) as parts:
        chat_id = await parts.chat("alice", "bob")
        bob = await live(parts, "bob")
        await parts.store.append([draft("k1", sender=ALICE, chat_id=chat_id)])
        parts.gateway.deliver(entries(chat_id, 1))
        store.gate.clear()
        await parts.gateway.on_log_lost()
        await soon()
        parts.gateway.deliver(entries(chat_id, 1))
        assert pushed(bob) == [1], "and nothing while its membership is in doubt"
        store.gate.set()
        await asyncio.sleep(2)
        parts.gateway.deliver(entries(chat_id, 2))
        assert pushed(bob) == [2]


async def test_session_that_missed_something_in_a_loss_gets_a_resync() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        new = await parts.chat("alice")
        bob = await live(parts, "bob")
        await parts.store.append([draft("k1", sender=ALICE, chat_id=chat_id)])
        await parts.add(new, "bob")
        await parts.gateway.on_log_lost()
        await asyncio.sleep(2)
        assert sorted(resyncs(bob)) == sorted([chat_id, new])
        parts.gateway.deliver(entries(chat_id, 2))
        assert pushed(bob) == []


async def test_pull_during_a_loss_makes_nobody_live_who_was_removed_in_it() -> None:
    """The page was read before the removal, and its event is lost."""
    store = SlowStore()
    async with bench(store=store) as parts:
        chat_id = await parts.chat("alice", "bob")
        bob = await live(parts, "bob")
        store.gate.clear()
        await parts.gateway.on_log_lost()
        bob.say("sync_request", "q", chat_id=chat_id, epoch=1, after_sequence=0)
        await settle()
        assert [frame["type"] for frame in bob.take()] == ["sync_response"]
        await parts.remove(chat_id, "bob")
        parts.gateway.deliver(entries(chat_id, 1, 2))
        assert pushed(bob) == []
        store.gate.set()
        await asyncio.sleep(3)
        parts.gateway.deliver(entries(chat_id, 3))
        assert not is_in(parts, bob, chat_id) and pushed(bob) == []


async def test_memberships_read_before_a_loss_are_read_again() -> None:
    store = SlowStore()
    async with bench(store=store) as parts:
        chat_id = await parts.chat("alice", "bob")
        store.gate.clear()
        bob = parts.connect("bob")
        await soon()
        await parts.remove(chat_id, "bob")
        await parts.gateway.on_log_lost()
        store.gate.set()
        await soon()
        assert bob.connection.established and not is_in(parts, bob, chat_id)


async def test_joined_chat_whose_read_was_overtaken_by_a_loss_is_read_again() -> None:
    store = SlowStore()
    async with bench(store=store) as parts:
        chat_id = await parts.chat("alice")
        bob = await live(parts, "bob")
        await soon()
        store.gate.clear()
        parts.gateway.deliver([await parts.add(chat_id, "bob")])
        await settle()
        await parts.remove(chat_id, "bob")
        await parts.gateway.on_log_lost()
        store.gate.set()
        await asyncio.sleep(2)
        assert store.single_reads == [(BOB, chat_id)] * 2 and not is_in(parts, bob, chat_id)


@pytest.mark.covers("000 graceful_fanout")
@pytest.mark.covers("000 3.1 transient: retry, at most 3")
async def test_graceful_fanout_at_most_three_reads_of_a_joined_chat_then_skip() -> None:
    store = SlowStore()
    async with bench(store=store) as parts:
        skipped = metric("fanout_delivery_skipped_total", reason="members_unknown")
        retried = metric("fanout_retries_total")
        chat_id = await parts.chat("alice")
        bob = await live(parts, "bob")
        store.fails = 3
        parts.gateway.deliver([await parts.add(chat_id, "bob")])
        await asyncio.sleep(5)
        assert store.single_reads == [(BOB, chat_id)] * 3 and not is_in(parts, bob, chat_id)
        assert metric("fanout_delivery_skipped_total", reason="members_unknown") == skipped + 1
        assert metric("fanout_retries_total") == retried + 2
        await asyncio.sleep(30)
        assert is_in(parts, bob, chat_id), "the heartbeat's comparison finds it"


async def test_event_that_does_not_say_what_it_changes_has_its_members_read_again() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        bob = await live(parts, "bob")
        await parts.remove(chat_id, "bob")
        broken = entry(message(chat_id, 1, kind="event", content="{"))
        assert parts.gateway.deliver([broken]) == [broken]
        assert pushed(bob) == [1], "it is delivered all the same"
        await soon()
        assert not is_in(parts, bob, chat_id)


async def test_each_message_is_pushed_with_the_proof_of_its_cursor() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        bob = await live(parts, "bob")
        parts.gateway.deliver(entries(chat_id, 1, 2))
        await settle()
        assert [frame["payload"]["proof"] for frame in bob.take()] == [
            PROOFS.of("default", chat_id, Cursor(1, sequence)) for sequence in (1, 2)
        ]


@pytest.mark.covers("000 3.2 recipient offline: skip")
async def test_who_is_offline_syncs_later() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        await parts.store.append([draft("k1", sender=ALICE, chat_id=chat_id)])
        parts.gateway.deliver(entries(chat_id, 1))
        bob = parts.connect("bob")
        await asyncio.sleep(5)
        assert pushed(bob) == [], "nothing was queued for later"
        bob.say("sync_request", "q", chat_id=chat_id, epoch=1, after_sequence=0)
        await settle()
        (page,) = (frame for frame in bob.take() if frame["type"] == "sync_response")
        assert [each["sequence"] for each in page["payload"]["messages"]] == [1]


@pytest.mark.parametrize("named", [True, False], ids=["its chat is known", "nothing is known"])
async def test_chat_in_doubt_is_compared_with_the_store_at_once(named: bool) -> None:
    async with bench() as parts:
        chat_id, quiet = await parts.chat("alice", "bob"), await parts.chat("alice", "bob")
        bob = await live(parts, "bob")
        await parts.store.append([draft(quiet, "alice", "c0"), draft(chat_id, "alice", "c1")])
        parts.gateway.deliver(entries(quiet, 1))  # nobody delivers the other
        assert pushed(bob) == [1]
        joined = await parts.chat("alice", "bob")  # nor this
        await soon()
        assert bob.take() == []
        parts.gateway.roster_sync.compare_chats([chat_id] if named else [])
        await soon()
        assert sorted(resyncs(bob)) == sorted([chat_id, joined])
        assert is_in(parts, bob, joined) and is_in(parts, bob, quiet)
        parts.gateway.deliver(entries(quiet, 2))
        assert pushed(bob) == [2], "a chat of which nothing is missing stays live"
