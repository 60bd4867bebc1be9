"""What is easily lost when the limiter is changed, because nothing else notices. In
virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from limits_rig import Shared
from msgspec import structs

from holdfast.errors import InvalidCheck
from holdfast.limits.counters.contract import CounterRequest, CounterResponse
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.limiter.settings import LimiterSettings, NodeIdentity
from holdfast.limits.rules import Check, Rule, RuleSet
from proof import virtual_loop

RULE = Rule("acme", "x", "fixed_window", 100, 36_000.0)
QUIET: dict[str, Any] = {"heartbeat_seconds": 1000.0, "node_ttl_seconds": 5000.0}
"""Nothing happens here because of a heartbeat."""


def node(counters: Shared, rule: Rule = RULE, **settings: Any) -> Limiter:
    return Limiter(
        counters,
        virtual_loop.LoopClock(),
        LimiterSettings(**settings),
        RuleSet.of([rule]),
        NodeIdentity("a", "eu"),
    )


async def admitted(limits: Limiter, times: int) -> int:
    return sum([(await limits.check("acme", "x", "ann")).allowed for _ in range(times)])


async def test_share_is_computed_again_when_the_nodes_change() -> None:
    counters = Shared()
    async with node(counters, node_ttl_seconds=3.0) as limits:
        shares = []
        for nodes in (1, 4, 2):
            counters.mood, counters.nodes = "well", nodes
            await asyncio.sleep(10)
            counters.mood = "away"
            shares.append((await limits.check("acme", "x", f"ann{nodes}")).limit)
        assert shares == [100, 25, 50]


async def test_peek_shows_use_beyond_the_capacity() -> None:
    """It said 5 used of 5, and that nothing would be used in 227 s of a window of 60 s."""
    counters, ann = Shared(), Check("acme", "x", "ann")
    limits = node(counters, Rule("acme", "x", "token_bucket", 5, 60.0))
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


async def test_pending_charges_are_sent_as_soon_as_the_counters_answer() -> None:
    counters = Shared()
    async with node(counters, **QUIET) as limits:
        counters.mood = "away"
        assert await admitted(limits, 60) == 60
        counters.mood = "well"
        await asyncio.sleep(2)  # the breaker lets one through again
        await limits.check("acme", "x", "bob")
        await asyncio.sleep(0.01)
        assert [(debt.key[1], debt.charged) for debt in counters.adjustments] == [("ann", 60)]


async def test_share_drained_before_reconciliation_is_not_pending() -> None:
    counters = Shared()
    bucket = Rule("acme", "x", "token_bucket", 60, 60.0)
    async with node(counters, bucket, **QUIET) as limits:
        counters.mood = "away"
        assert await admitted(limits, 50) == 50
        await asyncio.sleep(30)
        counters.mood = "well"
        await limits.check("acme", "x", "bob")
        await asyncio.sleep(0.01)
        assert [debt.charged for debt in counters.adjustments] == [20]


async def test_share_that_drained_starts_fresh() -> None:
    counters = Shared()
    limits = node(counters, structs.replace(RULE, window_seconds=60.0))
    assert await admitted(limits, 90) == 90
    await asyncio.sleep(61)
    counters.mood = "away"
    assert await admitted(limits, 100) == 100


async def test_group_answer_is_cached_per_key() -> None:
    """That its node is behind, and what was denied."""
    counters, behind = Shared(), []
    rules = [RULE, structs.replace(RULE, resource="y", limit=1)]
    newer = Limiter(
        counters, virtual_loop.LoopClock(), rules=RuleSet.of([structs.replace(RULE, version=2)])
    )
    await newer.check("acme", "x", "ann")
    limits = Limiter(
        counters,
        virtual_loop.LoopClock(),
        rules=RuleSet.of(rules),
        on_behind=lambda: behind.append("told"),
    )
    group = [Check("acme", "x", "ann"), Check("acme", "y", "ann")]
    assert [d.rule_version for d in await limits.check_many(group)] == [2, 1]
    assert behind == ["told"]
    assert [d.exceeded for d in await limits.check_many(group)] == [False, True]
    remembered = limits.try_check("acme", "y", "ann")
    assert remembered is not None and remembered.decided_by == "denial_cache"


async def test_group_whose_sum_can_never_fit_is_an_error() -> None:
    counters = Shared()
    limits = node(counters)
    with pytest.raises(InvalidCheck, match="cost"):
        await limits.check_many([Check("acme", "x", "ann", 60), Check("acme", "x", "ann", 41)])
    assert not counters.calls
    decisions = await limits.check_many(
        [Check("acme", "x", "ann", 60), Check("acme", "x", "ann", 40)]
    )
    assert [d.allowed for d in decisions] == [True, True]


async def test_node_that_stops_returns_its_leases() -> None:
    counters = Shared()
    leased = structs.replace(RULE, precision="leased")
    async with node(counters, leased, lease_percent=10, **QUIET) as limits:
        await admitted(limits, 8)
        stock = limits.lease_stock
        assert stock > 0
    assert sum(gift.given for gift in counters.adjustments) == stock
    assert (
        await node(counters, leased, lease_percent=0).check("acme", "x", "ann")
    ).remaining == 100 - 8 - 1


async def test_decision_by_lease_has_its_region() -> None:
    limits = node(Shared(), structs.replace(RULE, precision="leased"), lease_percent=10)
    decisions = [await limits.check("acme", "x", "ann") for _ in range(3)]
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
    limits = node(counters)
    counters.mood = "away"
    await admitted(limits, 5)
    assert limits.counters_state == "down"
    counters.mood, counters.withdraw = "well", True
    await asyncio.sleep(2)
    assert (await limits.check("acme", "x", "ann")).degraded, "the probe told nothing"
    counters.withdraw = False
    assert not (await limits.check("acme", "x", "ann")).degraded
    assert limits.counters_state == "up"
