"""Among how many nodes limits are shared, whatever the counters remember of them."""

from __future__ import annotations

import asyncio

import pytest
import virtual
from limitworld import Members

from holdfast.limits.limiter import Limiter, LimiterSettings, Place
from holdfast.limits.membership import Membership
from holdfast.limits.rules import Rule, RuleSet

NODES = 10
LIMIT = 100


@pytest.mark.parametrize("outage_seconds", [0.0, 60.0])
def test_counters_that_forgot_everybody_do_not_give_each_node_the_whole_limit(outage_seconds: float) -> None:
    """Restarted empty, or away for longer than anybody is remembered; then away again before all are back."""

    async def main() -> None:
        counters, rules = Members(), RuleSet.of([Rule("acme", "x", "fixed_window", LIMIT, 36_000.0)])
        crowd = [Limiter(counters, virtual.LoopClock(), rules=rules, place=Place(f"n{n}")) for n in range(NODES)]
        for limits in crowd:
            await limits.__aenter__()
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        counters.mood = "away"
        await asyncio.sleep(outage_seconds)
        counters.members.clear()
        counters.mood = "well"
        await asyncio.sleep(0.55)
        assert [limits.nodes for limits in crowd] == [NODES] * NODES
        counters.mood = "away"
        checks = [limits.check("acme", "x", "ann") for limits in crowd for _ in range(LIMIT)]
        assert sum(decision.allowed for decision in await asyncio.gather(*checks)) == LIMIT
        for limits in crowd:
            await limits.__aexit__()

    virtual.run(main())


def test_who_died_is_counted_until_it_was_missing_for_a_whole_ttl() -> None:
    async def main() -> None:
        counters, settings = Members(), LimiterSettings(heartbeat_seconds=1.0, node_ttl_seconds=5.0)
        async with Limiter(counters, virtual.LoopClock(), settings, place=Place("a")) as alive:
            async with Limiter(counters, virtual.LoopClock(), settings, place=Place("b")):
                await asyncio.sleep(1.5)
            assert alive.nodes == 2
            await asyncio.sleep(8)
            assert alive.nodes == 2
            await asyncio.sleep(4)
            assert alive.nodes == 1

    virtual.run(main())


def test_fewer_are_believed_only_while_the_counters_answer_all_the_time() -> None:
    members = Membership(5.0)
    for now, count in enumerate([10, 3, 4, 2, 3, 3]):
        members.seen(count, float(now))
        assert members.count == 10
    members.unseen()
    members.seen(3, 20.0)
    members.seen(6, 24.0)
    assert members.count == 10, "begun again"
    members.seen(2, 25.0)
    assert members.count == 6, "as many as were seen"
    members.seen(7, 25.5)
    assert members.count == 7, "more at once"
