"""Counters in a dict, at a time the caller passes in. (Pure.)

It is the core of the memory counters and of the local share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy

from holdfast.limits.algorithms import (
    COUNTERS,
    Concurrency,
    Counter,
    CounterReading,
    LimitParams,
    carried_over,
    hold,
    peek,
    reading,
    take,
)
from holdfast.limits.counters.contract import Adjustment, CounterKey, CounterRequest

SUBJECTS_MAX = 1_000_000
"""Counters kept. A new one evicts an idle one, else the oldest, whose use is
forgotten."""

OVERFLOW = ""
"""No subject has this name."""

KEPT_ANYWAY_MAX = 65_536
"""Counters kept even if idle, at most half of the table: they are costly to create."""

_LOOKED_AT_PER_NEW = 2


class CounterTable:
    """See ``contract`` for entries, requests and adjustments.

    With ``overflows`` no counter in use is evicted: while the table is full, all new
    subjects of a rule share one extra counter. (At most as many of these as subjects;
    beyond that the oldest counter is evicted.)
    """

    __slots__ = (
        "_counters",
        "_counters_max",
        "_kept_anyway",
        "_line",
        "_overflows",
        "_subjects_max",
        "get",
    )

    def __init__(self, subjects_max: int = SUBJECTS_MAX, overflows: bool = False) -> None:
        self._subjects_max = subjects_max
        self._overflows = overflows
        self._counters_max = 2 * subjects_max if overflows else subjects_max
        self._kept_anyway = min(KEPT_ANYWAY_MAX, subjects_max // 2)
        self._counters: dict[CounterKey, Counter] = {}
        self._line: deque[CounterKey] = deque()
        """Every key once, in the order of inspection. The dict alone would be slow: it
        scans past all removed keys to find its first."""
        self.get = self._counters.get

    def decide(self, entry: Sequence[CounterRequest], now: float) -> tuple[CounterReading, ...]:
        """Decide one entry: as many costs of one request as fit; of several all or
        none."""
        if len(entry) == 1:
            return (self.take(entry[0], now),)
        if all(self._fits(request, now) for request in entry):
            return tuple(self.take(request, now) for request in entry)
        return tuple(self.refuse(request, now) for request in entry)

    def take(self, request: CounterRequest, now: float) -> CounterReading:
        counter = self.counter(request.key, request.params, now)
        if request.hold and isinstance(counter, Concurrency):
            return hold(counter, request.params, now, request.hold, request.spent)
        if request.times == 1 and not request.want and not request.spent:
            return counter.admit(request.params, now, request.cost)
        return take(
            counter, request.params, now, request.cost, request.times, request.want, request.spent
        )

    def peek(
        self, key: CounterKey, params: LimitParams, count: int, now: float
    ) -> CounterReading | None:
        """None if ``count`` costs of 1 fit now, else how many do. Takes nothing."""
        counter = self.counter(key, params, now)
        if peek(counter, params, now, count):
            return None
        admitted = reading(counter, now, 0, 0).remaining
        # as it is once the admitted costs are taken: the wait is that of the next one
        after = copy(counter)
        after.take_ahead(now, admitted)
        return reading(after, now, admitted, 1)

    def adjust(self, adjustment: Adjustment, now: float) -> bool:
        """Whether it took effect: what other parameters took stays charged."""
        key, theirs = adjustment.key, adjustment.params
        counter = self._find(key)
        if adjustment.charged or adjustment.held:
            counter = self.counter(
                key if counter is None or key in self else (key[0], OVERFLOW), theirs, now
            )
        if counter is None:
            return False
        if adjustment.given and (theirs.stamp, theirs.store) != (
            counter.params.stamp,
            counter.params.store,
        ):
            return False
        if not adjustment.released:  # a hold ends whatever rule the caller knows
            counter.agree(theirs, now)
        counter.settle(now)
        return _apply(adjustment, counter, now)

    def reset(self, key: CounterKey) -> bool:
        """Forget what is used; False if there is no such counter."""
        counter = self._counters.get(key)
        if counter is None:
            return False
        self._counters[key] = COUNTERS[counter.params.algorithm](counter.params)
        return True

    def used(self, key: CounterKey, now: float) -> float:
        """What is used of the counter now; 0 if there is none."""
        counter = self._find(key)
        if counter is None:
            return 0.0
        counter.settle(now)
        return counter.params.capacity - counter.room(now)

    def full(self, key: CounterKey, now: float) -> bool:
        """Whether not even a cost of 1 fits now."""
        counter = self._find(key)
        return counter is not None and not peek(counter, counter.params, now, 1)

    def held_ms(self, key: CounterKey, hold: str, now: float) -> float:
        """How long this hold still lasts; 0 if it is over or unknown."""
        counter = self._find(key)
        return (
            max(0.0, counter.holders.get(hold, now) - now)
            if isinstance(counter, Concurrency)
            else 0.0
        )

    def clear(self) -> None:
        self._counters.clear()
        self._line.clear()

    def __contains__(self, key: object) -> bool:
        return key in self._counters

    def __len__(self) -> int:
        return len(self._counters)

    def _fits(self, request: CounterRequest, now: float) -> bool:
        counter = self.counter(request.key, request.params, now)
        fits = peek(counter, request.params, now, request.cost)  # this also drops expired holds
        return fits or (isinstance(counter, Concurrency) and request.hold in counter.holders)

    def refuse(self, request: CounterRequest, now: float) -> CounterReading:
        """Take nothing; there is a wait only if it would not have fitted."""
        fits = self._fits(request, now)
        return reading(
            self.counter(request.key, request.params, now), now, 0, 0 if fits else request.cost
        )

    def counter(self, key: CounterKey, params: LimitParams, now: float) -> Counter:
        """The key's counter, by the algorithm of the newer parameters.

        If there is none, create it, which may evict an idle one.
        """
        counter = self._counters.get(key)
        if counter is not None and counter.params is not params:
            counter = self._counters[key] = carried_over(counter, params, now)
        if counter is None:
            if len(self._counters) >= self._kept_anyway:
                self._make_room(now)
                if (
                    self._overflows
                    and key[1] != OVERFLOW
                    and len(self._counters) >= self._subjects_max
                ):
                    return self.counter((key[0], OVERFLOW), params, now)
            counter = self._counters[key] = COUNTERS[params.algorithm](params)
            self._line.append(key)
        return counter

    def _find(self, key: CounterKey) -> Counter | None:
        """The counter the key is counted in, if any."""
        return self._counters.get(key) or (
            self._counters.get((key[0], OVERFLOW)) if self._overflows else None
        )

    def _make_room(self, now: float) -> None:
        """Evict idle counters, a few per new subject; those in use move to the end."""
        for _ in range(min(_LOOKED_AT_PER_NEW, len(self._line))):
            key = self._line.popleft()
            counter = self._counters[key]
            counter.settle(now)
            if counter.reset(now) > 0:
                self._line.append(key)
            else:
                del self._counters[key]
        while len(self._counters) >= self._counters_max:
            del self._counters[self._line.popleft()]


def _apply(adjustment: Adjustment, counter: Counter, now: float) -> bool:
    """Adjust one settled counter; a charge stops at the capacity.

    Nothing happens if the counter's algorithm is of the other kind.
    """
    if isinstance(counter, Concurrency):
        if not adjustment.held:
            return counter.release(adjustment.released)
        counter.holders[adjustment.held] = now + adjustment.held_ms
    elif adjustment.given:
        counter.give(now, adjustment.given, adjustment.taken_at)
    elif adjustment.charged:
        counter.take(now, min(adjustment.charged, reading(counter, now, 0, 0).remaining))
    else:
        return False
    return True
