"""The checks of one event-loop turn as one call to the counters.

Equal costs on one key are merged. The counters admit as many as fit, and the callers
get them in the order in which they asked. A group of several rules stays an entry of
its own. While ``calls_max`` calls are in flight, further checks gather for the next
call.

An entry without an answer by the deadline fails over to the local share. Its call may
have been counted, so it is neither cancelled nor repeated; a late answer only frees its
slot.

While every slot holds an overdue call, the counters are *hanging*, and checks do not
wait for them until one of those calls is answered. An overdue call that fails is
replaced by a probe, a call without keys, so that no check has to wait to find out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import Struct

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.errors import HoldfastError
from holdfast.limits.algorithms import CounterReading
from holdfast.limits.counters.contract import (
    KEYS_PER_CALL_MAX,
    CounterKey,
    CounterRequest,
    CounterResponse,
    Counters,
)
from holdfast.limits.limiter.decisions import CompiledRule
from holdfast.resilience import Breaker, BreakerSettings, BreakerState


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How checks are batched on their way to the counters."""

    deadline_seconds: float = 0.05
    """A check without an answer by then is decided by the local share."""
    calls_max: int = 2
    """Calls in flight at a time; meanwhile further checks gather."""
    keys_per_call: int = KEYS_PER_CALL_MAX // 2
    """Half of what a call may carry: the counters work on one call while the next is
    written."""
    waiting_max: int = 16_384
    """Keys that may wait for a call; checks beyond that are decided by the local
    share."""
    breaker: BreakerSettings = field(
        default_factory=lambda: BreakerSettings(
            failure_threshold=3,
            failure_window_seconds=5,
            open_duration_seconds=1,
            min_failure_ratio=0.5,
        )
    )
    """The breaker before shared counters."""

    def __post_init__(self) -> None:
        if self.deadline_seconds <= 0 or self.calls_max < 1 or self.waiting_max < 1:
            raise ValueError("deadline_seconds, calls_max and waiting_max must be greater than 0")
        if not 1 <= self.keys_per_call <= KEYS_PER_CALL_MAX:
            raise ValueError(f"keys_per_call must be from 1 to {KEYS_PER_CALL_MAX}")


TURNS_OF_GRACE = 4
"""Event-loop turns between the deadline and giving up: after a stall the loop first
reads the answers that have already arrived."""


class BatchResult(Struct, frozen=True, gc=False):
    """The readings of an entry; when it was sent (our clock) and counted (theirs)."""

    readings: tuple[CounterReading, ...]
    sent_at: float
    counted_at: float


class BatchedCheck(Struct):
    """Checks asked together under the same rules.

    Callers that do not wait come before ``waiters`` in the order of admission.
    """

    compiled_rules: tuple[CompiledRule, ...]
    requests: tuple[CounterRequest, ...]
    waiters: list[asyncio.Future[Any]]


OnResult = Callable[[BatchedCheck, BatchResult | None], None]
"""Answers the waiters of an entry; None if the counters did not answer."""


class _Batch:
    """One call: its entries, when it was sent, and whether its callers are gone.

    A probe has no entries and no callers from the start.
    """

    __slots__ = ("entries", "gone", "sent_at")

    def __init__(self, entries: list[BatchedCheck], sent_at: float) -> None:
        self.entries = entries
        self.sent_at = sent_at
        self.gone = False


class Batcher:
    """Calls ``on_result`` once per entry, ``on_success`` after each answered call."""

    def __init__(
        self,
        counters: Counters,
        clock: Clock,
        settings: BatchSettings,
        on_result: OnResult,
        on_success: Callable[[], None],
    ) -> None:
        self._counters = counters
        self._monotonic = clock.monotonic
        self._settings = settings
        self._on_result = on_result
        self._on_success = on_success
        self.breaker = Breaker(settings.breaker)
        self._merged: dict[CounterKey, BatchedCheck] = {}
        self._waiting: list[BatchedCheck] = []
        self._waiting_max = settings.waiting_max
        self._keys_waiting = 0
        self._expiry: asyncio.TimerHandle | None = None
        self._flush_due = False
        self._calls: set[asyncio.Future[CounterResponse]] = set()
        self._overdue_calls = 0
        self._probes = True
        self.keys_per_call = 0

    def ask(self, compiled: CompiledRule, request: CounterRequest) -> BatchedCheck | None:
        """Ask for one key; callers that wait join the entry. None: must not ask now."""
        entry = self._merged.get(request.key)
        if entry is not None and _alike(entry.requests[0], request):
            entry.requests[0].times += request.times
            entry.requests[0].spent += request.spent
            return entry
        entry = self.ask_all((compiled,), (request,))
        if entry is not None:
            self._merged[request.key] = entry
        return entry

    def ask_all(
        self, compiled_rules: tuple[CompiledRule, ...], requests: tuple[CounterRequest, ...]
    ) -> BatchedCheck | None:
        """Ask for several keys, all or none."""
        keys_waiting = self._keys_waiting + len(requests)
        if keys_waiting > self._waiting_max or not (self._flush_due or self._begin_turn()):
            return None
        entry = BatchedCheck(compiled_rules, requests, [])
        self._waiting.append(entry)
        self._keys_waiting = keys_waiting
        return entry

    @property
    def idle(self) -> bool:
        """Nothing is in flight and nothing waits."""
        return not self._waiting and not self._calls

    @property
    def hanging(self) -> bool:
        """Every slot is taken by an overdue call or by the probe that replaced one."""
        return self._overdue_calls >= self._settings.calls_max

    @property
    def healthy(self) -> bool:
        return not self.hanging and self.breaker.state(self._monotonic()) is BreakerState.CLOSED

    async def aclose(self) -> None:
        """Answer all waiters without the counters and cancel the calls."""
        self._expire()
        self._probes = False
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _begin_turn(self) -> bool:
        """The first request of a turn; False if the counters must not be asked now."""
        if self.hanging or self.breaker.state(self._monotonic()) is BreakerState.OPEN:
            return False
        loop = asyncio.get_running_loop()
        self._flush_due = True
        loop.call_soon(self._flush)
        if self._expiry is None:
            self._expiry = loop.call_later(self._settings.deadline_seconds, self._expire)
        return True

    def _flush(self) -> None:
        self._flush_due = False
        while self._waiting and len(self._calls) < self._settings.calls_max:
            if not self._breaker_admits():
                return
            self._send(self._next_batch())
        if not self._waiting and self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _breaker_admits(self) -> bool:
        if self.breaker.admit(self._monotonic()):
            return True
        self._expire()
        return False

    def _next_batch(self) -> _Batch:
        self._merged.clear()
        keys = count = 0
        for entry in self._waiting:
            if count and keys + len(entry.requests) > self._settings.keys_per_call:
                break
            keys += len(entry.requests)
            count += 1
        entries, self._waiting = self._waiting[:count], self._waiting[count:]
        self._keys_waiting -= keys
        self.keys_per_call = keys
        return _Batch(entries, self._monotonic())

    def _expire(self) -> None:
        """Answer without the counters all entries that were never sent."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        waiting, self._waiting, self._keys_waiting = self._waiting, [], 0
        self._merged.clear()
        for entry in waiting:
            self._answer(entry, None)

    def _send(self, batch: _Batch) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._settings.deadline_seconds, self._due, batch, TURNS_OF_GRACE)
        call: asyncio.Future[CounterResponse]
        try:
            call = asyncio.ensure_future(
                self._counters.take([entry.requests for entry in batch.entries])
            )
        except Exception as error:  # a defect: fail the call, or its callers would wait in vain
            call = loop.create_future()
            call.set_exception(error)
        self._calls.add(call)
        call.add_done_callback(partial(self._ended, batch, timer))

    def _ended(
        self, batch: _Batch, timer: asyncio.TimerHandle, call: asyncio.Future[CounterResponse]
    ) -> None:
        timer.cancel()
        self._calls.discard(call)
        self._overdue_calls -= batch.gone
        if call.cancelled():
            if not batch.gone:
                self.breaker.neither()
                self._give_up(batch)
        elif (error := call.exception()) is not None:
            if not isinstance(error, HoldfastError):
                telemetry.defect("limits", error)
            slow = self._monotonic() - batch.sent_at >= self._settings.deadline_seconds
            if batch.gone and slow and self._probes:
                self._probe()
            self._overdue(batch)
        elif not batch.gone:
            self._answered(batch, call.result())
        if self._waiting:
            self._flush()

    def _probe(self) -> None:
        """Send a call without keys.

        A probe that fails within the deadline is not repeated: checks then get a quick
        refusal and do not wait.
        """
        probe = _Batch([], self._monotonic())
        probe.gone = True
        self._overdue_calls += 1
        self._send(probe)

    def _answered(self, batch: _Batch, taken: CounterResponse) -> None:
        batch.gone = True
        self.breaker.success(self._monotonic())
        for entry, readings in zip(batch.entries, taken.readings, strict=True):
            self._answer(entry, BatchResult(readings, batch.sent_at, taken.now))
        self._on_success()

    def _due(self, batch: _Batch, turns: int) -> None:
        """The deadline has passed; after a stall of our own the answer may be here
        soon."""
        if turns:
            asyncio.get_running_loop().call_soon(self._due, batch, turns - 1)
        else:
            if not batch.gone:
                telemetry.redis_failed("counters", "timeout")
                self._overdue_calls += 1
            self._overdue(batch)

    def _overdue(self, batch: _Batch) -> None:
        if not batch.gone:
            self.breaker.failure(self._monotonic())
            self._give_up(batch)

    def _give_up(self, batch: _Batch) -> None:
        batch.gone = True
        for entry in batch.entries:
            self._answer(entry, None)

    def _answer(self, entry: BatchedCheck, answer: BatchResult | None) -> None:
        """Contain a defect: it fails the waiters of this entry only."""
        try:
            self._on_result(entry, answer)
        except Exception as error:
            telemetry.defect("limits", error)
            for waiter in entry.waiters:
                if not waiter.done():
                    waiter.set_exception(error)


def _alike(one: CounterRequest, other: CounterRequest) -> bool:
    return one.cost == other.cost and one.params is other.params and not one.hold
