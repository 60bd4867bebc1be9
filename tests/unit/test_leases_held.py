"""A held lease: when its holder starts, stops and hands over, whatever the engine does.

The negative control judges leases by the wall clocks of two nodes: both hold at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from holdfast.clock import Clock
from holdfast.errors import Unavailable
from holdfast.store.leases.contract import Fence, Leases
from holdfast.store.leases.held import BEAT_SECONDS, LEASE_SECONDS, HeldLease
from holdfast.store.leases.memory import MemoryLeases
from proof.faults import Fault, FaultPlan, Odds, faulty
from proof.virtual_loop import LoopClock


class LeaseNode:
    """One node that wants the lease; ``plan`` breaks its way to the engine."""

    def __init__(self, leases: Leases, seed: int = 0) -> None:
        self.plan = FaultPlan(random.Random(seed))
        self.held = HeldLease(faulty(leases, self.plan), "work", LoopClock())
        self.task = asyncio.create_task(self.held.run())

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def nodes(*leases: Leases) -> AsyncIterator[list[LeaseNode]]:
    made = [LeaseNode(each, seed) for seed, each in enumerate(leases)]
    await asyncio.sleep(0.01)
    yield made
    for node in made:
        await node.stop()


async def test_one_of_two_holds_it_and_the_other_follows_a_stop_at_once() -> None:
    leases = MemoryLeases(LoopClock())
    async with nodes(leases, leases) as (one, two):
        await asyncio.sleep(60)
        fence = one.held.fence
        assert fence is not None
        assert two.held.fence is None
        await one.stop()
        assert one.held.fence is None
        await asyncio.sleep(BEAT_SECONDS)
        assert two.held.fence is not None
        assert two.held.fence > fence


class Rounds:
    """Work that one node repeats: how often it began, and what came in its way."""

    def __init__(self) -> None:
        self.began, self.seconds = 0, 0.0
        self.error: Exception | None = None
        self.failures: list[str] = []

    async def work(self) -> None:
        self.began += 1
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error

    def on_failure(self, error: Exception) -> None:
        self.failures.append(type(error).__name__)


async def test_one_of_two_nodes_repeats_the_work_and_the_other_takes_over() -> None:
    leases, made = MemoryLeases(LoopClock()), [Rounds(), Rounds()]
    tasks = [
        asyncio.create_task(
            HeldLease(leases, "work", LoopClock()).repeat(5, each.work, each.on_failure)
        )
        for each in made
    ]
    await asyncio.sleep(51)
    assert [each.began for each in made] == [10, 0]
    tasks[0].cancel()
    await asyncio.sleep(50)
    assert [each.began for each in made] == [10, 10]
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_round_that_fails_or_hangs_is_reported_and_the_next_one_comes() -> None:
    lease, rounds = HeldLease(MemoryLeases(LoopClock()), "work", LoopClock()), Rounds()
    task = asyncio.create_task(lease.repeat(5, rounds.work, rounds.on_failure))
    rounds.error = Unavailable("the store restarts")
    await asyncio.sleep(6)
    rounds.seconds = 60
    await asyncio.sleep(10)
    assert rounds.failures == ["Unavailable", "TimeoutError"]
    rounds.seconds, rounds.error = 0, KeyError("a defect")
    with pytest.raises(ExceptionGroup):
        await task
    assert rounds.began == 3


async def test_holder_stops_two_thirds_after_it_sent_its_last_renewal() -> None:
    leases = MemoryLeases(LoopClock())
    async with nodes(leases) as (one,):
        one.plan.script["renew"] = [Fault.LATE_REPLY]
        one.plan.odds = {"*": Odds(fail=1.0, seconds_max=0.9)}
        await asyncio.sleep(BEAT_SECONDS)  # the renewal was sent 0.01 s ago
        await asyncio.sleep(LEASE_SECONDS * 2 / 3 - 0.02)
        assert one.held.fence is not None
        await asyncio.sleep(0.02)
        assert one.held.fence is None


async def test_holder_whose_lease_ended_asks_for_a_new_fence() -> None:
    leases = MemoryLeases(LoopClock())
    async with nodes(leases) as (one,):
        fence = one.held.fence
        assert fence is not None
        one.plan.odds = {"*": Odds(fail=1.0)}
        await asyncio.sleep(LEASE_SECONDS + BEAT_SECONDS)
        one.plan.heal()
        await asyncio.sleep(BEAT_SECONDS)
        assert one.held.fence is not None
        assert one.held.fence > fence


@pytest.mark.parametrize("seed", range(20))
async def test_no_two_hold_it_whatever_calls_are_lost_or_late(seed: int) -> None:
    rng = random.Random(seed)
    leases = MemoryLeases(LoopClock())
    async with nodes(leases, leases, leases) as all_nodes:
        assert await _hold_at_once(all_nodes, rng) == 0


class WallClockLeases(MemoryLeases):
    """The negative control: each node judges the end of a lease by its own wall
    clock.
    """

    def __init__(self, shared: MemoryLeases, ahead_seconds: float) -> None:
        self._held = shared._held
        self._clock = Ahead(ahead_seconds)


class Ahead(Clock):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def now(self) -> float:
        return self.monotonic()

    def monotonic(self) -> float:
        return LoopClock().now() + self._seconds


async def test_control_leases_by_two_wall_clocks_are_held_twice() -> None:
    shared = MemoryLeases(LoopClock())
    behind, ahead = WallClockLeases(shared, 0.0), WallClockLeases(shared, 3600.0)
    async with nodes(behind, ahead) as both:
        assert await _hold_at_once(both, random.Random(1), faults=False) > 0


async def _hold_at_once(
    all_nodes: list[LeaseNode], rng: random.Random, *, faults: bool = True
) -> int:
    """How often two held the lease, or a fence was held again after a higher one."""
    wrong, highest, kept = 0, Fence(0, 0), 0
    for _ in range(600):
        if faults and rng.random() < 0.05:
            odds = {name: rng.choice([0.0, 0.3]) for name in ("fail", "lost_reply", "late_reply")}
            rng.choice(all_nodes).plan.odds = {"*": Odds(**odds, seconds_max=10.0)}
        await asyncio.sleep(0.1)
        held = [node.held.fence for node in all_nodes if node.held.fence is not None]
        wrong += len(held) > 1 or any(fence < highest for fence in held)
        highest = max([highest, *held])
        kept += len(held)
    assert kept > 100, "somebody held it most of the time"
    return wrong
