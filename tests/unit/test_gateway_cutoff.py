"""A revoked user is closed within a second; open sends are answered first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from gateway_rig import Bench, FakeSocket, bench, settle

from holdfast.access.principal import Principal
from holdfast.access.revocations.contract import Revocation, RevocationKind
from holdfast.access.revocations.in_force import RevocationsInForce
from holdfast.access.revocations.memory import MemoryRevocations
from holdfast.clock import SystemClock
from holdfast.errors import HoldfastError
from holdfast.message import Draft, Outcome, User
from holdfast.store.memory import MemoryStore
from holdfast.wire.close_codes import CloseReason

ALICE = User("default", "alice")
UNAUTHORIZED = (4502, "unauthorized")


def entry(
    kind: RevocationKind, user_id: str = "alice", item: str = "", issued_before: float = 1.0
) -> Revocation:
    return Revocation(kind, "default", user_id, item, issued_before, "t", None)


class List:
    """Revocations that a test makes, and the gateway asks."""

    def __init__(self) -> None:
        self.held = RevocationsInForce(MemoryRevocations(SystemClock()), SystemClock())

    def refusal(self, who: Principal, device_id: str) -> HoldfastError | None:
        return self.held.refusal(who, device_id)

    async def add(self, parts: Bench, *entries: Revocation) -> None:
        self.held.on_added = parts.gateway.cutoff.on_revoked
        for one in entries:
            await self.held.add(one)


async def live(parts: Bench, user_id: str, device_id: str = "") -> FakeSocket:
    socket = parts.connect(user_id, device_id)
    await settle()
    socket.take()
    return socket


def closings(frames: Sequence[dict[str, Any]]) -> list[tuple[str, str, bool]]:
    said = [frame["payload"] for frame in frames if frame["type"] == "connection_closing"]
    return [(one["reason"], one["message"], one["reconnect_allowed"]) for one in said]


async def test_only_sockets_of_a_banned_user_close_at_once() -> None:
    cut = List()
    async with bench(refusal=cut.refusal) as parts:
        phone, tablet = await live(parts, "alice", "phone"), await live(parts, "alice", "tablet")
        bob = await live(parts, "bob")
        await cut.add(parts, entry("ban"))
        assert phone.closed == tablet.closed == UNAUTHORIZED and bob.closed is None
        assert closings(phone.take()) == [("unauthorized", "this user is banned", False)]


async def test_device_and_token_are_cut_off_alone() -> None:
    cut = List()
    async with bench(refusal=cut.refusal) as parts:
        phone, tablet = await live(parts, "alice", "phone"), await live(parts, "alice", "tablet")
        await cut.add(parts, entry("device", item="phone"))
        assert phone.closed == UNAUTHORIZED and tablet.closed is None
        socket = FakeSocket()
        who = Principal("default", "carl", frozenset(), "user", issued_at=5.0, token_id="jti-1")
        socket.connection = parts.gateway.accept(socket, who, "")
        parts.sockets.append(socket)
        await settle()
        await cut.add(parts, entry("token", "", "jti-1"))
        assert socket.closed is None, (
            "whose token it is nobody said: everybody is looked at, in turns"
        )
        await settle()
        assert socket.closed == UNAUTHORIZED and tablet.closed is None


async def test_tokens_of_a_tenant_are_cut_off_within_a_second_and_no_other_tenants() -> None:
    cut = List()
    async with bench(refusal=cut.refusal) as parts:

        async def accepted(tenant: str, user_id: str, issued_at: float) -> FakeSocket:
            socket = FakeSocket()
            who = Principal(tenant, user_id, frozenset(), "user", issued_at=issued_at)
            socket.connection = parts.gateway.accept(socket, who, "")
            parts.sockets.append(socket)
            await settle()
            return socket

        old = [await accepted("default", name, 5.0) for name in ("alice", "bob")]
        others = [await accepted("default", "carl", 6.0), await accepted("other", "alice", 5.0)]
        await cut.add(parts, entry("tenant", "", issued_before=6.0))
        await asyncio.sleep(0.99)
        assert [socket.closed for socket in old] == [UNAUTHORIZED] * 2
        assert [socket.closed for socket in others] == [None] * 2


class SlowStore(MemoryStore):
    """Holds a commit until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()

    async def append(self, group: Sequence[Draft]) -> list[Outcome]:
        await self.go_on.wait()
        return await super().append(group)


async def sending(parts: Bench) -> tuple[FakeSocket, str]:
    """A connection of alice whose send waits for its commit, and its chat."""
    chat_id = await parts.chat("alice", "bob")
    socket = await live(parts, "alice")
    socket.say("send_message", "q1", client_message_id="c1", chat_id=chat_id, content="hello")
    await settle()
    return socket, chat_id


async def test_send_in_flight_is_answered_before_the_close_and_nothing_more_is_taken() -> None:
    cut, store = List(), SlowStore()
    async with bench(refusal=cut.refusal, store=store) as parts:
        socket, chat_id = await sending(parts)
        await cut.add(parts, entry("ban"))
        assert socket.closed is None and not socket.reading
        socket.say(
            "send_message", "q2", client_message_id="c2", chat_id=chat_id, content="too late"
        )
        store.go_on.set()
        await asyncio.sleep(0.3)
        frames = socket.take()
        assert [frame["type"] for frame in frames] == ["message_ack", "connection_closing"]
        assert frames[0]["request_id"] == "q1" and socket.closed == UNAUTHORIZED
        assert (await store.heads([chat_id]))[chat_id].sequence == 1


async def test_nothing_makes_a_socket_that_is_to_close_be_read_again() -> None:
    cut, store = List(), SlowStore()
    async with bench(refusal=cut.refusal, store=store) as parts:
        socket, _ = await sending(parts)
        burst = parts.gateway._deps.settings.backpressure.inbound.work_rate_limit_burst
        socket.connection.work_done(burst + 20)
        await cut.add(parts, entry("ban"))
        await asyncio.sleep(0.4)
        assert socket.closed is None and not socket.reading, "though the work rate allows it"
        store.go_on.set()
        await asyncio.sleep(0.3)
        assert socket.closed == UNAUTHORIZED


async def test_a_socket_that_closes_already_is_read_to_its_end() -> None:
    cut = List()
    async with bench(refusal=cut.refusal) as parts:
        socket = await live(parts, "alice")
        socket.connection.close(CloseReason.ROTATION)
        await cut.add(parts, entry("ban"))
        assert socket.closed == (CloseReason.ROTATION.code, "rotation") and socket.reading


async def test_send_that_is_not_answered_in_time_does_not_keep_the_socket_open() -> None:
    cut, store = List(), SlowStore()
    async with bench(refusal=cut.refusal, store=store) as parts:
        socket, _ = await sending(parts)
        await cut.add(parts, entry("ban"))
        await asyncio.sleep(0.99)
        assert socket.closed == UNAUTHORIZED, "within a second"
        (answer, _) = socket.take()
        assert (answer["request_id"], answer["payload"]["outcome"]) == ("q1", "unknown")
        store.go_on.set()
        await settle()


async def test_user_revoked_between_handshake_and_opening_is_refused() -> None:
    cut = List()
    async with bench(refusal=cut.refusal) as parts:
        await cut.add(parts, entry("ban"))
        socket = parts.connect("alice")
        await settle()
        (error, closing) = socket.take()
        assert (error["payload"]["code"], error["payload"]["details"]) == (
            "UNAUTHORIZED",
            {"revoked": "ban"},
        )
        assert closing["type"] == "connection_closing" and socket.closed == UNAUTHORIZED
        assert not parts.gateway.roster.of_user(ALICE)


async def test_revoked_token_is_refused_in_the_first_frame_and_in_band() -> None:
    cut = List()

    def verify(token: str) -> Principal:
        return Principal("default", "alice", frozenset(), "user", issued_at=5.0, token_id=token)

    async with bench(refusal=cut.refusal, verify=verify) as parts:
        await cut.add(parts, entry("token", "", "old"))
        first = parts.connect(None)
        first.say("authenticate", "a", token="old")
        (error, _) = first.take()
        assert (error["request_id"], error["payload"]["code"]) == ("a", "UNAUTHORIZED")
        assert first.closed == UNAUTHORIZED
        second = parts.connect(None, "phone")
        second.say("authenticate", "a", token="new")
        await settle()
        second.take()
        second.say("authenticate", "b", token="old")
        await settle()
        (answer,) = second.take()
        assert (answer["request_id"], answer["payload"]["code"]) == ("b", "UNAUTHORIZED")
        assert second.closed is None, "it lives on by the token it had"
        second.say("authenticate", "c", token="newer")
        await settle()
        assert second.take()[0]["type"] == "authenticated"
        await cut.add(parts, entry("token", "alice", "newer"))
        assert second.closed == UNAUTHORIZED, "the token that counts is the last one"


async def test_disconnected_user_or_device_may_reconnect() -> None:
    async with bench() as parts:
        phone, tablet = await live(parts, "alice", "phone"), await live(parts, "alice", "tablet")
        bob = await live(parts, "bob")
        assert parts.gateway.cutoff.disconnect(ALICE, "phone") == 1
        assert phone.closed == (4004, "rotation") and tablet.closed is None
        assert closings(phone.take())[0][2] is True
        phone.connection.connection_lost()
        assert parts.gateway.cutoff.disconnect(ALICE) == 1 and tablet.closed is not None
        assert (
            parts.gateway.cutoff.disconnect(User("default", "nobody")) == 0 and bob.closed is None
        )
        assert (await live(parts, "alice", "phone")).closed is None
