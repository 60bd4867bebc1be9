"""Rules that a failover or a restore has lost decide nowhere any more, and those of
another store never did.

The surviving rule may have a lower version than the lost one. In virtual time.
"""

from __future__ import annotations

import pytest
from limits_rig import Shared
from msgspec import structs

from holdfast.clock import ManualClock
from holdfast.limits.counters.memory import MemoryCounters
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.limiter.settings import LimiterSettings
from holdfast.limits.rules import Algorithm, Rule, RuleSet, RuleSnapshot
from proof import virtual_loop

ALGORITHMS: list[Algorithm] = ["token_bucket", "fixed_window", "sliding_window", "concurrency"]


def rule(limit: int, version: int, algorithm: Algorithm = "fixed_window", epoch: int = 1) -> Rule:
    return Rule("acme", "x", algorithm, limit, 36_000.0, version=version, epoch=epoch)


def lost_and_survived(lost: Rule, survivor: Rule) -> tuple[RuleSet, RuleSet]:
    """What a node has before and after a failover that lost ``lost``."""
    before = RuleSet().merge_snapshot(RuleSnapshot(1, 9, (lost,), store="ours"))
    return before, before.merge_snapshot(RuleSnapshot(2, 8, (survivor,), store="ours"))


async def admitted(limits: Limiter, times: int) -> int:
    return sum([(await limits.check("acme", "x", "ann")).allowed for _ in range(times)])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shared", [False, True])
async def test_surviving_rule_decides_where_the_lost_one_was_counted(
    algorithm: Algorithm, shared: bool
) -> None:
    counters = Shared() if shared else MemoryCounters(ManualClock())
    before, after = lost_and_survived(rule(2, 9, algorithm), rule(1000, 8, algorithm))
    behind = [0, 0]
    heard = Limiter(
        counters, virtual_loop.LoopClock(), rules=before, on_behind=lambda: _count(behind, 0)
    )
    unheard = Limiter(
        counters, virtual_loop.LoopClock(), rules=before, on_behind=lambda: _count(behind, 1)
    )
    assert await admitted(heard, 5) == 2
    heard.use(after)
    decision = await heard.check("acme", "x", "ann")
    assert (decision.allowed, decision.limit, decision.rule_version) == (True, 1000, 8)
    assert behind == [0, 0]
    later = await unheard.check("acme", "x", "bob" if algorithm == "concurrency" else "ann")
    if algorithm != "concurrency":
        assert (later.allowed, later.limit, later.rule_version) == (True, 1000, 8), (
            "a node that is behind is notified"
        )
        assert not shared or behind == [0, 1]


def _count(counts: list[int], place: int) -> None:
    counts[place] += 1


async def test_denial_and_lease_of_the_lost_rule_do_not_answer() -> None:
    before, after = lost_and_survived(rule(2, 9), rule(1000, 8))
    limits = Limiter(Shared(), virtual_loop.LoopClock(), rules=before)
    assert await admitted(limits, 3) == 2
    denied = limits.try_check("acme", "x", "ann")
    assert denied is not None and denied.decided_by == "denial_cache"
    limits.use(after)
    assert limits.try_check("acme", "x", "ann") is None, "the counters must be asked again"
    assert (await limits.check("acme", "x", "ann")).allowed

    leased = structs.replace(rule(1000, 9), precision="leased")
    before, after = lost_and_survived(leased, structs.replace(leased, limit=3, version=8))
    limits = Limiter(Shared(), virtual_loop.LoopClock(), LimiterSettings(lease_percent=10), before)
    await admitted(limits, 8)
    assert limits.lease_stock > 50
    limits.use(after)
    assert await admitted(limits, 20) == 0, "more than 3 are used"


async def test_local_share_follows_the_surviving_rule() -> None:
    counters = Shared()
    before, after = lost_and_survived(rule(2, 9), rule(50, 8))
    limits = Limiter(counters, virtual_loop.LoopClock(), rules=before)
    counters.mood = "unavailable"
    assert await admitted(limits, 5) == 2
    limits.use(after)
    assert await admitted(limits, 100) == 48


@pytest.mark.parametrize("algorithm", ["token_bucket", "fixed_window", "sliding_window"])
async def test_node_with_the_rules_of_another_store_is_decided_by_its_own(
    algorithm: Algorithm,
) -> None:
    """A database filled again, or an emptied state directory: versions begin at 1, and
    what was used stays used.
    """
    counters, behind = Shared(), [0]
    old = RuleSet.of([rule(10, 9, algorithm)], 1, "old")
    new = RuleSet.of([rule(100, 1, algorithm)], 1, "new")
    first = Limiter(
        counters, virtual_loop.LoopClock(), rules=old, on_behind=lambda: _count(behind, 0)
    )
    assert await admitted(first, 12) == 10
    second = Limiter(
        counters, virtual_loop.LoopClock(), rules=new, on_behind=lambda: _count(behind, 0)
    )
    decision = await second.check("acme", "x", "ann")
    assert (decision.limit, decision.rule_version, decision.remaining) == (100, 1, 89)
    still = await first.check("acme", "x", "ann")
    assert (still.allowed, still.limit) == (False, 10), "each has the limit of its own rules"
    first.use(new)
    assert await admitted(first, 100) == 89, (
        "a node that reads another store forgets what the old one denied"
    )
    assert behind == [0]


async def test_default_rules_yield_to_those_of_any_store() -> None:
    """A node that starts without its database has only the default rules."""
    counters = Shared()
    stored = Limiter(counters, virtual_loop.LoopClock(), rules=RuleSet.of([rule(3, 1)], 1, "ours"))
    await admitted(stored, 1)
    starting = Limiter(
        counters, virtual_loop.LoopClock(), rules=RuleSet.of([rule(100, 0, epoch=0)])
    )
    assert await admitted(starting, 10) == 2
