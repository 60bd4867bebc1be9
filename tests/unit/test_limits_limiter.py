"""One check, step by step: rule, denial cache, lease, batch, breaker, local share."""

from __future__ import annotations

import asyncio
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Sequence
from typing import Any, ClassVar

import pytest
from limits_rig import Shared
from msgspec import structs
from structlog.testing import capture_logs

from holdfast import telemetry
from holdfast.clock import ManualClock, SystemClock
from holdfast.errors import InvalidCheck
from holdfast.limits.asgi import RateLimitMiddleware as RateLimitedApp
from holdfast.limits.counters.contract import (
    KEYS_PER_CALL_MAX,
    CounterKey,
    CounterRequest,
    CounterResponse,
    NodesAnnounced,
)
from holdfast.limits.counters.memory import MemoryCounters
from holdfast.limits.limiter.batch import BatchSettings
from holdfast.limits.limiter.decisions import RuleCompiler
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.limiter.remote_checks import COUNTED_LATER_MAX
from holdfast.limits.limiter.settings import LimiterSettings, NodeIdentity
from holdfast.limits.rules import Check, Decision, Rule, RuleSet
from proof import virtual_loop


def rule(limit: int = 10, resource: str = "send", **changes: Any) -> Rule:
    made = Rule("acme", resource, "fixed_window", limit, 3600.0)
    return structs.replace(made, **changes)


def limiter(counters: MemoryCounters, *rules: Rule, **settings: Any) -> Limiter:
    return Limiter(
        counters, virtual_loop.LoopClock(), LimiterSettings(**settings), RuleSet.of(rules)
    )


async def ask(limits: Limiter, times: int, subject: str = "ann", cost: int = 1) -> list[Decision]:
    return list(
        await asyncio.gather(*[limits.check("acme", "send", subject, cost) for _ in range(times)])
    )


async def ask_in_turn(limits: Limiter, times: int) -> None:
    for _ in range(times):
        await limits.check("acme", "send", "ann")


def allowed(decisions: list[Decision]) -> int:
    return sum(decision.allowed for decision in decisions)


async def test_check_without_a_rule_is_allowed() -> None:
    decision = await limiter(Shared()).check("acme", "send", "ann")
    assert (decision.allowed, decision.decided_by, decision.rule) == (True, "no_rule", "")
    off = await limiter(Shared(), rule(1, mode="off")).check("acme", "send", "ann")
    assert off.decided_by == "no_rule"


async def test_checks_of_one_turn_are_one_call_merged_by_key() -> None:
    counters = Shared()
    limits = limiter(counters, rule(10))
    decisions = await ask(limits, 15)
    assert [d.allowed for d in decisions] == [True] * 10 + [False] * 5, (
        "in the order in which they asked"
    )
    assert len(counters.calls) == 1
    assert [len(entry) for entry in counters.calls[0]] == [1]
    assert counters.calls[0][0][0].times == 15
    refused = decisions[-1]
    assert (refused.remaining, refused.limit, refused.exceeded) == (0, 10, True)
    assert 0 < refused.retry_after <= 3600


async def test_unequal_costs_on_a_key_are_decided_one_by_one() -> None:
    limits = limiter(Shared(), rule(10))
    big, small = await asyncio.gather(
        limits.check("acme", "send", "ann", 8), limits.check("acme", "send", "ann", 2)
    )
    assert big.allowed and small.allowed
    first, second = await asyncio.gather(
        limits.check("acme", "send", "bob", 9), limits.check("acme", "send", "bob", 2)
    )
    assert (first.allowed, second.allowed) == (True, False)


async def test_call_carries_at_most_256_keys_and_calls_are_bounded() -> None:
    counters = Shared()
    limits = limiter(
        counters, rule(10), batch=BatchSettings(calls_max=2, keys_per_call=KEYS_PER_CALL_MAX)
    )
    checks = [limits.check("acme", "send", f"u{n}") for n in range(3 * KEYS_PER_CALL_MAX)]
    decisions = await asyncio.gather(*checks)
    assert allowed(list(decisions)) == 3 * KEYS_PER_CALL_MAX
    assert [len(call) for call in counters.calls] == [KEYS_PER_CALL_MAX] * 3


async def test_denial_is_cached_from_the_send_for_its_cost_and_version() -> None:
    counters = Shared()
    counters.delay = 0.02
    limits = limiter(counters, rule(10, algorithm="token_bucket", window_seconds=10.0))
    assert allowed(await ask(limits, 1, cost=8)) == 1
    first = (await ask(limits, 1, cost=5))[0]
    assert (first.allowed, first.decided_by) == (False, "counters")
    calls = len(counters.calls)
    again = (await ask(limits, 1, cost=6))[0]
    assert (again.allowed, again.decided_by) == (False, "denial_cache")
    assert again.retry_after < first.retry_after, "counted from the send"
    assert len(counters.calls) == calls
    assert (await ask(limits, 1, cost=2))[0].allowed, "a smaller cost is not covered by the denial"
    limits.use(
        limits.rules.merge(rule(50, algorithm="token_bucket", window_seconds=10.0, version=2))
    )
    assert (await ask(limits, 1, cost=6))[0].allowed, "a denial belongs to its version"


@pytest.mark.covers("004 limiter pool, quiesce window, cutover by the event's version")
async def test_checks_in_flight_across_a_rule_change_are_counted_once() -> None:
    counters = Shared()
    counters.delay = 0.02
    limits = limiter(counters, rule(10))
    in_flight = [asyncio.ensure_future(limits.check("acme", "send", "ann")) for _ in range(12)]
    await asyncio.sleep(0.01)
    limits.use(limits.rules.merge(rule(50, version=2)))
    before = await asyncio.gather(*in_flight)
    assert (allowed(before), {(d.limit, d.rule_version) for d in before}) == (10, {(10, 1)})
    after = await ask(limits, 50)
    assert {(d.limit, d.rule_version) for d in after} == {(50, 2)}, (
        "no denial of the old version holds"
    )
    assert allowed(after) == 40, "what was admitted across the change is used, and used once"


async def test_denial_ends_when_it_said() -> None:
    limits = limiter(Shared(), rule(10, algorithm="token_bucket", window_seconds=10.0))
    await ask(limits, 10)
    refused = (await ask(limits, 1))[0]
    await asyncio.sleep(refused.retry_after)
    assert (await ask(limits, 1))[0].allowed


async def test_concurrency_rule_is_never_denied_from_the_cache() -> None:
    counters = Shared()
    limits = limiter(counters, rule(1, algorithm="concurrency", window_seconds=60.0))
    held = (await ask(limits, 1))[0]
    assert held.allowed and held.hold
    assert not (await ask(limits, 1))[0].allowed
    assert await limits.release(Check("acme", "send", "ann"), held.hold)
    assert (await ask(limits, 1))[0].allowed


async def test_leased_rule_is_spent_locally_and_a_strict_one_never() -> None:
    counters = Shared()
    limits = limiter(
        counters, rule(1000, precision="leased"), rule(1000, "strict"), lease_percent=1.0
    )
    for _ in range(30):
        assert (await limits.check("acme", "send", "ann")).allowed
    leased_calls = len(counters.calls)
    assert leased_calls <= 5
    for _ in range(30):
        assert (await limits.check("acme", "strict", "ann")).decided_by == "counters"
    assert len(counters.calls) == leased_calls + 30


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("lease", [1.0, 10.0])
async def test_leases_admit_exactly_the_limit_under_full_demand(nodes: int, lease: float) -> None:
    counters = Shared()
    crowd = [
        limiter(counters, rule(1000, precision="leased"), lease_percent=lease) for _ in range(nodes)
    ]
    total = 0
    for _ in range(500):
        decisions = await asyncio.gather(*[limits.check("acme", "send", "ann") for limits in crowd])
        total += allowed(list(decisions))
    for _ in range(100):
        total += allowed(await ask(crowd[0], 10))
    assert total <= 1000
    assert total >= 1000 - nodes * 1000 * lease / 100, (
        "what is held back is at most one lease a node"
    )


async def test_unspent_lease_is_returned() -> None:
    counters = Shared()
    async with limiter(counters, rule(1000, precision="leased"), lease_seconds=1.0) as limits:
        for _ in range(6):  # a first little lease is used up, then a whole one is taken
            await limits.check("acme", "send", "ann")
        await asyncio.sleep(3)
        assert sum(each.given for each in counters.adjustments) == 10
    decision = await limiter(counters, rule(1000)).check("acme", "send", "ann")
    assert decision.remaining == 1000 - 6 - 1


@pytest.mark.covers("004 a limiter that outlives the full sync")
async def test_lease_of_an_old_rule_version_is_not_spent() -> None:
    counters = Shared()
    limits = limiter(counters, rule(1000, precision="leased"))
    for _ in range(3):
        await limits.check("acme", "send", "ann")
    assert limits.lease_stock > 0
    limits.use(limits.rules.merge(rule(2, precision="leased", version=2)))
    decision = await limits.check("acme", "send", "ann")
    assert (decision.allowed, decision.rule_version) == (False, 2)


@pytest.mark.covers("004 never stops limiting")
@pytest.mark.parametrize("mood", ["unavailable", "lost", "silent", "broken"])
async def test_local_share_decides_at_the_deadline(mood: str) -> None:
    counters = Shared()
    counters.nodes = 4
    async with limiter(counters, rule(100)) as limits:
        counters.mood = mood
        start = asyncio.get_running_loop().time()
        decisions = await ask(limits, 200)
        assert asyncio.get_running_loop().time() - start <= 0.051
        assert allowed(decisions) == 25, "limit ÷ live nodes"
        assert {(d.decided_by, d.degraded) for d in decisions} == {("local_share", True)}
        assert len(counters.calls) == 1, "what may have been counted is never sent again"


async def test_open_breaker_answers_at_once_and_one_probe_closes_it() -> None:
    counters = Shared()
    limits = limiter(counters, rule(1000), batch=BatchSettings(calls_max=8))
    counters.mood = "silent"
    for _ in range(3):
        await ask(limits, 1)
    assert limits.counters_state == "down"
    loop, calls = asyncio.get_running_loop(), len(counters.calls)
    start = loop.time()
    assert (await ask(limits, 1))[0].decided_by == "local_share"
    assert loop.time() == start, "nobody waits while it is open"
    assert len(counters.calls) == calls
    counters.mood = "well"
    await asyncio.sleep(1.1)
    assert (await ask(limits, 1))[0].decided_by == "counters"
    assert limits.counters_state == "up"


async def test_local_share_starts_from_what_was_left_and_is_charged_later() -> None:
    counters = Shared()
    counters.nodes = 2
    async with limiter(counters, rule(100)) as limits:
        await ask(limits, 1, cost=80)
        counters.mood = "unavailable"
        assert allowed(await ask(limits, 100)) == 10, "half of the 20 that were left"
        counters.mood = "well"
        await asyncio.sleep(1.2)
        await ask(limits, 1, "probe")
        await asyncio.sleep(0.01)
        assert [each.charged for each in counters.adjustments] == [10]
        assert (await ask(limits, 1))[0].remaining == 100 - 80 - 10 - 1


async def test_flapping_counters_do_not_grant_a_new_share_each_time() -> None:
    counters = Shared()
    async with limiter(counters, rule(100)) as limits:
        total = 0
        for _ in range(10):
            counters.mood = "unavailable"
            total += allowed(await ask(limits, 100))
            counters.mood = "well"
            await asyncio.sleep(1.2)
            await ask(limits, 1, "probe")
            await asyncio.sleep(0.01)
        assert total <= 100


@pytest.mark.parametrize(("policy", "admitted"), [("open", 1000), ("closed", 0)])
async def test_rule_chooses_what_happens_without_counters(policy: str, admitted: int) -> None:
    counters = Shared()
    counters.mood = "unavailable"
    limits = limiter(counters, rule(100, on_store_failure=policy))
    decisions = await ask(limits, 2000)
    assert allowed(decisions) == admitted, "open is bounded too"
    assert {d.decided_by for d in decisions} == {policy}


@pytest.mark.covers("004 Redis counters down during an update")
async def test_changed_rule_applies_to_the_share_at_once() -> None:
    counters = Shared()
    counters.mood = "unavailable"
    limits = limiter(counters, rule(100))
    assert allowed(await ask(limits, 10)) == 10
    limits.use(limits.rules.merge(rule(5, version=2)))
    assert allowed(await ask(limits, 10)) == 0
    limits.use(limits.rules.merge(rule(12, version=3)))
    assert allowed(await ask(limits, 10)) == 7, (
        "of the ten that were used, five count: they were above the limit"
    )


class Telling(Shared):
    """Reports each reset once to each node, as Redis does."""

    def __init__(self) -> None:
        super().__init__()
        self.resets: list[bytes] = []
        self.reported: dict[str, int] = {}

    async def reset(self, key: CounterKey) -> bool:
        self.resets.append(self.name(key))
        return await super().reset(key)

    async def announce(self, node: str, ttl_seconds: float) -> NodesAnnounced:
        announced = await super().announce(node, ttl_seconds)
        since, self.reported[node] = self.reported.get(node, 0), len(self.resets)
        return announced._replace(resets=frozenset(self.resets[since:]))


async def test_reset_reaches_denials_leases_and_shares_of_every_node() -> None:
    """A node remembers a refusal; it learns of the reset with its next heartbeat."""
    counters, rules = Telling(), RuleSet.of([rule(100), rule(1000, "leased", precision="leased")])
    nodes = [
        Limiter(counters, virtual_loop.LoopClock(), rules=rules, node=NodeIdentity(name))
        for name in ("here", "there")
    ]
    here, there = nodes
    async with here, there:
        for node in nodes:
            await ask(node, 101)
            assert (await ask(node, 1))[0].decided_by == "denial_cache"
        for _ in range(3):
            await there.check("acme", "leased", "ann")
            await asyncio.sleep(0.01)
        assert there.lease_stock > 0
        for resource in ("send", "leased"):
            await here.reset(Check("acme", resource, "ann"))
        assert allowed(await ask(here, 1)) == 1, "here at once"
        assert allowed(await ask(there, 1)) == 0
        await asyncio.sleep(1.1)
        assert there.lease_stock == 0 and allowed(await ask(there, 1)) == 1
        standing = await there.peek(Check("acme", "send", "ann"))
        assert standing is not None and (standing.used, standing.remaining, standing.capacity) == (
            2,
            98,
            100,
        )
        assert await there.peek(Check("acme", "nothing", "ann")) is None


async def test_share_admitted_before_a_reset_is_not_charged_after_it() -> None:
    counters = Telling()
    async with limiter(counters, rule(10)) as limits:
        counters.mood = "unavailable"
        assert allowed(await ask(limits, 12)) == 10
        counters.mood = "well"
        await limits.reset(Check("acme", "send", "ann"))
        await asyncio.sleep(3)
        assert not counters.adjustments and allowed(await ask(limits, 12)) == 10


async def test_node_count_is_frozen_while_the_counters_do_not_answer() -> None:
    counters = Shared()
    counters.nodes = 5
    async with limiter(counters, rule(100)) as limits:
        assert limits.nodes == 5
        counters.mood = "unavailable"
        await asyncio.sleep(60)
        assert limits.nodes == 5
        counters.mood, counters.nodes = "well", 3
        await asyncio.sleep(4)
        assert limits.nodes == 5
        await asyncio.sleep(3)
        assert limits.nodes == 3


async def test_recently_used_keys_are_evicted_last() -> None:
    counters = Shared()
    limits = limiter(counters, rule(1), keys_max=2)
    for subject in ("ann", "bob", "ann", "cid"):
        await ask(limits, 1, subject)
    calls = len(counters.calls)
    assert (await ask(limits, 1, "ann"))[0].decided_by == "denial_cache"
    assert len(counters.calls) == calls, "bob, not ann, was forgotten for cid"
    assert (await ask(limits, 1, "bob"))[0].decided_by == "counters"


class Wild(Shared):
    """Raises what no contract names when a node says that it lives."""

    async def announce(self, node: str, ttl_seconds: float) -> NodesAnnounced:
        if self.mood == "wild":
            raise ValueError("a foreign error")
        return await super().announce(node, ttl_seconds)


async def test_heartbeat_survives_any_error_of_the_counters() -> None:
    counters = Wild()
    counters.mood = "wild"
    async with limiter(counters, rule(100)) as limits:
        with capture_logs() as logs:
            await asyncio.sleep(3)
        assert "node.defect_found" in [entry["event"] for entry in logs]
        counters.mood, counters.nodes = "well", 3
        await asyncio.sleep(2)
        assert limits.nodes == 3


async def test_check_many_is_all_or_none_and_names_the_refusing_rule() -> None:
    limits = limiter(Shared(), rule(10), rule(1, "connect"), rule(1, "shadow", mode="shadow"))
    group = [Check("acme", name, "ann") for name in ("send", "connect", "shadow", "free")]
    assert all(d.allowed for d in await limits.check_many(group))
    second = await limits.check_many(group)
    assert [d.allowed for d in second] == [False, False, True, True]
    assert [d.exceeded for d in second] == [False, True, True, False]
    alone = await limits.check("acme", "send", "ann")
    assert alone.remaining == 8, "a refused group counts nothing"
    assert (await limits.check("acme", "connect", "ann")).decided_by == "denial_cache", (
        "and is remembered"
    )
    twice = [Check("acme", "send", "bob", 5), Check("acme", "send", "bob", 4)]
    assert [d.remaining for d in await limits.check_many(twice)] == [
        1,
        1,
    ], "the same rule twice is one sum"


async def test_groups_are_never_merged() -> None:
    counters = Shared()
    limits = limiter(counters, rule(3), rule(3, "connect"))
    group = [Check("acme", name, "ann") for name in ("send", "connect")]
    single = limits.check("acme", "send", "ann")
    decided = await asyncio.gather(*[limits.check_many(group) for _ in range(4)], single)
    assert [[len(entry) for entry in call] for call in counters.calls] == [[2, 2, 2, 2, 1]]
    assert [[d.allowed for d in each] for each in decided[:4]] == [[True, True]] * 3 + [
        [False, False]
    ]


async def test_check_in_flight_keeps_its_rule_and_the_next_has_the_new_one() -> None:
    limits = limiter(Shared(), rule(1))
    begun = [asyncio.ensure_future(limits.check("acme", "send", "ann")) for _ in range(2)]
    await asyncio.sleep(0)
    limits.use(limits.rules.merge(rule(100, version=2)))
    decisions = await asyncio.gather(*begun)
    assert [(d.allowed, d.limit, d.rule_version) for d in decisions] == [
        (True, 1, 1),
        (False, 1, 1),
    ]
    after = await limits.check("acme", "send", "ann")
    assert (after.allowed, after.limit, after.rule_version) == (True, 100, 2)


def test_rule_is_looked_up_once_per_resource_in_a_bounded_cache() -> None:
    class Noted(RuleSet):
        looked: ClassVar[list[str]] = []

        def lookup(self, tenant: str, resource: str) -> Rule | None:
            self.looked.append(resource)
            return super().lookup(tenant, resource)

    rules = Noted({made.name: made for made in [rule(10), rule(5, "*")]})
    compiler = RuleCompiler(rules, lease_percent=1.0, size_max=5)
    for _ in range(3):
        found = compiler.find("acme", "send")
        assert found is not None and found.params.limit == 10
    assert rules.looked == ["send"]
    for n in range(20):
        found = compiler.find("acme", f"r{n}")
        assert found is not None and found.params.limit == 5
        assert len(compiler.by_resource) <= 5
    limits = Limiter(MemoryCounters(ManualClock()), ManualClock(), rules=rules)
    for _ in range(3):
        assert limits.try_check("acme", "send", "ann") is not None
    assert limits.try_check("other", "send", "ann") == limits.try_check("other", "send", "bob")
    assert rules.looked[-3:] == ["send"] * 3, "that nothing limits is not remembered"


@pytest.mark.parametrize("wildcard", [None, "/*"])
async def test_long_resources_use_no_memory_and_match_wildcards_only(
    wildcard: str | None,
) -> None:
    """An application behind the middleware asks for its paths, which strangers choose:
    3,000 of 15 kB kept 46 MB.
    """
    rules = [rule(10**9, "/other"), *([rule(10**9, wildcard)] if wildcard else [])]
    limits = Limiter(Shared(), virtual_loop.LoopClock(), rules=RuleSet.of(rules))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["type"])

    asked: list[str] = []
    guarded = RateLimitedApp(app, limits, lambda scope: [Check("acme", scope["path"], "ann")])
    tracemalloc.start()
    try:
        for n in range(3_000):
            path = f"/{n}".ljust(15_000, "x")
            await guarded({"type": "http", "path": path}, None, None)  # type: ignore[arg-type]
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(asked) == 3_000 and kept < 2_000_000
    decision = await limits.check("acme", "/".ljust(15_000, "x"), "ann")
    assert decision.rule == (f"acme/{wildcard}" if wildcard else "")
    assert len(limits._compiled_by_resource) == 0


async def test_heartbeat_reports_checks_batches_and_leases_to_the_metrics() -> None:
    def sample(name: str, **labels: str) -> float:
        return telemetry.REGISTRY.get_sample_value(f"holdfast_limits_{name}", labels) or 0.0

    def counted() -> list[float]:
        results = [
            ("counters", "allowed"),
            ("counters", "refused"),
            ("denial_cache", "refused"),
            ("lease", "allowed"),
        ]
        return [sample("checks_total", decided_by=by, decision=said) for by, said in results]

    counters, before = Shared(), counted()
    counters.nodes = 3
    async with limiter(counters, rule(2), rule(1000, "leased", precision="leased")) as limits:
        await ask(limits, 3)
        await ask(limits, 1)
        for _ in range(3):
            await limits.check("acme", "leased", "ann")
        await asyncio.gather(*[limits.check("acme", "send", f"u{n}") for n in range(7)])
        await asyncio.sleep(1.1)
        assert [now - then for now, then in zip(counted(), before, strict=True)] == [
            2 + 1 + 7,
            1,
            1,
            2,
        ]
        assert (sample("batch_keys"), sample("lease_tokens"), sample("nodes")) == (7, 2, 3)


async def test_group_with_shadow_rules_takes_one_round_trip() -> None:
    counters, loop = Shared(), asyncio.get_running_loop()
    counters.delay = 0.04
    limits = limiter(counters, rule(1), *[rule(1, f"s{n}", mode="shadow") for n in range(50)])
    group = [Check("acme", "send", "ann"), *[Check("acme", f"s{n}", "ann") for n in range(50)]]
    for exceeded in (False, True):
        start = loop.time()
        decisions = await limits.check_many(group)
        assert loop.time() - start < 0.041
        assert [d.allowed for d in decisions] == [not exceeded] + [True] * 50
        assert [d.exceeded for d in decisions] == [exceeded] * 51


async def test_shadow_rule_counts_and_reports_but_refuses_nothing() -> None:
    limits = limiter(Shared(), rule(1, mode="shadow"))
    decisions = await ask(limits, 3)
    assert [d.allowed for d in decisions] == [True] * 3
    assert [d.exceeded for d in decisions] == [False, True, True]


@pytest.mark.covers("004 option 3: compare versions at each check")
async def test_node_behind_is_notified_and_decides_by_the_newer_rule() -> None:
    counters, notified = Shared(), []
    ahead = limiter(counters, rule(5, version=8))
    behind = Limiter(
        counters,
        virtual_loop.LoopClock(),
        rules=RuleSet.of([rule(100, version=7)]),
        on_behind=lambda: notified.append(1),
    )
    await ask(ahead, 1)
    decisions = await ask(behind, 20)
    assert allowed(decisions) == 4
    assert {(d.limit, d.rule_version) for d in decisions} == {(5, 8)}
    assert notified


@pytest.mark.parametrize("immediate", [True, False])
@pytest.mark.parametrize(
    ("subject", "cost", "field"),
    [
        ("ann", 0, "cost"),
        ("ann", -1, "cost"),
        ("ann", 11, "cost"),
        ("", 1, "subject"),
        ("x" * 1025, 1, "subject"),
    ],
)
async def test_check_that_can_never_fit_is_an_error(
    immediate: bool, subject: str, cost: int, field: str
) -> None:
    counters = MemoryCounters(virtual_loop.LoopClock()) if immediate else Shared()
    limits = limiter(counters, rule(10))
    with pytest.raises(InvalidCheck) as raised:
        await limits.check("acme", "send", subject, cost)
    assert raised.value.details["field"] == field


async def test_caches_are_bounded() -> None:
    limits = limiter(Shared(), rule(1), keys_max=10)
    for n in range(50):
        await ask(limits, 2, f"u{n}")
    assert len(limits._cache) <= 10


async def test_keys_beyond_the_queue_bound_are_decided_by_the_share() -> None:
    limits = limiter(Shared(), rule(10), batch=BatchSettings(waiting_max=100, calls_max=1))
    decisions = await asyncio.gather(*[limits.check("acme", "send", f"u{n}") for n in range(150)])
    assert sum(d.decided_by == "local_share" for d in decisions) == 50
    assert all(d.allowed for d in decisions)


async def test_optimistic_check_is_answered_at_once_and_counted_later() -> None:
    counters = Shared()
    limits = limiter(counters, rule(10))
    first = [limits.check_optimistic("acme", "send", "ann") for _ in range(15)]
    assert all(d.allowed and d.decided_by == "counted_later" for d in first), (
        "one round trip's worth slips through"
    )
    await asyncio.sleep(0.01)
    assert len(counters.calls) == 1
    later = limits.check_optimistic("acme", "send", "ann")
    assert (later.allowed, later.decided_by) == (False, "denial_cache")
    exact = limiter(MemoryCounters(virtual_loop.LoopClock()), rule(10))
    assert [exact.check_optimistic("acme", "send", "ann").allowed for _ in range(12)] == [
        True
    ] * 10 + [False] * 2


async def test_optimistic_checks_are_bounded_in_an_outage_and_notice_its_end() -> None:
    counters = Shared()
    counters.mood = "unavailable"
    limits = limiter(counters, rule(100))
    for _ in range(10):
        limits.check_optimistic("acme", "send", "warm")
        await asyncio.sleep(0.01)
    assert limits.counters_state == "down"
    decisions = [limits.check_optimistic("acme", "send", "ann") for _ in range(500)]
    assert allowed(decisions) == 100
    counters.mood = "well"
    for _ in range(30):
        await asyncio.sleep(0.1)
        limits.check_optimistic("acme", "send", "warm")
    assert limits.counters_state == "up"


async def test_optimistic_check_creates_no_task_and_is_admitted_first() -> None:
    counters = Shared()
    limits = limiter(counters, rule(10))
    tasks = len(asyncio.all_tasks())
    begun = []
    for _ in range(4):
        begun.append(limits.begin_check("acme", "send", "ann"))
        limits.check_optimistic("acme", "send", "ann")
        limits.check_optimistic("acme", "send", "ann")
    assert len(asyncio.all_tasks()) == tasks
    decisions = await asyncio.gather(*[each for each in begun if isinstance(each, asyncio.Future)])
    assert [d.allowed for d in decisions] == [True] * 2 + [False] * 2, (
        "the eight were allowed already"
    )
    assert [call[0][0].times for call in counters.calls] == [12]


async def test_uncounted_checks_are_charged_to_the_share_without_an_answer() -> None:
    counters = Shared()
    counters.mood = "unavailable"
    limits = limiter(counters, rule(10))
    for _ in range(8):
        limits.check_optimistic("acme", "send", "ann")
    assert allowed(await ask(limits, 4)) == 2


async def test_checks_whose_callers_do_not_wait_are_bounded() -> None:
    limits, most = limiter(Shared(), rule(10 * COUNTED_LATER_MAX)), COUNTED_LATER_MAX
    for _ in range(2):  # what was counted makes room
        asked = (limits.check_optimistic("acme", "send", "ann") for _ in range(most + 2))
        decided = [decision.decided_by for decision in asked]
        assert decided == ["counted_later"] * most + ["local_share"] * 2
        await asyncio.sleep(1)


async def test_begun_check_needs_no_coroutine_and_its_future_never_fails() -> None:
    counters = Shared()
    limits = limiter(counters, rule(1), rule(1, "off", mode="off"))
    assert limits.begin_check("acme", "off", "ann") == await limits.check("acme", "off", "ann")
    begun = [limits.begin_check("acme", "send", "ann") for _ in range(2)]
    assert counters.calls == [], "it is asked at the end of the turn"
    futures = [each for each in begun if isinstance(each, asyncio.Future)]
    assert [d.allowed for d in await asyncio.gather(*futures)] == [True, False]
    denied = limits.begin_check("acme", "send", "ann")
    assert isinstance(denied, Decision) and denied.decided_by == "denial_cache"
    counters.mood = "unavailable"
    unknown = limits.begin_check("acme", "send", "bob")
    assert isinstance(unknown, asyncio.Future)
    assert (await unknown).decided_by == "local_share"


async def test_lease_is_kept_after_its_caller_was_cancelled() -> None:
    limits = limiter(Shared(), rule(1000, precision="leased"))
    begun = limits.begin_check("acme", "send", "ann")
    assert isinstance(begun, asyncio.Future)
    begun.cancel()
    await asyncio.sleep(0.01)
    assert limits.lease_stock == 4


async def test_defect_in_one_answer_does_not_affect_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = limiter(Shared(), rule(10))
    learn = limits._remote._learn

    def learn_but_of_bob(compiled: Any, ask: CounterRequest, *rest: Any) -> Any:
        if ask.key[1] == "bob":
            raise ZeroDivisionError
        return learn(compiled, ask, *rest)

    monkeypatch.setattr(limits._remote, "_learn", learn_but_of_bob)
    checks = [limits.check("acme", "send", who) for who in ("ann", "bob", "cid")]
    with capture_logs() as logs:
        ann, bob, cid = await asyncio.gather(*checks, return_exceptions=True)
    assert (
        isinstance(ann, Decision)
        and isinstance(bob, ZeroDivisionError)
        and isinstance(cid, Decision)
    )
    assert len(logs) == 1
    limits.check_optimistic("acme", "send", "bob")
    await asyncio.sleep(0.01)
    assert limits._remote._counted_later == 0, "what nobody waits for makes room, however it ended"


async def test_counters_that_fail_at_once_leave_no_caller_waiting() -> None:
    class Broken(Shared):
        def take(  # type: ignore[override]
            self, entries: Sequence[Sequence[CounterRequest]]
        ) -> Awaitable[CounterResponse]:
            raise ZeroDivisionError

    limits = limiter(Broken(), rule(10))
    began = asyncio.get_running_loop().time()
    with capture_logs() as logs:
        decisions = await ask(limits, 2)
    assert [decision.degraded for decision in decisions] == [True, True]
    assert asyncio.get_running_loop().time() == began, "by the share, and at once"
    assert [entry["log_level"] for entry in logs if "ZeroDivisionError" in str(entry)] == ["error"]


async def test_try_check_answers_without_io_or_has_no_effect() -> None:
    counters = Shared()
    limits = limiter(
        counters, rule(10), rule(1000, "leased", precision="leased"), rule(1, "off", mode="off")
    )
    free = limits.try_check("acme", "off", "ann")
    assert free is not None and free.decided_by == "no_rule"
    assert limits.try_check("acme", "send", "ann") is None, "nothing is known of ann yet"
    await asyncio.sleep(1)
    assert counters.calls == [], "who is not answered was not counted"
    await ask(limits, 11)
    denied = limits.try_check("acme", "send", "ann")
    assert denied is not None and (denied.allowed, denied.decided_by) == (False, "denial_cache")
    await limits.check("acme", "leased", "ann")
    leased = [limits.try_check("acme", "leased", "ann") for _ in range(5)]
    assert [d.decided_by if d else None for d in leased] == ["lease"] * 4 + [None], (
        "until it is spent"
    )
    with pytest.raises(InvalidCheck):
        limits.try_check("acme", "send", "ann", 11)


def test_checks_never_wait_with_counters_in_this_process() -> None:
    limits = Limiter(
        MemoryCounters(ManualClock()),
        ManualClock(),
        rules=RuleSet.of([rule(2), rule(1, "hold", algorithm="concurrency", window_seconds=60.0)]),
    )
    assert [d.allowed for _ in range(3) if (d := limits.try_check("acme", "send", "ann"))] == [
        True,
        True,
        False,
    ]
    held, refused = (
        limits.try_check("acme", "hold", "ann"),
        limits.check_optimistic("acme", "hold", "ann"),
    )
    assert held is not None and held.allowed and held.hold
    assert (refused.allowed, refused.hold) == (False, "")


async def test_ended_lease_is_renewed_and_its_rest_is_returned() -> None:
    counters = Shared()
    limits = limiter(counters, rule(1000, precision="leased"), lease_seconds=1.0)
    for _ in range(6):  # the first four, then a whole lease of ten
        await limits.check("acme", "send", "ann")
    assert limits.lease_stock == 10
    await asyncio.sleep(0.9)
    await limits.check("acme", "send", "ann")
    await asyncio.sleep(0.2)
    again = await limits.check("acme", "send", "ann")
    assert (again.decided_by, limits.lease_stock) == (
        "counters",
        10,
    ), "a new lease in place of the old"
    async with limits:
        await asyncio.sleep(1.1)
    assert sum(each.given for each in counters.adjustments) == 9 + 10
    decision = await limiter(counters, rule(1000)).check("acme", "send", "ann")
    assert decision.remaining == 1000 - 8 - 1


@pytest.mark.real_time
async def test_stalled_loop_reads_the_answer_before_it_gives_up() -> None:
    """The answer is there in time, the loop is not: a pause of this process is no
    failure of the counters.
    """

    class Quick(Shared):
        async def take(self, entries: Sequence[Sequence[CounterRequest]]) -> CounterResponse:
            taken = await MemoryCounters.take(self, entries)
            answered = asyncio.get_running_loop().create_future()
            thread = threading.Thread(
                target=loop.call_soon_threadsafe, args=(answered.set_result, taken)
            )
            loop.call_soon(lambda: (thread.start(), thread.join(), time.sleep(1.1 * deadline)))
            return await answered

    loop, deadline = asyncio.get_running_loop(), 1.0
    settings = LimiterSettings(batch=BatchSettings(deadline_seconds=deadline))
    limits = Limiter(Quick(), SystemClock(), settings, RuleSet.of([rule(10)]))
    assert (await limits.check("acme", "send", "ann")).decided_by == "counters"


async def test_peek_shows_use_beyond_the_capacity() -> None:
    """It once showed 5 used of 5, all drained only after 227 s of a 60 s window."""
    counters, ann = Shared(), Check("acme", "send", "ann")
    limits = limiter(counters, Rule("acme", "send", "token_bucket", 5, 60.0))
    for _ in range(19):
        assert limits.check_optimistic(*ann).allowed
    await asyncio.sleep(0.01)
    standing = await limits.peek(ann)
    assert standing is not None
    assert (standing.used, standing.capacity, standing.remaining) == (19, 5, 0)
    assert standing.reset_after == pytest.approx(19 * 12, abs=0.1)
    await asyncio.sleep(17 * 12 + 1)
    later = await limits.peek(ann)
    assert later is not None
    assert (later.used, later.remaining) == (2, 3), "what is left is what is not used"


async def test_group_answer_is_cached_per_key() -> None:
    """Also that this node is behind, and what was denied."""
    counters, behind = Shared(), []
    rules = [rule(100), rule(1, "y")]
    newer = Limiter(counters, virtual_loop.LoopClock(), rules=RuleSet.of([rule(100, version=2)]))
    await newer.check("acme", "send", "ann")
    limits = Limiter(
        counters,
        virtual_loop.LoopClock(),
        rules=RuleSet.of(rules),
        on_behind=lambda: behind.append("behind"),
    )
    group = [Check("acme", "send", "ann"), Check("acme", "y", "ann")]
    assert [d.rule_version for d in await limits.check_many(group)] == [2, 1]
    assert behind == ["behind"]
    assert [d.exceeded for d in await limits.check_many(group)] == [False, True]
    remembered = limits.try_check("acme", "y", "ann")
    assert remembered is not None and remembered.decided_by == "denial_cache"


async def test_group_whose_sum_can_never_fit_is_an_error() -> None:
    counters = Shared()
    limits = limiter(counters, rule(100))
    with pytest.raises(InvalidCheck, match="cost"):
        await limits.check_many(
            [Check("acme", "send", "ann", 60), Check("acme", "send", "ann", 41)]
        )
    assert not counters.calls
    decisions = await limits.check_many(
        [Check("acme", "send", "ann", 60), Check("acme", "send", "ann", 40)]
    )
    assert [d.allowed for d in decisions] == [True, True]


async def test_node_that_stops_returns_its_leases() -> None:
    counters = Shared()
    leased = rule(100, precision="leased")
    quiet = {"heartbeat_seconds": 1000.0, "node_ttl_seconds": 5000.0}
    async with limiter(counters, leased, lease_percent=10, **quiet) as limits:
        await ask_in_turn(limits, 8)
        stock = limits.lease_stock
        assert stock > 0
    assert sum(returned.given for returned in counters.adjustments) == stock
    assert (
        await limiter(counters, leased, lease_percent=0).check("acme", "send", "ann")
    ).remaining == 100 - 8 - 1


async def test_decision_by_lease_has_its_region() -> None:
    limits = Limiter(
        Shared(),
        virtual_loop.LoopClock(),
        LimiterSettings(lease_percent=10),
        RuleSet.of([rule(100, precision="leased")]),
        NodeIdentity("a", "eu"),
    )
    decisions = [await limits.check("acme", "send", "ann") for _ in range(3)]
    assert [d.decided_by for d in decisions] == ["counters", "lease", "lease"]
    assert {d.region for d in decisions} == {"eu"}


class Withdrawn(Shared):
    """A call may be cancelled under way, by whoever runs it."""

    withdraw = False

    async def take(self, entries: Sequence[Sequence[CounterRequest]]) -> CounterResponse:
        if self.withdraw:
            raise asyncio.CancelledError
        return await super().take(entries)


async def test_cancelled_probe_does_not_keep_the_breaker_open() -> None:
    counters = Withdrawn()
    limits = limiter(counters, rule(100))
    counters.mood = "unavailable"
    await ask_in_turn(limits, 5)
    assert limits.counters_state == "down"
    counters.mood, counters.withdraw = "well", True
    await asyncio.sleep(2)
    assert (await limits.check("acme", "send", "ann")).degraded, "the probe has no result"
    counters.withdraw = False
    assert not (await limits.check("acme", "send", "ann")).degraded
    assert limits.counters_state == "up"
