"""The bus of the nodes of one process: payloads are handed over by a call."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.fanout.bus.batches import BusInbox, BusOutbox
from holdfast.fanout.bus.contract import Notification

PAYLOAD_BYTES_MAX = 65_536


class MemoryHub:
    """Connects the buses of a process."""

    def __init__(self) -> None:
        self.receivers: list[Callable[[bytes], None]] = []

    async def send(self, payload: bytes) -> None:
        for receive in list(self.receivers):
            receive(payload)


class MemoryBus:
    """See ``contract.Bus``. A node that is alone publishes to nobody, at no cost."""

    def __init__(self, sender: str, hub: MemoryHub | None = None) -> None:
        """``sender`` is unlike that of any other node."""
        self._hub = hub or MemoryHub()
        self._outbox = BusOutbox(sender, PAYLOAD_BYTES_MAX)
        self._inbox = BusInbox(sender)
        self.subscribe = self._inbox.subscribe

    def publish(self, notification: Notification) -> None:
        if len(self._hub.receivers) > 1:
            self._outbox.add(notification)

    async def run(self) -> None:
        self._hub.receivers.append(self._inbox.on_payload)
        try:
            await self._outbox.run(self._hub.send)
        finally:
            self._hub.receivers.remove(self._inbox.on_payload)
