"""One port for HTTP and WebSocket: HTTP reads the request, picows takes over the connection of one that is admitted.

This is the only module that leans on picows's ``WSProtocol``, which is undocumented and pinned in pyproject.toml. It
reads a handshake by itself, with bounds and words of its own: it is shown one that holds nothing of the client's but
the key, after ours is decided. The tests of this module are the alarm for a changed library.
"""

from __future__ import annotations

import logging
import socket
import sys
from asyncio import Transport
from collections.abc import Callable
from typing import Any

from picows import WSAutoPingStrategy
from picows.picows import WSProtocol  # type: ignore[attr-defined]  # not in its stubs

from holdfast.gateway.handshake import KEY, Refusal, UpgradeRequest
from holdfast.gateway.transport.websocket import HEADER_BYTES_MAX, WebSocketListener

READ_BUFFER_BYTES = 2048
"""picows's least; it grows with the frames a client really sends."""
READ_BYTES_MAX = 4096
"""What is read from one socket in one turn of the loop: 682 frames at most, for picows parses all of a read in a row.
A longer frame counts as several ("work_rate_limit_per_second")."""
BAD_FRAME = "WS parser error"

_logger = logging.getLogger("holdfast.picows")
_logger.setLevel(logging.WARNING)  # it tells of every connection at level info; we count them instead

_HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: holdfast\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %b\r\n\r\n"
)
Decide = Callable[[UpgradeRequest, Transport], WebSocketListener | Refusal]


class _Heard(Exception):
    """Takes over from picows where it would close by itself."""


class _Ear:
    """What picows takes for its logger: the only way in which it tells of a frame it can make nothing of.

    It would go on to close with a code of its own, ten milliseconds later the socket as well, and have a line for
    whatever more such a client sends, at every read. Told before, we answer what is open and close as we close; the
    lines are worth nothing to an operator.
    """

    __slots__ = ("listener",)

    def __init__(self, listener: WebSocketListener) -> None:
        self.listener = listener

    def error(self, message: str, *args: Any) -> None:
        if message.startswith(BAD_FRAME):
            self.listener.on_bad_frame(args[0][1])
            raise _Heard
        _logger.error(message, *args)

    def isEnabledFor(self, level: int) -> bool:  # a logger's name for it
        return _logger.isEnabledFor(level)

    def info(self, message: str, *args: Any) -> None:
        """Every connection that comes or goes: we count them instead."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_logger, name)


class _Unasked:
    """The transport and its socket, as picows is shown them: it asks for six things that it would tell its logger, and
    sets what the loop has set already. Each takes a system call, and on uvloop a socket object."""

    __slots__ = ("transport",)

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def get_extra_info(self, name: str) -> Any:
        if name == "socket":
            return self
        return None if name in ("peername", "sockname") else self.transport.get_extra_info(name)

    def fileno(self) -> int:
        return int(self.transport.get_extra_info("socket").fileno())

    def getsockopt(self, level: int, option: int) -> int:
        return 0

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """TCP_NODELAY, which every loop sets, and TCP_QUICKACK, which lasts for a moment only."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


class _Protocol(WSProtocol):  # type: ignore[misc]  # a Cython class without stubs
    """picows's protocol, fed a handshake first. It counts what waits to be a frame, and reads a little at a time."""

    __slots__ = ("offered", "unread_max")
    unread_max: int
    offered: int
    """How much the read under way can bring: one that brings all of it has left something behind."""

    def connection_made(self, transport: Transport) -> None:
        super().connection_made(_Unasked(transport))

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer: memoryview = super().get_buffer(sizehint)
        if len(buffer) > READ_BYTES_MAX:
            buffer = buffer[:READ_BYTES_MAX]
        self.offered = len(buffer)
        return buffer

    def buffer_updated(self, size: int) -> None:
        listener = self.listener
        if listener is not None:
            listener.coming(size)
        try:
            super().buffer_updated(size)
        except _Heard:
            return
        if listener is not None:
            listener.parsed(self.unread_max)
            if size == self.offered:
                listener.read_on_next_turn()

    def data_received(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            buffer = self.get_buffer(-1)
            size = min(len(buffer), len(view))
            buffer[:size] = view[:size]
            view = view[size:]
            self.buffer_updated(size)


class Port:
    """Makes WebSockets of connections."""

    def __init__(self, decide: Decide, frame_bytes_max: int, send_buffer_bytes: int) -> None:
        """A frame above ``frame_bytes_max`` is refused by us, with our closing, as soon as so much of it has come. The
        library would close by a code of its own."""
        self._decide = decide
        self._frame_bytes_max = frame_bytes_max
        self._send_buffer_bytes = send_buffer_bytes

    def upgrade(self, request: UpgradeRequest, transport: Transport) -> Refusal | None:
        """Answer a handshake and take over its connection, or say why not and change nothing."""
        listener = self._decide(request, transport)
        if isinstance(listener, Refusal):
            return listener
        protocol: WSProtocol = _Protocol(
            None, None, False, lambda _: listener.accept(), _Ear(listener), True, None,
            False, 0, 0, WSAutoPingStrategy.PING_WHEN_IDLE, False, sys.maxsize, None, READ_BUFFER_BYTES,
        )  # fmt: skip
        protocol.unread_max = self._frame_bytes_max + HEADER_BYTES_MAX
        sock = transport.get_extra_info("socket")
        # A stopped reader would otherwise swallow thousands of frames into the kernel before we notice.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer_bytes)
        # Whatever the kernel does not take at once pauses us, so that what waits is in our lanes and counted.
        transport.set_write_buffer_limits(high=0)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(_HANDSHAKE % dict(request.headers)[KEY])
        return None
