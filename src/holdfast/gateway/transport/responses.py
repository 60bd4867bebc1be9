"""HTTP responses as bytes: in one write, or as the last one of a refused connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from holdfast.errors import MessageTooLarge
from holdfast.gateway.handshake import Refusal, refused_with


class OneWrite:
    """Writes a response in one piece: its head waits for its body.

    uvicorn writes them apart, which costs one more system call and wakes the reader
    twice, and matches every header against two patterns (measured:
    docs/internals/speed.md). A response in several parts is left to uvicorn.
    """

    __slots__ = ("_cycle", "_set_unread_seconds", "_start")

    def __init__(
        self, cycle: RequestResponseCycle, set_unread_seconds: Callable[[float], None]
    ) -> None:
        self._cycle = cycle
        self._set_unread_seconds = set_unread_seconds
        self._start: Any = None

    async def send(self, message: Any) -> None:
        """ASGI's ``send``."""
        cycle = self._cycle
        if message["type"] == "http.response.start":
            self._start = message
            if "unread_seconds_max" in message:
                self._set_unread_seconds(message["unread_seconds_max"])
            return
        start, self._start = self._start, None
        if (
            start is None
            or message.get("more_body")
            or cycle.flow.write_paused
            or cycle.disconnected
        ):
            if start is not None:
                await cycle.send(start)
            await cycle.send(message)
            return
        self._write(start["status"], [*cycle.default_headers, *start["headers"]], message["body"])

    def _write(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        cycle = self._cycle
        lines = [b"%b: %b\r\n" % header for header in headers]
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        head = b"".join(lines)
        if len(lines) != head.count(b"\n"):
            raise ValueError("a header of the answer holds a line break")
        cycle.response_started = cycle.response_complete = True
        shown = b"" if cycle.scope["method"] == "HEAD" else body
        cycle.transport.write(b"".join((STATUS_LINE[status], head, b"\r\n", shown)))
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


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
