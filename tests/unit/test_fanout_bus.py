"""Typing, presence and receipts between two nodes: one notification each, delivered by
every node to its own sessions, within its own bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from scripted_durability import ANNA, BELA, CHAT, create_chat

from holdfast import telemetry
from holdfast.fanout.bus.batches import WAITING_MAX, BusInbox, BusOutbox
from holdfast.fanout.bus.contract import (
    ChatsInDoubt,
    DeviceDisplaced,
    KeysChanged,
    Notification,
    PresenceChanged,
    ReceiptMoved,
    RevocationsChanged,
    TypingChanged,
)
from holdfast.fanout.bus.memory import MemoryBus, MemoryHub
from holdfast.fanout.ephemeral import Ephemeral, EphemeralSettings
from holdfast.fanout.members import Members
from holdfast.message import LogEntry, Message, User, Watermark
from holdfast.store.memory import MemoryStore
from proof.virtual_loop import LoopClock


class RecordingHub(MemoryHub):
    """Notes the payloads that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.payloads: list[bytes] = []

    async def send(self, payload: bytes) -> None:
        self.payloads.append(payload)
        await super().send(payload)

    def notifications(self) -> int:
        return sum(len(msgspec.json.decode(each)["notifications"]) for each in self.payloads)


class BusNode:
    """One node's notes and the sessions that get them."""

    def __init__(self, name: str, store: MemoryStore, hub: MemoryHub) -> None:
        self.bus = MemoryBus(name, hub)
        clock, settings = LoopClock(), EphemeralSettings()
        members = Members(store.members)
        self.ephemeral = Ephemeral(members, store.memberships, clock, self.bus, settings)
        self.ephemeral.connect(self)
        self.bus.subscribe(self.ephemeral.on_notification)  # type: ignore[arg-type]
        self.got: list[tuple[object, dict[str, Any]]] = []

    async def push_to_chats(
        self, chat_ids: Iterable[str], key: tuple[str, ...], frame: bytes
    ) -> None:
        for chat_id in chat_ids:
            self._note(chat_id, frame)

    def push_to_user(self, user: User, chat_id: str, key: tuple[str, ...], frame: bytes) -> None:
        self._note(user, frame)

    def _note(self, to: object, frame: bytes) -> None:
        decoded = msgspec.json.decode(frame[frame.index(b"{") :])
        self.got.append((to, decoded["payload"]))

    def take(self) -> list[tuple[object, dict[str, Any]]]:
        got, self.got = self.got, []
        return got


@asynccontextmanager
async def two_nodes() -> AsyncIterator[tuple[BusNode, BusNode, RecordingHub]]:
    store, hub = MemoryStore(), RecordingHub()
    await create_chat(store, ANNA, BELA)
    nodes = [BusNode(name, store, hub) for name in ("east", "west")]
    tasks = [asyncio.create_task(node.bus.run()) for node in nodes]
    tasks += [asyncio.create_task(node.ephemeral.run()) for node in nodes]
    await asyncio.sleep(0)
    yield nodes[0], nodes[1], hub
    for task in tasks:
        assert not task.done()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def at(seconds: float) -> int:
    return int((LoopClock().now() + seconds) * 1_000_000)


async def test_typing_reaches_the_sessions_of_every_node_by_one_notification() -> None:
    async with two_nodes() as (east, west, hub):
        east.ephemeral.typing(ANNA, CHAT, True)
        await asyncio.sleep(0.1)
        shown = (CHAT, {"chat_id": CHAT, "user_id": "anna", "active": True})
        assert (east.take(), west.take()) == ([shown], [shown])
        assert hub.notifications() == 1


async def test_typing_ends_on_a_node_that_hears_no_more_of_it() -> None:
    async with two_nodes() as (east, west, hub):
        west.ephemeral.on_notification(TypingChanged(ANNA, CHAT, active=True))
        await asyncio.sleep(9.9)
        assert [payload["active"] for _, payload in west.take()] == [True]
        await asyncio.sleep(1.2)
        assert [payload["active"] for _, payload in west.take()] == [False]
        assert (east.take(), hub.payloads) == ([], []), "a note of another node is not passed on"


async def test_typing_of_other_nodes_is_bounded_by_the_rate_of_this_one() -> None:
    async with two_nodes() as (_, west, _):
        for n in range(1_000):
            west.ephemeral.on_notification(TypingChanged(ANNA, f"chat-{n}", active=True))
        await asyncio.sleep(0.1)
        assert len(west.take()) == EphemeralSettings().typing_burst


async def test_presence_reaches_every_node_and_both_remember_it() -> None:
    async with two_nodes() as (east, west, hub):
        east.ephemeral.presence(ANNA, "online", at(0))
        await asyncio.sleep(0.1)
        seen = west.ephemeral.last_seen(ANNA)
        shown = (CHAT, {"user_id": "anna", "status": "online", "last_seen": seen})
        assert seen == east.ephemeral.last_seen(ANNA)
        assert (east.take(), west.take()) == ([shown], [shown])
        assert hub.notifications() == 1


@pytest.mark.parametrize("gap_seconds", [0.0, 0.01, 2.0])
async def test_older_presence_that_comes_later_is_ignored(gap_seconds: float) -> None:
    async with two_nodes() as (_, west, _):
        west.ephemeral.presence(ANNA, "online", at(1))
        await asyncio.sleep(gap_seconds)
        west.ephemeral.on_notification(PresenceChanged(ANNA, "offline", at(-3), (CHAT,)))
        await asyncio.sleep(2)
        assert [payload["status"] for _, payload in west.take()] == ["online"]


async def test_presence_by_a_clock_that_was_set_back_is_shown() -> None:
    async with two_nodes() as (_, west, _):
        west.ephemeral.presence(ANNA, "online", at(0))
        await asyncio.sleep(2)
        west.ephemeral.on_notification(PresenceChanged(ANNA, "offline", at(-3600), (CHAT,)))
        await asyncio.sleep(2)
        assert [payload["status"] for _, payload in west.take()] == ["online", "offline"]


@pytest.mark.parametrize("gap_seconds", [0.0, 0.01, 2.0])
async def test_newer_presence_replaces_one_that_waits(gap_seconds: float) -> None:
    async with two_nodes() as (_, west, _):
        west.ephemeral.presence(ANNA, "offline", at(0))
        await asyncio.sleep(gap_seconds)
        west.ephemeral.on_notification(PresenceChanged(ANNA, "online", at(1), (CHAT,)))
        await asyncio.sleep(2)
        assert [payload["status"] for _, payload in west.take()][-1] == "online"


async def test_receipt_reaches_the_sender_on_another_node() -> None:
    async with two_nodes() as (east, west, hub):
        text = Message("msg_1", CHAT, 1, "text", "anna", None, "hi", "text/plain", "now")
        west.ephemeral.on_entries([LogEntry(0, 1, "default", CHAT, 1, text)])
        west.ephemeral.on_watermarks_moved([Watermark(BELA, "phone", CHAT, 1, 1, 0)])
        await asyncio.sleep(0.1)
        receipt = {"chat_id": CHAT, "user_id": "bela", "delivered": 1, "read": 0}
        assert east.take() == [(ANNA, receipt)]
        assert hub.notifications() == 1


async def test_node_that_is_alone_publishes_nothing() -> None:
    hub, store = RecordingHub(), MemoryStore()
    await create_chat(store, ANNA, BELA)
    node = BusNode("east", store, hub)
    tasks = [asyncio.create_task(node.bus.run()), asyncio.create_task(node.ephemeral.run())]
    await asyncio.sleep(0)
    node.ephemeral.typing(ANNA, CHAT, True)
    await asyncio.sleep(1)
    assert len(node.take()) == 1
    assert hub.payloads == []
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# --- payloads -------------------------------------------------------------------------

KINDS: list[Notification] = [
    TypingChanged(ANNA, CHAT, active=True),
    PresenceChanged(ANNA, "offline", 2**53 - 1, (CHAT, "chät")),
    ReceiptMoved(ANNA, BELA, CHAT, 7, 3),
    DeviceDisplaced("east", ("c1", "c2")),
    RevocationsChanged(),
    KeysChanged(),
    ChatsInDoubt(("chat_1", "chat_2")),
]


def counted(outcome: str) -> float:
    name = "holdfast_fanout_bus_notifications_total"
    return telemetry.REGISTRY.get_sample_value(name, {"outcome": outcome}) or 0.0


async def payloads_of(notifications: Iterable[Notification], bytes_max: int) -> list[bytes]:
    sent: list[bytes] = []

    async def send(payload: bytes) -> None:
        sent.append(payload)

    outbox = BusOutbox("east", bytes_max)
    for notification in notifications:
        outbox.add(notification)
    task = asyncio.create_task(outbox.run(send))
    await asyncio.sleep(1)
    task.cancel()
    return sent


def read(payloads: Iterable[bytes]) -> list[Notification]:
    got: list[Notification] = []
    inbox = BusInbox("west")
    inbox.subscribe(got.append)
    for payload in payloads:
        inbox.on_payload(payload)
    return got


async def test_every_kind_of_notification_survives_the_way() -> None:
    payloads = await payloads_of([*KINDS, *KINDS], 65_536)
    assert len(payloads) == 1, "gathered"
    assert read(payloads) == KINDS, "equal ones once"


@pytest.mark.parametrize("bytes_max", range(150, 260, 7))
async def test_no_payload_is_larger_than_the_bound(bytes_max: int) -> None:
    many = [TypingChanged(ANNA, f"chat-{n}", active=True) for n in range(50)]
    payloads = await payloads_of(many, bytes_max)
    assert max(map(len, payloads)) <= bytes_max
    assert read(payloads) == many


async def test_notification_larger_than_a_payload_is_dropped_alone_and_counted() -> None:
    before = counted("dropped")
    large = PresenceChanged(ANNA, "online", 1, tuple(f"chat-{n}" for n in range(100)))
    payloads = await payloads_of([KINDS[0], large, KINDS[4]], 200)
    assert read(payloads) == [KINDS[0], KINDS[4]]
    assert counted("dropped") == before + 1


async def test_notifications_beyond_the_bound_are_dropped_and_counted() -> None:
    before = counted("dropped")
    many = (TypingChanged(ANNA, f"chat-{n}", active=True) for n in range(WAITING_MAX + 10))
    assert len(read(await payloads_of(many, 65_536))) == WAITING_MAX
    assert counted("dropped") == before + 10


async def test_payload_that_cannot_be_sent_is_dropped_and_the_next_one_goes() -> None:
    sent: list[bytes] = []

    async def send(payload: bytes) -> None:
        if not sent:
            sent.append(b"")
            await asyncio.sleep(60)
        sent.append(payload)

    before, outbox = counted("dropped"), BusOutbox("east", 65_536)
    task = asyncio.create_task(outbox.run(send))
    outbox.add(KINDS[0])
    await asyncio.sleep(0.5)
    outbox.add(KINDS[4])
    await asyncio.sleep(2)
    assert read(sent[1:]) == [KINDS[4]]
    assert counted("dropped") == before + 1
    task.cancel()


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xff", b"[]", b'{"sender": 1}', b'{"sender":"x","notifications":[{"type":"new"}]}'],
)
def test_payload_of_another_version_or_of_nobody_is_counted_and_skipped(payload: bytes) -> None:
    before = counted("unreadable")
    good = b'{"sender":"x","notifications":[{"type":"new"},{"type":"revocations"}]}'
    assert read([payload, good]) == [RevocationsChanged()]
    assert counted("unreadable") == before + 2


def test_subscriber_that_breaks_does_not_keep_others_from_it() -> None:
    got: list[Notification] = []
    inbox = BusInbox("west")
    inbox.subscribe(lambda notification: [][1])
    inbox.subscribe(got.append)
    inbox.on_payload(b'{"sender":"x","notifications":[{"type":"revocations"}]}')
    assert got == [RevocationsChanged()]
