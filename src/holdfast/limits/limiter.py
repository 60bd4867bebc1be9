"""One check. The first that can answer does:

1. the rule, from an immutable snapshot; no database
2. the denial cache: what was refused a moment ago still does not fit
3. a lease: tokens already taken from the counters and spent here (never for strict rules)
4. the counters: the checks of one event-loop turn in one call
5. without an answer in time, or with the breaker open: this node's local share

A check never raises because something is away, and never waits longer than the deadline. What it does raise is the
caller's mistake: a cost that can never fit, a subject without end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast import telemetry
from holdfast.clock import Clock, Ids
from holdfast.errors import HoldfastError, InvalidMessage
from holdfast.limits.algorithms import Reading, Terms, terms_of
from holdfast.limits.batch import Answer, Batcher, BatchSettings, new
from holdfast.limits.counters.contract import KEYS_PER_CALL_MAX, Adjustment, Ask, Counters, Key, key_prefix
from holdfast.limits.rules import Check, DecidedBy, Decision, Rule, RuleSet
from holdfast.limits.share import LocalShare
from holdfast.limits.shortcuts import Bounded, Denial, Lease, Seen

SUBJECT_LENGTH_MAX = 1024
PLANS_MAX = 65_536
FIRST_LEASE = 4
"""Tokens leased with a subject's first check: enough for the few that most subjects ask."""
COUNTED_LATER_MAX = 10_000
"""Checks on their way to the counters whose askers did not wait; above it the local share decides."""


@dataclass(frozen=True, slots=True)
class LimiterSettings:
    """How one node answers checks."""

    keys_max: int = 65_536
    """Subjects whose denials, leases and last readings are remembered, each; the longest known is forgotten."""
    lease_percent: float = 1.0
    """A lease of a rule with precision ``leased``, in percent of its capacity; each node may admit so much more."""
    lease_seconds: float = 5.0
    """What is left of a lease after this is given back."""
    heartbeat_seconds: float = 1.0
    """How often the node says that it lives, and gives leases back."""
    node_ttl_seconds: float = 5.0
    """A node that was silent for so long is not counted when limits are shared out."""
    batch: BatchSettings = field(default_factory=BatchSettings)

    def __post_init__(self) -> None:
        if not 0 <= self.lease_percent <= 10:
            raise ValueError("lease_percent must be between 0 and 10")
        if self.keys_max < 1 or self.lease_seconds <= 0 or self.heartbeat_seconds <= 0:
            raise ValueError("keys_max, lease_seconds and heartbeat_seconds must be greater than 0")
        if self.node_ttl_seconds < 2 * self.heartbeat_seconds:
            raise ValueError("node_ttl_seconds must be at least two heartbeats")


class Place(NamedTuple):
    """Which node this is, and whose counters it shares: each region has its own and grants the whole limit."""

    node: str = "node"
    region: str = "local"


class _Plan(NamedTuple):
    """A rule made ready for the hot path, for one tenant and resource."""

    rule: Rule
    terms: Terms
    prefix: str
    label: str
    lease: int
    holds: bool
    shadow: bool


class Limiter:
    """Checks for one node. ``async with`` runs its heartbeat; a check works with or without it.

    ``rules`` may be assigned at any time: the next check has them. ``on_behind`` is called when the counters knew a
    newer rule than we do.
    """

    def __init__(
        self,
        counters: Counters,
        clock: Clock,
        settings: LimiterSettings | None = None,
        rules: RuleSet | None = None,
        place: Place | None = None,
        on_behind: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings or LimiterSettings()
        self._counters = counters
        self._take_now = counters.take_now
        self._immediate = counters.immediate
        self._monotonic = clock.monotonic
        self._ids = Ids(clock)
        self._on_behind = on_behind
        self.place = place or Place()
        self._region = self.place.region
        self._rules = rules or RuleSet()
        self._plans: dict[tuple[str, str], _Plan | None] = {}
        self._batcher = Batcher(counters, clock, self.settings.batch, self._recovered)
        self._denials: Bounded[Denial] = Bounded(self.settings.keys_max)
        self._leases: Bounded[Lease] = Bounded(self.settings.keys_max)
        self._seen: Bounded[Seen] = Bounded(self.settings.keys_max)
        self._share = LocalShare(self.settings.keys_max)
        self._tally: Counter[tuple[str, bool]] = Counter()
        self._background: set[asyncio.Task[None]] = set()

    @property
    def rules(self) -> RuleSet:
        return self._rules

    @rules.setter
    def rules(self, rules: RuleSet) -> None:
        self._rules = rules
        self._plans = {}

    def use(self, rules: RuleSet) -> None:
        """Check by these rules from now on: one pointer swap."""
        self.rules = rules

    @property
    def nodes(self) -> int:
        """Live nodes of this region as last known."""
        return self._share.nodes

    @property
    def lease_stock(self) -> int:
        return sum(lease.tokens for _, lease in self._leases.items())

    @property
    def healthy(self) -> bool:
        """Whether the shared counters answer; limiting goes on without them."""
        return self._batcher.healthy

    async def check(self, tenant: str, resource: str, subject: str, cost: int = 1) -> Decision:
        """May ``subject`` use ``cost`` of ``resource`` now? Cancelled: it may have been counted."""
        plan = self._plan(tenant, resource)
        if plan is None:
            return _FREE
        if cost != 1 or not 0 < len(subject) <= SUBJECT_LENGTH_MAX:
            _validate(plan, subject, cost)
        key = (plan.prefix, subject)
        if not plan.holds:
            found = self._now(plan, key, cost)
            if found is not None:
                return found
        want, hold = self._want(plan, key) if plan.lease else 0, self._ids.new("hld_") if plan.holds else ""
        ask = new(Ask, (key, plan.terms, cost, 1, want, hold))
        waiting = self._batcher.ask(ask)
        answer = await waiting if waiting is not None else None
        if answer is None:
            return self._local([plan], [ask])[0]
        return self._counted(plan, ask, answer)

    def check_soon(self, tenant: str, resource: str, subject: str, cost: int = 1) -> Decision:
        """``check`` for who cannot wait: by what is known here, and counted a moment later.

        Exact where the counters need no I/O. Otherwise a first check of a subject is allowed, and what may slip
        through is what the subject can ask within one round trip: the answer is remembered for the next. Without
        the counters the local share decides.
        """
        plan = self._plan(tenant, resource)
        if plan is None:
            return _FREE
        _validate(plan, subject, cost)
        key = (plan.prefix, subject)
        found = self._now(plan, key, cost) if not plan.holds else None
        if found is not None:
            return found
        if not self._batcher.healthy or len(self._background) >= COUNTED_LATER_MAX:
            if len(self._background) <= 1:
                self._in_background(self._count(tenant, resource, subject, cost))  # the probe that ends an open breaker
            hold = self._ids.new("hld_") if plan.holds else ""
            return self._local([plan], [Ask(key, plan.terms, cost, 1, 0, hold)])[0]
        self._in_background(self._count(tenant, resource, subject, cost))
        limit, stamp = plan.rule.limit, plan.terms.stamp
        return self._decision(plan, Reading(1, limit, 0.0, 0.0, 0, limit, stamp), True, "counted_later")

    def refused_soon(self, check: Check) -> Decision | None:
        """``check_soon`` where only a refusal matters: where the counters are here, nothing is built for a yes."""
        tenant, resource, subject, cost = check
        plan = self._plan(tenant, resource) if self._immediate else None
        if plan is not None and not plan.holds and cost == 1 and 0 < len(subject) <= SUBJECT_LENGTH_MAX:
            reading = self._take_now((plan.prefix, subject), plan.terms, 1)
            assert reading is not None
            if reading[0] > 0:
                self._tally["counters", True] += 1
                return None
            decision = self._decision(plan, reading, False, "counters")
        else:
            decision = self.check_soon(tenant, resource, subject, cost)
        return None if decision.allowed else decision

    async def _count(self, tenant: str, resource: str, subject: str, cost: int) -> None:
        await self.check(tenant, resource, subject, cost)

    async def check_many(self, checks: Sequence[Check]) -> list[Decision]:
        """Several checks at once: all are admitted and counted, or none; each refusing rule says so itself.

        A rule in shadow mode is counted apart and stands in nobody's way.
        """
        if len(checks) > KEYS_PER_CALL_MAX:
            raise InvalidMessage(f"at most {KEYS_PER_CALL_MAX} checks at once", field="checks")
        plans = [self._plan(check.tenant, check.resource) for check in checks]
        merged: dict[Key, tuple[_Plan, int]] = {}
        for plan, check in zip(plans, checks, strict=True):
            if plan is not None and not plan.shadow:
                cost = check.cost + merged.get((plan.prefix, check.subject), (plan, 0))[1]
                _validate(plan, check.subject, cost)
                merged[plan.prefix, check.subject] = (plan, cost)
        group = await self._check_group(merged)
        decisions = []
        for plan, check in zip(plans, checks, strict=True):
            if plan is None:
                decisions.append(_FREE)
            elif plan.shadow:
                decisions.append(await self.check(*check))
            else:
                decisions.append(group[plan.prefix, check.subject])
        return decisions

    async def release(self, check: Check, hold: str) -> bool:
        """Give back what a concurrency rule granted; without it the hold ends with the rule's window.

        False if there is no such rule. Wherever it was granted, here or by the counters, it is given back.
        """
        plan = self._plan(check.tenant, check.resource)
        if plan is None or not plan.holds:
            return False
        key = (plan.prefix, check.subject)
        self._share.release(key, plan.terms, hold, self._monotonic() * 1000)
        await self._adjust([Adjustment(key, plan.terms, released=hold)])
        return True

    def _plan(self, tenant: str, resource: str) -> _Plan | None:
        try:
            return self._plans[tenant, resource]
        except KeyError:
            pass
        rule = self._rules.lookup(tenant, resource)
        plan = None
        if rule is not None and rule.mode != "off":
            holds = rule.algorithm == "concurrency"
            leased = rule.precision == "leased" and not holds
            lease = int(rule.capacity * self.settings.lease_percent / 100) if leased else 0
            plan = _Plan(
                rule, terms_of(rule), key_prefix(tenant, rule), rule.label, lease, holds, rule.mode == "shadow"
            )
        if len(self._plans) >= PLANS_MAX:
            self._plans.clear()
        self._plans[tenant, resource] = plan
        return plan

    def _now(self, plan: _Plan, key: Key, cost: int) -> Decision | None:
        """An answer without I/O: counters in this process, a denial that still holds, a lease that has enough."""
        if self._immediate:
            reading = self._take_now(key, plan.terms, cost)
            assert reading is not None
            return self._decision(plan, reading, reading[0] > 0, "counters")
        denial = self._denials.get(key)
        if denial is not None and cost >= denial.cost and denial.stamp >= plan.terms.stamp:
            left = denial.until - self._monotonic()
            if left > 0:
                reading = denial.reading._replace(wait_ms=left * 1000)
                return self._decision(plan, reading, False, "denial_cache")
            self._denials.drop(key)
        return self._from_lease(plan, key, cost) if plan.lease else None

    def _from_lease(self, plan: _Plan, key: Key, cost: int) -> Decision | None:
        lease, terms = self._leases.get(key), plan.terms
        if lease is None or lease.tokens < cost or (lease.terms is not terms and lease.terms != terms):
            return None
        now = self._monotonic()
        if now >= lease.until:
            return None
        lease.tokens = left = lease.tokens - cost
        self._tally["lease", True] += 1
        reset, window = max(0.0, lease.reset_at - now), plan.rule.window_seconds
        return Decision(
            True, terms.limit, lease.remaining + left, reset, 0.0, plan.label, terms.stamp.version,
            "lease", False, False, window, self._region,
        )  # fmt: skip

    def _want(self, plan: _Plan, key: Key) -> int:
        """A little for who asks for the first time, a whole lease for who asks again; never two at a time."""
        seen, lease = self._seen.get(key), self._leases.get(key)
        if lease is not None and lease.tokens > 0:
            return 0
        if seen is None or seen.at < self._monotonic() - self.settings.lease_seconds:
            return min(FIRST_LEASE, plan.lease)
        return plan.lease

    def _counted(self, plan: _Plan, ask: Ask, answer: Answer) -> Decision:
        """Remember what the counters said, once for all who asked together, and answer this one."""
        readings, place, sent_at, counted_at = answer
        reading = readings[0]
        allowed = place < reading.admitted
        if place == 0 or place == reading.admitted:
            self._learn(plan, ask, reading, sent_at)
        if place == 0 and reading.leased and ask.terms.stamp == reading.stamp:
            until = sent_at + self.settings.lease_seconds
            self._leases.put(ask.key, Lease(ask.terms, reading, counted_at, self._monotonic(), until))
        return self._decision(plan, reading, allowed, "counters", ask.hold if allowed else "")

    def _learn(self, plan: _Plan, ask: Ask, reading: Reading, sent_at: float) -> None:
        self._seen.put(ask.key, new(Seen, (reading, sent_at)))
        if reading.wait_ms > 0 and not plan.holds:
            until = sent_at + reading.wait_ms / 1000
            self._denials.put(ask.key, Denial(reading.stamp, ask.cost, until, reading))
        if reading.stamp > plan.terms.stamp:
            self._on_behind()

    async def _check_group(self, merged: dict[Key, tuple[_Plan, int]]) -> dict[Key, Decision]:
        if not merged:
            return {}
        plans = [plan for plan, _ in merged.values()]
        asks = [
            Ask(key, plan.terms, cost, 1, 0, self._ids.new("hld_") if plan.holds else "")
            for key, (plan, cost) in merged.items()
        ]
        if self._immediate:
            taken = await self._counters.take([asks])
            return dict(zip(merged, self._group_decisions(plans, asks, taken.readings[0], "counters"), strict=True))
        waiting = self._batcher.ask_all(asks)
        answer = await waiting if waiting is not None else None
        if answer is None:
            decisions = self._local(plans, asks)
        else:
            for plan, ask, reading in zip(plans, asks, answer.readings, strict=True):
                self._learn(plan, ask, reading, answer.sent_at)
            decisions = self._group_decisions(plans, asks, answer.readings, "counters")
        return dict(zip(merged, decisions, strict=True))

    def _local(self, plans: list[_Plan], asks: list[Ask]) -> list[Decision]:
        """Decide by this node's share; the counters did not answer or are not to be asked."""
        seen = [self._seen.get(ask.key) for ask in asks]
        rules = [plan.rule for plan in plans]
        readings = self._share.decide(rules, asks, seen, self._monotonic() * 1000)
        return self._group_decisions(plans, asks, readings, None)

    def _group_decisions(
        self, plans: list[_Plan], asks: list[Ask], readings: Sequence[Reading], by: DecidedBy | None
    ) -> list[Decision]:
        allowed = all(reading.admitted for reading in readings)
        return [
            self._decision(plan, reading, allowed, by or plan.rule.on_store_failure, ask.hold if allowed else "")
            for plan, ask, reading in zip(plans, asks, readings, strict=True)
        ]

    def _decision(self, plan: _Plan, reading: Reading, allowed: bool, by: DecidedBy, hold: str = "") -> Decision:
        self._tally[by, allowed] += 1
        _, remaining, reset_ms, wait_ms, _, limit, stamp = reading
        return Decision(
            allowed or plan.shadow,
            limit,
            remaining,
            reset_ms / 1000,
            0.0 if allowed else wait_ms / 1000,
            plan.label,
            stamp[1],
            by,
            by in _DEGRADED,
            not allowed and wait_ms > 0,
            plan.rule.window_seconds,
            self._region,
            hold,
        )

    def _recovered(self) -> None:
        """The counters answered: charge them with what was admitted without them."""
        if self._share.owes:
            self._in_background(self._settle_debts())

    async def _settle_debts(self) -> None:
        await self._adjust(self._share.debts(self._monotonic() * 1000))

    async def _adjust(self, adjustments: list[Adjustment]) -> None:
        """Best effort, never repeated: what is lost stays charged, or drains."""
        for at in range(0, len(adjustments), KEYS_PER_CALL_MAX):
            try:
                await self._counters.adjust(adjustments[at : at + KEYS_PER_CALL_MAX])
            except HoldfastError as error:
                telemetry.log.warning("limits.adjustment_lost", count=len(adjustments) - at, reason=error.message)
                return

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def __aenter__(self) -> Limiter:
        await self._beat()
        self._in_background(self._live())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._give_back(all_of_them=True)
        await self._batcher.aclose()

    async def _live(self) -> None:
        while True:
            await asyncio.sleep(self.settings.heartbeat_seconds)
            await self._beat()
            await self._give_back()

    async def _beat(self) -> None:
        """Say that we live, learn who else does; the last number known stays when nobody answers."""
        try:
            count = await self._counters.announce(self.place.node, self.settings.node_ttl_seconds)
            self._share.nodes = max(1, count)
            telemetry.dependency_up("counters", True)
        except HoldfastError:
            telemetry.dependency_up("counters", False)
        telemetry.limits_checked(self._tally)
        self._tally.clear()
        telemetry.limits_state(self._batcher.keys_per_call, self.lease_stock, self._share.nodes)

    async def _give_back(self, all_of_them: bool = False) -> None:
        now, unspent = self._monotonic(), []
        for key, lease in self._leases.items():
            if all_of_them or now >= lease.until or lease.tokens == 0:
                self._leases.drop(key)
                if lease.tokens:
                    unspent.append(Adjustment(key, lease.terms, given=lease.tokens, taken_at=lease.taken_at))
        if unspent:
            await self._adjust(unspent)


_FREE = Decision(True)
_DEGRADED = frozenset(("local_share", "open", "closed"))


def _validate(plan: _Plan, subject: str, cost: int) -> None:
    if not 1 <= cost <= plan.terms.capacity:
        raise InvalidMessage(
            f"cost must be between 1 and {plan.terms.capacity}, the capacity of {plan.rule.label}", field="cost"
        )
    if plan.holds and cost != 1:
        raise InvalidMessage("cost must be 1 for a concurrency rule", field="cost")
    if not subject or len(subject) > SUBJECT_LENGTH_MAX:
        raise InvalidMessage(f"subject must have 1 to {SUBJECT_LENGTH_MAX} characters", field="subject")
