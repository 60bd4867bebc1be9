"""Holds of concurrency rules: granted, renewed, released, cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from limits_rig import Shared
from msgspec import structs

from holdfast.errors import Unavailable
from holdfast.limits.counters.contract import Adjustment
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.rules import Check, Rule, RuleSet
from proof import virtual_loop

SLOTS = Rule("acme", "slots", "concurrency", 2, 3600.0)
ANN = Check("acme", "slots", "ann")


@asynccontextmanager
async def opened(rule: Rule = SLOTS) -> AsyncIterator[tuple[Limiter, Shared]]:
    counters = Shared()
    async with Limiter(counters, virtual_loop.LoopClock(), rules=RuleSet.of([rule])) as limits:
        yield limits, counters


async def free(limits: Limiter) -> int:
    """How many places there are, by taking and leaving them."""
    await asyncio.sleep(2)  # two heartbeats: whatever is owed is settled
    taken = [
        decision.hold
        for decision in [await limits.check(*ANN) for _ in range(3)]
        if decision.allowed
    ]
    for hold in taken:
        assert await limits.release(ANN, hold)
    return len(taken)


@pytest.mark.parametrize("turns", range(6))
async def test_cancelled_check_keeps_no_hold(turns: int) -> None:
    """Whenever it is cancelled: before the counters are asked, before they answer, or
    before the answer is read.
    """

    async with opened() as (limits, counters):
        for _ in range(2):
            asking = asyncio.create_task(limits.check(*ANN))
            if turns < 5:
                for _ in range(turns):
                    await asyncio.sleep(0)
            else:
                await asyncio.sleep(counters.delay)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        assert await free(limits) == 2


async def test_cancelled_group_keeps_no_hold() -> None:
    async with opened() as (limits, counters):
        limits.use(RuleSet.of([SLOTS, Rule("acme", "calls", "token_bucket", 100, 1.0)]))
        for delay in (0, counters.delay / 2, counters.delay):
            asking = asyncio.create_task(limits.check_many([ANN, Check("acme", "calls", "ann")]))
            await asyncio.sleep(delay)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        assert await free(limits) == 2


async def test_late_answer_to_a_refused_caller_keeps_no_hold() -> None:
    async with opened(structs.replace(SLOTS, on_store_failure="closed")) as (limits, counters):
        counters.delay = 0.06
        assert not (await limits.check(*ANN)).allowed, "closed, after the deadline"
        assert not (await limits.check(*ANN)).allowed
        counters.delay = 0.001
        assert await free(limits) == 2


async def test_release_during_an_outage_is_made_up_for_after_it() -> None:
    async with opened() as (limits, counters):
        held = [(await limits.check(*ANN)).hold for _ in range(2)]
        counters.mood = "unavailable"
        assert [await limits.release(ANN, hold) for hold in held] == [False, False]
        counters.mood = "well"
        assert await free(limits) == 2


@pytest.mark.parametrize(
    "now",
    [
        structs.replace(SLOTS, mode="off", version=2),
        structs.replace(SLOTS, algorithm="token_bucket", version=2),
        Rule("acme", "slots", "fixed_window", 5, 60.0, version=9),
    ],
)
async def test_hold_is_released_where_it_was_granted_after_a_rule_change(
    now: Rule,
) -> None:
    general = structs.replace(SLOTS, tenant="*")

    async with opened(general) as (limits, _):
        held = [(await limits.check(*ANN)).hold for _ in range(2)]
        limits.use(RuleSet.of([general, now]))
        assert [await limits.release(ANN, hold) for hold in held] == [True, True]
        limits.use(RuleSet.of([structs.replace(general, version=3)]))
        assert await free(limits) == 2


async def test_hold_of_another_subject_is_not_released() -> None:
    async with opened() as (limits, _):
        hold = (await limits.check(*ANN)).hold
        for other in (Check("acme", "slots", "bob"), Check("evil", "slots", "ann")):
            assert not await limits.release(other, hold)
        assert await limits.release(ANN, hold)


@pytest.mark.parametrize("shared", [True, False])
async def test_renewed_hold_lasts(shared: bool) -> None:
    async with opened() as (limits, counters):
        counters.in_process = limits._counters_in_process = not shared
        held = [(await limits.check(*ANN)).hold for _ in range(2)]
        for _ in range(10):
            await asyncio.sleep(1800)
            assert (await limits.renew(ANN, held[0])).hold == held[0]
        assert (await limits.check(*ANN)).allowed, "the other did not come back"
        assert not (await limits.check(*ANN)).allowed
        assert await limits.release(ANN, held[0])
        assert not await limits.release(ANN, held[1])


async def test_renew_without_a_rule_is_allowed() -> None:
    async with opened() as (limits, _):
        hold = (await limits.check(*ANN)).hold
        limits.use(RuleSet.of([structs.replace(SLOTS, mode="off", version=2)]))
        assert (await limits.renew(ANN, hold)).allowed
        assert (await limits.renew(ANN, "nonsense")).allowed


@pytest.mark.parametrize("mood", ["unavailable", "lost", "silent"])
async def test_renewal_without_an_answer_grants_nothing_more(mood: str) -> None:
    async with opened() as (limits, counters):
        held = [(await limits.check(*ANN)).hold for _ in range(2)]
        counters.mood = mood
        assert (await limits.renew(ANN, held[0])).degraded
        counters.mood = "well"
        assert await free(limits) == 0
        assert [await limits.release(ANN, hold) for hold in held] == [True, True]
        assert await free(limits) == 2


@pytest.mark.parametrize("asked_between", ["", "check", "peek"])
async def test_hold_is_released_on_another_node_after_a_change_of_algorithm(
    asked_between: str,
) -> None:
    async with opened() as (limits, counters):
        elsewhere = Limiter(counters, virtual_loop.LoopClock(), rules=limits.rules)
        held = await limits.check(*ANN)
        rate = structs.replace(SLOTS, algorithm="token_bucket", limit=10, version=2)
        for node in (limits, elsewhere):
            node.use(RuleSet.of([rate]))
        if asked_between == "check":
            assert (await elsewhere.check(*ANN)).remaining == 9
        elif asked_between == "peek":
            assert (standing := await elsewhere.peek(ANN)) is not None and standing.remaining == 10
        assert (await elsewhere.renew(ANN, held.hold)).decided_by == "no_rule", (
            "a rate has nothing to renew"
        )
        assert await elsewhere.release(ANN, held.hold) is (asked_between == ""), (
            "known until somebody counts by the new rule"
        )
        limits.use(RuleSet.of([structs.replace(SLOTS, version=3)]))
        assert await free(limits) == 2


async def test_unconfirmed_release_is_repeated_until_confirmed() -> None:
    class Refusing(Shared):
        refusals = 0

        async def adjust(self, adjustments: Sequence[Adjustment]) -> int:
            if self.refusals:
                self.refusals -= 1
                raise Unavailable("not now")
            return await super().adjust(adjustments)

    counters, slots = Refusing(), Rule("acme", "x", "concurrency", 1, 3600.0)
    async with Limiter(counters, virtual_loop.LoopClock(), rules=RuleSet.of([slots])) as one:
        ann = Check("acme", "x", "ann")
        hold = (await one.check(*ann)).hold
        counters.refusals = 3
        assert not await one.release(ann, hold)
        assert not (await one.check(*ann)).allowed
        await asyncio.sleep(4.0)
        assert (await one.check(*ann)).allowed
