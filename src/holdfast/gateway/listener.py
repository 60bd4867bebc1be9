"""Between picows and a connection: reassembles fragments, answers pings, writes raw frames."""

from __future__ import annotations

from asyncio import Transport
from collections.abc import Callable
from typing import Any

from picows import WSFrame, WSListener, WSMsgType, WSTransport, WSUpgradeResponse, WSUpgradeResponseWithListener

from holdfast.gateway.connection import Connection, Socket
from holdfast.wire.assembler import CLOSE, PING, Assembler, BrokenProtocol, control
from holdfast.wire.frames import SUBPROTOCOL


class Listener(WSListener):
    """One WebSocket, as picows tells of it; also the ``Socket`` its connection writes to."""

    __slots__ = ("_assembler", "_connect", "_connection", "_gone", "_raw", "_subprotocol", "_transport", "write")

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

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        kind: Any = frame.msg_type  # a C enum: an int at run time
        reserved = frame.rsv1 or frame.rsv2 or frame.rsv3
        payload = frame.get_payload_as_bytes()
        try:
            if kind >= CLOSE:
                self._control(transport, kind, control(kind, frame.fin, reserved, payload))
            elif (data := self._assembler.feed(kind, frame.fin, reserved, payload)) is not None:
                self._connection.frame_received(data)
        except BrokenProtocol as broken:
            self._connection.protocol_broken(str(broken))

    def _control(self, transport: WSTransport, kind: int, answer: bytes) -> None:
        if kind == PING and self._connection.ping_received():
            transport.send_pong(answer)
        elif kind == CLOSE:
            transport.send(WSMsgType.CLOSE, answer)
            transport.disconnect()

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        self._connection.lost()
        self._gone()

    def pause_writing(self) -> None:
        self._connection.writing_paused()

    def resume_writing(self) -> None:
        self._connection.writing_resumed()

    # --- what the connection calls (Socket) ------------------------------------------------------------

    def close(self, code: int, reason: str) -> None:
        close: Any = self._transport.send_close  # takes any code, though its stub names only the standard ones
        close(code, reason.encode())
        self._transport.disconnect()

    def abort(self) -> None:
        self._raw.abort()

    def pause_reading(self) -> None:
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        self._raw.resume_reading()
