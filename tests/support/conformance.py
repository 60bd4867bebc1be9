"""The conformance suite for clients: a scripted server that fails in every way the protocol allows.

``ScriptedServer`` speaks protocol version 1 from memory (it shares no code with Holdfast's server) and does what a
scenario tells it: drop before or after storing, push twice, leave a hole, number anew, refuse, close, fall silent.
``SCENARIOS`` is the suite: each is a coroutine over a server and a ``Subject``, the client under test. What must
hold in the end is always the same (``verify``). docs/guides/client-conformance.md describes it for other clients.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

CHAT = "chat_conformance"
USER = "alice"
PATIENCE_SECONDS = 10.0


class Subject(Protocol):
    """The client under test. It follows CHAT, shows what it receives, and keeps its state over ``restart``."""

    received: list[tuple[int, int, str]]
    """(epoch generation, sequence, content) in the order shown; a reset starts the next generation."""

    outcomes: dict[str, str]
    """client_message_id -> "sent" or the error code it was refused with."""

    stopped: str | None
    """Why the client gave up for good, or None."""

    def send(self, content: str, client_message_id: str) -> None: ...

    async def restart(self, hard: bool) -> None:
        """Stop the client (``hard``: as if killed) and start it again on the same state."""
        ...


@dataclass
class Script:
    """What the server does wrong next; counters count down."""

    refuse_handshakes: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    drop_before_store: int = 0
    drop_after_store: int = 0
    send_errors: list[dict[str, Any]] = field(default_factory=list)
    push_twice: bool = False
    skip_pushes: int = 0
    silent: bool = False
    heartbeat_ms: int = 30_000
    page_limit: int = 500


@dataclass
class Connection:
    """One socket as the server saw it."""

    socket: ServerConnection
    opened_at: float
    token: str
    device_id: str
    live: bool = False
    closed_at: float | None = None
    frames: list[dict[str, Any]] = field(default_factory=list)


class ScriptedServer:
    """A chat with one user in it, in memory. Use it as ``async with ScriptedServer() as server``."""

    def __init__(self) -> None:
        self.script = Script()
        self.epoch = 1
        self.messages: list[dict[str, Any]] = []
        self.keys: dict[str, dict[str, Any]] = {}
        self.connections: list[Connection] = []
        self.handshakes: list[float] = []
        self.acked = (0, 0)
        self.violations: list[str] = []
        self._server: Server | None = None
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> ScriptedServer:
        self._server = await serve(
            self._serve, "127.0.0.1", 0, process_request=self._handshake, ping_interval=None, close_timeout=1
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def here(self) -> Connection:
        """The newest connection."""
        return self.connections[-1]

    # What a scenario does

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(condition)

        try:
            await asyncio.wait_for(wait(), PATIENCE_SECONDS)
        except TimeoutError:
            raise AssertionError(f"in vain waited for: {what}") from None

    async def touch(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def say(self, content: str) -> None:
        """Somebody else writes."""
        await self._store("bob", f"bob-{len(self.messages)}", content)

    async def renumber(self, contents: list[str]) -> None:
        """An operator restored or repaired the chat: a new epoch, other messages."""
        self.epoch += 1
        self.messages = []
        for content in contents:
            self._append("bob", f"bob-{self.epoch}-{content}", content)
        await self.push_frame("heartbeat", {"heads": {CHAT: [self.epoch, len(self.messages)]}})

    async def push_frame(self, kind: str, payload: dict[str, Any]) -> None:
        await self._write(self.here, kind, payload)

    async def announce(self, reason: str, code: int, delay_ms: int = 0, close: bool = True) -> None:
        """Close as a server does: say so, then do."""
        await self.push_frame(
            "connection_closing",
            {
                "reason": reason,
                "message": reason,
                "reconnect_allowed": code < 4500,
                "reconnect_delay_ms": delay_ms,
                "sync_from_sequence": {},
            },
        )
        if close:
            await self.here.socket.close(code, reason)

    def cut(self) -> None:
        """End the newest connection without a word."""
        self.here.socket.transport.abort()

    # The protocol

    def _handshake(self, socket: ServerConnection, request: Request) -> Response | None:
        self.handshakes.append(time.monotonic())
        if request.path != "/v1/ws":
            self.violations.append(f"asked for {request.path}")
        if self.script.refuse_handshakes:
            status, headers = self.script.refuse_handshakes.pop(0)
            body = json.dumps({"error": {"code": "REFUSED", "message": "as scripted", "details": {}}}).encode()
            fields = Headers({**headers, "Content-Length": str(len(body)), "Connection": "close"})
            return Response(status, HTTPStatus(status).phrase, fields, body)
        return None

    async def _serve(self, socket: ServerConnection) -> None:
        assert socket.request is not None
        headers = socket.request.headers
        connection = Connection(
            socket,
            time.monotonic(),
            headers.get("Authorization", "").removeprefix("Bearer "),
            headers.get("X-Device-ID", ""),
        )
        self.connections.append(connection)
        await self.touch()
        try:
            if not self.script.silent:
                await self._write(connection, "connection_established", self._hello(connection))
            async for data in socket:
                frame = json.loads(data)
                connection.frames.append(frame)
                if not self.script.silent:
                    await self._answer(connection, frame)
                await self.touch()
        except ConnectionClosed:
            pass
        finally:
            connection.closed_at = time.monotonic()
            connection.live = False
            await self.touch()

    def _hello(self, connection: Connection) -> dict[str, Any]:
        return {
            "connection_id": f"conn_{len(self.connections)}",
            "user_id": USER,
            "device_id": connection.device_id,
            "server_time": "2026-01-01T00:00:00.000Z",
            "heartbeat_interval_ms": self.script.heartbeat_ms,
            "protocol_version": 1,
            "limits": {},
        }

    async def _answer(self, connection: Connection, frame: dict[str, Any]) -> None:
        payload, request_id = frame.get("payload", {}), frame.get("request_id")
        match frame["type"]:
            case "resume":
                if not payload.get("more"):
                    await self._write(connection, "resumed", self._resumed(payload["cursors"]), request_id)
                    connection.live = True
            case "sync_request":
                page = self._page(payload["epoch"], payload["after_sequence"], payload.get("limit") or 100)
                await self._write(connection, "sync_response", page, request_id)
            case "send_message":
                await self._sent(connection, payload, request_id)
            case "ack":
                self._ack(payload)
            case "authenticate":
                connection.token = payload["token"]
            case "heartbeat_ack" | "read" | "typing_start" | "typing_stop":
                pass
            case other:
                self.violations.append(f"sent a frame of type {other}")

    def _resumed(self, cursors: dict[str, list[int]]) -> dict[str, Any]:
        epoch, sequence = cursors.get(CHAT, [self.epoch, 0])
        page = self._page(epoch, sequence, 100)
        moved = page["messages"] or page["reset"]
        return {
            "chats": [page] if moved else [],
            "joined": [] if CHAT in cursors else [CHAT],
            "gone": [chat_id for chat_id in cursors if chat_id != CHAT],
        }

    def _page(self, epoch: int, after: int, limit: int) -> dict[str, Any]:
        if epoch == self.epoch and after > len(self.messages):
            self.violations.append(f"cursor {after} is beyond the head {len(self.messages)}")
        reset = epoch != self.epoch
        start = 0 if reset else after
        messages = self.messages[start : start + min(limit, self.script.page_limit)]
        through = start + len(messages)
        return {
            "chat_id": CHAT,
            "epoch": self.epoch,
            "messages": messages,
            "through": through,
            "has_more": through < len(self.messages),
            "head": len(self.messages),
            "reset": reset,
        }

    def _ack(self, payload: dict[str, Any]) -> None:
        mark = (payload["epoch"], payload["sequence"])
        if payload["epoch"] == self.epoch and payload["sequence"] > len(self.messages):
            self.violations.append(f"acked {mark}, which was never sent")
        self.acked = max(self.acked, mark)

    async def _sent(self, connection: Connection, payload: dict[str, Any], request_id: str | None) -> None:
        if self.script.drop_before_store:
            self.script.drop_before_store -= 1
            connection.socket.transport.abort()
            return
        if self.script.send_errors:
            await self._write(connection, "error", self.script.send_errors.pop(0), request_id)
            return
        key = payload["client_message_id"]
        known = self.keys.get(key)
        if known is not None and known["content"] != payload["content"]:
            self.violations.append(f"{key} was used for two messages")
        message = known or await self._store(USER, key, payload["content"], push=False)
        if self.script.drop_after_store:
            self.script.drop_after_store -= 1
            connection.socket.transport.abort()
            return
        ack = {name: message[name] for name in ("client_message_id", "message_id", "chat_id", "sequence", "created_at")}
        await self._write(connection, "message_ack", {**ack, "deduplicated": known is not None}, request_id)
        if known is None:
            await self._push(message)

    async def _store(self, sender: str, key: str, content: str, push: bool = True) -> dict[str, Any]:
        message = self._append(sender, key, content)
        if push:
            await self._push(message)
        await self.touch()
        return message

    def _append(self, sender: str, key: str, content: str) -> dict[str, Any]:
        message = {
            "message_id": f"msg_{self.epoch}_{len(self.messages) + 1}",
            "chat_id": CHAT,
            "sequence": len(self.messages) + 1,
            "kind": "text",
            "sender_id": sender,
            "client_message_id": key,
            "content": content,
            "content_type": "text/plain",
            "created_at": "2026-01-01T00:00:00.000Z",
        }
        self.messages.append(message)
        self.keys[key] = message
        return message

    async def _push(self, message: dict[str, Any]) -> None:
        if self.script.skip_pushes:
            self.script.skip_pushes -= 1
            return
        for connection in self.connections:
            if connection.live:
                for _ in range(2 if self.script.push_twice else 1):
                    await self._write(connection, "message", message)

    async def _write(
        self, connection: Connection, kind: str, payload: dict[str, Any], request_id: str | None = None
    ) -> None:
        frame: dict[str, Any] = {"type": kind, "payload": payload}
        if request_id is not None:
            frame["request_id"] = request_id
        try:
            await connection.socket.send(json.dumps(frame))
        except ConnectionClosed:
            pass


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


SCENARIOS: list[Scenario] = [
    in_order, drop_before_store, drop_after_store, duplicate_pushes, gap, heads, resync, reset, rotation,
    shutdown_with_delay, slow_closing, announced_and_not_closed, token_expiry, bad_handshakes, blackhole, refusals,
    replaced, killed_client,
]  # fmt: skip
