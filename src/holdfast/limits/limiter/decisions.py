"""What a check is answered: what the counters said, or what is remembered of them, in the words of its rule.

Every check is counted, by who decided and what he said; the counts go to the metrics with each heartbeat.

Rules made ready for the hot path, each for one tenant. (Pure.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar, get_args

from msgspec import Struct, structs

from holdfast import telemetry
from holdfast.errors import InvalidCheck
from holdfast.limits.algorithms import EPSILON, CounterReading, LimitParams, terms_of
from holdfast.limits.counters.contract import CounterRequest, key_prefix
from holdfast.limits.limiter.cache import CacheEntry, Denial
from holdfast.limits.rule_json import LIMIT_MAX, RESOURCE_LENGTH_MAX, TENANT_LENGTH_MAX
from holdfast.limits.rules import DecidedBy, Decision, Rule, RuleName, RuleSet

SUBJECT_LENGTH_MAX = 1024
PLANS_MAX = 65_536
"""Plans, and names under which they were found, that are remembered; when full they are forgotten and made again."""

K = TypeVar("K")


class CompiledRule(Struct, frozen=True, gc=False):
    """What a check needs to know of its rule, worked out once."""

    rule: Rule
    terms: LimitParams
    prefix: str
    label: str
    lease: int
    holds: bool
    shadow: bool


class RuleCompiler:
    """The plans of one set of rules, by tenant and resource.

    Who asks chooses the text of a resource, so little of it is kept: one plan for each tenant and rule, and under which
    names it was found, of names that a rule could have. What no rule limits, and a name longer than any rule's (a path;
    only wildcards can answer for it), is looked up each time.
    """

    def __init__(self, rules: RuleSet, lease_percent: float) -> None:
        self._rules = rules
        self._lease_percent = lease_percent
        self._of_rules: dict[tuple[str, RuleName], CompiledRule] = {}
        self.found: dict[tuple[str, str], CompiledRule] = {}
        """For who cannot spend the time of a call."""

    def find(self, tenant: str, resource: str) -> CompiledRule | None:
        """None where nothing limits: no rule, or one that is off."""
        plan = self.found.get((tenant, resource))
        if plan is not None:
            return plan
        rule = self._rules.lookup(tenant, resource)
        if rule is None or rule.mode == "off":
            return None
        if len(tenant) > TENANT_LENGTH_MAX:
            return self._made(tenant, rule)
        plan = self._of_rules.get((tenant, rule.name))
        if plan is None:
            plan = self._made(tenant, rule)
            _put(self._of_rules, (tenant, rule.name), plan)
        if len(resource) <= RESOURCE_LENGTH_MAX:
            _put(self.found, (tenant, resource), plan)
        return plan

    def _made(self, tenant: str, rule: Rule) -> CompiledRule:
        holds = rule.algorithm == "concurrency"
        leased = rule.precision == "leased" and not holds
        lease = int(rule.capacity * self._lease_percent / 100) if leased else 0
        terms = terms_of(rule, self._rules.in_force(rule), self._rules.store)
        return CompiledRule(rule, terms, key_prefix(tenant, rule), rule.label, lease, holds, rule.mode == "shadow")


def _put(plans: dict[K, CompiledRule], key: K, plan: CompiledRule) -> None:
    if len(plans) >= PLANS_MAX:
        plans.clear()
    plans[key] = plan


def validate(plan: CompiledRule | None, subject: str, cost: int) -> None:
    """InvalidCheck for what no rule, or not this one, can ever answer."""
    most, whose = (LIMIT_MAX, "any rule") if plan is None else (plan.terms.capacity, plan.label)
    if not 1 <= cost <= most:
        raise InvalidCheck(f"cost must be between 1 and {most}, the capacity of {whose}", field="cost")
    if plan is not None and plan.holds and cost != 1:
        raise InvalidCheck("cost must be 1 for a concurrency rule", field="cost")
    if not subject or len(subject) > SUBJECT_LENGTH_MAX:
        raise InvalidCheck(f"subject must have 1 to {SUBJECT_LENGTH_MAX} characters", field="subject")


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
