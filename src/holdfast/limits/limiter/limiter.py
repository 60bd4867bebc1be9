"""One check, answered by the first source that can:

1. the rule, from an immutable snapshot in memory, without a database
2. the denial cache: a cost that was refused a moment ago still does not fit
3. a lease: tokens already taken from the counters (never for strict rules)
4. the counters: the checks of one event-loop turn in one call
5. this node's local share, if the counters miss the deadline or the breaker is open

``try_check`` is what needs no I/O and no coroutine: the first three, or, if the
counters are in this process, the rule and the counters. ``remote_checks`` has the last
two for shared counters. A check never raises because a dependency is unavailable, and
never waits past the deadline. It raises for the caller's mistakes: a cost that can
never fit, or a subject that is too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.errors import HoldfastError, InvalidCheck
from holdfast.limits.algorithms import LimitParams
from holdfast.limits.counters.contract import (
    KEYS_PER_CALL_MAX,
    Adjustment,
    CounterKey,
    CounterRequest,
    Counters,
)
from holdfast.limits.limiter.counter_health import WINDOW_SECONDS, CounterHealth, CountersState
from holdfast.limits.limiter.decisions import (
    ALLOWED,
    REFUSED,
    SUBJECT_LENGTH_MAX,
    CompiledRule,
    DecisionBuilder,
    RuleCompiler,
    Standing,
    standing_of,
    validate,
    validate_subject,
)
from holdfast.limits.limiter.maintenance import NodeCount, NodeHeartbeat, Reconciler
from holdfast.limits.limiter.remote_checks import KeyMemory, RemoteChecks
from holdfast.limits.limiter.settings import LimiterSettings, NodeIdentity
from holdfast.limits.rule_json import LIMIT_MAX
from holdfast.limits.rules import Check, Decision, RuleSet


class Limiter:
    """The checks of one node. ``async with`` runs its heartbeat; checks work without.

    ``on_behind`` is called when the counters have a newer rule than this node. ``file``
    keeps the number of nodes for the next start. ``health`` is a ratio over the last
    ``health_window_seconds``.
    """

    def __init__(
        self,
        counters: Counters,
        clock: Clock,
        settings: LimiterSettings | None = None,
        rules: RuleSet | None = None,
        node: NodeIdentity | None = None,
        on_behind: Callable[[], None] = lambda: None,
        file: Path | None = None,
        health_window_seconds: float = WINDOW_SECONDS,
    ) -> None:
        self.settings = settings = settings or LimiterSettings()
        self.node = node or NodeIdentity()
        self._counters = counters
        self._monotonic = clock.monotonic
        self._use(rules or RuleSet())
        self._decisions = DecisionBuilder(self.node.region, clock.monotonic)
        memory = KeyMemory(settings, clock, self.node.name)
        self._memory, self._share, self._hold_registry = memory, memory.share, memory.hold_registry
        self._reconciler = Reconciler(counters, memory.share, memory.leases, clock.monotonic)
        self.health = CounterHealth(settings.heartbeat_seconds, health_window_seconds)
        self._heartbeat = NodeHeartbeat(
            NodeCount(counters, self.node.name, settings.node_ttl_seconds, clock.monotonic, file),
            memory.share,
            self._reconciler,
            settings.heartbeat_seconds,
            self._report,
            self._forget_named,
        )
        self._remote = RemoteChecks(
            counters, clock, settings, self._decisions, memory, self._heartbeat, on_behind
        )
        # for ``try_check``, which cannot afford two attribute lookups for one
        self._cache = memory.cache
        self._counters_in_process = counters.in_process
        self._take_now = counters.take_now

    @property
    def rules(self) -> RuleSet:
        return self._rules

    def use(self, rules: RuleSet) -> None:
        """Check by these rules from now on. Denials by another store's rules end."""
        if rules.store != self._rules.store:
            for known in self._cache.values():
                known.denial = None
        self._use(rules)

    def _use(self, rules: RuleSet) -> None:
        self._rules = rules
        self._compiler = RuleCompiler(rules, self.settings.lease_percent)
        self._compiled_by_resource = self._compiler.by_resource  # for ``try_check``, as above

    def has_own_rule(self, tenant: str, resource: str) -> bool:
        """Whether the answering rule belongs to this tenant, not to ``*``."""
        compiled = self._compiler.find(tenant, resource)
        return compiled is not None and compiled.rule.tenant == tenant

    @property
    def nodes(self) -> int:
        """Live nodes of this region, as last known."""
        return self._share.nodes

    @property
    def lease_stock(self) -> int:
        return self._memory.leases.stock

    @property
    def counters_state(self) -> CountersState:
        """How well the shared counters answer; limiting goes on without them."""
        return self.health.state if self._remote.batcher.healthy else "down"

    async def check(self, tenant: str, resource: str, subject: str, cost: int = 1) -> Decision:
        """May ``subject`` use ``cost`` now?

        If cancelled, the cost may have been counted, but no hold remains.
        """
        decision = self.try_check(tenant, resource, subject, cost)
        if decision is not None:
            return decision
        begun = self._remote.begin(self._rule_of(tenant, resource), subject, cost)
        return begun if isinstance(begun, Decision) else await self._remote.wait(begun)

    def begin_check(
        self, tenant: str, resource: str, subject: str, cost: int = 1
    ) -> Decision | asyncio.Future[Decision]:
        """``check`` without a coroutine: a decision, or a future if it needs I/O.

        The future resolves within the deadline and never fails. A cancelled future is
        like a cancelled ``check``.
        """
        decision = self.try_check(tenant, resource, subject, cost)
        if decision is not None:
            return decision
        return self._remote.begin(self._rule_of(tenant, resource), subject, cost)

    def _rule_of(self, tenant: str, resource: str) -> CompiledRule:
        """The rule of a check that ``try_check`` could not answer: there is one."""
        compiled = self._compiler.find(tenant, resource)
        assert compiled is not None
        return compiled

    def try_check(self, tenant: str, resource: str, subject: str, cost: int = 1) -> Decision | None:
        """``check`` without I/O: a counted decision, or None without any effect.

        It answers if there is no rule, if the counters are in this process (then
        always), by a denial that still applies, and by a lease with enough tokens.
        About a microsecond.
        """
        try:
            compiled: CompiledRule | None = self._compiled_by_resource[tenant, resource]
        except KeyError:
            compiled = self._compiler.find(tenant, resource)
        if cost != 1 or not 0 < len(subject) <= SUBJECT_LENGTH_MAX:
            validate(compiled, subject, cost)
        if compiled is None:
            self._decisions.tally["no_rule"][ALLOWED] += 1
            return self._decisions.unlimited
        if self._counters_in_process:
            hold_id = (
                self._hold_registry.new_hold_id((compiled.prefix, subject), compiled.params)
                if compiled.counts_holders
                else ""
            )
            reading = self._take_now((compiled.prefix, subject), compiled.params, cost, hold_id)
            return self._decisions.from_reading(
                compiled, reading, reading.admitted > 0, "counters", hold_id
            )
        known = self._cache.get((compiled.prefix, subject))
        return (
            self._decisions.from_memory(compiled, known, cost)
            if known is not None and not compiled.counts_holders
            else None
        )

    def check_optimistic(self, tenant: str, resource: str, subject: str, cost: int = 1) -> Decision:
        """``check`` without waiting: ``try_check``, or allowed and counted later.

        Exact if the counters need no I/O. Otherwise a subject can exceed its limit by
        what it asks for in one round trip. That is charged too, and drains before more
        passes.
        """
        decision = self.try_check(tenant, resource, subject, cost)
        if decision is not None:
            return decision
        compiled = self._rule_of(tenant, resource)
        request = self._remote.new_request(compiled, subject, cost)
        reading, by = self._remote.admit_uncounted(compiled, request)
        return self._decisions.from_reading(
            compiled, reading, reading.admitted > 0, by, request.hold
        )

    def charge(self, tenant: str, resource: str, subject: str, amount: int) -> bool:
        """Count what has already been used, whether it fits or not. Never waits.

        Beyond the limit nothing more passes until the excess has drained. A negative
        amount gives back, down to 0 used. False if nothing counts it: there is no rule,
        or it counts holders.
        """
        compiled = self._compiler.find(tenant, resource)
        validate_subject(subject)
        if not -LIMIT_MAX <= amount <= LIMIT_MAX:
            raise InvalidCheck(f"amount must be at most {LIMIT_MAX}", field="amount")
        if compiled is None or compiled.counts_holders:
            return False
        key = (compiled.prefix, subject)
        if self._counters_in_process:
            self._counters.charge_now(key, compiled.params, amount)
        elif amount:
            self._remote.charge(compiled, CounterRequest(key, compiled.params, amount, spent=1))
        return True

    def admit(self, checks: Sequence[Check], count: int) -> tuple[int, Decision | None]:
        """``check_optimistic`` for ``count`` requests, each of which makes ``checks``.

        Returns how many pass, and the last decision that refused the rest. Peeks at
        every rule but the first before charging any, so that a request refused by a
        later rule is not charged to the first.
        """
        refused = None
        for check in checks[1:]:
            fitting, decision = self._peek_now(check, count)
            if decision is not None:
                count, refused = fitting, decision
        for check in checks if count else ():
            admitted, decision = self._admit(check, count)
            if decision is not None:
                count, refused = admitted, decision
        return count, refused

    def _admit(self, check: Check, count: int) -> tuple[int, Decision | None]:
        """How many of ``count`` checks of cost 1 pass, and the decision for the rest.

        In shadow mode all pass.
        """
        compiled = self._compiler.find(check.tenant, check.resource)
        if count == 1 or compiled is None or compiled.counts_holders:
            return self._one_by_one(check, count)
        validate(compiled, check.subject, 1)
        key = (compiled.prefix, check.subject)
        if self._counters_in_process:
            return self._decisions.from_merged_reading(
                compiled, self._take_now(key, compiled.params, 1, "", count), count, "counters"
            )
        known = self._cache.get(key)
        decision = (
            self._decisions.from_memory(compiled, known, 1, count) if known is not None else None
        )
        if decision is not None:
            return (count, None) if decision.allowed else (0, decision)
        request = self._remote.new_request(compiled, check.subject, 1)
        request.times = count
        reading, by = self._remote.admit_uncounted(compiled, request)
        return self._decisions.from_merged_reading(compiled, reading, count, by)

    def _one_by_one(self, check: Check, count: int) -> tuple[int, Decision | None]:
        """Check up to the first refusal, which refuses the rest too."""
        for passed in range(count):
            decision = self.check_optimistic(*check)
            if not decision.allowed:
                self._decisions.tally[decision.decided_by][REFUSED] += count - passed - 1
                return passed, decision
        return count, None

    def _peek_now(self, check: Check, count: int) -> tuple[int, Decision | None]:
        """How many of ``count`` checks would pass, and the decision for the rest.

        Takes nothing. Exact if the counters need no I/O; else it knows only denials.
        """
        compiled = self._compiler.find(check.tenant, check.resource)
        if compiled is None or compiled.shadow or compiled.counts_holders:
            return count, None
        if self._counters_in_process:
            reading = self._counters.peek_now(
                (compiled.prefix, check.subject), compiled.params, count
            )
            if reading is None:
                return count, None
            return reading.admitted, self._decisions.refuse(
                compiled, reading, "counters", count - reading.admitted
            )
        known, now = self._cache.get((compiled.prefix, check.subject)), self._monotonic()
        denial = known.denial if known is not None else None
        if denial is None or not denial.stands(1, compiled.params.stamp, now):
            return count, None
        return 0, self._decisions.from_denial(compiled, denial, now, count)

    async def check_many(self, checks: Sequence[Check]) -> list[Decision]:
        """Several checks: all are admitted and counted, or none.

        Each decision says whether its own rule refused. Shadow rules are counted apart
        and refuse nothing.
        """
        # The checks that can refuse form one group. The counters decide a group
        # atomically, in one entry of one call: they read every key, and take from all
        # or from none. So a refusal by one rule costs the others nothing, and no other
        # caller can take what was found free in between. Leases and denials are not
        # used: what this node knows of one key cannot promise the others.
        if len(checks) > KEYS_PER_CALL_MAX:  # an entry is never split between calls
            raise InvalidCheck(f"at most {KEYS_PER_CALL_MAX} checks at once", field="checks")
        compiled_rules = [self._compiler.find(check.tenant, check.resource) for check in checks]
        pairs = list(zip(compiled_rules, checks, strict=True))
        group: dict[CounterKey, tuple[CompiledRule, int]] = {}
        for compiled, check in pairs:
            validate(compiled, check.subject, check.cost)
            if compiled is not None and not compiled.shadow:
                # Checks of one key are one request for their sum: two requests would
                # each be compared with what is left before the other, and both fit.
                key = (compiled.prefix, check.subject)
                cost = check.cost + group.get(key, (compiled, 0))[1]
                validate(compiled, check.subject, cost)  # the sum may exceed the capacity
                group[key] = (compiled, cost)
        # Begun before the group is awaited, so that they are in the same batch. Every
        # check is valid by now: nothing raises after the first one has been counted.
        ungrouped_checks = {
            at: self.begin_check(*check)
            for at, (compiled, check) in enumerate(pairs)
            if compiled is None or compiled.shadow
        }
        group_decisions = await self._check_group(group)
        decisions, counted = [], set[CounterKey]()
        for at, (compiled, check) in enumerate(pairs):
            if compiled is None or compiled.shadow:
                begun = ungrouped_checks[at]
                decided = begun if isinstance(begun, Decision) else await self._remote.wait(begun)
                decisions.append(decided)
                continue
            key = (compiled.prefix, check.subject)
            decisions.append(group_decisions[key])
            if key in counted:  # merged above; the metrics count checks, not keys
                self._decisions.count_again(group_decisions[key])
            counted.add(key)
        return decisions

    async def _check_group(
        self, group: dict[CounterKey, tuple[CompiledRule, int]]
    ) -> dict[CounterKey, Decision]:
        """What ``check_many`` decides together: rule and total cost by key."""
        if not group:
            return {}
        compiled_rules = tuple(compiled for compiled, _ in group.values())
        requests = tuple(
            # by position, as on every hot path: ``times`` is 1 and ``want`` 0, no lease
            CounterRequest(key, compiled.params, cost, 1, 0, self._new_hold_id(compiled, key))
            for key, (compiled, cost) in group.items()
        )
        decisions: Sequence[Decision]
        if self._counters_in_process:
            taken = await self._counters.take([requests])
            decisions = self._decisions.from_group(
                compiled_rules, requests, taken.readings[0], "counters"
            )
        else:
            decisions = await self._remote.decide_group(compiled_rules, requests)
        return dict(zip(group, decisions, strict=True))

    def _new_hold_id(self, compiled: CompiledRule, key: CounterKey) -> str:
        return (
            self._hold_registry.new_hold_id(key, compiled.params) if compiled.counts_holders else ""
        )

    def visible(self, checks: Sequence[Check], decisions: Sequence[Decision]) -> list[Decision]:
        """The decisions a client may see: none that a shadow rule allowed."""
        compiled_rules = (self._compiler.find(check.tenant, check.resource) for check in checks)
        each = zip(compiled_rules, decisions, strict=True)
        return [
            d for compiled, d in each if compiled is None or not compiled.shadow or not d.allowed
        ]

    async def peek(self, check: Check) -> Standing | None:
        """How a subject stands, or None without a rule. Raises as the counters do."""
        compiled = self._compiler.find(check.tenant, check.resource)
        validate(compiled, check.subject, 1)
        if compiled is None:
            return None
        taken = await self._counters.take(
            [[CounterRequest((compiled.prefix, check.subject), compiled.params, 1, 0)]]
        )
        return standing_of(compiled, taken.readings[0][0])

    async def reset(self, check: Check) -> None:
        """Forget what a subject has used: elsewhere at the next heartbeat."""
        compiled = self._compiler.find(check.tenant, check.resource)
        validate(compiled, check.subject, 1)
        if compiled is not None:
            key = (compiled.prefix, check.subject)
            await self._counters.reset(key)
            self._memory.forget(key)

    def _forget_named(self, names: Collection[bytes]) -> None:
        for key in [key for key, _ in self._cache.items() if self._counters.name(key) in names]:
            self._memory.forget(key)

    async def renew(self, check: Check, hold_id: str) -> Decision:
        """Keep a hold for another window; refused if it is over and there is no room.

        It is a call of its own, so that a later release cannot overtake it.
        """
        counter = self._counter_of(check, hold_id)
        compiled = self._compiler.find(check.tenant, check.resource)
        if (
            counter is None
            or compiled is None
            or not compiled.counts_holders
            or compiled.prefix != counter[0][0]
        ):
            # the rule has changed: nothing to renew; the old hold is released under its
            # own rule
            return self._decisions.unlimited
        request = CounterRequest(counter[0], compiled.params, hold=hold_id)
        if self._remote.batcher.hanging:
            return self._remote.decide_locally(compiled, request)
        try:
            async with asyncio.timeout(self.settings.batch.deadline_seconds):
                reading = (await self._counters.take([[request]])).readings[0][0]
        except (HoldfastError, TimeoutError):
            return self._remote.decide_locally(compiled, request)
        return self._decisions.from_reading(
            compiled, reading, reading.admitted > 0, "counters", hold_id
        )

    async def release(self, check: Check, hold_id: str) -> bool:
        """Give back a hold where it was granted, whatever the rule is today.

        Without a release it ends with the rule's window. False if it is unknown or
        over, or if the counters did not confirm; then the release is repeated once they
        answer.
        """
        counter = self._counter_of(check, hold_id)
        if counter is None:
            return False
        key, params = counter
        self._hold_registry.end(hold_id)
        ours = self._share.release(key, params, hold_id, self._monotonic() * 1000)
        released = Adjustment(key, params, released=hold_id)
        if self._remote.batcher.hanging:
            self._reconciler.release_soon(released)
            return ours
        return await self._reconciler.release(released) or ours

    def _counter_of(self, check: Check, hold_id: str) -> tuple[CounterKey, LimitParams] | None:
        """The counter of a hold; of one granted elsewhere, that of the current rule."""
        counter = self._hold_registry.counter_of(check, hold_id)
        compiled = self._compiler.find(check.tenant, check.resource)
        if counter is None and compiled is not None:
            return (compiled.prefix, check.subject), compiled.params
        return counter

    async def __aenter__(self) -> Limiter:
        await self._heartbeat.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._heartbeat.end()
        await self._remote.batcher.aclose()
        await self._reconciler.give_back(all_of_them=True)
        await self._reconciler.settle()

    def _report(self, alive: bool) -> None:
        self.health.observe(self._decisions.tally, alive, self._counters.take_trouble())
        telemetry.dependency_up("counters", self.counters_state == "up")
        telemetry.limits_state(
            self._remote.batcher.keys_per_call,
            self.lease_stock,
            self._share.nodes,
            self.health.ratio,
        )
        self._decisions.report()
