"""One port for HTTP and WebSocket: uvicorn accepts and reads the request, picows takes over upgrades.

This is the only module that leans on two undocumented things, both pinned in pyproject.toml: uvicorn's
``Config(ws=…)`` class and picows's ``WSProtocol``. uvicorn calls our factory when a request asks for an upgrade,
feeds it the request again and makes it the transport's protocol. The tests of this module are the alarm
for a changed library.
"""

from __future__ import annotations

import logging
import socket
import sys
from asyncio import Transport, get_running_loop
from collections.abc import Callable
from typing import Any

import uvicorn
from picows import WSAutoPingStrategy, WSUpgradeRequest, WSUpgradeResponse, WSUpgradeResponseWithListener
from picows.picows import WSProtocol  # type: ignore[attr-defined]  # not in its stubs

from holdfast.gateway.linger import LINGER_SECONDS, linger
from holdfast.gateway.listener import HEADER_BYTES_MAX, Listener

READ_BUFFER_BYTES = 2048
"""picows's least; it grows with the frames a client really sends."""
READ_BYTES_MAX = 4096
"""What is read from one socket in one turn of the loop: 682 frames at most, for picows parses all of a read in a row.
A longer frame counts as several ("work_rate_limit_per_second")."""
HANDSHAKE_SECONDS = 5
BAD_FRAME = "WS parser error"

_logger = logging.getLogger("holdfast.picows")
_logger.setLevel(logging.WARNING)  # it tells of every connection at level info; we count them instead

Upgrade = Callable[[WSUpgradeRequest, Transport], Listener | WSUpgradeResponse]
"""Decides an upgrade: a listener takes the connection, a response refuses it."""


class _Heard(Exception):
    """Takes over from picows where it would close by itself."""


class _Ear:
    """What picows takes for its logger: the only way in which it tells of a frame it can make nothing of.

    It would go on to close with a code of its own, ten milliseconds later the socket as well, and have a line for
    whatever more such a client sends, at every read. Told before, we answer what is open and close as we close; the
    lines are worth nothing to an operator.
    """

    __slots__ = ("listener", "protocol")

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self.protocol: WSProtocol | None = None
        """Until the upgrade is decided: then nobody must hold it but its transport."""

    def error(self, message: str, *args: Any) -> None:
        if message.startswith(BAD_FRAME) and self.listener is not None:
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

    __slots__ = ("transport", "upgraded")

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.upgraded = False

    def close(self) -> None:
        """picows closes behind the answer to a handshake that is refused: it is to be read."""
        if self.upgraded:
            self.transport.close()
        else:
            linger(self.transport)
            get_running_loop().call_later(LINGER_SECONDS, self.transport.abort)

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
    """picows's protocol, fed once with the request uvicorn has already read. It counts what waits to be a frame, and
    reads a little at a time."""

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
    """What uvicorn calls for each upgrade; makes the protocol of the new connection."""

    def __init__(self, upgrade: Upgrade, frame_bytes_max: int, send_buffer_bytes: int) -> None:
        """A frame above ``frame_bytes_max`` is refused by us, with our closing, as soon as so much of it has come. The
        library would close by a code of its own."""
        self._upgrade = upgrade
        self._frame_bytes_max = frame_bytes_max
        self._send_buffer_bytes = send_buffer_bytes

    def __call__(self, config: uvicorn.Config, server_state: Any, app_state: Any) -> WSProtocol:
        ear = _Ear()
        protocol: WSProtocol = _Protocol(
            None, None, False, lambda request: self._listener(request, ear), ear, True, HANDSHAKE_SECONDS,
            False, 0, 0, WSAutoPingStrategy.PING_WHEN_IDLE, False, sys.maxsize, None, READ_BUFFER_BYTES,
        )  # fmt: skip
        ear.protocol = protocol
        protocol.unread_max = self._frame_bytes_max + HEADER_BYTES_MAX
        return protocol

    def _listener(self, request: WSUpgradeRequest, ear: _Ear) -> WSUpgradeResponseWithListener:
        # Firefox says "keep-alive, Upgrade", which is right, and picows refuses it; uvicorn has checked it before us.
        request.headers["Connection"] = "upgrade"
        protocol, ear.protocol = ear.protocol, None
        transport: Transport = protocol.transport.underlying_transport.transport  # type: ignore[union-attr]  # decided once
        answer = self._upgrade(request, transport)
        if isinstance(answer, WSUpgradeResponse):
            return WSUpgradeResponseWithListener(answer, None)
        sock = transport.get_extra_info("socket")
        # A stopped reader would otherwise swallow thousands of frames into the kernel before we notice.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer_bytes)
        # Whatever the kernel does not take at once pauses us, so that what waits is in our lanes and counted.
        transport.set_write_buffer_limits(high=0)
        protocol.transport.underlying_transport.upgraded = True  # type: ignore[union-attr]
        ear.listener = answer
        return answer.accept()
