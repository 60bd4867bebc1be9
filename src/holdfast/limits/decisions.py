"""What a check is answered: what the counters said, or what is remembered of them, in the words of its rule.

Every decision is counted, by who decided; the counts go to the metrics with each heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

from msgspec import structs

from holdfast import telemetry
from holdfast.limits.algorithms import Reading
from holdfast.limits.counters.contract import Ask
from holdfast.limits.plans import Plan
from holdfast.limits.rules import DecidedBy, Decision
from holdfast.limits.shortcuts import Denial, Known

FREE = Decision(True)
"""Where there is no rule."""

_DEGRADED = frozenset(("local_share", "open", "closed"))


class Decisions:
    """Makes the decisions of one node; ``region`` is told in each. ``tally`` counts [refusals, admissions]."""

    def __init__(self, region: str, monotonic: Callable[[], float]) -> None:
        self._region = region
        self._monotonic = monotonic
        self.tally: dict[str, list[int]] = {by: [0, 0] for by in get_args(DecidedBy)}

    def of(self, plan: Plan, reading: Reading, allowed: bool, by: DecidedBy, hold: str = "") -> Decision:
        """``hold`` is what was asked for, and given only with a yes."""
        self.tally[by][allowed] += 1
        reset, version, window = reading.reset_ms / 1000, reading.stamp.version, plan.rule.window_seconds
        if allowed:
            return Decision(
                True, reading.limit, reading.remaining, reset, 0.0, plan.label, version,
                by, by in _DEGRADED, False, window, self._region, hold,
            )  # fmt: skip
        wait = reading.wait_ms / 1000
        return Decision(
            plan.shadow, reading.limit, reading.remaining, reset, wait, plan.label, version,
            by, by in _DEGRADED, wait > 0, window, self._region,
        )  # fmt: skip

    def of_group(
        self, plans: Sequence[Plan], asks: Sequence[Ask], readings: Sequence[Reading], by: DecidedBy | None
    ) -> list[Decision]:
        """All are allowed, or none; ``by`` None: each rule's own word for what happens without the counters."""
        allowed = all(reading.admitted for reading in readings)
        return [
            self.of(plan, reading, allowed, by or plan.rule.on_store_failure, ask.hold)
            for plan, ask, reading in zip(plans, asks, readings, strict=True)
        ]

    def from_memory(self, plan: Plan, known: Known, cost: int) -> Decision | None:
        """By a denial that still holds, or by a lease that has enough; None if neither can answer."""
        denial, lease, terms = known.denial, known.lease, plan.terms
        now = self._monotonic()
        if denial is not None:
            if denial.stands(cost, terms.stamp, now):
                return self.denied(plan, denial, now)
            if now >= denial.until:
                known.denial = None
        if lease is None or lease.tokens < cost or now >= lease.until:
            return None
        if lease.terms is not terms and lease.terms != terms:
            return None
        lease.tokens = left = lease.tokens - cost
        self.tally["lease"][True] += 1
        reset = lease.reset_at - now
        return Decision(
            True, terms.limit, lease.remaining + left, reset if reset > 0 else 0.0, 0.0, plan.label,
            terms.stamp.version, "lease", False, False, plan.rule.window_seconds, self._region,
        )  # fmt: skip

    def denied(self, plan: Plan, denial: Denial, now: float) -> Decision:
        reading = structs.replace(denial.reading, wait_ms=(denial.until - now) * 1000)
        return self.of(plan, reading, False, "denial_cache")

    def report(self) -> None:
        telemetry.limits_checked(self.tally)
        for counts in self.tally.values():
            counts[:] = (0, 0)
