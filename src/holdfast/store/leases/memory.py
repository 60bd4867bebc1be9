"""The leases of the nodes of one process: one value that they share."""

from __future__ import annotations

from holdfast.clock import Clock
from holdfast.store.leases.contract import Fence


class MemoryLeases:
    """See ``contract.Leases``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[str, tuple[Fence, float]] = {}

    async def acquire(self, name: str, seconds: float) -> Fence | None:
        last, until = self._held.get(name, (Fence(0, 0), 0.0))
        if until > self._clock.monotonic():
            return None
        return self._hold(name, Fence(last.base, last.number + 1), seconds)

    async def renew(self, name: str, fence: Fence, seconds: float) -> bool:
        if not self._is_held(name, fence):
            return False
        self._hold(name, fence, seconds)
        return True

    async def release(self, name: str, fence: Fence) -> None:
        if self._is_held(name, fence):
            self._hold(name, fence, 0.0)

    def _is_held(self, name: str, fence: Fence) -> bool:
        held, until = self._held.get(name, (None, 0.0))
        return held == fence and until > self._clock.monotonic()

    def _hold(self, name: str, fence: Fence, seconds: float) -> Fence:
        self._held[name] = fence, self._clock.monotonic() + seconds
        return fence
