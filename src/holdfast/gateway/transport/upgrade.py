"""From an upgrade request to a connection or a refusal."""

from __future__ import annotations

from asyncio import Transport
from http import HTTPStatus

import msgspec

from holdfast import telemetry
from holdfast.errors import InternalError
from holdfast.gateway.gateway import Gateway
from holdfast.gateway.handshake import Handshake, Refusal, UpgradeRequest
from holdfast.gateway.transport.websocket import WebSocketListener
from holdfast.session.settings import InboundSettings
from holdfast.wire.assembler import Assembler
from holdfast.wire.codec import error_payload
from holdfast.wire.frames import ErrorBody

_DEFECT = Refusal(
    HTTPStatus.INTERNAL_SERVER_ERROR,
    {"Content-Type": "application/json"},
    msgspec.json.encode(ErrorBody(error_payload(InternalError()))),
)


class WebSocketUpgrade:
    """Decides upgrades for the port; counts a connection until it ends."""

    def __init__(self, handshake: Handshake, gateway: Gateway, settings: InboundSettings) -> None:
        self._handshake = handshake
        self._gateway = gateway
        self._settings = settings

    def __call__(
        self, request: UpgradeRequest, transport: Transport
    ) -> WebSocketListener | Refusal:
        try:
            decision = self._decide(request, transport)
        except Exception as error:
            telemetry.defect("gateway", error)
            decision = _DEFECT
        if isinstance(decision, Refusal):
            telemetry.handshake_refused(decision.status)
        return decision

    def _decide(self, request: UpgradeRequest, transport: Transport) -> WebSocketListener | Refusal:
        peer = transport.get_extra_info("peername")
        decision = self._handshake.decide(request, peer[0] if peer else "")
        if isinstance(decision, Refusal):
            return decision
        slot = decision.slot
        return WebSocketListener(
            lambda socket: self._gateway.accept(
                socket, decision.principal, decision.device_id, slot.identify
            ),
            slot.leave,
            Assembler(self._settings.max_frame_bytes, self._settings.max_fragments),
            subprotocol=decision.subprotocol,
        )
