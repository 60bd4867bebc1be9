"""Counters of this process alone: the embedded default."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.clock import Clock
from holdfast.limits.algorithms import CounterReading, LimitParams
from holdfast.limits.counters.contract import (
    Adjustment,
    CounterKey,
    CounterRequest,
    CounterResponse,
    CountersTrouble,
    NodesAnnounced,
)
from holdfast.limits.counters.table import SUBJECTS_MAX, CounterTable


class MemoryCounters:
    """A table and a monotonic clock, so that steps of the wall clock have no effect."""

    in_process = True

    def __init__(self, clock: Clock, subjects_max: int = SUBJECTS_MAX) -> None:
        self._monotonic = clock.monotonic
        self.table = CounterTable(subjects_max)
        self._get = self.table.get

    def take_now(
        self, key: CounterKey, params: LimitParams, cost: int, hold: str = "", times: int = 1
    ) -> CounterReading:
        now = self._monotonic() * 1000
        if hold or times != 1:
            return self.table.take(CounterRequest(key, params, cost, times, hold=hold), now)
        counter = self._get(key)
        if counter is None or counter.params is not params:
            counter = self.table.counter(key, params, now)
        return counter.admit(params, now, cost)

    def peek_now(self, key: CounterKey, params: LimitParams, count: int) -> CounterReading | None:
        return self.table.peek(key, params, count, self._monotonic() * 1000)

    def charge_now(self, key: CounterKey, params: LimitParams, amount: int) -> None:
        self.table.take(CounterRequest(key, params, amount, spent=1), self._monotonic() * 1000)

    async def take(self, entries: Sequence[Sequence[CounterRequest]]) -> CounterResponse:
        now = self._monotonic() * 1000
        return CounterResponse(now, [self.table.decide(entry, now) for entry in entries])

    async def adjust(self, adjustments: Sequence[Adjustment]) -> int:
        now = self._monotonic() * 1000
        return sum(self.table.adjust(adjustment, now) for adjustment in adjustments)

    async def reset(self, key: CounterKey) -> bool:
        return self.table.reset(key)

    def name(self, key: CounterKey) -> bytes:
        return "".join(key).encode(errors="surrogatepass")

    async def announce(self, node: str, ttl_seconds: float) -> NodesAnnounced:
        return NodesAnnounced(1, (node,))

    def take_trouble(self) -> CountersTrouble | None:
        return None

    async def aclose(self) -> None:
        self.table.clear()
