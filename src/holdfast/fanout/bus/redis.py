"""The bus of all nodes by Redis PUBLISH and SUBSCRIBE, on one channel."""

from __future__ import annotations

from typing import Final

from holdfast import telemetry
from holdfast.drivers.redis import RedisReason, trouble_of
from holdfast.drivers.redis_scripts import Script, ScriptRunner
from holdfast.drivers.redis_subscription import ChannelSubscription
from holdfast.fanout.bus.batches import BusInbox, BusOutbox

CHANNEL: Final = "gateways:bus"
PAYLOAD_BYTES_MAX = 65_536

PUBLISH = Script("holdfast.fanout.bus", "publish")


class RedisBus:
    """See ``contract.Bus``."""

    def __init__(self, url: str, sender: str, channel: str = CHANNEL) -> None:
        """``sender`` is unlike that of any other node."""
        self._url = url
        self._channel = channel
        self._outbox = BusOutbox(sender, PAYLOAD_BYTES_MAX)
        self._inbox = BusInbox(sender)
        self._scripts = ScriptRunner(url, "the bus", self._on_trouble)
        self.publish = self._outbox.add
        self.subscribe = self._inbox.subscribe
        self.trouble: tuple[RedisReason, str] | None = None
        """Why the last call failed that did."""

    async def run(self) -> None:
        subscription = ChannelSubscription(
            self._url, self._channel, self._inbox.on_payload, self._on_trouble, "fanout"
        )
        try:
            await self._outbox.run(self._send)
        finally:
            await subscription.close()
            await self._scripts.aclose()

    async def _send(self, payload: bytes) -> None:
        await self._scripts.run(PUBLISH, [self._channel.encode()], (payload,), int)

    def _on_trouble(self, error: Exception | str) -> None:
        self.trouble = trouble_of(error, self._url)
        telemetry.redis_failed("bus", self.trouble[0])
