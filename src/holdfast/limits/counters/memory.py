"""Counters of this process alone: the embedded default, and the local share of a node whose Redis is away."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.clock import Clock
from holdfast.limits.algorithms import COUNTERS, Concurrency, Counter, Reading, Terms, hold, peek, reading, take
from holdfast.limits.counters.contract import Adjustment, Ask, Taken

SUBJECTS_MAX = 1_000_000
"""Counters kept. The oldest is forgotten for a new one, idle ones first: a forgotten subject starts afresh."""

_LOOKED_AT_PER_NEW = 2


class MemoryCounters:
    """Pure algorithms in a dict. Time is monotonic, so a step of the wall clock changes nothing."""

    def __init__(self, clock: Clock, subjects_max: int = SUBJECTS_MAX) -> None:
        self._clock = clock
        self._subjects_max = subjects_max
        self._counters: dict[str, Counter] = {}

    def now(self) -> float:
        return self._clock.monotonic() * 1000

    def take_now(self, ask: Ask) -> Reading:
        return self._take(ask, self._clock.monotonic() * 1000)

    async def take(self, entries: Sequence[Sequence[Ask]]) -> Taken:
        return self.decide(entries)

    def decide(self, entries: Sequence[Sequence[Ask]]) -> Taken:
        now = self.now()
        return Taken(now, [self._entry(entry, now) for entry in entries])

    async def adjust(self, adjustments: Sequence[Adjustment]) -> None:
        now = self.now()
        for adjustment in adjustments:
            counter = self._counters.get(adjustment.key)
            if counter is None and adjustment.charged:
                counter = self._counter(adjustment.key, adjustment.terms, now)
            if counter is not None:
                counter.settle(now)
                apply(adjustment, counter, now)

    async def announce(self, node: str, ttl_seconds: float) -> int:
        return 1

    async def aclose(self) -> None:
        self._counters.clear()

    def used(self, key: str) -> float:
        """What is used of the counter now; 0 if there is none."""
        counter = self._counters.get(key)
        if counter is None:
            return 0.0
        now = self.now()
        counter.settle(now)
        return counter.terms.capacity - counter.room(now)

    def __contains__(self, key: str) -> bool:
        return key in self._counters

    def __len__(self) -> int:
        return len(self._counters)

    def _entry(self, entry: Sequence[Ask], now: float) -> tuple[Reading, ...]:
        if len(entry) == 1:
            return (self._take(entry[0], now),)
        if all(self._fits(ask, now) for ask in entry):
            return tuple(self._take(ask, now) for ask in entry)
        return tuple(self._refuse(ask, now) for ask in entry)

    def _take(self, ask: Ask, now: float) -> Reading:
        counter = self._counters.get(ask.key) or self._counter(ask.key, ask.terms, now)
        if ask.hold:
            assert isinstance(counter, Concurrency)
            return hold(counter, ask.terms, now, ask.hold)
        return take(counter, ask.terms, now, ask.cost, ask.times, ask.want)

    def _fits(self, ask: Ask, now: float) -> bool:
        counter = self._counter(ask.key, ask.terms, now)
        held = isinstance(counter, Concurrency) and ask.hold in counter.holders
        return peek(counter, ask.terms, now, ask.cost) or held

    def _refuse(self, ask: Ask, now: float) -> Reading:
        fits = self._fits(ask, now)
        return reading(self._counter(ask.key, ask.terms, now), now, 0, 0 if fits else ask.cost)

    def _counter(self, key: str, terms: Terms, now: float) -> Counter:
        counter = self._counters.get(key)
        if counter is None:
            self._make_room(now)
            counter = self._counters[key] = COUNTERS[terms.algorithm](terms)
        return counter

    def _make_room(self, now: float) -> None:
        """Forget what is idle, a little with each new subject; what is in use goes to the end of the line."""
        for _ in range(min(_LOOKED_AT_PER_NEW, len(self._counters))):
            key = next(iter(self._counters))
            counter = self._counters.pop(key)
            counter.settle(now)
            if counter.reset(now) > 0:
                self._counters[key] = counter
        while len(self._counters) >= self._subjects_max:
            del self._counters[next(iter(self._counters))]


def apply(adjustment: Adjustment, counter: Counter, now: float) -> None:
    """Put one settled counter right."""
    if adjustment.released and isinstance(counter, Concurrency):
        counter.release(adjustment.released)
    elif adjustment.given and counter.terms.stamp == adjustment.terms.stamp:
        counter.give(now, adjustment.given, adjustment.taken_at)
    elif adjustment.charged:
        counter.take(now, adjustment.charged)
