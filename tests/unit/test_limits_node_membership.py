"""Among how many nodes limits are shared, whatever the counters remember of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from limits_rig import Members, Shared

from holdfast.limits.limiter.fallback import NodeMembership
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.limiter.settings import LimiterSettings, NodeIdentity
from holdfast.limits.rules import Algorithm, Rule, RuleSet
from proof import virtual_loop

NODES = 10
LIMIT = 100


@pytest.mark.parametrize("outage_seconds", [0.0, 60.0])
async def test_counters_that_lost_all_nodes_do_not_grant_each_node_the_limit(
    outage_seconds: float,
) -> None:
    """Restarted empty, or down for a TTL; then down before all nodes are announced."""
    counters, rules = Members(), RuleSet.of([Rule("acme", "x", "fixed_window", LIMIT, 36_000.0)])
    crowd = [
        Limiter(counters, virtual_loop.LoopClock(), rules=rules, node=NodeIdentity(f"n{n}"))
        for n in range(NODES)
    ]
    for limits in crowd:
        await limits.__aenter__()
        await asyncio.sleep(0.1)
    await asyncio.sleep(1)
    counters.mood = "unavailable"
    await asyncio.sleep(outage_seconds)
    counters.members.clear()
    counters.mood = "well"
    await asyncio.sleep(0.55)
    assert [limits.nodes for limits in crowd] == [NODES] * NODES
    counters.mood = "unavailable"
    checks = [limits.check("acme", "x", "ann") for limits in crowd for _ in range(LIMIT)]
    assert sum(decision.allowed for decision in await asyncio.gather(*checks)) == LIMIT
    for limits in crowd:
        await limits.__aexit__()


async def test_nodes_started_during_an_outage_share_among_the_nodes_last_known(
    tmp_path: Path,
) -> None:
    counters, rules = Members(), RuleSet.of([Rule("acme", "x", "fixed_window", LIMIT, 36_000.0)])

    def crowd(count: int) -> list[Limiter]:
        return [
            Limiter(
                counters,
                virtual_loop.LoopClock(),
                rules=rules,
                node=NodeIdentity(f"n{n}"),
                file=tmp_path / f"n{n}.json",
            )
            for n in range(count)
        ]

    async with AsyncExitStack() as stack:
        for limits in crowd(NODES):
            await stack.enter_async_context(limits)
        await asyncio.sleep(1.5)
    counters.mood = "unavailable"
    async with AsyncExitStack() as stack:
        again = [await stack.enter_async_context(limits) for limits in crowd(NODES)]
        assert [limits.nodes for limits in again] == [NODES] * NODES
        checks = [limits.check("acme", "x", "ann") for limits in again for _ in range(LIMIT)]
        assert sum(decision.allowed for decision in await asyncio.gather(*checks)) == LIMIT
    counters.mood = "well"
    counters.members.clear()
    async with AsyncExitStack() as stack:
        left = [await stack.enter_async_context(limits) for limits in crowd(2)]
        await asyncio.sleep(4)
        assert [limits.nodes for limits in left] == [NODES, NODES], "who else comes back?"
        await asyncio.sleep(4)
        assert [limits.nodes for limits in left] == [2, 2], "the others are gone"
    counters.mood = "unavailable"
    async with crowd(1)[0] as one:
        assert one.nodes == 2


@pytest.mark.parametrize(
    "algorithm", ["token_bucket", "fixed_window", "sliding_window", "concurrency"]
)
@pytest.mark.parametrize("limit", [2, 6, 15])
async def test_shares_add_up_to_a_limit_that_does_not_divide(
    algorithm: Algorithm, limit: int
) -> None:
    """A limit of 2 on 6 nodes once admitted 6. The remainder differs by subject."""
    counters, rules = Members(), RuleSet.of([Rule("acme", "x", algorithm, limit, 36_000.0)])
    async with AsyncExitStack() as stack:
        crowd = [
            Limiter(counters, virtual_loop.LoopClock(), rules=rules, node=NodeIdentity(f"n{n}"))
            for n in range(6)
        ]
        for limits in crowd:
            await stack.enter_async_context(limits)
        await asyncio.sleep(1.5)
        counters.mood = "unavailable"
        has_more = dict.fromkeys(range(6), 0)
        for subject in range(60):
            admitted = [0] * 6
            for n, limits in enumerate(crowd):
                decisions = [await limits.check("acme", "x", f"s{subject}") for _ in range(limit)]
                admitted[n] = sum(decision.allowed for decision in decisions)
                assert all(d.retry_after > 0 for d in decisions if not d.allowed)
                has_more[n] += admitted[n] > limit // 6
            assert sum(admitted) == limit and max(admitted) - min(admitted) <= 1
        assert min(has_more.values()) > 0 or limit == 6, "nobody is always the one"


async def test_nodes_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """It saved how many there were, without names: no node gets the remainder."""
    counters, file = Members(), tmp_path / "nodes.json"
    counters.mood = "unavailable"
    file.write_bytes(b'{"nodes":4}')
    rules = RuleSet.of([Rule("acme", "x", "fixed_window", 10, 36_000.0)])
    async with Limiter(counters, virtual_loop.LoopClock(), rules=rules, file=file) as limits:
        assert limits.nodes == 4
        assert sum([(await limits.check("acme", "x", "ann")).allowed for _ in range(10)]) == 2


@pytest.mark.parametrize(
    "on_disk", [None, b"", b"{", b'{"nodes":0}', b'{"nodes":-3}', b'{"nodes":1e99}', b"\xff"]
)
async def test_node_that_never_knew_others_counts_itself(
    tmp_path: Path, on_disk: bytes | None
) -> None:
    counters, file = Members(), tmp_path / "nodes.json"
    counters.mood = "unavailable"
    if on_disk is not None:
        file.write_bytes(on_disk)
    async with Limiter(counters, virtual_loop.LoopClock(), file=file) as limits:
        assert limits.nodes == 1
        counters.mood = "well"
        await asyncio.sleep(1.1)
    assert file.read_bytes() == b'{"nodes":1,"names":["node"]}'


async def test_disk_that_cannot_save_the_nodes_does_not_stop_the_heartbeat(
    tmp_path: Path,
) -> None:
    counters = Members()
    async with Limiter(
        counters, virtual_loop.LoopClock(), file=tmp_path / "nowhere" / "nodes.json"
    ) as limits:
        await asyncio.sleep(10)
        assert counters.members[limits.node.name] > asyncio.get_running_loop().time() + 3


async def test_dead_node_counts_until_it_is_missing_for_a_ttl() -> None:
    counters, settings = Members(), LimiterSettings(heartbeat_seconds=1.0, node_ttl_seconds=5.0)
    async with Limiter(
        counters, virtual_loop.LoopClock(), settings, node=NodeIdentity("a")
    ) as alive:
        async with Limiter(counters, virtual_loop.LoopClock(), settings, node=NodeIdentity("b")):
            await asyncio.sleep(1.5)
        assert alive.nodes == 2
        await asyncio.sleep(8)
        assert alive.nodes == 2
        await asyncio.sleep(4)
        assert alive.nodes == 1


def test_lower_node_count_is_used_only_after_continuous_answers() -> None:
    members, named = NodeMembership(5.0, "n0"), True

    def answered(count: int, now: float) -> None:
        members.on_answer(count, [f"n{n}" for n in range(count)] if named else (), now)

    for now, count in enumerate([10, 3, 4, 2, 3, 3]):
        answered(count, float(now))
        assert members.count == len(members.names) == 10
    members.on_no_answer()
    answered(3, 20.0)
    answered(6, 24.0)
    assert members.count == len(members.names) == 10, "begun again"
    answered(2, 25.0)
    assert members.count == 6 and members.names == tuple(f"n{n}" for n in range(6)), (
        "as many as were seen"
    )
    answered(7, 25.5)
    assert members.count == len(members.names) == 7, "more at once"
    named = False
    answered(300, 26.0)
    assert (members.count, members.names) == (300, ()), "with 300 nodes not all names are known"


def test_new_node_counts_beside_a_missing_one_until_its_ttl() -> None:
    members = NodeMembership(5.0, "a")
    members.on_answer(2, ["a", "b"], 0.0)
    for now in (1.0, 5.9):
        members.on_answer(2, ["a", "c"], now)
        assert members.names == ("a", "b", "c") and members.count == 3
    members.on_answer(2, ["a", "c"], 6.0)
    assert members.names == ("a", "c") and members.count == 2


def test_outage_restarts_the_ttl_of_a_missing_node() -> None:
    """Fewer nodes count only after a TTL of answers; time without any is no proof."""
    members = NodeMembership(5.0, "n0", count=10)
    members.on_answer(3, (), 0.0)
    members.on_no_answer()
    members.on_answer(3, (), 10.0)
    members.on_answer(3, (), 14.9)
    assert members.count == 10
    members.on_answer(3, (), 15.0)
    assert members.count == 3


PER_HOUR = Rule("acme", "send", "fixed_window", 100, 3600.0)


async def admitted(limiter: Limiter, times: int) -> int:
    decisions = await asyncio.gather(*[limiter.check("acme", "send", "ann") for _ in range(times)])
    return sum(decision.allowed for decision in decisions)


@pytest.mark.covers("004 split brain: 5 seen of 10")
async def test_ten_nodes_that_see_five_admit_at_most_twice_the_limit() -> None:
    total = 0
    for n in range(10):
        counters = Shared()
        counters.nodes = 5
        async with Limiter(
            counters,
            virtual_loop.LoopClock(),
            rules=RuleSet.of([PER_HOUR]),
            node=NodeIdentity(f"n{n}", "here"),
        ) as node:
            counters.mood = "unavailable"
            total += await admitted(node, 300)
    assert total == 200
