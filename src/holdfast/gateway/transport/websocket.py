"""Between picows and a connection: assembles fragments, passes on pings, writes frames.

After a close frame, the client's or ours after a defect, further input is ignored.
"""

from __future__ import annotations

import socket
import struct
from asyncio import Transport, get_running_loop
from collections.abc import Callable
from typing import Any

from picows import (
    WSCloseCode,
    WSFrame,
    WSListener,
    WSMsgType,
    WSTransport,
    WSUpgradeResponse,
    WSUpgradeResponseWithListener,
)

from holdfast import telemetry
from holdfast.gateway.connection import Connection
from holdfast.gateway.contract import Socket
from holdfast.gateway.transport.linger import LINGER_SECONDS, linger
from holdfast.session.heartbeat import Transmission
from holdfast.wire.assembler import CLOSE, PING, Assembler, BrokenProtocol, control
from holdfast.wire.frames import SUBPROTOCOL

HEADER_BYTES_MAX = 14
INTERNAL_ERROR = (1011).to_bytes(2, "big")
"""Payload of the close frame after a defect."""
TCP_INFO = getattr(socket, "TCP_INFO", 0)
"""Only on Linux; elsewhere we see no further than our own buffer."""
_TCP_INFO_FIELDS = struct.Struct("=24xI92xQ16xI")
"""From ``tcp_info``: unacknowledged segments, acknowledged bytes, unsent bytes."""


class WebSocketListener(WSListener):
    """One WebSocket: picows's listener, and the ``Socket`` of its connection."""

    __slots__ = (
        "_assembler",
        "_broken",
        "_connect",
        "_connection",
        "_ended",
        "_frames",
        "_held",
        "_on_end",
        "_raw",
        "_subprotocol",
        "_transport",
        "_unread",
        "write",
    )

    def __init__(
        self,
        connect: Callable[[Socket], Connection],
        on_end: Callable[[], None],
        assembler: Assembler,
        *,
        subprotocol: bool,
    ) -> None:
        self._connect = connect
        self._on_end = on_end
        self._assembler = assembler
        self._subprotocol = subprotocol
        self._unread = 0
        self._frames = 0
        """Frames of the read that is being parsed."""
        self._held = False
        """The connection has paused reading."""
        self._broken = False
        self._ended = False
        """A close frame has ended it; further frames are ignored."""
        self._connection: Connection
        self._transport: WSTransport
        self._raw: Transport
        self.write: Callable[[bytes], None]

    def accept(self) -> WSUpgradeResponseWithListener:
        """The 101 response; names our subprotocol if offered, never the token's."""
        headers = {"Sec-WebSocket-Protocol": SUBPROTOCOL} if self._subprotocol else None
        return WSUpgradeResponseWithListener(WSUpgradeResponse.create_101_response(headers), self)

    # --- called by picows -------------------------------------------------------------

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport
        shown: Any = transport.underlying_transport  # the port's wrapper
        self._raw = shown.transport
        self.write = self._raw.write
        self._connection = self._connect(self)
        # Drop the handshake now: it holds the credential.
        del self._connect
        transport.request.headers.clear()
        transport.response.headers.clear()

    def on_bytes_read(self, size: int) -> None:
        """``size`` more bytes are about to be parsed."""
        self._unread += size

    def on_parsed(self, unread_max: int) -> None:
        """A read was parsed. Refuse a frame that is too large before it is complete."""
        frames, self._frames = self._frames, 0
        self._connection.work_done(frames or 1)
        if self._unread > unread_max and not self._broken:
            self._break(f"a frame is larger than {unread_max - HEADER_BYTES_MAX} bytes")

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        self._unread = frame.tail_size
        self._frames += 1
        if self._ended or self._broken:
            return
        kind: Any = frame.msg_type  # a C enum: an int at run time
        reserved = frame.rsv1 or frame.rsv2 or frame.rsv3
        payload = frame.get_payload_as_bytes()
        try:
            if kind >= CLOSE:
                self._control(kind, control(kind, frame.fin, reserved, payload))
            elif (data := self._assembler.feed(kind, frame.fin, reserved, payload)) is not None:
                self._connection.frame_received(data)
        except BrokenProtocol as broken:
            self._break(str(broken))
        except Exception as error:
            # picows would close so soon that a reset overtakes the close frame
            telemetry.defect("gateway", error)
            self._end(INTERNAL_ERROR)

    def on_bad_frame(self, why: str) -> None:
        """picows could not parse the input; ignored after a close frame."""
        if self._broken or self._ended:
            return
        closes = self._transport.close_handshake
        received: Any = closes and closes.recv  # its code is an int at run time
        if received is None:
            self._break(why)
            return
        # picows parses the next frame before it hands one over, so the close frame that
        # came first has not reached us yet.
        reason = (received.reason or "").encode()
        payload = (
            b""
            if received.code == WSCloseCode.NO_INFO
            else received.code.to_bytes(2, "big") + reason
        )
        try:
            self._control(CLOSE, control(CLOSE, True, False, payload))
        except BrokenProtocol as broken:
            self._break(str(broken))

    def _break(self, message: str) -> None:
        self._broken = True
        self._connection.protocol_broken(message)

    def _control(self, kind: int, answer: bytes) -> None:
        if kind == PING:
            self._connection.ping_received(answer)
        elif kind == CLOSE:
            self._end(answer)

    def _end(self, payload: bytes) -> None:
        """End the connection with this close frame, unless ours was sent already.

        It lingers, so the client can read the frame even if it goes on sending.
        """
        self._ended = True
        if self._connection.closing is not None:
            return
        self._transport.send(WSMsgType.CLOSE, payload)
        linger(self._raw, 0)
        get_running_loop().call_later(LINGER_SECONDS, self._raw.abort)
        self._connection.connection_lost()

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        self._on_end()
        self._connection.connection_lost()
        # Break the reference cycle: the memory is freed now, not by the collector.
        del self._connection, self._on_end

    def pause_writing(self) -> None:
        self._connection.writing_paused()

    def resume_writing(self) -> None:
        self._connection.writing_resumed()

    # --- called by the connection (Socket) --------------------------------------------

    def close(self, code: int, reason: str) -> None:
        # takes any code; its stub allows only the standard ones
        close: Any = self._transport.send_close
        close(code, reason.encode())
        linger(self._raw)

    def abort(self) -> None:
        self._raw.abort()

    @property
    def unsent(self) -> int:
        return self._raw.get_write_buffer_size()

    def transmission(self) -> Transmission:
        unsent = self._raw.get_write_buffer_size()
        try:
            info = self._raw.get_extra_info("socket").getsockopt(
                socket.IPPROTO_TCP, TCP_INFO, _TCP_INFO_FIELDS.size
            )
            unacknowledged, acknowledged, waiting = _TCP_INFO_FIELDS.unpack(info)
        except (OSError, struct.error):  # not Linux, or the socket is closed
            return Transmission.of_buffer(unsent)
        return Transmission(unsent, unsent + unacknowledged + waiting, acknowledged)

    def pause_reading(self) -> None:
        self._held = True
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        self._held = False
        self._raw.resume_reading()

    def read_on_next_turn(self) -> None:
        """More input waits: read it in the next turn of the loop, after the others."""
        if not self._held:
            self._raw.pause_reading()
            get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self._held:
            self._raw.resume_reading()
