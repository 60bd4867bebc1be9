"""The leases of one node: tokens taken from the counters with a check and spent here without asking. (Pure.)

A lease is charged when it is taken, so whatever becomes of it the limit holds; what is left when it ends is given back
so that other nodes can have it. Who asks for the first time gets a little, who asks again a whole lease, and nobody
two at a time. Memory: as many leases as keys are remembered; one that is pushed out stays charged.
"""

from __future__ import annotations

from holdfast.limits.algorithms import CounterReading, LimitParams
from holdfast.limits.counters.contract import Adjustment, CounterKey
from holdfast.limits.shortcuts import CacheEntry, Lease, LruDict

FIRST_LEASE = 4
"""Tokens leased with a subject's first check: enough for the few that most subjects ask."""


class Leases:
    """Times are monotonic seconds, except ``taken_at``, which is the counters' own."""

    def __init__(self, keys_max: int, seconds: float) -> None:
        self._keys_max = keys_max
        self._seconds = seconds
        self._leases: LruDict[Lease] = LruDict(keys_max)
        self._left_over: list[Adjustment] = []

    @property
    def stock(self) -> int:
        """Tokens leased and not yet spent."""
        return sum(lease.tokens for lease in self._leases.values())

    def wanted(self, known: CacheEntry | None, whole: int, now: float) -> int:
        """How many tokens to take with the next check."""
        if known is None or known.at < now - 2 * self._seconds:  # longer than the lease it may have lived on
            return min(FIRST_LEASE, whole)
        lease = known.lease
        return 0 if lease is not None and lease.tokens > 0 and now < lease.until else whole

    def begin(self, key: CounterKey, known: CacheEntry, terms: LimitParams, taken_at: float, now: float) -> None:
        """What ``known`` has just been told was leased to it; what is left of its last lease ends."""
        if known.lease is not None:
            self._end(key, known.lease)
        reading: CounterReading = known.reading
        reset_at, until = now + reading.reset_ms / 1000, known.at + self._seconds
        known.lease = Lease(terms, reading.leased, reading.remaining, reset_at, taken_at, until)
        self._leases.put_last(key, known.lease)

    def forget(self, key: CounterKey) -> None:
        """What was taken is not charged any more, and not given back. Its ``Known`` is forgotten, too."""
        self._leases.drop(key)

    def ended(self, now: float, all_of_them: bool = False) -> list[Adjustment]:
        """End what is over, and say once what there is to give back."""
        while (oldest := self._leases.first()) is not None and (all_of_them or now >= oldest[1].until):
            self._end(*oldest)
            self._leases.drop(oldest[0])
        left_over, self._left_over = self._left_over, []
        return left_over

    def _end(self, key: CounterKey, lease: Lease) -> None:
        if lease.tokens and len(self._left_over) < self._keys_max:
            self._left_over.append(Adjustment(key, lease.terms, given=lease.tokens, taken_at=lease.taken_at))
        lease.tokens = 0
