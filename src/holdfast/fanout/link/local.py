"""The way to the gateways of this process: a call."""

from __future__ import annotations

from collections.abc import Callable

from holdfast import telemetry
from holdfast.errors import Unavailable
from holdfast.fanout.contract import Envelope


class LocalLink:
    """See ``holdfast.fanout.contract.Link``. The envelope is in the sessions' lanes when ``deliver`` returns."""

    def __init__(self) -> None:
        self._gateways: dict[str, Callable[[Envelope], None]] = {}

    def connect(self, gateway: str, deliver: Callable[[Envelope], None]) -> None:
        """``deliver`` takes the envelopes of this gateway from now on."""
        self._gateways[gateway] = deliver

    def disconnect(self, gateway: str) -> None:
        """The gateway takes no more."""
        self._gateways.pop(gateway, None)

    async def deliver(self, gateway: str, envelope: Envelope) -> None:
        deliver = self._gateways.get(gateway)
        if deliver is None:
            raise Unavailable(f"there is no gateway {gateway} here")
        try:
            deliver(envelope)
        except Exception as error:
            telemetry.defect("gateway", error)
            raise Unavailable(f"gateway {gateway} failed at the envelope") from error
