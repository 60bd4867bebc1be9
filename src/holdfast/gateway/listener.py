"""Between picows and a connection: reassembles fragments, answers pings, writes raw frames."""

from __future__ import annotations

from asyncio import BufferedProtocol, Transport
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

from holdfast.gateway.connection import Connection
from holdfast.gateway.contract import Socket
from holdfast.wire.assembler import CLOSE, PING, Assembler, BrokenProtocol, control
from holdfast.wire.frames import SUBPROTOCOL

HEADER_BYTES_MAX = 14
_waste = bytearray(64 * 1024)


class _Discarding(BufferedProtocol):
    """In the place of a protocol that is to hear nothing more than its end. All share one buffer: nobody reads it."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def get_buffer(self, sizehint: int) -> bytearray:
        return _waste

    def connection_lost(self, error: Exception | None) -> None:
        self._before.connection_lost(error)


class Listener(WSListener):
    """One WebSocket, as picows tells of it; also the ``Socket`` its connection writes to."""

    __slots__ = (
        "_assembler",
        "_broken",
        "_connect",
        "_connection",
        "_ended",
        "_gone",
        "_raw",
        "_subprotocol",
        "_transport",
        "_unread",
        "write",
    )

    def __init__(
        self,
        connect: Callable[[Socket], Connection],
        gone: Callable[[], None],
        assembler: Assembler,
        *,
        subprotocol: bool,
    ) -> None:
        self._connect = connect
        self._gone = gone
        self._assembler = assembler
        self._subprotocol = subprotocol
        self._unread = 0
        self._broken = False
        self._ended = False
        """The client has sent its close frame: what stands behind it does not count."""
        self._connection: Connection
        self._transport: WSTransport
        self._raw: Transport
        self.write: Callable[[bytes], None]

    def accept(self) -> WSUpgradeResponseWithListener:
        """The 101 answer; it names our subprotocol if the client offered it, and never the token beside it."""
        headers = {"Sec-WebSocket-Protocol": SUBPROTOCOL} if self._subprotocol else None
        return WSUpgradeResponseWithListener(WSUpgradeResponse.create_101_response(headers), self)

    # --- what picows calls -----------------------------------------------------------------------------

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport
        self._raw = transport.underlying_transport
        self.write = self._raw.write
        self._connection = self._connect(self)
        # Nothing of the handshake is kept as long as the connection: its headers hold the credential.
        del self._connect
        transport.request.headers.clear()
        transport.response.headers.clear()

    def coming(self, size: int) -> None:
        """So many bytes more are about to be parsed."""
        self._unread += size

    def parsed(self, unread_max: int) -> None:
        """What remains is the beginning of a frame. One that is larger than it may be is not waited for."""
        if self._unread > unread_max and not self._broken:
            self._break(f"a frame is larger than {unread_max - HEADER_BYTES_MAX} bytes")

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        self._unread = frame.tail_size
        if self._ended or self._broken:
            return
        kind: Any = frame.msg_type  # a C enum: an int at run time
        reserved = frame.rsv1 or frame.rsv2 or frame.rsv3
        payload = frame.get_payload_as_bytes()
        try:
            if kind >= CLOSE:
                self._control(transport, kind, control(kind, frame.fin, reserved, payload))
            elif (data := self._assembler.feed(kind, frame.fin, reserved, payload)) is not None:
                self._connection.frame_received(data)
        except BrokenProtocol as broken:
            self._break(str(broken))

    def on_bad_frame(self, why: str) -> None:
        """picows can make nothing of what came. What stands behind a close does not count."""
        if self._broken or self._ended:
            return
        closes = self._transport.close_handshake
        received: Any = closes and closes.recv  # its code is an int at run time
        if received is None:
            self._break(why)
            return
        # It looks at the next frame before it hands one over: the close that came first is yet to be told.
        reason = (received.reason or "").encode()
        payload = b"" if received.code == WSCloseCode.NO_INFO else received.code.to_bytes(2, "big") + reason
        try:
            self._control(self._transport, CLOSE, control(CLOSE, True, False, payload))
        except BrokenProtocol as broken:
            self._break(str(broken))

    def _break(self, message: str) -> None:
        self._broken = True
        self._connection.protocol_broken(message)

    def _control(self, transport: WSTransport, kind: int, answer: bytes) -> None:
        if kind == PING and self._connection.ping_received():
            transport.send_pong(answer)
        elif kind == CLOSE:
            self._ended = True
            transport.send(WSMsgType.CLOSE, answer)
            transport.disconnect()

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        self._connection.lost()
        self._gone()
        # They hold each other: the memory of a connection goes with it, and not when the collector comes by.
        del self._connection, self._gone

    def pause_writing(self) -> None:
        self._connection.writing_paused()

    def resume_writing(self) -> None:
        self._connection.writing_resumed()

    # --- what the connection calls (Socket) ------------------------------------------------------------

    def close(self, code: int, reason: str) -> None:
        close: Any = self._transport.send_close  # takes any code, though its stub names only the standard ones
        close(code, reason.encode())
        if self._broken:  # it may still be sending: closed now, its kernel would drop our last words for a reset
            self._raw.set_protocol(_Discarding(self._raw.get_protocol()))
            self._raw.write_eof()
        else:
            self._transport.disconnect()

    def abort(self) -> None:
        self._raw.abort()

    @property
    def unsent(self) -> int:
        return self._raw.get_write_buffer_size()

    def pause_reading(self) -> None:
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        self._raw.resume_reading()
