"""A doorbell for listeners in this process: whoever is too slow loses rings, which are only hints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from holdfast.limits.rulestore.contract import Ring

RINGS_WAITING_MAX = 1_000
"""A listener that has so many waiting loses the oldest; its next sync brings what they said."""

LISTENING = Ring(0, 0)


class Bell:
    """Rings all listeners. ``ring`` never waits."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[Ring | None]] = set()

    def ring(self, ring: Ring) -> None:
        for queue in self._listeners:
            _put(queue, ring)

    def close(self) -> None:
        """End every listener's iteration."""
        for queue in self._listeners:
            _put(queue, None)

    async def rings(self) -> AsyncIterator[Ring]:
        queue: asyncio.Queue[Ring | None] = asyncio.Queue(RINGS_WAITING_MAX)
        self._listeners.add(queue)
        try:
            yield LISTENING
            while (ring := await queue.get()) is not None:
                yield ring
        finally:
            self._listeners.discard(queue)


def _put(queue: asyncio.Queue[Ring | None], ring: Ring | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(ring)
