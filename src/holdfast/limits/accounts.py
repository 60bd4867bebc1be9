"""What a node owes the shared counters, and what it has to give back to them.

Owed is what its local share admitted while they were away, amounts and holds; it is charged as soon as they answer,
with the heartbeat, and when the node leaves. Given back is what is left of leases. Nothing is sent twice: a call
whose outcome is unknown counts as made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast import telemetry
from holdfast.errors import HoldfastError, Unavailable
from holdfast.limits.counters.contract import KEYS_PER_CALL_MAX, Adjustment, Counters
from holdfast.limits.leases import Leases
from holdfast.limits.share import LocalShare


class Accounts:
    def __init__(self, counters: Counters, share: LocalShare, leases: Leases, monotonic: Callable[[], float]) -> None:
        self._counters = counters
        self._share = share
        self._leases = leases
        self._monotonic = monotonic
        self._settling = False

    @property
    def due(self) -> bool:
        """Something is owed, and nobody is about to settle it."""
        return self._share.owes and not self._settling

    async def settle(self) -> None:
        """Charge what is owed. What the counters did not take stays on the books; what they may have taken does not."""
        if self._settling:
            return
        self._settling = True
        try:
            while self._share.owes:
                owed = self._share.debts(self._monotonic() * 1000, KEYS_PER_CALL_MAX)
                try:
                    await self._adjust(owed)
                except Unavailable:
                    self._share.owe(owed)
                    return
        except HoldfastError as error:
            _lost(owed, error)
        finally:
            self._settling = False

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
        """End a hold, best effort; whether the counters say that it was one and is over."""
        try:
            return await self._counters.adjust([adjustment]) > 0
        except HoldfastError as error:
            _lost([adjustment], error)
            return False

    async def _adjust(self, adjustments: Sequence[Adjustment]) -> None:
        if adjustments:
            await self._counters.adjust(adjustments)


def _lost(adjustments: Sequence[Adjustment], error: HoldfastError) -> None:
    telemetry.log.warning("limits.adjustment_lost", count=len(adjustments), reason=error.message)
