"""From an upgrade request to a connection or a refusal."""

from __future__ import annotations

from asyncio import Transport
from http import HTTPStatus

import msgspec
from picows import WSUpgradeRequest, WSUpgradeResponse

from holdfast import telemetry
from holdfast.errors import InternalError
from holdfast.gateway.gateway import Gateway
from holdfast.gateway.handshake import Handshake, Refusal
from holdfast.gateway.listener import Listener
from holdfast.session.limits import Inbound
from holdfast.wire.assembler import Assembler
from holdfast.wire.codec import error_payload
from holdfast.wire.frames import ErrorBody

_DEFECT = Refusal(
    HTTPStatus.INTERNAL_SERVER_ERROR,
    {"Content-Type": "application/json"},
    msgspec.json.encode(ErrorBody(error_payload(InternalError()))),
)


class Entrance:
    """Decides upgrades for the port; every connection that it admits is counted until it is gone."""

    def __init__(self, handshake: Handshake, gateway: Gateway, limits: Inbound) -> None:
        self._handshake = handshake
        self._gateway = gateway
        self._limits = limits

    def __call__(self, request: WSUpgradeRequest, transport: Transport) -> Listener | WSUpgradeResponse:
        try:
            return self._decide(request, transport)
        except Exception as error:  # the library would put its text into the answer
            telemetry.defect("gateway", error)
            return _answer(_DEFECT)

    def _decide(self, request: WSUpgradeRequest, transport: Transport) -> Listener | WSUpgradeResponse:
        peer = transport.get_extra_info("peername")
        decision = self._handshake.decide(request.path.decode("latin-1"), request.headers, peer[0] if peer else "")
        if isinstance(decision, Refusal):
            telemetry.handshake_refused(decision.status)
            return _answer(decision)
        seat = decision.seat
        return Listener(
            lambda socket: self._gateway.accept(socket, decision.principal, decision.device_id, seat.identify),
            seat.leave,
            Assembler(self._limits.max_frame_bytes, self._limits.max_fragments),
            subprotocol=decision.subprotocol,
        )


def _answer(refusal: Refusal) -> WSUpgradeResponse:
    answer: WSUpgradeResponse = WSUpgradeResponse.create_error_response(refusal.status, refusal.body, refusal.headers)
    return answer
