"""Checks that need the shared counters, and what becomes of them without an answer.

``RemoteChecks`` sends a check to the counters in the batch of its event-loop turn. When
the batch is answered, it remembers the reading, the denial and the lease of each key
and gives the waiting callers their decisions. If there is no answer, or the counters
must not be asked, the local share decides.

A caller waits (``begin``, ``decide_group``), or is admitted at once and counted later
(``admit_uncounted``). Callers that do not wait are charged first when the answer comes.

A caller may be cancelled after its check was counted. Tokens stay charged, but a hold
that no caller received is released, or it would block others for a whole window.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.clock import Clock, Ids
from holdfast.limits.algorithms import CounterReading
from holdfast.limits.counters.contract import Adjustment, CounterKey, CounterRequest, Counters
from holdfast.limits.limiter.batch import BatchedCheck, Batcher, BatchResult
from holdfast.limits.limiter.cache import CacheEntry, Denial, HoldRegistry, LruDict, TokenLeases
from holdfast.limits.limiter.decisions import CompiledRule, DecisionBuilder
from holdfast.limits.limiter.fallback import FallbackLimiter
from holdfast.limits.limiter.maintenance import NodeHeartbeat
from holdfast.limits.limiter.settings import LimiterSettings
from holdfast.limits.rules import DecidedBy, Decision

COUNTED_LATER_MAX = 10_000
"""Unanswered checks whose callers do not wait; above it the local share decides."""


class KeyMemory:
    """What one node remembers of keys: readings, leases, holds and its local share."""

    def __init__(self, settings: LimiterSettings, clock: Clock, node: str) -> None:
        self.cache: LruDict[CacheEntry] = LruDict(settings.keys_max)
        self.leases = TokenLeases(settings.keys_max, settings.lease_seconds)
        self.hold_registry = HoldRegistry(Ids(clock), settings.keys_max)
        self.share = FallbackLimiter(settings.keys_max, node)

    def forget(self, key: CounterKey) -> None:
        """The counter of this key was reset."""
        self.leases.forget(key)
        self.cache.drop(key)
        self.share.forget(key)


class RemoteChecks:
    """Sends checks to the counters and turns the results into decisions.

    ``on_behind`` is called when the counters have a newer rule than this node.
    """

    def __init__(
        self,
        counters: Counters,
        clock: Clock,
        settings: LimiterSettings,
        decisions: DecisionBuilder,
        memory: KeyMemory,
        heartbeat: NodeHeartbeat,
        on_behind: Callable[[], None],
    ) -> None:
        self._monotonic = clock.monotonic
        self._decisions = decisions
        self._cache = memory.cache
        self._leases = memory.leases
        self._hold_registry = memory.hold_registry
        self._share = memory.share
        self._reconciler = heartbeat.reconciler
        self._on_behind = on_behind
        self.batcher = Batcher(
            counters, clock, settings.batch, self._on_result, heartbeat.on_counters_answered
        )
        self._counted_later = 0

    def begin(
        self, compiled: CompiledRule, subject: str, cost: int
    ) -> Decision | asyncio.Future[Decision]:
        """A future of the decision; or the decision, by the local share."""
        request = self.new_request(compiled, subject, cost)
        entry = self.batcher.ask(compiled, request)
        if entry is None:
            return self.decide_locally(compiled, request)
        waiter: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        return waiter

    async def decide_group(
        self, compiled_rules: tuple[CompiledRule, ...], requests: tuple[CounterRequest, ...]
    ) -> Sequence[Decision]:
        """Decide several keys together: all are admitted, or none."""
        # One key alone may be merged with equal checks of this turn; a group may not,
        # because it is admitted as a whole.
        entry = (
            self.batcher.ask_all(compiled_rules, requests)
            if len(requests) > 1
            else self.batcher.ask(compiled_rules[0], requests[0])
        )
        if entry is None:
            return self._decide_group_locally(compiled_rules, requests)
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        decided = await self.wait(waiter)
        return [decided] if isinstance(decided, Decision) else decided

    async def wait(self, begun: asyncio.Future[Any]) -> Any:
        """Wait for the decision; a caller that is cancelled keeps no hold."""
        try:
            return await begun
        except asyncio.CancelledError:
            if begun.done() and not begun.cancelled():
                decided = begun.result()
                for decision in [decided] if isinstance(decided, Decision) else decided:
                    self._release_hold(decision.hold)
            raise

    def admit_uncounted(
        self, compiled: CompiledRule, request: CounterRequest
    ) -> tuple[CounterReading, DecidedBy]:
        """Without waiting: admitted and counted later, or by the local share."""
        healthy, now = self.batcher.healthy, self._monotonic() * 1000
        exhausted = self._share.exhausted(request.key, now)
        if healthy and not exhausted and self._counted_later < COUNTED_LATER_MAX:
            times = request.spent = request.times
            if self.batcher.ask(compiled, request) is not None:
                self._counted_later += times
                params = compiled.params
                # by position, as on every hot path: admitted, remaining, reset_ms,
                # wait_ms, leased; then the rule's limit, stamp and capacity
                reading = CounterReading(
                    times, params.limit, 0.0, 0.0, 0, params.limit, params.stamp, params.capacity
                )
                return reading, "counted_later"
        elif self.batcher.idle or (healthy and exhausted):
            # takes nothing: it finds out whether the counters answer again
            self.batcher.ask(
                compiled, CounterRequest(request.key, compiled.params, request.cost, 0)
            )
        reading = self._share.decide_one(
            compiled.rule, request, self._cache.get(request.key), now, request.times
        )
        return reading, compiled.rule.on_store_failure

    def charge(self, compiled: CompiledRule, request: CounterRequest) -> None:
        """Count ``request``, which is spent, with the checks of this turn.

        Without an answer it is charged to the local share, which passes it on later.
        """
        known = self._cache.get(request.key)
        if request.cost < 0 and known is not None:
            known.denial = None  # what was refused may fit now
        if self.batcher.ask(compiled, request) is not None:
            self._counted_later += 1
        else:
            self._share.spend(compiled.rule, request, known, self._monotonic() * 1000)

    def new_request(self, compiled: CompiledRule, subject: str, cost: int) -> CounterRequest:
        """One check, with the lease and the hold that it asks for."""
        key = (compiled.prefix, subject)
        want = (
            self._leases.wanted(self._cache.get(key), compiled.lease, self._monotonic())
            if compiled.lease
            else 0
        )
        hold_id = (
            self._hold_registry.new_hold_id(key, compiled.params) if compiled.counts_holders else ""
        )
        return CounterRequest(key, compiled.params, cost, 1, want, hold_id)

    def decide_locally(self, compiled: CompiledRule, request: CounterRequest) -> Decision:
        """Decide by the local share: the counters must not be asked or are silent."""
        reading = self._share.decide_one(
            compiled.rule, request, self._cache.get(request.key), self._monotonic() * 1000
        )
        return self._decisions.from_reading(
            compiled, reading, reading.admitted > 0, compiled.rule.on_store_failure, request.hold
        )

    def _decide_group_locally(
        self, compiled_rules: tuple[CompiledRule, ...], requests: tuple[CounterRequest, ...]
    ) -> list[Decision]:
        known = [self._cache.get(request.key) for request in requests]
        readings = self._share.decide(
            [compiled.rule for compiled in compiled_rules],
            requests,
            known,
            self._monotonic() * 1000,
        )
        return self._decisions.from_group(compiled_rules, requests, readings, None)

    def _on_result(self, entry: BatchedCheck, result: BatchResult | None) -> None:
        """Remember what the counters said, once per entry, and answer each waiter."""
        self._counted_later -= entry.requests[0].spent
        if result is None:
            self._on_no_answer(entry)
        elif len(entry.requests) > 1:
            each = zip(entry.compiled_rules, entry.requests, result.readings, strict=True)
            for compiled, request, reading in each:
                self._learn(compiled, request, reading, result.sent_at)
            decisions = self._decisions.from_group(
                entry.compiled_rules, entry.requests, result.readings, "counters"
            )
            for waiter in entry.waiters:
                if not waiter.done():
                    waiter.set_result(decisions)
                else:
                    self._release_unless_received(entry.requests, ())
        else:
            self._on_reading(entry.compiled_rules[0], entry.requests[0], entry.waiters, result)

    def _on_reading(
        self,
        compiled: CompiledRule,
        request: CounterRequest,
        waiters: list[asyncio.Future[Decision]],
        result: BatchResult,
    ) -> None:
        reading = result.readings[0]
        known = self._learn(compiled, request, reading, result.sent_at)
        # A reading by a newer rule may bring a lease that our parameters do not fit.
        if reading.leased and request.params.stamp == reading.stamp:
            self._leases.begin(
                request.key, known, request.params, result.counted_at, self._monotonic()
            )
        self._share.on_counted(request.key)
        # Of the merged checks, ``spent`` callers did not wait and come first; the
        # others are admitted in the order in which they asked.
        for rank, waiter in enumerate(waiters, request.spent):
            if not waiter.done():
                allowed = rank < reading.admitted
                waiter.set_result(
                    self._decisions.from_reading(
                        compiled, reading, allowed, "counters", request.hold
                    )
                )
            elif reading.admitted:
                self._release_unless_received((request,), ())

    def _on_no_answer(self, entry: BatchedCheck) -> None:
        """Decide by the local share; only charge it for callers that did not wait."""
        compiled, request = entry.compiled_rules[0], entry.requests[0]
        is_group = len(entry.requests) > 1
        if request.spent:
            self._share.spend(
                compiled.rule, request, self._cache.get(request.key), self._monotonic() * 1000
            )
        for waiter in entry.waiters:
            decisions: list[Decision] = []
            if not waiter.done():
                decisions = (
                    self._decide_group_locally(entry.compiled_rules, entry.requests)
                    if is_group
                    else [self.decide_locally(compiled, request)]
                )
                waiter.set_result(decisions if is_group else decisions[0])
            self._release_unless_received(entry.requests, decisions)

    def _learn(
        self,
        compiled: CompiledRule,
        request: CounterRequest,
        reading: CounterReading,
        sent_at: float,
    ) -> CacheEntry:
        known = self._cache.get(request.key)
        if known is None:
            known = CacheEntry(reading, sent_at)
            self._cache.put(request.key, known)
        else:
            known.reading, known.at = reading, sent_at
            self._cache.renew(request.key)
        # Counted from when the call was sent, which is before the counters refused, so
        # the denial never outlasts theirs. A hold may be released at any moment, so a
        # refusal by a concurrency rule is not remembered.
        if reading.wait_ms > 0 and not compiled.counts_holders:
            known.denial = Denial(request.cost, sent_at + reading.wait_ms / 1000, reading)
        # Identity first: it is the usual case, and comparing versions costs more.
        if reading.stamp is not compiled.params.stamp and reading.stamp > compiled.params.stamp:
            self._on_behind()
        return known

    def _release_unless_received(
        self, requests: Sequence[CounterRequest], received: Sequence[Decision]
    ) -> None:
        """Release what the counters granted and no caller received."""
        held = [decision.hold for decision in received]
        for request in requests:
            if request.hold not in held:
                self._release_hold(request.hold)

    def _release_hold(self, hold_id: str) -> None:
        if hold_id and (counter := self._hold_registry.end(hold_id)) is not None:
            self._share.release(*counter, hold_id, self._monotonic() * 1000)
            self._reconciler.release_soon(Adjustment(*counter, released=hold_id))
