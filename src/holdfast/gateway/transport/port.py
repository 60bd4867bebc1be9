"""Hands the connection of an accepted handshake over from HTTP to picows.

HTTP and WebSockets share one port: ``http`` reads the request, ``handshake`` decides
it, and picows takes over.

This replaces uvicorn's WebSocket protocol class (its setting ``ws`` is ``none``) for
two reasons. uvicorn's classes speak ASGI: a task per connection and a dict and an await
per frame, a third of picows's speed (decision 13). And they write frame by frame, while
a delivery is bytes that were encoded once for all connections: the session's writes go
straight to the transport.

It relies on:

- uvicorn: ``HttpToolsProtocol`` leaves the transport alone after ``_should_upgrade``,
  so that ``http`` can give it another protocol;
- asyncio and uvloop: ``set_protocol`` works on a transport in use;
- picows: ``WSProtocol`` can be made by hand, reads a handshake from ``data_received``,
  and reports a bad frame only to its logger.

None of that is documented, so both libraries are pinned in pyproject.toml, only
``transport/`` knows them, and tests fail if one changes (test_gateway_sockets,
test_autobahn_cases).

picows insists on reading a handshake itself, with its own limits and error texts. So it
is fed one of ours that has only the key from the client's.
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
"""picows's minimum; the buffer grows with the frames a client really sends."""
READ_BYTES_MAX = 4096
"""Read from one socket per turn of the loop: at most 682 frames, because picows
parses a whole read at once. A longer frame counts as several
(``work_rate_limit_per_second``)."""
BAD_FRAME = "WS parser error"

_logger = logging.getLogger("holdfast.picows")
_logger.setLevel(logging.WARNING)  # at level info it logs every connection; we count them

_HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: holdfast\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %b\r\n\r\n"
)
Decide = Callable[[UpgradeRequest, Transport], WebSocketListener | Refusal]


class _BadFrame(Exception):
    """Stops picows where it would close the connection itself."""


class _PicowsLogger:
    """Stands in for picows's logger, the only channel on which it reports a bad frame.

    After the log line picows would close with its own code, close the socket ten
    milliseconds later, and log again at every further read. By raising from the log
    call we answer open requests and close our way instead.
    """

    __slots__ = ("listener",)

    def __init__(self, listener: WebSocketListener) -> None:
        self.listener = listener

    def error(self, message: str, *args: Any) -> None:
        if message.startswith(BAD_FRAME):
            self.listener.on_bad_frame(args[0][1])
            raise _BadFrame
        _logger.error(message, *args)

    def isEnabledFor(self, level: int) -> bool:  # a logger's name for it
        return _logger.isEnabledFor(level)

    def info(self, message: str, *args: Any) -> None:
        """Dropped: one line per opened or closed connection, which we count instead."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_logger, name)


class _QuietTransport:
    """The transport and its socket as picows sees them, without needless system calls.

    picows asks for six values that it would only log, and sets options that the loop
    has set. Each costs a system call, and on uvloop a socket object.
    """

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
        """Ignored: every loop sets TCP_NODELAY, and TCP_QUICKACK does not last."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


class _Protocol(WSProtocol):  # type: ignore[misc]  # a Cython class without stubs
    """picows's protocol with bounds on a read and on an unfinished frame."""

    __slots__ = ("offered", "unread_max")
    unread_max: int
    offered: int
    """Size of the buffer offered to this read; if it is filled, more input waits."""

    def connection_made(self, transport: Transport) -> None:
        super().connection_made(_QuietTransport(transport))

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer: memoryview = super().get_buffer(sizehint)
        if len(buffer) > READ_BYTES_MAX:
            buffer = buffer[:READ_BYTES_MAX]
        self.offered = len(buffer)
        return buffer

    def buffer_updated(self, size: int) -> None:
        listener = self.listener
        if listener is not None:
            listener.on_bytes_read(size)
        try:
            super().buffer_updated(size)
        except _BadFrame:
            return
        if listener is not None:
            listener.on_parsed(self.unread_max)
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
    """Turns HTTP connections into WebSockets."""

    def __init__(self, decide: Decide, frame_bytes_max: int, send_buffer_bytes: int) -> None:
        """A frame above ``frame_bytes_max`` is closed with our code, unfinished.

        picows would close with a code of its own.
        """
        self._decide = decide
        self._frame_bytes_max = frame_bytes_max
        self._send_buffer_bytes = send_buffer_bytes

    def upgrade(self, request: UpgradeRequest, transport: Transport) -> Refusal | None:
        """Answer a handshake and take over its connection, or return why not."""
        listener = self._decide(request, transport)
        if isinstance(listener, Refusal):
            return listener
        # By name: a release of picows that moves or renames one fails here at once.
        protocol: WSProtocol = _Protocol(
            host_port=None,
            ws_path=None,
            is_client_side=False,
            ws_listener_factory=lambda _: listener.accept(),
            logger=_PicowsLogger(listener),
            disconnect_on_exception=True,
            websocket_handshake_timeout=None,
            enable_auto_ping=False,
            auto_ping_idle_timeout=0,
            auto_ping_reply_timeout=0,
            auto_ping_strategy=WSAutoPingStrategy.PING_WHEN_IDLE,
            enable_auto_pong=False,
            max_frame_size=sys.maxsize,
            extra_headers=None,
            read_buffer_init_size=READ_BUFFER_BYTES,
        )
        protocol.unread_max = self._frame_bytes_max + HEADER_BYTES_MAX
        sock = transport.get_extra_info("socket")
        # With the default size, thousands of frames disappear in the kernel before we
        # notice that a client does not read.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer_bytes)
        # Pause as soon as the kernel takes no more: what waits is then in the lanes.
        transport.set_write_buffer_limits(high=0)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(_HANDSHAKE % dict(request.headers)[KEY])
        return None
