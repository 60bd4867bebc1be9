"""The conformance suite for clients: every failure a client must survive, one scenario each.

``SCENARIOS`` is the suite: each is a coroutine over a ``ScriptedServer`` and a ``Subject``, the client under test. What
must hold in the end is always the same (``verify``). docs/guides/client-conformance.md describes it for other clients.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from scripted_server import CHAT, USER, ScriptedServer


class Subject(Protocol):
    """The client under test. It follows CHAT, shows what it receives, and keeps its state over ``restart``."""

    received: list[tuple[int, int, str]]
    """(epoch generation, sequence, content) in the order shown; a reset starts the next generation."""

    outcomes: dict[str, str]
    """client_message_id -> "sent" or the error code it was refused with."""

    stopped: str | None
    """Why the client gave up for good, or None."""

    gone: bool
    """Whether the client has told that the user is no member of CHAT any more."""

    def send(self, content: str, client_message_id: str) -> None: ...

    async def restart(self, hard: bool) -> None:
        """Stop the client (``hard``: as if killed) and start it again on the same state."""
        ...


async def verify(server: ScriptedServer, subject: Subject) -> None:
    """What every scenario ends with: the subject has exactly what the server has, in order, once, and acked it."""
    want = [(message["sequence"], message["content"]) for message in server.messages]

    def have() -> list[tuple[int, str]]:
        newest = max((generation for generation, _, _ in subject.received), default=0)
        return [(sequence, content) for generation, sequence, content in subject.received if generation == newest]

    try:
        await server.until(lambda: have() == want, "every message")
    except AssertionError:
        raise AssertionError(f"want {want}, have {subject.received}") from None
    await server.until(lambda: server.acked == (server.epoch, len(want)) or not want, "the ack of everything")
    assert have() == want, "something came again after the end"
    assert server.violations == []


Scenario = Callable[[ScriptedServer, Subject], Awaitable[None]]


async def in_order(server: ScriptedServer, subject: Subject) -> None:
    """Messages from both sides arrive in order, once."""
    await server.until(lambda: bool(server.connections) and server.here.live, "a resumed connection")
    for n in range(5):
        await server.say(f"theirs {n}")
        subject.send(f"mine {n}", f"key-{n}")
    await server.until(lambda: len(server.messages) == 10, "ten messages")
    await server.until(lambda: len(subject.outcomes) == 5, "five outcomes")
    mine = [message["content"] for message in server.messages if message["sender_id"] == USER]
    assert mine == [f"mine {n}" for n in range(5)], "a chat's sends must keep their order"


async def drop_before_store(server: ScriptedServer, subject: Subject) -> None:
    """The connection dies before the send is stored: it is sent again under the same key, its followers after it."""
    server.script.drop_before_store = 2
    for n in range(4):
        subject.send(f"mine {n}", f"key-{n}")
    await server.until(lambda: len(subject.outcomes) == 4, "four outcomes")
    assert [message["content"] for message in server.messages] == [f"mine {n}" for n in range(4)]


async def drop_after_store(server: ScriptedServer, subject: Subject) -> None:
    """The ack is lost: the retry is answered as the first, and nothing is stored twice."""
    server.script.drop_after_store = 1
    subject.send("mine", "key-lost-ack")
    await server.until(lambda: subject.outcomes.get("key-lost-ack") == "sent", "the second ack")
    assert len(server.messages) == 1


async def duplicate_pushes(server: ScriptedServer, subject: Subject) -> None:
    """Every push comes twice and is shown once."""
    server.script.push_twice = True
    await server.until(lambda: bool(server.connections) and server.here.live, "a resumed connection")
    for n in range(5):
        await server.say(f"theirs {n}")


async def gap(server: ScriptedServer, subject: Subject) -> None:
    """A push is missing: the client pulls it, and shows nothing out of order."""
    await server.until(lambda: bool(server.connections) and server.here.live, "a resumed connection")
    await server.say("first")
    server.script.skip_pushes = 2
    for n in range(4):
        await server.say(f"theirs {n}")


async def heads(server: ScriptedServer, subject: Subject) -> None:
    """The last push is missing and nothing follows: the heartbeat's heads tell."""
    await server.until(lambda: bool(server.connections) and server.here.live, "a resumed connection")
    server.script.skip_pushes = 1
    await server.say("unheard")
    await server.push_frame("heartbeat", {"heads": {CHAT: [server.epoch, 1]}})
    await server.until(lambda: any(f["type"] == "heartbeat_ack" for f in server.here.frames), "a heartbeat_ack")


async def resync(server: ScriptedServer, subject: Subject) -> None:
    """ "I did not send you everything": the client pulls, in pages."""
    server.script.page_limit = 3
    await server.until(lambda: bool(server.connections) and server.here.live, "a resumed connection")
    server.script.skip_pushes = 8
    for n in range(8):
        await server.say(f"theirs {n}")
    await server.push_frame("resync", {"chats": [{"chat_id": CHAT, "head": 8}]})


async def slow_link(server: ScriptedServer, subject: Subject) -> None:
    """A page takes longer than any answer may, and a heartbeat behind it could not come through: the client says
    unasked that it is here, and stays."""
    await server.until(lambda: bool(server.connections) and server.here.live, "a resumed connection")
    server.script.heartbeat_ms, server.script.page_seconds = 1_000, 1.5
    server.cut()
    await server.until(lambda: len(server.connections) == 2 and server.here.live, "a connection with those heartbeats")
    server.script.skip_pushes = 3
    for n in range(3):
        await server.say(f"theirs {n} " + "x" * 500)
    await server.push_frame("resync", {"chats": [{"chat_id": CHAT, "head": 3}]})
    await server.until(lambda: server.acked == (server.epoch, 3), "the ack of the page")
    unasked = [frame for frame in server.here.frames if frame["type"] == "heartbeat_ack"]
    assert len(unasked) >= 5, f"said {len(unasked)} times that it was here in 1.5 s"
    assert len(server.connections) == 2, "nothing was wrong with the connection"


async def reset(server: ScriptedServer, subject: Subject) -> None:
    """The chat was numbered anew: the client drops its copy and starts at 0."""
    for n in range(3):
        await server.say(f"old {n}")
    await server.until(lambda: len(subject.received) == 3, "the old messages")
    await server.renumber(["new 0", "new 1"])


async def rotation(server: ScriptedServer, subject: Subject) -> None:
    """A planned close: the client comes back by itself and misses nothing."""
    await server.say("before")
    await server.until(lambda: len(subject.received) == 1, "the first message")
    await server.announce("rotation", 4004)
    await server.say("between")
    await server.until(lambda: len(server.connections) == 2, "a second connection")
    resumed = next(frame for frame in server.here.frames if frame["type"] == "resume") if server.here.frames else None
    assert resumed is None or resumed["payload"]["cursors"].get(CHAT, [1, 1])[0] == server.epoch


async def shutdown_with_delay(server: ScriptedServer, subject: Subject) -> None:
    """The server names a delay: the client waits that long."""
    await server.until(lambda: bool(server.connections) and server.here.live, "a resumed connection")
    left = time.monotonic()
    await server.announce("server_shutdown", 4000, delay_ms=700)
    await server.until(lambda: len(server.connections) == 2, "a second connection")
    waited = server.here.opened_at - left
    assert 0.65 <= waited <= 3.0, f"waited {waited:.2f} s instead of 0.7 s"


async def slow_closing(server: ScriptedServer, subject: Subject) -> None:
    """Warned as slow, then closed with 4002: the client comes back and has everything."""
    await server.until(lambda: bool(server.connections) and server.here.live, "a resumed connection")
    await server.push_frame(
        "error",
        {"code": "SLOW_CONSUMER", "message": "slow", "retryable": True, "grace_period_seconds": 5},
    )
    server.script.skip_pushes = 5
    for n in range(5):
        await server.say(f"theirs {n}")
    await server.announce("slow_consumer", 4002)
    await server.until(lambda: len(server.connections) == 2, "a second connection")


async def announced_and_not_closed(server: ScriptedServer, subject: Subject) -> None:
    """The server says that it will close and then hangs: the client leaves by itself."""
    await server.until(lambda: bool(server.connections) and server.here.live, "a resumed connection")
    await server.announce("server_shutdown", 4000, close=False)
    server.script.silent = True
    await server.until(lambda: server.here.closed_at is not None, "the client to leave")
    server.script.silent = False
    await server.say("after")


async def token_expiry(server: ScriptedServer, subject: Subject) -> None:
    """Closed because the token has expired: the client comes back with another one."""
    await server.until(lambda: bool(server.connections) and server.here.live, "a resumed connection")
    await server.announce("token_expired", 4008)
    await server.until(lambda: len(server.connections) == 2, "a second connection")
    assert server.connections[0].token != server.connections[1].token
    assert server.connections[0].device_id == server.connections[1].device_id != ""


async def bad_handshakes(server: ScriptedServer, subject: Subject) -> None:
    """500, 503, 429 at the handshake are no reason to give up; Retry-After is a reason to wait."""
    await server.until(lambda: bool(server.connections) and server.here.live, "a resumed connection")
    server.script.refuse_handshakes = [(500, {}), (503, {}), (429, {"Retry-After": "1"})]
    server.cut()
    await server.say("missed")
    await server.until(lambda: len(server.connections) == 2, "a second connection")
    refused, accepted = server.handshakes[-2:]
    assert accepted - refused >= 0.95, f"came back {accepted - refused:.2f} s after Retry-After: 1"


async def blackhole(server: ScriptedServer, subject: Subject) -> None:
    """The server accepts and then says nothing at all: the client gives that connection up and tries another."""
    await server.until(lambda: bool(server.connections) and server.here.live, "a resumed connection")
    server.script.silent = True
    subject.send("into the dark", "key-dark")
    silent = len(server.connections)
    await server.until(lambda: server.connections[silent - 1].closed_at is not None, "the client to give up")
    server.script.silent = False
    if server.here.closed_at is None and not server.here.live:
        server.cut()
    await server.until(lambda: subject.outcomes.get("key-dark") == "sent", "the send")


async def refusals(server: ScriptedServer, subject: Subject) -> None:
    """A retryable refusal is tried again, in order; a final one is told and lets the next pass."""
    await server.until(lambda: bool(server.connections) and server.here.live, "a resumed connection")
    server.script.send_errors = [
        {"code": "RATE_LIMITED", "message": "slow down", "retryable": True, "outcome": "rejected",
         "retry_after_seconds": 0.2},
        {"code": "SERVICE_UNAVAILABLE", "message": "who knows", "retryable": True, "outcome": "unknown"},
        {"code": "INVALID_MESSAGE", "message": "no", "retryable": False, "outcome": "rejected"},
    ]  # fmt: skip
    for n in range(3):
        subject.send(f"mine {n}", f"key-{n}")
    await server.until(lambda: len(subject.outcomes) == 3, "three outcomes")
    assert subject.outcomes == {"key-0": "INVALID_MESSAGE", "key-1": "sent", "key-2": "sent"}
    assert [message["content"] for message in server.messages] == ["mine 1", "mine 2"]


async def replaced(server: ScriptedServer, subject: Subject) -> None:
    """4500 and above: the client stops, says why, and does not come back."""
    await server.until(lambda: bool(server.connections) and server.here.live, "a resumed connection")
    await server.announce("duplicate_connection", 4500)
    await server.until(lambda: subject.stopped is not None, "the client to stop")
    count = len(server.handshakes)
    await asyncio.sleep(0.5)  # the absence of a reconnect is what is to be seen
    assert len(server.handshakes) == count


async def killed_client(server: ScriptedServer, subject: Subject) -> None:
    """The client dies with unsent and unread messages: after its restart nothing is missing and nothing twice."""
    await server.say("before")
    await server.until(lambda: len(subject.received) == 1, "the first message")
    server.script.drop_after_store = 1
    subject.send("mine", "key-killed")
    await server.until(lambda: "key-killed" in server.keys, "the send")
    await subject.restart(hard=True)
    await server.say("after")
    await server.until(lambda: len(subject.received) >= 3, "three messages")


async def resume_refused_for_now(server: ScriptedServer, subject: Subject) -> None:
    """The server has no time for a resume: it is repeated on the same connection, not at once."""
    await server.until(lambda: bool(server.connections) and server.here.live, "a resumed connection")
    busy = {"code": "SERVER_BUSY", "message": "too many resumes", "retryable": True, "retry_after_seconds": 0.3}
    server.script.resume_errors = [busy, busy]
    server.cut()
    await server.say("missed")
    await server.until(lambda: len(server.connections) > 1 and server.here.live, "the resume")
    assert len(server.connections) == 2, "a refused resume is no reason to reconnect"
    assert time.monotonic() - server.here.opened_at >= 0.55, "came again sooner than it was told to"


async def resume_refused_for_good(server: ScriptedServer, subject: Subject) -> None:
    """No resume can be had: the client pulls each chat it knows, on the same connection."""
    await server.say("before")
    await server.until(lambda: len(subject.received) == 1, "the first message")
    server.script.resume_errors = [{"code": "INTERNAL_ERROR", "message": "a defect", "retryable": False}]
    server.cut()
    await server.say("missed")
    await server.until(lambda: len(subject.received) == 2, "the missed message")
    assert len(server.connections) == 2


async def refused_ack(server: ScriptedServer, subject: Subject) -> None:
    """An ack comes at the wrong moment and is refused, without a request's id: it is said again, later."""
    await server.until(lambda: bool(server.connections) and server.here.live, "a resumed connection")
    server.script.ack_errors = [
        {"code": "RATE_LIMITED", "message": "slow down", "retryable": True, "retry_after_seconds": 0.2}
    ]
    await server.say("once")
    await server.until(lambda: not server.script.ack_errors, "the first ack")


async def removed(server: ScriptedServer, subject: Subject) -> None:
    """The user is removed while connected: the refusal of the next ack makes the client ask, and it tells."""
    await server.say("before")
    await server.until(lambda: server.acked == (1, 1), "the ack of the first message")
    server.is_member = False
    await server.say("bob removed alice")
    await server.until(lambda: subject.gone, "the client to tell that the chat is gone")
    assert [content for _, _, content in subject.received] == ["before", "bob removed alice"]


async def codes_to_return_from(server: ScriptedServer, subject: Subject) -> None:
    """Below 4500 every close is one to return from, known or not, announced or not."""
    for number, code in enumerate((1001, 1011, 4001, 4003, 4005, 4006, 4007, 4499)):
        await server.until(lambda number=number: len(server.connections) == number + 1 and server.here.live, "a return")
        await server.say(f"before {code}")
        await server.here.socket.close(code, "")
    await server.until(lambda: server.here.live, "the last return")
    assert subject.stopped is None


async def codes_to_stop_at(server: ScriptedServer, subject: Subject) -> None:
    """From 4500 on none is, known or not; a restarted client is a new attempt."""
    for number, code in enumerate((4500, 4501, 4502, 4999)):
        await server.until(lambda number=number: len(server.connections) == number + 1 and server.here.live, "a client")
        await server.here.socket.close(code, "")
        await server.until(lambda: subject.stopped is not None, f"the client to stop at {code}")
        await subject.restart(hard=False)


WITHOUT_VERIFY = (replaced, removed)
"""Scenarios after which the client has no more of the chat to show or to ack."""

SCENARIOS: list[Scenario] = [
    in_order, drop_before_store, drop_after_store, duplicate_pushes, gap, heads, resync, slow_link, reset,
    rotation, shutdown_with_delay, slow_closing, announced_and_not_closed, token_expiry, bad_handshakes, blackhole,
    refusals, replaced, killed_client, resume_refused_for_now, resume_refused_for_good, refused_ack, removed,
    codes_to_return_from, codes_to_stop_at,
]  # fmt: skip
