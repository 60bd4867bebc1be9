"""One check, answered by the first source that can:

1. the rule, from an immutable snapshot in memory, without a database
2. the denial cache: a cost that was refused a moment ago still does not fit
3. a lease: tokens already taken from the counters (never for strict rules)
4. the counters: the checks of one event-loop turn in one call
5. this node's local share, if the counters miss the deadline or the breaker is open

``try_check`` is the first three alone, which need no I/O and no coroutine. A check
never raises because a dependency is unavailable, and never waits past the deadline. It
raises for the caller's mistakes: a cost that can never fit, or a subject that is too
long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from holdfast import telemetry
from holdfast.clock import Clock, Ids
from holdfast.errors import HoldfastError, InvalidCheck
from holdfast.limits.algorithms import CounterReading, LimitParams
from holdfast.limits.counters.contract import (
    KEYS_PER_CALL_MAX,
    Adjustment,
    CounterKey,
    CounterRequest,
    Counters,
)
from holdfast.limits.limiter.batch import BatchedCheck, Batcher, BatchResult
from holdfast.limits.limiter.cache import CacheEntry, Denial, Holds, Leases, LruDict
from holdfast.limits.limiter.counter_health import CounterHealth, CountersState
from holdfast.limits.limiter.decisions import (
    SUBJECT_LENGTH_MAX,
    CompiledRule,
    DecisionBuilder,
    RuleCompiler,
    Standing,
    standing_of,
    validate,
)
from holdfast.limits.limiter.fallback import FallbackLimiter
from holdfast.limits.limiter.maintenance import NodeCount, NodeHeartbeat, Reconciler
from holdfast.limits.limiter.settings import LimiterSettings, NodeIdentity
from holdfast.limits.rules import Check, DecidedBy, Decision, RuleSet

COUNTED_LATER_MAX = 10_000
"""Unanswered checks whose callers do not wait; above it the local share decides."""


class Limiter:
    """The checks of one node. ``async with`` runs its heartbeat; checks work without.

    ``on_behind`` is called when the counters have a newer rule than this node. ``file``
    keeps the number of nodes for the next start.
    """

    def __init__(
        self,
        counters: Counters,
        clock: Clock,
        settings: LimiterSettings | None = None,
        rules: RuleSet | None = None,
        place: NodeIdentity | None = None,
        on_behind: Callable[[], None] = lambda: None,
        file: Path | None = None,
    ) -> None:
        self.settings = settings or LimiterSettings()
        self._counters = counters
        self._take_now = counters.take_now
        self._immediate = counters.immediate
        self._monotonic = clock.monotonic
        self._holds = Holds(Ids(clock), self.settings.keys_max)
        self._on_behind = on_behind
        self.place = place or NodeIdentity()
        self._rules = rules or RuleSet()
        self._plans = RuleCompiler(self._rules, self.settings.lease_percent)
        self._found = self._plans.found
        self._decisions = DecisionBuilder(self.place.region, clock.monotonic)
        self._known: LruDict[CacheEntry] = LruDict(self.settings.keys_max)
        self._leases = Leases(self.settings.keys_max, self.settings.lease_seconds)
        self._share = FallbackLimiter(self.settings.keys_max, self.place.node)
        self._accounts = Reconciler(counters, self._share, self._leases, clock.monotonic)
        nodes = NodeCount(
            counters, self.place.node, self.settings.node_ttl_seconds, clock.monotonic, file
        )
        beat = self.settings.heartbeat_seconds
        self.health = CounterHealth(beat)
        self._upkeep = NodeHeartbeat(
            nodes, self._share, self._accounts, beat, self._report, self._forget_named
        )
        self._batcher = Batcher(
            counters, clock, self.settings.batch, self._told, self._upkeep.recovered
        )
        self._counted_later = 0

    @property
    def rules(self) -> RuleSet:
        return self._rules

    def use(self, rules: RuleSet) -> None:
        """Check by these rules from now on. Denials by another store's rules end."""
        if rules.store != self._rules.store:
            for known in self._known.values():
                known.denial = None
        self._rules = rules
        self._plans = RuleCompiler(rules, self.settings.lease_percent)
        self._found = self._plans.found

    def has_own_rule(self, tenant: str, resource: str) -> bool:
        """Whether the answering rule belongs to this tenant, not to ``*``."""
        plan = self._plans.find(tenant, resource)
        return plan is not None and plan.rule.tenant == tenant

    @property
    def nodes(self) -> int:
        """Live nodes of this region, as last known."""
        return self._share.nodes

    @property
    def lease_stock(self) -> int:
        return self._leases.stock

    @property
    def counters_state(self) -> CountersState:
        """How well the shared counters answer; limiting goes on without them."""
        return self.health.state if self._batcher.healthy else "down"

    async def check(self, tenant: str, resource: str, subject: str, cost: int = 1) -> Decision:
        """May ``subject`` use ``cost`` now? Cancelled: maybe counted, nothing held."""
        found = self.try_check(tenant, resource, subject, cost)
        if found is not None:
            return found
        begun = self._begin(tenant, resource, subject, cost)
        return begun if isinstance(begun, Decision) else await self._taken(begun)

    def begin_check(
        self, tenant: str, resource: str, subject: str, cost: int = 1
    ) -> Decision | asyncio.Future[Decision]:
        """``check`` without a coroutine: a decision, or a future if it needs I/O.

        The future resolves within the deadline and never fails. Cancelled: as
        ``check``.
        """
        found = self.try_check(tenant, resource, subject, cost)
        return found if found is not None else self._begin(tenant, resource, subject, cost)

    def try_check(self, tenant: str, resource: str, subject: str, cost: int = 1) -> Decision | None:
        """``check`` without I/O: a counted decision, or None without any effect.

        It answers if there is no rule, if the counters are in this process (then
        always), by a denial that holds, and by a lease with enough tokens. About a
        microsecond.
        """
        try:
            plan: CompiledRule | None = self._found[tenant, resource]
        except KeyError:
            plan = self._plans.find(tenant, resource)
        if cost != 1 or not 0 < len(subject) <= SUBJECT_LENGTH_MAX:
            validate(plan, subject, cost)
        if plan is None:
            self._decisions.tally["no_rule"][True] += 1
            return self._decisions.free
        if self._immediate:
            hold = self._holds.ask((plan.prefix, subject), plan.terms) if plan.holds else ""
            reading = self._take_now((plan.prefix, subject), plan.terms, cost, hold)
            return self._decisions.of(plan, reading, reading.admitted > 0, "counters", hold)
        known = self._known.get((plan.prefix, subject))
        return (
            self._decisions.from_memory(plan, known, cost)
            if known is not None and not plan.holds
            else None
        )

    def check_optimistic(self, tenant: str, resource: str, subject: str, cost: int = 1) -> Decision:
        """``check`` without waiting: ``try_check``, or allowed and counted later.

        Exact if the counters need no I/O. Otherwise a subject can exceed its limit by
        what it asks for in one round trip. That is charged too, and drains before more
        passes.
        """
        found = self.try_check(tenant, resource, subject, cost)
        if found is not None:
            return found
        plan = self._plans.find(tenant, resource)
        assert plan is not None
        ask = self._question(plan, subject, cost)
        reading, by = self._soon(plan, ask)
        return self._decisions.of(plan, reading, reading.admitted > 0, by, ask.hold)

    def admit_soon(self, check: Check, count: int) -> tuple[int, Decision | None]:
        """``check_optimistic`` for ``count`` checks of cost 1; as many pass as fit.

        Returns how many, and the decision for the rest. In shadow mode all pass.
        """
        plan = self._plans.find(check.tenant, check.resource)
        if count == 1 or plan is None or plan.holds:
            return self._one_by_one(check, count)
        validate(plan, check.subject, 1)
        key = (plan.prefix, check.subject)
        if self._immediate:
            return self._decisions.of_alike(
                plan, self._take_now(key, plan.terms, 1, "", count), count, "counters"
            )
        known = self._known.get(key)
        found = self._decisions.from_memory(plan, known, 1, count) if known is not None else None
        if found is not None:
            return (count, None) if found.allowed else (0, found)
        ask = self._question(plan, check.subject, 1)
        ask.times = count
        reading, by = self._soon(plan, ask)
        return self._decisions.of_alike(plan, reading, count, by)

    def _one_by_one(self, check: Check, count: int) -> tuple[int, Decision | None]:
        """Check up to the first refusal, which refuses the rest too."""
        for passed in range(count):
            decision = self.check_optimistic(*check)
            if not decision.allowed:
                self._decisions.tally[decision.decided_by][False] += count - passed - 1
                return passed, decision
        return count, None

    def _soon(self, plan: CompiledRule, ask: CounterRequest) -> tuple[CounterReading, DecidedBy]:
        """Without waiting: allowed and sent to the counters, or by the local share."""
        healthy, now = self._batcher.healthy, self._monotonic() * 1000
        exhausted = self._share.exhausted(ask.key, now)
        if healthy and not exhausted and self._counted_later < COUNTED_LATER_MAX:
            times = ask.spent = ask.times
            if self._batcher.ask(plan, ask) is not None:
                self._counted_later += times
                terms = plan.terms
                reading = CounterReading(
                    times, terms.limit, 0.0, 0.0, 0, terms.limit, terms.stamp, terms.capacity
                )
                return reading, "counted_later"
        elif self._batcher.idle or (healthy and exhausted):
            # takes nothing: it finds out whether the counters answer again
            self._batcher.ask(plan, CounterRequest(ask.key, plan.terms, ask.cost, 0))
        reading = self._share.decide_one(plan.rule, ask, self._known.get(ask.key), now, ask.times)
        return reading, plan.rule.on_store_failure

    def look(self, check: Check, count: int) -> tuple[int, Decision | None]:
        """How many of ``count`` checks would pass, and the decision for the rest.

        Takes nothing. Exact if the counters need no I/O; else it knows only denials.
        """
        plan = self._plans.find(check.tenant, check.resource)
        if plan is None or plan.shadow or plan.holds:
            return count, None
        if self._immediate:
            reading = self._counters.look_now((plan.prefix, check.subject), plan.terms, count)
            if reading is None:
                return count, None
            return reading.admitted, self._decisions.refused(
                plan, reading, "counters", count - reading.admitted
            )
        known, now = self._known.get((plan.prefix, check.subject)), self._monotonic()
        denial = known.denial if known is not None else None
        if denial is None or not denial.stands(1, plan.terms.stamp, now):
            return count, None
        return 0, self._decisions.denied(plan, denial, now, count)

    async def check_many(self, checks: Sequence[Check]) -> list[Decision]:
        """Several checks: all are admitted and counted, or none.

        Each decision says whether its own rule refused. Shadow rules are counted apart
        and refuse nothing.
        """
        if len(checks) > KEYS_PER_CALL_MAX:
            raise InvalidCheck(f"at most {KEYS_PER_CALL_MAX} checks at once", field="checks")
        plans = [self._plans.find(check.tenant, check.resource) for check in checks]
        group: dict[CounterKey, tuple[CompiledRule, int]] = {}
        for plan, check in zip(plans, checks, strict=True):
            validate(plan, check.subject, check.cost)
            if plan is not None and not plan.shadow:
                cost = check.cost + group.get((plan.prefix, check.subject), (plan, 0))[1]
                validate(plan, check.subject, cost)
                group[plan.prefix, check.subject] = (plan, cost)
        alone = {
            at: self.begin_check(*check)
            for at, (plan, check) in enumerate(zip(plans, checks, strict=True))
            if plan is None or plan.shadow
        }
        together = await self._check_group(group)
        decisions, told = [], set[CounterKey]()
        for at, (plan, check) in enumerate(zip(plans, checks, strict=True)):
            if plan is None or plan.shadow:
                begun = alone[at]
                decisions.append(begun if isinstance(begun, Decision) else await self._taken(begun))
                continue
            key = (plan.prefix, check.subject)
            decisions.append(together[key])
            if key in told:
                self._decisions.again(together[key])
            told.add(key)
        return decisions

    def told(self, checks: Sequence[Check], decisions: Sequence[Decision]) -> list[Decision]:
        """The decisions a client may see: none that a shadow rule allowed."""
        plans = (self._plans.find(check.tenant, check.resource) for check in checks)
        each = zip(plans, decisions, strict=True)
        return [d for plan, d in each if plan is None or not plan.shadow or not d.allowed]

    async def peek(self, check: Check) -> Standing | None:
        """How a subject stands, or None without a rule. Raises as the counters do."""
        plan = self._plans.find(check.tenant, check.resource)
        validate(plan, check.subject, 1)
        if plan is None:
            return None
        taken = await self._counters.take(
            [[CounterRequest((plan.prefix, check.subject), plan.terms, 1, 0)]]
        )
        return standing_of(plan, taken.readings[0][0])

    async def reset(self, check: Check) -> None:
        """Forget what a subject has used: elsewhere at the next heartbeat."""
        plan = self._plans.find(check.tenant, check.resource)
        validate(plan, check.subject, 1)
        if plan is not None:
            key = (plan.prefix, check.subject)
            await self._counters.reset(key)
            self._forget(key)

    def _forget_named(self, names: Collection[bytes]) -> None:
        for key in [key for key, _ in self._known.items() if self._counters.name(key) in names]:
            self._forget(key)

    def _forget(self, key: CounterKey) -> None:
        self._leases.forget(key)
        self._known.drop(key)
        self._share.forget(key)

    async def renew(self, check: Check, hold: str) -> Decision:
        """Keep a hold for another window; refused if it is over and there is no room.

        It is a call of its own, so that a later release cannot overtake it.
        """
        place, plan = self._place(check, hold), self._plans.find(check.tenant, check.resource)
        if place is None or plan is None or not plan.holds or plan.prefix != place[0][0]:
            # the current rule is another; the hold is released where it was granted
            return self._decisions.free
        ask = CounterRequest(place[0], plan.terms, hold=hold)
        if self._batcher.hanging:
            return self._local(plan, ask)
        try:
            async with asyncio.timeout(self.settings.batch.deadline_seconds):
                reading = (await self._counters.take([[ask]])).readings[0][0]
        except (HoldfastError, TimeoutError):
            return self._local(plan, ask)
        return self._decisions.of(plan, reading, reading.admitted > 0, "counters", hold)

    async def release(self, check: Check, hold: str) -> bool:
        """Give back a hold where it was granted, whatever the rule is today.

        Without a release it ends with the rule's window. False if it is unknown or
        over, or if the counters did not confirm; then the release is repeated once they
        answer.
        """
        place = self._place(check, hold)
        if place is None:
            return False
        key, terms = place
        self._holds.end(hold)
        ours = self._share.release(key, terms, hold, self._monotonic() * 1000)
        released = Adjustment(key, terms, released=hold)
        if self._batcher.hanging:
            self._accounts.release_soon(released)
            return ours
        return await self._accounts.release(released) or ours

    def _place(self, check: Check, hold: str) -> tuple[CounterKey, LimitParams] | None:
        """The counter of a hold; of one granted elsewhere, that of the current rule."""
        place = self._holds.place(check, hold)
        plan = self._plans.find(check.tenant, check.resource)
        if place is None and plan is not None:
            return (plan.prefix, check.subject), plan.terms
        return place

    async def _taken(self, begun: asyncio.Future[Any]) -> Any:
        """Wait for the decision; a caller that is cancelled keeps no hold."""
        try:
            return await begun
        except asyncio.CancelledError:
            if begun.done() and not begun.cancelled():
                decided = begun.result()
                for decision in [decided] if isinstance(decided, Decision) else decided:
                    self._give_back(decision.hold)
            raise

    def _unless_held(self, asks: Sequence[CounterRequest], told: Sequence[Decision]) -> None:
        """Release what the counters granted and no caller received."""
        held = [decision.hold for decision in told]
        for ask in asks:
            if ask.hold not in held:
                self._give_back(ask.hold)

    def _give_back(self, hold: str) -> None:
        if hold and (place := self._holds.end(hold)) is not None:
            self._share.release(*place, hold, self._monotonic() * 1000)
            self._accounts.release_soon(Adjustment(*place, released=hold))

    def _question(self, plan: CompiledRule, subject: str, cost: int) -> CounterRequest:
        key = (plan.prefix, subject)
        want = (
            self._leases.wanted(self._known.get(key), plan.lease, self._monotonic())
            if plan.lease
            else 0
        )
        return CounterRequest(
            key, plan.terms, cost, 1, want, self._holds.ask(key, plan.terms) if plan.holds else ""
        )

    def _begin(
        self, tenant: str, resource: str, subject: str, cost: int
    ) -> Decision | asyncio.Future[Decision]:
        """Ask the counters what ``try_check`` could not answer."""
        plan = self._plans.find(tenant, resource)
        assert plan is not None
        ask = self._question(plan, subject, cost)
        entry = self._batcher.ask(plan, ask)
        if entry is None:
            return self._local(plan, ask)
        waiter: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        return waiter

    def _told(self, entry: BatchedCheck, answer: BatchResult | None) -> None:
        """Remember what the counters said, once per entry, and answer each waiter."""
        self._counted_later -= entry.asks[0].spent
        if answer is None:
            self._told_nothing(entry)
        elif len(entry.asks) > 1:
            for plan, ask, reading in zip(entry.plans, entry.asks, answer.readings, strict=True):
                self._learn(plan, ask, reading, answer.sent_at)
            decisions = self._decisions.of_group(
                entry.plans, entry.asks, answer.readings, "counters"
            )
            for waiter in entry.waiters:
                if not waiter.done():
                    waiter.set_result(decisions)
                else:
                    self._unless_held(entry.asks, ())
        else:
            self._told_one(entry.plans[0], entry.asks[0], entry.waiters, answer)

    def _told_one(
        self,
        plan: CompiledRule,
        ask: CounterRequest,
        waiters: list[asyncio.Future[Decision]],
        answer: BatchResult,
    ) -> None:
        reading = answer.readings[0]
        known = self._learn(plan, ask, reading, answer.sent_at)
        if reading.leased and ask.terms.stamp == reading.stamp:
            self._leases.begin(ask.key, known, ask.terms, answer.counted_at, self._monotonic())
        self._share.heard(ask.key)
        for place, waiter in enumerate(waiters, ask.spent):
            if not waiter.done():
                waiter.set_result(
                    self._decisions.of(
                        plan, reading, place < reading.admitted, "counters", ask.hold
                    )
                )
            elif reading.admitted:
                self._unless_held((ask,), ())

    def _told_nothing(self, entry: BatchedCheck) -> None:
        """Decide by the local share; only charge it for callers that did not wait."""
        plan, ask, together = entry.plans[0], entry.asks[0], len(entry.asks) > 1
        if ask.spent:
            self._share.spend(plan.rule, ask, self._known.get(ask.key), self._monotonic() * 1000)
        for waiter in entry.waiters:
            decisions: list[Decision] = []
            if not waiter.done():
                decisions = (
                    self._local_group(entry.plans, entry.asks)
                    if together
                    else [self._local(plan, ask)]
                )
                waiter.set_result(decisions if together else decisions[0])
            self._unless_held(entry.asks, decisions)

    def _learn(
        self, plan: CompiledRule, ask: CounterRequest, reading: CounterReading, sent_at: float
    ) -> CacheEntry:
        known = self._known.get(ask.key)
        if known is None:
            known = CacheEntry(reading, sent_at)
            self._known.put(ask.key, known)
        else:
            known.reading, known.at = reading, sent_at
            self._known.renew(ask.key)
        if reading.wait_ms > 0 and not plan.holds:
            known.denial = Denial(ask.cost, sent_at + reading.wait_ms / 1000, reading)
        if reading.stamp is not plan.terms.stamp and reading.stamp > plan.terms.stamp:
            self._on_behind()
        return known

    async def _check_group(
        self, group: dict[CounterKey, tuple[CompiledRule, int]]
    ) -> dict[CounterKey, Decision]:
        """What ``check_many`` decides together: rule and total cost by key."""
        if not group:
            return {}
        plans = tuple(plan for plan, _ in group.values())
        asks = tuple(
            CounterRequest(
                key, plan.terms, cost, 1, 0, self._holds.ask(key, plan.terms) if plan.holds else ""
            )
            for key, (plan, cost) in group.items()
        )
        if self._immediate:
            taken = await self._counters.take([asks])
            return dict(
                zip(
                    group,
                    self._decisions.of_group(plans, asks, taken.readings[0], "counters"),
                    strict=True,
                )
            )
        entry = (
            self._batcher.ask_all(plans, asks)
            if len(asks) > 1
            else self._batcher.ask(plans[0], asks[0])
        )
        if entry is None:
            return dict(zip(group, self._local_group(plans, asks), strict=True))
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        decided = await self._taken(waiter)
        return dict(
            zip(group, [decided] if isinstance(decided, Decision) else decided, strict=True)
        )

    def _local(self, plan: CompiledRule, ask: CounterRequest) -> Decision:
        """Decide by the local share: the counters must not be asked or are silent."""
        reading = self._share.decide_one(
            plan.rule, ask, self._known.get(ask.key), self._monotonic() * 1000
        )
        return self._decisions.of(
            plan, reading, reading.admitted > 0, plan.rule.on_store_failure, ask.hold
        )

    def _local_group(
        self, plans: tuple[CompiledRule, ...], asks: tuple[CounterRequest, ...]
    ) -> list[Decision]:
        known = [self._known.get(ask.key) for ask in asks]
        readings = self._share.decide(
            [plan.rule for plan in plans], asks, known, self._monotonic() * 1000
        )
        return self._decisions.of_group(plans, asks, readings, None)

    async def __aenter__(self) -> Limiter:
        await self._upkeep.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._upkeep.end()
        await self._batcher.aclose()
        await self._accounts.give_back(all_of_them=True)
        await self._accounts.settle()

    def _report(self, alive: bool) -> None:
        self.health.observe(self._decisions.tally, alive, self._counters.take_trouble())
        telemetry.dependency_up("counters", self.counters_state == "up")
        telemetry.limits_state(
            self._batcher.keys_per_call, self.lease_stock, self._share.nodes, self.health.ratio
        )
        self._decisions.report()
