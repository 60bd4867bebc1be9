"""A gateway and its connections on virtual time, without sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
from gateway_rig import Bench, FakeSocket, bench, entries, entry, message, settle
from store_rigs import draft
from structlog.testing import capture_logs

from holdfast.clock import TURN_SECONDS, Turns
from holdfast.errors import Unavailable
from holdfast.gateway.connection import Connection
from holdfast.gateway.gateway import LINES_AT_ONCE, LINES_SECONDS
from holdfast.gateway.roster_sync import RosterSync
from holdfast.gateway.settings import GatewaySettings
from holdfast.message import ChatCreated, Cursor, LogEntry, User
from holdfast.session.effects import Effects
from holdfast.session.session import Session
from holdfast.session.settings import BackpressureSettings, OutboundSettings
from holdfast.store.memory import MemoryStore
from holdfast.telemetry.metrics import REGISTRY
from holdfast.wire.close_codes import CloseReason
from holdfast.wire.codec import encode_frame
from holdfast.wire.frames import Typing
from proof.virtual_loop import LoopClock

TYPING = encode_frame(Typing("chat", "alice", True))
ALICE, BOB = User("default", "alice"), User("default", "bob")


def types_of(frames: list[dict[str, Any]]) -> list[str]:
    return [frame["type"] for frame in frames]


async def live(parts: Bench, user_id: str) -> FakeSocket:
    """A connection that has resumed: it is live in all its chats."""
    socket = parts.connect(user_id)
    await settle()
    socket.say("resume", "r", cursors={})
    await settle()
    assert types_of(socket.take()) == ["connection_established", "resumed"]
    return socket


@pytest.mark.covers("000 contract 1, persisted: `message_ack` with the sequence")
async def test_a_send_is_acknowledged_after_its_commit() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        socket = await live(parts, "alice")
        socket.say("send_message", "q1", client_message_id="c1", chat_id=chat_id, content="hello")
        await settle()
        (ack,) = socket.take()
        assert ack["type"] == "message_ack"
        assert ack["request_id"] == "q1"
        assert ack["payload"]["sequence"] == 1
        assert (await parts.store.heads([chat_id]))[chat_id] == Cursor(1, 1)


async def test_a_client_without_a_device_id_leaves_one_watermark_however_often_it_comes() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        for n in range(1, 4):
            await parts.store.append([draft(f"c{n}", sender=ALICE, chat_id=chat_id)])
            socket = await live(parts, "bob")
            socket.say("ack", chat_id=chat_id, epoch=1, sequence=n)
            socket.say("read", chat_id=chat_id, sequence=n)
            await parts.watermarks.flush()
            socket.connection.connection_lost()
        (mark,) = await parts.store.watermarks(chat_id)
        assert (mark.device_id, mark.delivered, mark.read) == ("", 3, 3)


async def test_frames_of_one_turn_leave_in_one_write() -> None:
    async with bench() as parts:
        chats = [await parts.chat("alice", "bob") for _ in range(3)]
        socket = await live(parts, "alice")
        parts.gateway.deliver([entry(message(chat_id, 1)) for chat_id in chats])
        await settle()
        assert len(socket.writes) == 1
        assert [f["payload"]["chat_id"] for f in socket.take()] == chats


async def test_a_run_that_comes_alone_is_written_at_once_but_never_ahead_of_what_waits() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        socket = await live(parts, "alice")
        parts.gateway.deliver(entries(chat_id, 1))
        assert len(socket.writes) == 1, "before the turn ends"
        socket.connection.writing_paused()
        parts.gateway.deliver(entries(chat_id, 2))
        socket.connection.paused = False
        parts.gateway.deliver(entries(chat_id, 3))
        await settle()
        assert [f["payload"]["sequence"] for f in socket.take()] == [1, 2, 3]


async def test_two_connections_are_written_the_same_bytes() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        one, two = await live(parts, "alice"), await live(parts, "bob")
        parts.gateway.deliver(entries(chat_id, 1, 2))
        await settle()
        assert one.writes[0] is two.writes[0]


async def test_removed_member_gets_the_event_and_nothing_after_it() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        alice, bob = await live(parts, "alice"), await live(parts, "bob")
        left = message(
            chat_id, 2, kind="event", content='{"event":"member_removed","user_id":"bob"}'
        )
        parts.gateway.deliver([*entries(chat_id, 1), entry(left), *entries(chat_id, 3)])
        await settle()
        assert [f["payload"]["sequence"] for f in alice.take()] == [1, 2, 3]
        assert [f["payload"]["sequence"] for f in bob.take()] == [1, 2]


async def test_new_member_gets_a_resync_and_what_follows() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice")
        bob = await live(parts, "bob")
        parts.gateway.deliver([await parts.add(chat_id, "bob")])
        await asyncio.sleep(0.1)
        assert bob.take() == [
            {"type": "resync", "payload": {"chats": [{"chat_id": chat_id, "head": 1}]}}
        ]


async def test_chat_created_later_reaches_connected_members() -> None:
    async with bench() as parts:
        bob = await live(parts, "bob")
        chat_id = await parts.chat("alice", "bob")
        created = ChatCreated(("alice", "bob"))
        parts.gateway.deliver([LogEntry(0, 0, "default", chat_id, 1, created)])
        await asyncio.sleep(0.1)
        assert types_of(bob.take()) == ["resync"]


async def test_an_unknown_member_elsewhere_does_not_make_others_join() -> None:
    async with bench() as parts:
        carol = await live(parts, "carol")
        chat_id = await parts.chat("alice", "bob")
        parts.gateway.deliver(entries(chat_id, 1))
        await settle()
        assert carol.take() == []


async def test_a_paused_socket_is_not_written_to_and_catches_up_when_it_takes_again() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        socket = await live(parts, "alice")
        socket.connection.writing_paused()
        parts.gateway.deliver(entries(chat_id, 1))
        parts.gateway.deliver(entries(chat_id, 2))
        await settle()
        assert socket.writes == []
        socket.connection.writing_resumed()
        await settle()
        assert [f["payload"]["sequence"] for f in socket.take()] == [1, 2]


@pytest.mark.covers(
    "000 server: `connection_closing` with its reason, `reconnect_allowed`, `sync_from_sequence`"
)
async def test_stopped_reader_is_warned_then_closed_with_where_to_sync_from() -> None:
    limits = GatewaySettings(
        backpressure=BackpressureSettings(outbound=OutboundSettings(max_buffer_messages=20))
    )
    async with bench(limits) as parts:
        chat_id = await parts.chat("alice", "bob")
        socket = await live(parts, "alice")
        parts.gateway.deliver(entries(chat_id, 1))
        await settle()
        socket.say("ack", chat_id=chat_id, epoch=1, sequence=1)
        socket.take()
        socket.connection.writing_paused()
        for n in range(2, 40):
            parts.gateway.deliver(entries(chat_id, n))
        warned_at = parts.clock.monotonic()
        await asyncio.sleep(4.9)
        assert socket.closed is None
        await asyncio.sleep(0.5)
        assert parts.clock.monotonic() - warned_at >= 5
        frames = socket.take()
        assert [f["payload"].get("code") for f in frames] == ["SLOW_CONSUMER", None]
        assert frames[-1]["type"] == "connection_closing"
        assert frames[-1]["payload"]["sync_from_sequence"] == {chat_id: 1}
        assert socket.closed == (4002, "slow_consumer")


async def test_without_a_header_the_first_frame_authenticates() -> None:
    async with bench() as parts:
        socket = parts.connect(None)
        socket.say("authenticate", token="alice", device_id="phone")
        await settle()
        (hello,) = socket.take()
        assert hello["payload"]["user_id"] == "alice"
        assert hello["payload"]["device_id"] == "phone"


async def test_any_other_first_frame_is_refused() -> None:
    async with bench() as parts:
        socket = parts.connect(None)
        socket.say("heartbeat_ack")
        assert [f["type"] for f in socket.take()] == ["error", "connection_closing"]
        assert socket.closed == (4502, "unauthorized")


async def test_a_bad_token_is_refused_and_closed_for_good() -> None:
    async with bench() as parts:
        socket = parts.connect(None)
        socket.say("authenticate", "q", token="bad")
        error, closing = socket.take()
        assert error["payload"]["code"] == "UNAUTHORIZED" and error["request_id"] == "q"
        assert closing["payload"]["reconnect_allowed"] is False


async def test_the_authentication_deadline_closes_a_silent_connection() -> None:
    async with bench() as parts:
        socket = parts.connect(None)
        await asyncio.sleep(4.9)
        assert socket.closed is None
        await asyncio.sleep(0.5)
        assert socket.closed == (4502, "unauthorized")


async def test_frames_sent_before_the_hello_wait_for_it() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice")
        socket = parts.connect("alice")
        assert socket.reading is False
        socket.say("send_message", "q1", client_message_id="c1", chat_id=chat_id, content="early")
        await settle()
        assert socket.reading is True
        assert types_of(socket.take()) == ["connection_established", "message_ack"]


async def test_a_flood_before_the_hello_is_a_protocol_error() -> None:
    async with bench() as parts:
        socket = parts.connect("alice")
        for _ in range(101):
            socket.say("heartbeat_ack")
        assert socket.closed == (4501, "protocol_error")


async def test_frames_before_the_connection_is_established_are_bounded_in_bytes() -> None:
    async with bench() as parts:
        socket = parts.connect("alice")
        for n in range(5):
            assert socket.closed is None
            socket.say(
                "send_message", f"q{n}", client_message_id="c", chat_id="x", content="x" * 60_000
            )
        assert socket.closed == (4501, "protocol_error")


async def test_a_new_socket_of_a_device_replaces_the_old_one_and_a_sixth_device_the_oldest() -> (
    None
):
    async with bench() as parts:
        first = parts.connect("alice", "phone")
        parts.connect("alice", "phone")
        assert first.closed == (4500, "duplicate_connection")
        others = [parts.connect("alice", f"d{n}") for n in range(4)]
        assert [s.closed for s in others] == [None] * 4
        parts.connect("alice", "d9")
        assert parts.sockets[1].closed == (4500, "duplicate_connection")


async def test_an_expired_token_closes_and_asks_for_a_new_one() -> None:
    async with bench() as parts:
        socket = parts.connect("alice", expires_at=parts.clock.now() + 3)
        await asyncio.sleep(3.5)
        assert socket.closed == (4008, "token_expired")


async def test_a_token_refreshed_in_band_keeps_the_connection() -> None:
    async with bench() as parts:
        socket = parts.connect("alice", expires_at=parts.clock.now() + 3)
        await settle()
        socket.say("authenticate", "q", token="alice")
        await asyncio.sleep(5)
        assert socket.closed is None


async def test_another_users_token_does_not_refresh() -> None:
    async def _after_a_turn(socket: FakeSocket) -> list[dict[str, Any]]:
        await settle()
        return socket.take()

    async with bench() as parts:
        socket = parts.connect("alice")
        await settle()
        socket.take()
        socket.say("authenticate", "q", token="bob")
        (error,) = socket.take() or await _after_a_turn(socket)
        assert error["payload"]["code"] == "UNAUTHORIZED"


async def test_ten_frames_that_cannot_be_read_close_the_connection() -> None:
    async with bench() as parts:
        socket = parts.connect("alice")
        await settle()
        for _ in range(10):
            socket.connection.frame_received(b"{not json")
        await settle()
        assert socket.closed == (4501, "protocol_error")


async def test_no_answer_to_a_heartbeat_closes_as_idle() -> None:
    async with bench() as parts:
        socket = parts.connect("alice")
        await asyncio.sleep(41)
        assert socket.closed == (4001, "idle_timeout")


async def test_a_client_that_sends_anything_is_not_idle() -> None:
    async with bench() as parts:
        socket = parts.connect("alice")
        await settle()
        for _ in range(30):
            await asyncio.sleep(8)
            socket.connection.work_done(1)  # a pong, a fragment, a part of a frame
        assert socket.closed is None
        await asyncio.sleep(41)
        assert socket.closed == (4001, "idle_timeout")


async def test_heartbeat_that_has_not_left_waits_as_long_as_bytes_leave() -> None:
    async with bench() as parts:
        socket = parts.connect("alice")
        await settle()
        socket.connection.writing_paused()
        for socket.unsent in range(120, 0, -1):
            await asyncio.sleep(1)
        assert socket.closed is None
        await asyncio.sleep(21)
        assert socket.closed == (4001, "idle_timeout")


@pytest.mark.covers("000 contract 6, what was skipped last")
async def test_a_skipped_last_delivery_is_found_by_the_heads() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        bob = await live(parts, "bob")
        alice = await live(parts, "alice")
        alice.say(
            "send_message", client_message_id="c1", chat_id=chat_id, content="nobody delivers this"
        )
        await settle()
        heads: dict[str, Any] = {}
        while not heads:
            await asyncio.sleep(1)
            for frame in bob.take():
                if frame["type"] == "heartbeat":
                    bob.say("heartbeat_ack")
                    heads = frame["payload"]["heads"]
        assert heads == {chat_id: [1, 1]}
        assert parts.clock.monotonic() <= 75


async def test_skipped_join_is_found_without_another_message() -> None:
    """The event of joining was skipped and the chat is quiet: no heads name it."""
    async with bench() as parts:
        bob = await live(parts, "bob")
        chat_id = await parts.chat("alice", "bob")
        named: list[str] = []
        while not named:
            await asyncio.sleep(1)
            for frame in bob.take():
                if frame["type"] == "heartbeat":
                    bob.say("heartbeat_ack")
                elif frame["type"] == "resync":
                    named = [chat["chat_id"] for chat in frame["payload"]["chats"]]
        assert named == [chat_id]
        assert parts.clock.monotonic() <= 75


@pytest.mark.covers("000 gateway under memory pressure")
async def test_above_the_memory_budget_the_fullest_connection_is_shed() -> None:
    """It learns why and when to reconnect; shed clients do not return together."""
    async with bench(memory_budget_bytes=10_000) as parts:
        chat_id = await parts.chat("alice", "bob")
        alice, bob = await live(parts, "alice"), await live(parts, "bob")
        for _ in range(498):
            parts.connect(None)
        alice.connection.writing_paused()
        for n in range(1, 61):
            parts.gateway.deliver(entries(chat_id, n))
        forced = REGISTRY.get_sample_value("holdfast_client_resync_forced_total") or 0.0
        await asyncio.sleep(0.5)
        closing = alice.take()[-1]["payload"]
        assert (closing["reason"], closing["reconnect_allowed"]) == ("memory_pressure", True)
        assert 0 < closing["reconnect_delay_ms"] <= 1_000, "500 connections return within a second"
        assert alice.closed == (4003, "memory_pressure")
        assert bob.closed is None
        assert REGISTRY.get_sample_value("holdfast_client_resync_forced_total") == forced + 1


async def test_unsent_bytes_of_a_socket_count_against_the_memory_budget() -> None:
    """A page leaves its lane in one piece and stays in the transport."""
    async with bench(memory_budget_bytes=10_000) as parts:
        alice, bob = await live(parts, "alice"), await live(parts, "bob")
        alice.unsent, bob.unsent = 8_000, 6_000
        alice.connection.writing_paused()
        await asyncio.sleep(0.5)
        assert REGISTRY.get_sample_value("holdfast_gateway_outbound_buffer_bytes") == 8_000
        assert alice.closed is None
        bob.connection.writing_paused()
        await asyncio.sleep(0.5)
        assert (alice.closed, bob.closed) == ((4003, "memory_pressure"), None)


async def test_bytes_of_a_closing_connection_shed_no_other() -> None:
    async with bench(memory_budget_bytes=10_000) as parts:
        alice, bob = await live(parts, "alice"), await live(parts, "bob")
        alice.unsent, bob.unsent = 50_000, 5_000
        alice.connection.writing_paused()
        bob.connection.writing_paused()
        await asyncio.sleep(1.5)
        assert (alice.closed, bob.closed) == ((4003, "memory_pressure"), None)


@pytest.mark.covers("000 gateway graceful shutdown")
async def test_a_drain_answers_open_requests_before_it_closes() -> None:
    limits = replace(GatewaySettings(), reconnect_spread_seconds=10)
    async with bench(limits) as parts:
        chat_id = await parts.chat("alice")
        socket = await live(parts, "alice")
        socket.say(
            "send_message", "q1", client_message_id="c1", chat_id=chat_id, content="last words"
        )
        draining = asyncio.create_task(parts.gateway.drain())
        await asyncio.sleep(1)
        frames = socket.take()
        assert types_of(frames) == ["message_ack", "connection_closing"]
        assert frames[-1]["payload"]["reconnect_allowed"] is True
        assert 0 <= frames[-1]["payload"]["reconnect_delay_ms"] <= 10_000
        assert socket.closed == (4000, "server_shutdown")
        socket.connection.connection_lost()
        await draining


@pytest.mark.parametrize(("connections", "seconds"), [(1, 0.002), (100, 0.2), (3_000, 2)])
async def test_after_a_restart_clients_return_at_five_hundred_a_second_within_the_spread(
    connections: int, seconds: float
) -> None:
    async with bench(GatewaySettings(reconnect_spread_seconds=2)) as parts:
        sockets = [parts.connect(None) for _ in range(connections)]
        draining = asyncio.create_task(parts.gateway.drain())
        await settle()
        delays = [socket.take()[-1]["payload"]["reconnect_delay_ms"] / 1000 for socket in sockets]
        assert max(delays) <= seconds
        assert connections == 1 or max(delays) >= seconds * 0.9, "spread over all of it"
        for socket in sockets:
            socket.connection.connection_lost()
        await draining


async def test_each_connection_is_announced_and_withdrawn_once() -> None:
    async with bench() as parts:
        one, two = parts.connect("alice", "a"), parts.connect("alice", "b")
        await settle()
        one.connection.connection_lost()
        two.connection.connection_lost()
        two.connection.connection_lost()
        assert parts.presence.events == [
            ("came", "alice", "a"),
            ("came", "alice", "b"),
            ("left", "alice", "a"),
            ("left", "alice", "b"),
        ]


async def test_connections_that_others_displaced_are_closed_and_only_these() -> None:
    async with bench() as parts:
        one, two = parts.connect("alice", "a"), parts.connect("alice", "b")
        await settle()
        named = [one.connection.connection_id, "conn_of_another_life"]
        for _ in range(2):
            parts.gateway.close_displaced(named)
        assert one.connection.closing is CloseReason.DUPLICATE_CONNECTION
        assert two.connection.closing is None


async def test_a_closed_connection_leaves_its_chats() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice")
        socket = await live(parts, "alice")
        socket.connection.protocol_broken("for the test")
        socket.connection.connection_lost()
        assert parts.gateway.roster.in_chat(chat_id) == ()
        assert parts.gateway.connections == 0


async def test_a_store_that_cannot_be_read_closes_a_newcomer_with_a_delay() -> None:
    class Unreachable(MemoryStore):
        async def memberships(self, users: Sequence[User]) -> Any:
            raise Unavailable("the store is unavailable")

    async with bench(store=Unreachable()) as parts:
        socket = parts.connect("alice")
        await settle()
        assert types_of(socket.take()) == ["error", "connection_closing"]
        assert socket.closed == (4007, "upstream_failure")
        socket.connection.connection_lost()
        assert parts.presence.events == [], "it displaces no connection that works"


@pytest.mark.parametrize("drained", [False, True])
async def test_requests_before_the_connection_is_established_are_answered_at_close(
    drained: bool,
) -> None:
    class Unreachable(MemoryStore):
        async def memberships(self, users: Sequence[User]) -> Any:
            await asyncio.sleep(1)
            raise Unavailable("the store is unavailable")

    async with bench(store=Unreachable()) as parts:
        socket = parts.connect("alice")
        socket.say("sync_request", "q1", chat_id="c", epoch=1, after_sequence=0)
        socket.say("heartbeat_ack")
        if drained:
            socket.connection.close(CloseReason.SERVER_SHUTDOWN)
        await asyncio.sleep(2)
        frames = socket.take()
        assert frames[-1]["type"] == "connection_closing"
        answers = [frame["payload"] for frame in frames if frame.get("request_id") == "q1"]
        assert [(answer["code"], answer["retryable"]) for answer in answers] == [
            ("SERVICE_UNAVAILABLE", True)
        ]


async def test_skipped_removal_ends_deliveries_and_sends_a_resync() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        stays = await parts.chat("alice", "bob")
        alice, bob = await live(parts, "alice"), await live(parts, "bob")
        await parts.remove(chat_id, "bob")
        await parts.gateway.roster_sync.compare_memberships()
        await parts.gateway.push_to_chats([chat_id], ("typing",), TYPING)
        await settle()
        assert bob.take() == [
            {"type": "resync", "payload": {"chats": [{"chat_id": chat_id, "head": 0}]}}
        ]
        assert types_of(alice.take()) == ["typing"]
        bob.say("sync_request", "q", chat_id=chat_id, epoch=1, after_sequence=0)
        await parts.gateway.push_to_chats([stays], ("typing",), TYPING)
        await settle()
        refused, typing = bob.take()
        assert (refused["payload"]["code"], typing["type"]) == ("NOT_A_MEMBER", "typing")


class SlowMemberships(MemoryStore):
    """Reads memberships at once and answers when the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[User] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def memberships(self, users: Sequence[User]) -> Mapping[User, Mapping[str, Cursor]]:
        self.asked += users
        found = await super().memberships(users)
        await self.gate.wait()
        return found


@pytest.mark.parametrize("what", ["member_removed", "member_added"])
async def test_memberships_read_before_an_event_do_not_take_it_back(what: str) -> None:
    """Above all not a removal: who left would get the chat's messages again."""
    store = SlowMemberships()
    async with bench(store=store) as parts:
        before = ("alice", "bob") if what == "member_removed" else ("alice",)
        chat_id = await parts.chat(*before)
        bob = await live(parts, "bob")
        store.gate.clear()
        asking = asyncio.create_task(parts.gateway.roster_sync.compare_memberships())
        await settle()
        change = parts.remove if what == "member_removed" else parts.add
        parts.gateway.deliver([await change(chat_id, "bob")])
        await asyncio.sleep(0.1)
        store.gate.set()
        await asking
        is_in = what == "member_added"
        assert (chat_id in bob.connection.chats) is is_in
        assert (bob.connection in parts.gateway.roster.in_chat(chat_id)) is is_in


async def test_member_who_leaves_during_a_membership_check_is_not_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        for user_id in ("alice", "bob"):
            await live(parts, user_id)
        event = message(
            chat_id, 1, kind="event", content='{"event":"member_removed","user_id":"bob"}'
        )

        async def give_way(turns: Turns) -> None:
            parts.gateway.deliver([entry(event)])

        monkeypatch.setattr(Turns, "give_way", give_way)
        await parts.gateway.roster_sync.compare_memberships()
        assert [connection.user for connection in parts.gateway.roster.in_chat(chat_id)] == [ALICE]


async def test_memberships_that_are_read_for_a_hello_are_not_asked_for_again() -> None:
    """A connection that is being established is about to learn all of them."""
    store = SlowMemberships()
    async with bench(store=store) as parts:
        await live(parts, "alice")
        store.gate.clear()
        parts.connect("bob")
        await settle()
        store.asked.clear()
        asking = asyncio.create_task(parts.gateway.roster_sync.compare_memberships())
        await settle()
        store.gate.set()
        await asking
        assert store.asked == [ALICE]


async def turns_of(work: Coroutine[Any, Any, None]) -> int:
    """How often others get the loop while it runs."""
    task = asyncio.create_task(work)
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    return turns


@pytest.mark.parametrize("ask", ["compare_heads", "compare_memberships"])
async def test_comparison_with_the_store_yields_to_the_loop(
    ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench() as parts:
        for n in range(40):
            await parts.chat(f"user_{n}", "alice")
            parts.connect(f"user_{n}")
        await settle()
        asking = getattr(parts.gateway.roster_sync, ask)
        idle = await turns_of(asking())
        worked = count(0, TURN_SECONDS)
        monkeypatch.setattr(LoopClock, "monotonic", lambda clock: next(worked))
        assert await turns_of(asking()) >= idle + 40, "each reading of the clock is a turn later"


async def test_heads_without_news_do_not_reach_sessions() -> None:
    named: list[str] = []

    class Recording(Session):
        def on_head(self, chat_id: str, head: Cursor, now: float) -> Effects:
            named.append(chat_id)
            return super().on_head(chat_id, head, now)

    async with bench(connection_type=partial(Connection, session_type=Recording)) as parts:
        chats = [await parts.chat("alice", "bob") for _ in range(3)]
        await parts.store.append([draft("c1", sender=ALICE, chat_id=chats[0])])
        await live(parts, "alice")
        never_resumed = parts.connect("bob")
        await asyncio.sleep(1)
        await parts.gateway.roster_sync.compare_heads()
        await asyncio.sleep(1)
        due = never_resumed.connection.due
        named.clear()
        await parts.gateway.roster_sync.compare_heads()
        assert named == []
        assert never_resumed.connection.due == due, "it need not be looked at"
        await parts.store.append([draft("c2", sender=ALICE, chat_id=chats[1])])
        await parts.gateway.roster_sync.compare_heads()
        assert named == [chats[1]] * 2


async def test_memberships_read_before_a_connection_came_say_nothing_about_it() -> None:
    store = SlowMemberships()
    async with bench(store=store) as parts:
        await live(parts, "bob")
        chat_id = await parts.chat("alice", "bob")
        store.gate.clear()
        asking = asyncio.create_task(parts.gateway.roster_sync.compare_memberships())
        await settle()
        await parts.remove(chat_id, "bob")
        tablet = parts.connect("bob", "tablet")
        store.gate.set()
        await asking
        await settle()
        assert list(tablet.connection.chats) == []


async def test_memberships_that_cannot_be_read_delay_no_other_user() -> None:
    class Partly(MemoryStore):
        async def memberships(self, users: Sequence[User]) -> Mapping[User, Mapping[str, Cursor]]:
            if broken and ALICE in users:
                raise Unavailable("this one cannot be read")
            return await super().memberships(users)

    broken: list[str] = []
    async with bench(store=Partly()) as parts:
        await live(parts, "alice")
        bob = await live(parts, "bob")
        broken.append("alice")
        await parts.chat("carol", "bob")
        history = parts.gateway.roster_sync._history
        one_by_one = RosterSync(
            parts.gateway.roster, history, parts.clock, random.Random(1), users_per_read=1
        )
        await one_by_one.compare_memberships()
        await settle()
        assert types_of(bob.take()) == ["resync"]


async def test_the_memberships_of_many_are_asked_for_in_few_reads() -> None:
    class Counting(MemoryStore):
        reads = 0

        async def memberships(self, users: Sequence[User]) -> Mapping[User, Mapping[str, Cursor]]:
            self.reads += 1
            return await super().memberships(users)

    store = Counting()
    async with bench(store=store) as parts:
        for n in range(120):
            parts.connect(f"user_{n}")
        await settle()
        store.reads = 0
        await parts.gateway.roster_sync.compare_memberships()
        assert store.reads == 3


async def test_log_names_the_client_of_a_warning_and_of_a_close() -> None:
    with capture_logs() as logs:
        limits = GatewaySettings(
            backpressure=BackpressureSettings(outbound=OutboundSettings(max_buffer_messages=20))
        )
        async with bench(limits) as parts:
            chat_id = await parts.chat("alice", "bob")
            socket = await live(parts, "alice")
            await live(parts, "bob")
            socket.connection.writing_paused()
            for n in range(1, 40):
                parts.gateway.deliver(entries(chat_id, n))
            await asyncio.sleep(10)
            assert socket.closed == (4002, "slow_consumer")
    alices = [line for line in logs if line.get("user_id") == "alice"]
    events = [
        "gateway.outbound_buffer_filled",
        "gateway.slow_consumer_warned",
        "gateway.connection_closed",
    ]
    assert [line["event"] for line in alices] == events, "each once"
    assert alices[-1]["reason"] == "slow_consumer"
    assert {(line["tenant"], line["connection_id"][:5]) for line in alices} == {
        ("default", "conn_")
    }


async def test_a_storm_of_closings_does_not_flood_the_log_and_says_what_it_left_out() -> None:
    with capture_logs() as logs:
        async with bench() as parts:
            for n in range(300):
                parts.connect(f"user_{n}")
            await settle()
            for socket in parts.sockets:
                socket.connection.close(CloseReason.SERVER_SHUTDOWN)
            await asyncio.sleep(LINES_SECONDS + 1)
            late = parts.connect("late")
            await settle()
            late.connection.close(CloseReason.ROTATION)
    lines = [line for line in logs if line["event"] == "gateway.connection_closed"]
    assert len(lines) == LINES_AT_ONCE + 2
    assert lines[-2]["left_out"] == 300 - LINES_AT_ONCE and lines[-1]["user_id"] == "late"


class _SlowLoopClock(LoopClock):
    """Every look at it takes longer than one turn of the loop may."""

    def __init__(self) -> None:
        super().__init__()
        self._looks = 0

    def monotonic(self) -> float:
        self._looks += 1
        return super().monotonic() + self._looks * TURN_SECONDS


async def test_presence_in_many_chats_gives_way_to_other_work_between_two_chats() -> None:
    async with bench() as parts:
        chats = [await parts.chat("alice", other) for other in ("bob", "carol")]
        for user_id in ("bob", "carol"):
            await live(parts, user_id)
        gateway = parts.gateway
        gateway._deps = replace(gateway._deps, clock=_SlowLoopClock())
        order: list[str] = []
        pushing = asyncio.create_task(gateway.push_to_chats(chats, ("presence",), TYPING))
        pushing.add_done_callback(lambda _: order.append("pushed"))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(order.append, "other work")
        await pushing
        await asyncio.sleep(0)
        assert order == ["other work", "pushed"]


async def test_session_in_many_chats_gets_an_ephemeral_frame_once() -> None:
    pushed: list[str] = []

    class Recording(Session):
        def ephemeral(self, key: Hashable, frame: bytes) -> Effects:
            pushed.append(self.user.user_id)
            return super().ephemeral(key, frame)

    async with bench(connection_type=partial(Connection, session_type=Recording)) as parts:
        chats = [await parts.chat("alice", "bob") for _ in range(5)]
        others = await parts.chat("alice", "carol")
        for user_id in ("alice", "bob", "carol"):
            await live(parts, user_id)
        await parts.gateway.push_to_chats([*chats, others], ("presence",), TYPING)
        assert sorted(pushed) == ["alice", "bob", "carol"]
