"""How use admitted without the shared counters is charged to them later."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest
from limits_rig import Members, Shared
from msgspec import structs

from holdfast.errors import OutcomeUnknown, Unavailable
from holdfast.limits.algorithms import params_of
from holdfast.limits.counters.contract import (
    Adjustment,
    CounterRequest,
    CounterResponse,
    NodesAnnounced,
)
from holdfast.limits.counters.memory import MemoryCounters
from holdfast.limits.limiter.fallback import FallbackLimiter
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.limiter.settings import LimiterSettings, NodeIdentity
from holdfast.limits.rules import Algorithm, Check, Rule, RuleSet
from proof import virtual_loop


def node(counters: Shared, rule: Rule, name: str = "a", **settings: Any) -> Limiter:
    return Limiter(
        counters,
        virtual_loop.LoopClock(),
        LimiterSettings(**settings),
        RuleSet.of([rule]),
        node=NodeIdentity(name),
    )


async def admitted(limits: Limiter, times: int, subject: str = "ann") -> int:
    return sum([(await limits.check("acme", "x", subject)).allowed for _ in range(times)])


HOURLY = Rule("acme", "x", "fixed_window", 100, 36_000.0)


async def test_idle_node_charges_its_share_with_the_next_heartbeat() -> None:
    counters = Shared()
    counters.nodes = 2
    async with node(counters, HOURLY) as one, node(counters, HOURLY, "b") as other:
        counters.mood = "unavailable"
        assert await admitted(one, 80) == 50
        counters.mood = "well"
        await asyncio.sleep(1.1)
        assert await admitted(other, 200) == 50


async def test_node_that_stops_charges_its_share() -> None:
    counters = Shared()
    async with node(counters, HOURLY) as one:
        counters.mood = "unavailable"
        assert await admitted(one, 60) == 60
        counters.mood = "well"
    assert await admitted(node(counters, HOURLY, "b"), 100) == 40


class Deaf(Shared):
    """Answers checks and heartbeats; for a while not what puts its counters right."""

    deaf: Exception | None = None

    async def adjust(self, adjustments: Sequence[Adjustment]) -> int:
        if self.deaf is not None:
            raise self.deaf
        return await super().adjust(adjustments)


@pytest.mark.parametrize(
    ("error", "charged"),
    [
        (Unavailable("nothing was counted"), 60),
        (OutcomeUnknown("it may have been counted"), 0),
    ],
)
async def test_pending_charges_are_kept_until_accepted_and_never_repeated(
    error: Exception, charged: int
) -> None:
    counters = Deaf()
    async with node(counters, HOURLY) as one:
        counters.mood = "unavailable"
        assert await admitted(one, 60) == 60
        counters.mood, counters.deaf = "well", error
        await asyncio.sleep(5)
        await one.check("acme", "x", "bob")
        await asyncio.sleep(5)
        counters.deaf = None
        await asyncio.sleep(5)
        assert not one._share.has_pending
        assert sum(each.charged for each in counters.adjustments) == charged


async def test_many_charges_are_split_into_calls() -> None:
    counters = Shared()
    async with node(counters, HOURLY) as one:
        counters.mood = "unavailable"
        for n in range(600):
            assert await admitted(one, 1, f"s{n}") == 1
        counters.mood = "well"
        await asyncio.sleep(1.1)
        assert {each.key[1] for each in counters.adjustments} == {f"s{n}" for n in range(600)}


async def test_long_charging_does_not_stop_the_heartbeat() -> None:
    class Slow(Members):
        async def adjust(self, adjustments: Sequence[Adjustment]) -> int:
            await asyncio.sleep(3)
            return await super().adjust(adjustments)

    counters, loop = Slow(), asyncio.get_running_loop()
    async with node(counters, HOURLY) as one:
        counters.mood = "unavailable"
        for n in range(1000):
            await one.check("acme", "x", f"s{n}")
        counters.mood = "well"
        await asyncio.sleep(9)
        assert one._share.has_pending
        assert counters.members["a"] >= loop.time() + 3
        await asyncio.sleep(6)
        assert not one._share.has_pending


async def test_holds_granted_in_an_outage_are_transferred_after_it() -> None:
    counters, rule = Shared(), Rule("acme", "x", "concurrency", 10, 3600.0)
    async with node(counters, rule) as one:
        counters.mood = "unavailable"
        held = [await one.check("acme", "x", "ann") for _ in range(12)]
        assert sum(d.allowed for d in held) == 10
        assert await one.release(Check("acme", "x", "ann"), held[0].hold)
        counters.mood = "well"
        await asyncio.sleep(1.5)
        assert await admitted(one, 30) == 1, "in the place of the one that left"
        await one.release(Check("acme", "x", "ann"), held[1].hold)
        assert await admitted(one, 30) == 1, "also one that came over is given back"


async def test_transferred_hold_keeps_its_end() -> None:
    """A hold whose holder vanished lasts one window, not the outage and a window."""
    counters, rule = Shared(), Rule("acme", "x", "concurrency", 1, 60.0)
    async with node(counters, rule) as one, node(counters, rule, "b") as other:
        counters.mood = "unavailable"
        assert (await one.check("acme", "x", "ann")).allowed
        await asyncio.sleep(50)
        counters.mood = "well"
        await asyncio.sleep(8)
        refused = await other.check("acme", "x", "ann")
        assert not refused.allowed and 0 < refused.retry_after <= 2
        await asyncio.sleep(2.1)
        assert (await other.check("acme", "x", "ann")).allowed


class Elsewhere(Shared):
    """Counters with their own clock: their windows start at other moments."""

    def __init__(self, ahead_seconds: float) -> None:
        super().__init__()
        ours = self._monotonic
        self._monotonic = lambda: ours() + ahead_seconds


@pytest.mark.parametrize("seed", range(40))
async def test_shares_add_one_limit_in_an_outage_and_cost_at_most_a_window(
    seed: int,
) -> None:
    """Wherever the windows of nodes and counters lie: a debt counts in the window in
    which the counters are back.
    """
    chance, window, limit = random.Random(seed), 60.0, 12
    ahead, rule = chance.uniform(0, window), Rule("acme", "x", "fixed_window", limit, window)
    passed: list[float] = []
    outages: list[tuple[float, float]] = []

    def windows(begin: float, end: float) -> int:
        return math.floor(end / window) - math.floor(begin / window) + 1

    counters, loop, since = Elsewhere(ahead), asyncio.get_running_loop(), 0.0
    counters.nodes = 2
    async with node(counters, rule) as one, node(counters, rule, "b") as other:
        for _ in range(40):
            if counters.mood == "well" and chance.random() < 0.3:
                counters.mood, since = "unavailable", loop.time()
            elif counters.mood == "unavailable" and chance.random() < 0.4:
                counters.mood = "well"
                outages.append((since, loop.time() + 1.1))  # until they are asked again
            for _ in range(chance.choice([1, limit, 3 * limit])):
                decision = await chance.choice([one, other]).check("acme", "x", "ann")
                passed.extend([loop.time()] * decision.allowed)
            await asyncio.sleep(chance.choice([0.5, 3.0, 20.0, window]))
        if counters.mood == "unavailable":
            outages.append((since, loop.time()))
        counters.mood = "well"
        await asyncio.sleep(1.5 + window)
        assert await admitted(one, limit) == limit, "a window later nothing is charged"
    for first, begin in enumerate(passed):
        for count, end in enumerate(passed[first:], 1):
            overlaps = [
                (max(begin, since), min(end, until))
                for since, until in outages
                if since <= end and until >= begin
            ]
            shares = windows(overlaps[0][0], overlaps[-1][1]) if overlaps else 0
            assert count <= limit * (windows(begin + ahead, end + ahead) + shares), (
                begin,
                end,
                overlaps,
            )


@pytest.mark.parametrize("nodes", [1, 4])
async def test_pending_charge_is_at_most_the_capacity(nodes: int) -> None:
    """``open`` admits ten times the limit on each node, but charges at most one."""
    counters, rule = Shared(), Rule("acme", "x", "token_bucket", 10, 60.0, on_store_failure="open")
    crowd = [node(counters, rule, f"n{n}") for n in range(nodes)]
    for limits in crowd:
        await limits.__aenter__()
    counters.mood = "unavailable"
    for limits in crowd:
        assert await admitted(limits, 200) == 100
    counters.mood = "well"
    await asyncio.sleep(1.1)
    refused = await crowd[0].check("acme", "x", "ann")
    assert not refused.allowed and refused.retry_after <= 6.0
    for limits in crowd:
        await limits.__aexit__()


async def test_subjects_beyond_the_bound_share_one_counter() -> None:
    counters, rule = Shared(), Rule("acme", "x", "fixed_window", 2, 36_000.0)
    counters.mood = "unavailable"
    limits = node(counters, rule, keys_max=100)
    total = 0
    for _ in range(4):
        for n in range(150):
            total += await admitted(limits, 1, f"s{n}")
    assert total == 100 * 2 + 2
    assert len(limits._share._table) == 101
    await asyncio.sleep(36_000)
    for _ in range(3):
        assert await admitted(limits, 3, "s149") <= 2, (
            "with a counter of its own again once others are idle"
        )
    assert await admitted(limits, 1, "fresh") == 1


def test_shares_of_more_rules_than_fit_the_cache_are_computed_again() -> None:
    share = FallbackLimiter(100, params_max=3)
    share.share_among(5)
    rules = [Rule("acme", f"r{n}", "fixed_window", 10 * (n + 1), 3600.0) for n in range(8)]
    for turn in range(2):
        for n, each in enumerate(rules):
            request = CounterRequest((f"r{n}", "ann"), params_of(each, each.stamp))
            assert share.decide_one(each, request, None, 0.0).limit == 2 * (n + 1), turn
            assert len(share._scaled_params) <= 3


async def test_hold_in_the_shared_overflow_counter_can_be_released() -> None:
    counters, rule = Shared(), Rule("acme", "x", "concurrency", 1, 36_000.0)
    counters.mood = "unavailable"
    limits = node(counters, rule, keys_max=2)
    held = [await limits.check("acme", "x", f"s{n}") for n in range(4)]
    assert [d.allowed for d in held] == [True, True, True, False]
    assert await limits.release(Check("acme", "x", "s2"), held[2].hold)
    assert await admitted(limits, 2, "s3") == 1, "in the place that s2 left"
    assert await admitted(limits, 2, "s0") == 0


async def test_release_is_true_only_if_the_hold_existed_and_is_over() -> None:
    counters, rule, ann = (
        Shared(),
        Rule("acme", "x", "concurrency", 1, 3600.0),
        Check("acme", "x", "ann"),
    )
    async with node(counters, rule) as limits:
        held = await limits.check(*ann)
        assert not await limits.release(ann, "nonsense")
        assert not await limits.release(Check("acme", "x", "bob"), held.hold)
        counters.mood = "unavailable"
        assert not await limits.release(ann, held.hold), "who knows"
        counters.mood = "well"
        assert not (await limits.check(*ann)).allowed
        assert await limits.release(ann, held.hold)
        assert not await limits.release(ann, held.hold), "once"
        counters.mood = "unavailable"
        ours = await limits.check(*ann)
        assert ours.decided_by == "local_share" and await limits.release(ann, ours.hold), (
            "nobody else knew of it"
        )
        ours = await limits.check(*ann)
        counters.mood = "well"
        await asyncio.sleep(1.5)
        counters.mood = "unavailable"
        assert not await limits.release(ann, ours.hold), (
            "it was carried over, and is still held there"
        )


async def test_closed_rule_refuses_a_group_and_the_others_are_not_exceeded() -> None:
    rules = [
        Rule("acme", "x", "fixed_window", 10, 3600.0),
        Rule("acme", "y", "fixed_window", 10, 3600.0, on_store_failure="closed"),
        Rule("acme", "z", "fixed_window", 1, 3600.0),
    ]
    counters = Shared()
    counters.mood = "unavailable"
    limits = Limiter(counters, virtual_loop.LoopClock(), rules=RuleSet.of(rules))
    group = [Check("acme", name, "ann") for name in "xyz"]
    assert (await limits.check(*group[2])).allowed
    refused = await limits.check_many(group)
    assert [(d.allowed, d.exceeded) for d in refused] == [
        (False, False),
        (False, True),
        (False, True),
    ]
    assert [d.remaining for d in refused] == [10, 0, 0], "and nothing was counted"


@pytest.mark.parametrize(
    ("limit", "changed", "left"), [(100, 500, 420), (500, 50, 0), (500, 100, 20), (100, 100, 20)]
)
@pytest.mark.parametrize("nodes", [1, 4])
async def test_rule_changed_in_an_outage_carries_over_the_used_amount(
    nodes: int, limit: int, changed: int, left: int
) -> None:
    counters = Shared()
    counters.nodes = nodes
    async with node(counters, structs.replace(HOURLY, limit=limit)) as one:
        assert await admitted(one, 80) == 80
        counters.mood = "unavailable"
        one.use(RuleSet.of([structs.replace(HOURLY, limit=changed, version=2)]))
        assert await admitted(one, 600) == left // nodes


async def test_used_amount_carries_over_by_burst_not_by_limit() -> None:
    counters = Shared()
    bucket = Rule("acme", "x", "token_bucket", 10, 36_000.0, burst_size=100)
    async with node(counters, bucket) as one:
        assert await admitted(one, 80) == 80
        counters.mood = "unavailable"
        one.use(RuleSet.of([structs.replace(bucket, burst_size=90, version=2)]))
        assert await admitted(one, 100) == 10


@pytest.mark.parametrize(("algorithm", "owed"), [("token_bucket", [40]), ("fixed_window", [60])])
async def test_drained_share_is_not_charged(algorithm: Algorithm, owed: list[int]) -> None:
    counters = Shared()
    async with node(counters, Rule("acme", "x", algorithm, 100, 100.0)) as one:
        await asyncio.sleep(0.5)  # between two heartbeats, and early in a window
        counters.mood = "unavailable"
        assert await admitted(one, 60) == 60
        await asyncio.sleep(19.6)
        counters.mood = "well"
        await asyncio.sleep(0.9)
        assert [debt.charged for debt in counters.adjustments] == owed


async def test_share_that_started_empty_drains_like_any_other() -> None:
    """It starts once from the last reading: what has drained since stays drained."""
    counters = Shared()
    async with node(counters, Rule("acme", "x", "token_bucket", 100, 100.0)) as one:
        assert await admitted(one, 100) == 100
        counters.mood = "unavailable"
        assert await admitted(one, 10) == 0
        await asyncio.sleep(50.0)
        assert 49 <= await admitted(one, 100) <= 51


class Hanging(Shared):
    """Calls wait until ``answers`` is set, or fail after ``silence`` seconds."""

    silence = 5.0

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()

    async def _answer(self) -> None:
        try:
            await asyncio.wait_for(self.answers.wait(), self.silence)
        except TimeoutError:
            raise OutcomeUnknown("the counters did not answer") from None

    async def take(self, entries: Sequence[Sequence[CounterRequest]]) -> CounterResponse:
        self.calls.append(entries)
        await self._answer()
        if self.mood == "unavailable":
            await asyncio.sleep(self.delay)
            raise Unavailable("unavailable")
        return await MemoryCounters.take(self, entries)

    async def adjust(self, adjustments: Sequence[Adjustment]) -> int:
        await self._answer()
        return await super().adjust(adjustments)

    async def announce(self, node: str, ttl_seconds: float) -> NodesAnnounced:
        await self._answer()
        return await super().announce(node, ttl_seconds)


async def timed(asked: Awaitable[Any]) -> tuple[float, Any]:
    start = asyncio.get_running_loop().time()
    answer = await asked
    return asyncio.get_running_loop().time() - start, answer


@pytest.mark.parametrize("clients", [1, 20])
async def test_hanging_counters_are_waited_for_only_a_few_times(clients: int) -> None:
    counters = Hanging()
    async with node(counters, structs.replace(HOURLY, limit=1_000_000)) as one:

        async def client(seconds: float) -> list[tuple[float, Any]]:
            loop, results = asyncio.get_running_loop(), []
            until = loop.time() + seconds
            while loop.time() < until:
                results.append(await timed(one.check("acme", "x", "ann")))
                await asyncio.sleep(0.01)
            return results

        assert await one.check("acme", "x", "ann")
        counters.answers.clear()
        first = [
            each
            for part in await asyncio.gather(*[client(0.2) for _ in range(clients)])
            for each in part
        ]
        assert 0.05 <= max(seconds for seconds, _ in first) <= 0.051, "the first ones find out"
        results = [
            each
            for part in await asyncio.gather(*[client(20.0) for _ in range(clients)])
            for each in part
        ]
        assert {decision.decided_by for _, decision in first + results} == {"local_share"}
        assert max(seconds for seconds, _ in results) == 0.0, (
            "nobody waits: it is asked beside the traffic"
        )
        assert len(counters.calls) <= 2 * 20 / counters.silence + 3, (
            "and little is sent to who does not answer"
        )
        assert one.counters_state == "down" and one.health.status()["counters_reason"] == "timeout"
        counters.answers.set()
        await asyncio.sleep(0.1)
        assert (await one.check("acme", "x", "ann")).decided_by == "counters", (
            "it recovers by itself"
        )
        await asyncio.sleep(1.1)
        assert one.counters_state == "degraded", (
            "of the last ten seconds most was without the counters"
        )
        for _ in range(20):
            await one.check("acme", "x", "ann")
            await asyncio.sleep(1.0)
        assert one.counters_state == "up"


async def test_counters_that_hung_and_now_refuse_open_the_breaker() -> None:
    counters = Hanging()
    async with node(counters, HOURLY) as one:
        counters.answers.clear()
        for _ in range(3):
            await one.check("acme", "x", "ann")
        asked = len(counters.calls)
        counters.mood = "unavailable"
        counters.answers.set()
        for _ in range(100):
            assert (await timed(one.check("acme", "x", "ann")))[0] < 2 * counters.delay
            await asyncio.sleep(0.01)
        assert len(counters.calls) - asked <= 5
        counters.mood = "well"
        await asyncio.sleep(1.1)
        assert (await one.check("acme", "x", "ann")).decided_by == "counters"


async def test_holds_do_not_wait_for_hanging_counters() -> None:
    counters, slots = Hanging(), Rule("acme", "x", "concurrency", 10, 3600.0)
    async with node(counters, slots) as one:
        ann = Check("acme", "x", "ann")
        first, second = [(await one.check(*ann)).hold for _ in range(2)]
        counters.answers.clear()
        for _ in range(2):
            await one.check(*ann)
        seconds, renewed = await timed(one.renew(ann, first))
        assert (seconds, renewed.decided_by) == (0.0, "local_share")
        assert await timed(one.release(ann, second)) == (0.0, False), (
            "the counters are notified later"
        )
        counters.answers.set()
        await asyncio.sleep(2.1)
        assert (await one.peek(ann)).used == 3, "first and the two of the outage"


QUIET: dict[str, Any] = {"heartbeat_seconds": 1000.0, "node_ttl_seconds": 5000.0}
"""Nothing happens because of a heartbeat."""


async def test_share_is_computed_again_when_the_nodes_change() -> None:
    counters = Shared()
    async with node(counters, HOURLY, node_ttl_seconds=3.0) as limits:
        shares = []
        for nodes in (1, 4, 2):
            counters.mood, counters.nodes = "well", nodes
            await asyncio.sleep(10)
            counters.mood = "unavailable"
            shares.append((await limits.check("acme", "x", f"ann{nodes}")).limit)
        assert shares == [100, 25, 50]


async def test_pending_charges_are_sent_as_soon_as_the_counters_answer() -> None:
    counters = Shared()
    async with node(counters, HOURLY, **QUIET) as limits:
        counters.mood = "unavailable"
        assert await admitted(limits, 60) == 60
        counters.mood = "well"
        await asyncio.sleep(2)  # the breaker lets one through again
        await limits.check("acme", "x", "bob")
        await asyncio.sleep(0.01)
        assert [(charge.key[1], charge.charged) for charge in counters.adjustments] == [("ann", 60)]


async def test_share_drained_before_reconciliation_is_not_pending() -> None:
    counters = Shared()
    bucket = Rule("acme", "x", "token_bucket", 60, 60.0)
    async with node(counters, bucket, **QUIET) as limits:
        counters.mood = "unavailable"
        assert await admitted(limits, 50) == 50
        await asyncio.sleep(30)
        counters.mood = "well"
        await limits.check("acme", "x", "bob")
        await asyncio.sleep(0.01)
        assert [charge.charged for charge in counters.adjustments] == [20]


async def test_share_that_drained_starts_fresh() -> None:
    counters = Shared()
    limits = node(counters, structs.replace(HOURLY, window_seconds=60.0))
    assert await admitted(limits, 90) == 90
    await asyncio.sleep(61)
    counters.mood = "unavailable"
    assert await admitted(limits, 100) == 100
