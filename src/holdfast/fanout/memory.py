"""The link of a single process: a delivery is a function call."""

from __future__ import annotations

from collections.abc import Callable

from holdfast import telemetry
from holdfast.errors import Unavailable
from holdfast.fanout.contract import Envelope


class LocalLink:
    """See ``holdfast.fanout.contract.Link``. When ``deliver`` returns, the envelope is
    in the sessions' lanes.
    """

    def __init__(self) -> None:
        self._gateways: dict[str, Callable[[Envelope], None]] = {}

    def connect(self, gateway: str, deliver: Callable[[Envelope], None]) -> None:
        """Pass this gateway's envelopes to ``deliver`` from now on."""
        self._gateways[gateway] = deliver

    def disconnect(self, gateway: str) -> None:
        """Stop passing envelopes to this gateway."""
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
