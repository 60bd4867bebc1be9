"""A chat server that fails in every way the protocol allows, as a scenario says.

``ScriptedServer`` keeps one chat in memory and shares no code with Holdfast's server,
so that both cannot have the same misunderstanding of the protocol. It drops sends
before or after storing them, pushes twice, leaves a hole, raises the epoch, refuses,
closes, stops replying, and writes many frames in one piece. It records the client's
violations.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

CHAT = "chat_conformance"
USER = "alice"
PATIENCE_SECONDS = 30.0
"""How long a scenario waits for an event that must happen."""
SLICE_SECONDS = 0.02
NOT_A_MEMBER = {
    "code": "NOT_A_MEMBER",
    "message": "not a member of this chat",
    "retryable": False,
    "details": {"chat_id": CHAT},
}


@dataclass
class ServerScript:
    """The server's next failures; counters count down."""

    refuse_handshakes: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    hang_handshakes: int = 0
    """How many handshakes are never answered."""
    refusal_body: bytes = b'{"error": {"code": "REFUSED", "message": "as scripted", "details": {}}}'
    drop_before_store: int = 0
    drop_after_store: int = 0
    send_errors: list[dict[str, Any]] = field(default_factory=list)
    resume_errors: list[dict[str, Any]] = field(default_factory=list)
    ack_errors: list[dict[str, Any]] = field(default_factory=list)
    push_twice: bool = False
    skip_pushes: int = 0
    pull_errors: list[dict[str, Any]] = field(default_factory=list)
    silent: bool = False
    holding: frozenset[str] = frozenset()
    """Frames of these types wait for ``release``, which writes them in one piece."""
    heartbeat_ms: int = 30_000
    page_limit: int = 500
    page_seconds: float = 0.0
    """How long each page takes to arrive, in small pieces."""


@dataclass
class ScriptedConnection:
    """One socket as the server saw it."""

    socket: ServerConnection
    opened_at: float
    token: str
    device_id: str
    live: bool = False
    closed_at: float | None = None
    frames: list[dict[str, Any]] = field(default_factory=list)
    held: list[tuple[str, bytes]] = field(default_factory=list)
    """Frames of the server that wait for ``release``, by their type."""

    def asked(self, kind: str) -> int:
        """How many frames of this type the client has sent here."""
        return sum(frame["type"] == kind for frame in self.frames)


class ScriptedServer:
    """A chat with one user in it, in memory.

    Use it as ``async with ScriptedServer() as server``.
    """

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.script = ServerScript()
        self._patience_seconds = patience_seconds
        self.epoch = 1
        self.is_member = True
        self.newest = 0
        """The highest sequence of this epoch, even if the message was lost later."""
        self.messages: list[dict[str, Any]] = []
        self.keys: dict[str, dict[str, Any]] = {}
        self.connections: list[ScriptedConnection] = []
        self.handshakes: list[float] = []
        self.acked = (0, 0)
        self.violations: list[str] = []
        self.failure: str | None = None
        """The reason to stop waiting at once."""
        self._ending = asyncio.Event()
        self._server: Server | None = None
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> ScriptedServer:
        self._server = await serve(
            self._serve,
            "127.0.0.1",
            0,
            process_request=self._handshake,
            ping_interval=None,
            close_timeout=1,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._ending.set()
        self._server.close()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def here(self) -> ScriptedConnection:
        """The newest connection."""
        return self.connections[-1]

    # For scenarios

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: condition() or self.failure is not None)

        try:
            await asyncio.wait_for(wait(), self._patience_seconds)
        except TimeoutError:
            raise AssertionError(f"waited {self._patience_seconds:g} s for {what}") from None
        if self.failure is not None:
            raise AssertionError(self.failure)

    async def until_live(self, connections: int = 1) -> None:
        """A client has resumed, after at least this many connections."""
        await self.until(
            lambda: len(self.connections) >= connections and self.here.live, "a resumed connection"
        )

    async def touch(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def say(self, content: str, sender: str = "bob", key: str = "") -> None:
        """Another user sends a message."""
        await self._store(sender, key or f"bob-{len(self.messages)}", content)

    def append_event(self, change: dict[str, Any]) -> dict[str, Any]:
        """Another user changed the chat: store an event message, without a push."""
        message = self._append("bob", f"event-{len(self.messages)}", json.dumps(change))
        message.update(kind="event", client_message_id=None)
        return message

    async def renumber(self, contents: list[str]) -> None:
        """An operator repaired the chat; a heartbeat carries the new epoch."""
        self.raise_epoch(contents)
        await self.push_frame("heartbeat", {"heads": {CHAT: [self.epoch, len(self.messages)]}})

    def raise_epoch(self, contents: list[str]) -> None:
        """A new epoch, other messages."""
        self.epoch += 1
        self.newest = 0
        self.messages = []
        for content in contents:
            self._append("bob", f"bob-{self.epoch}-{content}", content)

    async def lose(self, count: int) -> None:
        """Lose the last messages, as an unnoticed restore of an old store would."""
        for message in self.messages[-count:]:
            self.keys.pop(message["client_message_id"], None)
        del self.messages[-count:]

    def hold(self, *kinds: str) -> None:
        self.script.holding = frozenset(kinds)

    async def release(self, *order: str) -> None:
        """Write the held frames in one piece, in this order of types."""
        held, self.here.held, self.script.holding = self.here.held, [], frozenset()
        assert {kind for kind, _ in held} == set(order), (
            f"held {[kind for kind, _ in held]}, wanted {order}"
        )
        self.here.socket.transport.write(
            b"".join(frame for kind in order for each, frame in held if each == kind)
        )

    def holds(self, *kinds: str) -> bool:
        """Whether frames of all these types wait for ``release``."""
        return set(kinds) <= {kind for kind, _ in self.here.held}

    async def push_frame(self, kind: str, payload: dict[str, Any]) -> None:
        await self._write(self.here, kind, payload)

    async def announce(self, reason: str, code: int, delay_ms: int = 0, close: bool = True) -> None:
        """Close as a server does: announce it, then close."""
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
        """Break the newest connection, without a closing handshake."""
        self.here.socket.transport.abort()

    # The protocol

    async def _handshake(self, socket: ServerConnection, request: Request) -> Response | None:
        self.handshakes.append(time.monotonic())
        await self.touch()
        if self.script.hang_handshakes:
            self.script.hang_handshakes -= 1
            await self._ending.wait()
        if request.path != "/v1/ws":
            self.violations.append(f"asked for {request.path}")
        if self.script.refuse_handshakes:
            status, headers = self.script.refuse_handshakes.pop(0)
            body = self.script.refusal_body
            fields = Headers({**headers, "Content-Length": str(len(body)), "Connection": "close"})
            return Response(status, HTTPStatus(status).phrase, fields, body)
        return None

    async def _serve(self, socket: ServerConnection) -> None:
        assert socket.request is not None
        headers = socket.request.headers
        connection = ScriptedConnection(
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
                try:
                    frame = json.loads(data)
                    connection.frames.append({"type": frame["type"], **frame})
                    if not self.script.silent:
                        await self._answer(connection, frame)
                except (ValueError, KeyError, TypeError) as error:
                    self.violations.append(
                        f"sent {data[:200]!r}, which is no frame: {type(error).__name__} {error}"
                    )
                    self.failure = self.violations[-1]
                await self.touch()
        except ConnectionClosed:
            pass
        finally:
            connection.closed_at = time.monotonic()
            connection.live = False
            await self.touch()

    def _hello(self, connection: ScriptedConnection) -> dict[str, Any]:
        return {
            "connection_id": f"conn_{len(self.connections)}",
            "user_id": USER,
            "device_id": connection.device_id,
            "server_time": "2026-01-01T00:00:00.000Z",
            "heartbeat_interval_ms": self.script.heartbeat_ms,
            "protocol_version": 1,
            "limits": {},
        }

    async def _answer(self, connection: ScriptedConnection, frame: dict[str, Any]) -> None:
        payload, request_id = frame.get("payload", {}), frame.get("request_id")
        match frame["type"]:
            case "resume":
                if payload.get("more"):
                    return
                if self.script.resume_errors:
                    await self._write(
                        connection, "error", self.script.resume_errors.pop(0), request_id
                    )
                else:
                    await self._write(
                        connection, "resumed", self._resumed(payload["cursors"]), request_id
                    )
                    connection.live = True
            case "sync_request" if self.script.pull_errors:
                await self._write(connection, "error", self.script.pull_errors.pop(0), request_id)
            case "sync_request" if not self.is_member:
                await self._write(connection, "error", NOT_A_MEMBER, request_id)
            case "sync_request":
                cursor = [payload["epoch"], payload["after_sequence"], payload.get("proof")]
                page = self._page(cursor, payload.get("limit") or 100)
                await self._write(
                    connection, "sync_response", page, request_id, self.script.page_seconds
                )
                connection.live = connection.live or not page["has_more"]
            case "send_message":
                await self._sent(connection, payload, request_id)
            case "ack" if self.script.ack_errors:
                await self._write(connection, "error", self.script.ack_errors.pop(0))
            case "ack" if not self.is_member:
                await self._write(connection, "error", NOT_A_MEMBER)
            case "ack":
                self._ack(payload)
            case "authenticate":
                connection.token = payload["token"]
            case "heartbeat_ack" | "read" | "typing_start" | "typing_stop":
                pass
            case other:
                self.violations.append(f"sent a frame of type {other}")

    def _resumed(self, cursors: dict[str, list[Any]]) -> dict[str, Any]:
        page = self._page(cursors.get(CHAT, [self.epoch, 0]), 100)
        moved = page["messages"] or page["reset"]
        return {
            "chats": [page] if moved else [],
            "joined": [] if CHAT in cursors else [CHAT],
            "gone": [chat_id for chat_id in cursors if chat_id != CHAT],
        }

    def _page(self, cursor: list[Any], limit: int) -> dict[str, Any]:
        epoch, after, proof = (*cursor, None)[:3]
        if proof not in (None, _proof(epoch, after)):
            self.violations.append(f"cursor {[epoch, after]} was shown with the proof of another")
        beyond = epoch == self.epoch and after > len(self.messages)
        if beyond and after > self.newest:
            self.violations.append(
                f"cursor {after} was never sent: the newest message was {self.newest}"
            )
        reset = epoch != self.epoch or beyond
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
            "proof": _proof(self.epoch, through),
        }

    def _ack(self, payload: dict[str, Any]) -> None:
        mark = (payload["epoch"], payload["sequence"])
        if payload["epoch"] == self.epoch and payload["sequence"] > self.newest:
            self.violations.append(f"acked {mark}, which was never sent")
        self.acked = max(self.acked, mark)

    async def _sent(
        self, connection: ScriptedConnection, payload: dict[str, Any], request_id: str | None
    ) -> None:
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
        ack = {
            name: message[name]
            for name in ("client_message_id", "message_id", "chat_id", "sequence", "created_at")
        }
        await self._write(
            connection, "message_ack", {**ack, "deduplicated": known is not None}, request_id
        )
        if known is None:
            await self._push(message)

    async def _store(
        self, sender: str, key: str, content: str, push: bool = True
    ) -> dict[str, Any]:
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
        self.newest = max(self.newest, len(self.messages))
        self.keys[key] = message
        return message

    async def _push(self, message: dict[str, Any]) -> None:
        if self.script.skip_pushes:
            self.script.skip_pushes -= 1
            return
        for connection in self.connections:
            if connection.live:
                for _ in range(2 if self.script.push_twice else 1):
                    proof = _proof(self.epoch, message["sequence"])
                    await self._write(connection, "message", {**message, "proof": proof})

    async def _write(
        self,
        connection: ScriptedConnection,
        kind: str,
        payload: dict[str, Any],
        request_id: str | None = None,
        seconds: float = 0.0,
    ) -> None:
        frame: dict[str, Any] = {"type": kind, "payload": payload}
        if request_id is not None:
            frame["request_id"] = request_id
        text = json.dumps(frame).encode()
        try:
            if kind in self.script.holding:
                connection.held.append((kind, _text_frame(text)))
                await self.touch()
            elif seconds:
                await _trickle(connection.socket, text, seconds)
            else:
                await connection.socket.send(text, text=True)
        except ConnectionClosed:
            pass


def _text_frame(text: bytes) -> bytes:
    """A whole WebSocket frame, as a server writes it (RFC 6455 section 5.2)."""
    size = bytes([len(text)]) if len(text) < 126 else b"\x7e" + len(text).to_bytes(2, "big")
    return b"\x81" + size + text


def _proof(epoch: int, sequence: int) -> str:
    return f"{epoch:08x}{sequence:08x}"


async def _trickle(socket: ServerConnection, text: bytes, seconds: float) -> None:
    """Write one frame over ``seconds``.

    Nothing else may write to the socket meanwhile.
    """
    frame = _text_frame(text)
    size = math.ceil(len(frame) * SLICE_SECONDS / seconds)
    for start in range(0, len(frame), size):
        socket.transport.write(frame[start : start + size])
        await asyncio.sleep(SLICE_SECONDS)
