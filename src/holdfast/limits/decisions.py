"""What a check is answered: what the counters said, or what is remembered of them, in the words of its rule.

Every check is counted, by who decided and what he said; the counts go to the metrics with each heartbeat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import get_args

from msgspec import Struct, structs

from holdfast import telemetry
from holdfast.limits.algorithms import EPSILON, CounterReading
from holdfast.limits.counters.contract import CounterRequest
from holdfast.limits.plans import CompiledRule
from holdfast.limits.rules import DecidedBy, Decision
from holdfast.limits.shortcuts import CacheEntry, Denial

_REFUSED, _ALLOWED, _EXCEEDED = 0, 1, 2
_DEGRADED = frozenset(("local_share", "open", "closed"))


class Standing(Struct, frozen=True):
    """How a subject stands with the rule that limits it; ``reset_after`` is when nothing is used any more, in seconds.

    ``used`` is above ``capacity`` where a token bucket owes what was let through before it was counted.
    The numbers are those of the rule that the counters decide by, which may be newer than the one known here.
    """

    rule: str
    rule_version: int
    algorithm: str
    limit: int
    window_seconds: float
    capacity: int
    used: int
    remaining: int
    reset_after: float


def standing_of(plan: CompiledRule, reading: CounterReading) -> Standing:
    rule, used = plan.rule, max(0, reading.capacity - reading.remaining)
    if rule.algorithm == "token_bucket" and reading.stamp == plan.terms.stamp:
        used = max(used, math.ceil(reading.reset_ms * reading.limit / plan.terms.window_ms - EPSILON))
    told = (rule.algorithm, reading.limit, rule.window_seconds, reading.capacity, used, reading.remaining)
    return Standing(plan.label, reading.stamp.version, *told, reading.reset_ms / 1000)


class DecisionBuilder:
    """Makes the decisions of one node; ``region`` is told in each.

    ``tally`` counts what was refused, allowed, and exceeded the limit of a rule in shadow mode.
    """

    def __init__(self, region: str, monotonic: Callable[[], float]) -> None:
        self._region = region
        self.free = Decision(True, region=region)
        """Where there is no rule."""
        self._monotonic = monotonic
        self.tally: dict[str, list[int]] = {by: [0, 0, 0] for by in get_args(DecidedBy)}

    def of(self, plan: CompiledRule, reading: CounterReading, allowed: bool, by: DecidedBy, hold: str = "") -> Decision:
        """``hold`` is what was asked for, and given only with a yes."""
        if not allowed:
            return self.refused(plan, reading, by)
        self.tally[by][_ALLOWED] += 1
        return Decision(
            True, reading.limit, reading.remaining, reading.reset_ms / 1000, 0.0, plan.label, reading.stamp.version,
            by, by in _DEGRADED, False, plan.rule.window_seconds, self._region, hold,
        )  # fmt: skip

    def refused(self, plan: CompiledRule, reading: CounterReading, by: DecidedBy, times: int = 1) -> Decision:
        """What the rule refuses, told to so many; in shadow mode all the same allowed."""
        self.tally[by][_EXCEEDED if plan.shadow else _REFUSED] += times
        wait = reading.wait_ms / 1000
        return Decision(
            plan.shadow, reading.limit, reading.remaining, reading.reset_ms / 1000, wait, plan.label,
            reading.stamp.version, by, by in _DEGRADED, wait > 0, plan.rule.window_seconds, self._region,
        )  # fmt: skip

    def of_alike(
        self, plan: CompiledRule, reading: CounterReading, count: int, by: DecidedBy
    ) -> tuple[int, Decision | None]:
        """How many of so many may pass, and what the others are told."""
        admitted = reading.admitted
        self.tally[by][_ALLOWED] += admitted
        if admitted == count:
            return count, None
        refused = self.refused(plan, reading, by, count - admitted)
        return (count, None) if refused.allowed else (admitted, refused)

    def again(self, decision: Decision) -> None:
        """The same was told to one more."""
        self.tally[decision.decided_by][_ALLOWED if decision.allowed else _REFUSED] += 1

    def of_group(
        self,
        plans: Sequence[CompiledRule],
        asks: Sequence[CounterRequest],
        readings: Sequence[CounterReading],
        by: DecidedBy | None,
    ) -> list[Decision]:
        """All are allowed, or none; ``by`` None: each rule's own word for what happens without the counters."""
        allowed = all(reading.admitted for reading in readings)
        return [
            self.of(plan, reading, allowed, by or plan.rule.on_store_failure, ask.hold)
            for plan, ask, reading in zip(plans, asks, readings, strict=True)
        ]

    def from_memory(self, plan: CompiledRule, known: CacheEntry, cost: int, times: int = 1) -> Decision | None:
        """By a denial that still holds, or by a lease that has enough; None if neither can answer.

        ``times`` alike have one answer.
        """
        denial, lease, terms = known.denial, known.lease, plan.terms
        now = self._monotonic()
        if denial is not None:
            if denial.stands(cost, terms.stamp, now):
                return self.denied(plan, denial, now, times)
            if now >= denial.until:
                known.denial = None
        if lease is None or lease.tokens < cost * times or now >= lease.until:
            return None
        if lease.terms is not terms and lease.terms != terms:
            return None
        lease.tokens = left = lease.tokens - cost * times
        self.tally["lease"][_ALLOWED] += times
        reset = lease.reset_at - now
        return Decision(
            True, terms.limit, lease.remaining + left, reset if reset > 0 else 0.0, 0.0, plan.label,
            terms.stamp.version, "lease", False, False, plan.rule.window_seconds, self._region,
        )  # fmt: skip

    def denied(self, plan: CompiledRule, denial: Denial, now: float, times: int = 1) -> Decision:
        reading = structs.replace(denial.reading, wait_ms=(denial.until - now) * 1000)
        return self.refused(plan, reading, "denial_cache", times)

    def report(self) -> None:
        telemetry.limits_checked(self.tally)
        for counts in self.tally.values():
            counts[:] = (0, 0, 0)
