"""Rows of the limits document that no other test carries: regions, a split brain, the
start, the admin's own errors.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from limits_rig import Log, Shared

from holdfast.clock import SystemClock
from holdfast.errors import Unavailable
from holdfast.limits.admin import RuleAdmin
from holdfast.limits.feed import RuleFeed
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.limiter.settings import NodeIdentity
from holdfast.limits.rule_changes import Change, RuleChangeResult
from holdfast.limits.rules import Rule, RuleSet, RuleSnapshot
from holdfast.limits.rulestore.sqlite import SqliteRuleStore
from holdfast.telemetry import REGISTRY
from proof import virtual_loop

RULE = Rule("acme", "send", "fixed_window", 100, 3600.0)


async def admitted(limiter: Limiter, times: int) -> int:
    decisions = await asyncio.gather(*[limiter.check("acme", "send", "ann") for _ in range(times)])
    return sum(decision.allowed for decision in decisions)


@pytest.mark.covers("004 scenario 8: each region grants the whole limit")
@pytest.mark.parametrize(("redises", "granted"), [(1, 100), (2, 200)])
async def test_region_is_a_label_and_only_its_own_redis_grants_a_limit(
    redises: int, granted: int
) -> None:
    """The name of a region is in every decision and separates nothing: regions on one
    Redis share one limit.
    """
    nodes: list[Limiter] = []
    counters = [Shared() for _ in range(redises)]
    for index, region in enumerate(("us-east", "us-east", "eu-west", "eu-west")):
        identity = NodeIdentity(f"n{index}", region)
        shared = counters[0 if region == "us-east" else -1]
        nodes.append(
            Limiter(shared, virtual_loop.LoopClock(), rules=RuleSet.of([RULE]), node=identity)
        )
    assert sum([await admitted(node, 80) for node in nodes]) == granted
    for node in nodes:
        assert (await node.check("acme", "send", "ann")).region == node.node.region


@pytest.mark.covers("004 open questions: split brain, 5 seen of 10")
async def test_ten_nodes_that_see_five_admit_at_most_twice_the_limit() -> None:
    total = 0
    for n in range(10):
        counters = Shared()
        counters.nodes = 5
        async with Limiter(
            counters,
            virtual_loop.LoopClock(),
            rules=RuleSet.of([RULE]),
            node=NodeIdentity(f"n{n}", "here"),
        ) as node:
            counters.mood = "away"
            total += await admitted(node, 300)
    assert total == 200


class Busy(Log):
    """While it is being read, somebody changes a rule and notifies."""

    async def snapshot(self) -> RuleSnapshot:
        found = await super().snapshot()
        await asyncio.sleep(0.1)
        if len(self.changes) == 1:
            self.put("a", 50)
        return found


@pytest.mark.covers("004 scenario 7: load all, then subscribe")
async def test_change_during_startup_is_not_lost() -> None:
    """It listens first: a notification that comes while it loads is applied, and not only at the
    next sync.
    """
    log = Busy()
    log.put("a", 5)
    feed = RuleFeed(log, [log], lambda rules: None, virtual_loop.LoopClock(), None)
    async with feed:
        await asyncio.sleep(1)
        found = feed.rules.lookup("acme", "a")
        assert len(log.changes) == 2, "it changed while it was read"
        assert found is not None and found.limit == 50


class Away(SqliteRuleStore):
    async def change(self, change: Change) -> RuleChangeResult:
        raise Unavailable("the database of the rules cannot be reached now")


@pytest.mark.real_time
@pytest.mark.covers(
    '004 scenario 1: admin_errors_total{operation="update_rule", error="db_connection_failed"}'
)
async def test_unavailable_database_is_counted_as_an_admin_error(tmp_path: Path) -> None:
    def count() -> float:
        labels = {"operation": "update_rule", "error": "db_connection_failed"}
        return REGISTRY.get_sample_value("holdfast_admin_errors_total", labels) or 0.0

    before, clock = count(), SystemClock()
    async with Away(tmp_path / "limits.db", clock) as away:
        control = RuleAdmin(away, clock, "embedded")
        with pytest.raises(Unavailable):
            await control.update(
                {"tenantID": "acme", "resource": "/a", "limit": 1, "expectedVersion": 1}, "olga"
            )
    assert count() == before + 1
