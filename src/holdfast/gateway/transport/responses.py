"""HTTP responses as bytes: in one write, or as the last one of a refused connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from holdfast.errors import MessageTooLarge
from holdfast.gateway.handshake import Refusal, refused_with


class OneWrite:
    """Writes a response in one piece: its head waits for its body, or for the first
    piece of that.

    uvicorn writes them apart, which costs one more system call and wakes the reader
    twice, and matches every header against two patterns (measured:
    docs/internals/speed.md). It also takes three coroutines for a piece. What a client
    does not read, and the end of a response in pieces, is left to uvicorn.
    """

    __slots__ = ("_cycle", "_set_unread_seconds", "_start", "_time", "written_at")

    def __init__(
        self,
        cycle: RequestResponseCycle,
        set_unread_seconds: Callable[[float], None],
        time: Callable[[], float],
    ) -> None:
        """``time``: the loop's."""
        self._cycle = cycle
        self._set_unread_seconds = set_unread_seconds
        self._start: Any = None
        self._time = time
        self.written_at = 0.0
        """When the last piece was written, in the loop's time."""

    async def send(self, message: Any) -> None:
        """ASGI's ``send``."""
        cycle = self._cycle
        if message["type"] == "http.response.start":
            self._start = message
            self._note_unread_seconds(message)
            return
        start, self._start = self._start, None
        if start is None:
            await cycle.send(message)
        elif cycle.flow.write_paused or cycle.disconnected:
            await cycle.send(start)
            await cycle.send(message)
        elif message.get("more_body"):
            self.write_head(start, message["body"])
        else:
            self._write(start, message["body"])

    def write_head(self, start: Any, piece: bytes) -> bool:
        """Write the head of a response in pieces, and the first one; it has no
        Content-Length. False: only ``send`` can."""
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.disconnected:
            return False
        self._note_unread_seconds(start)
        head = self._head(start) + b"transfer-encoding: chunked\r\n\r\n"
        cycle.response_started = cycle.chunked_encoding = True
        cycle.transport.write(head + (b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""))
        return True

    def can_write(self) -> bool:
        """Whether a piece of a response that has begun can be written; if not, ``send``
        waits until the client reads. (No property: those are slower to call.)"""
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding)

    def write_piece(self, piece: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.written_at = self._time()

    def _write(self, start: Any, body: bytes) -> None:
        """Write the whole response."""
        cycle = self._cycle
        cycle.response_started = cycle.response_complete = True
        shown = b"" if cycle.scope["method"] == "HEAD" else body
        cycle.transport.write(self._head(start) + b"\r\n" + shown)
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()

    def _note_unread_seconds(self, start: Any) -> None:
        if "unread_seconds_max" in start:
            self._set_unread_seconds(start["unread_seconds_max"])

    def _head(self, start: Any) -> bytes:
        """Status and headers, without the empty line."""
        lines = [
            b"%b: %b\r\n" % header for header in (*self._cycle.default_headers, *start["headers"])
        ]
        if not self._cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        head = b"".join(lines)
        if len(lines) != head.count(b"\n"):
            raise ValueError("a header of the answer holds a line break")
        return STATUS_LINE[start["status"]] + head


def too_large(status: HTTPStatus, what: str, most: int, unit: str = "bytes") -> Refusal:
    error = MessageTooLarge(f"{what} of a request may have at most {most} {unit}", limit=most)
    return replace(refused_with(error), status=status)


def refusal_response(refusal: Refusal) -> bytes:
    """The last response of a connection, as bytes."""
    status, body = refusal.status, refusal.body
    headers = {**refusal.headers, "Content-Length": len(body), "Connection": "close"}
    lines = [
        f"HTTP/1.1 {status} {status.phrase}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
