"""What a node owes the shared counters, and what it has to give back to them.

Owed is what its local share admitted while they were away, amounts and holds; it is charged as soon as they answer,
with the heartbeat, and when the node leaves. Given back is what is left of leases. Neither is sent twice: a call whose
outcome is unknown counts as made. The end of a hold is told until it is heard: twice is once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from holdfast import telemetry
from holdfast.errors import HoldfastError, Unavailable
from holdfast.limits.counters.contract import KEYS_PER_CALL_MAX, Adjustment, Counters
from holdfast.limits.leases import Leases
from holdfast.limits.share import FallbackLimiter

RELEASES_MAX = 10_000
"""Ends of holds that the counters were not told yet; the oldest are dropped, and end with their window."""


class Reconciler:
    def __init__(
        self, counters: Counters, share: FallbackLimiter, leases: Leases, monotonic: Callable[[], float]
    ) -> None:
        self._counters = counters
        self._share = share
        self._leases = leases
        self._monotonic = monotonic
        self._settling = False
        self._releases: deque[Adjustment] = deque(maxlen=RELEASES_MAX)

    @property
    def due(self) -> bool:
        """Something is owed, and nobody is about to settle it."""
        return (self._share.owes or bool(self._releases)) and not self._settling

    async def settle(self) -> None:
        """Charge what is owed. What the counters did not take stays on the books; what they may have taken does not."""
        if self._settling:
            return
        self._settling = True
        try:
            while self._share.owes:
                owed = self._share.pending(self._monotonic() * 1000, KEYS_PER_CALL_MAX)
                try:
                    await self._adjust(owed)
                except Unavailable:
                    self._share.owe(owed)
                    return
                except HoldfastError as error:
                    _lost(owed, error)
                    return
            await self._end_holds()
        finally:
            self._settling = False

    async def _end_holds(self) -> None:
        while self._releases:
            ended = [self._releases.popleft() for _ in range(min(len(self._releases), KEYS_PER_CALL_MAX))]
            try:
                await self._adjust(ended)
            except HoldfastError:
                self._releases.extendleft(reversed(ended))
                return

    async def give_back(self, all_of_them: bool = False) -> None:
        """Best effort: what is lost stays charged until it drains."""
        left_over = self._leases.ended(self._monotonic(), all_of_them)
        for at in range(0, len(left_over), KEYS_PER_CALL_MAX):
            try:
                await self._adjust(left_over[at : at + KEYS_PER_CALL_MAX])
            except HoldfastError as error:
                _lost(left_over[at:], error)
                return

    async def release(self, adjustment: Adjustment) -> bool:
        """End a hold; whether the counters say that it was one and is over. If they are silent they are told again."""
        try:
            return await self._counters.adjust([adjustment]) > 0
        except HoldfastError:
            self.release_soon(adjustment)
            return False

    def release_soon(self, adjustment: Adjustment) -> None:
        """End a hold with the next ``settle``."""
        self._releases.append(adjustment)

    async def _adjust(self, adjustments: Sequence[Adjustment]) -> None:
        if adjustments:
            await self._counters.adjust(adjustments)


def _lost(adjustments: Sequence[Adjustment], error: HoldfastError) -> None:
    telemetry.log.warning("limits.adjustment_lost", count=len(adjustments), reason=error.message)
