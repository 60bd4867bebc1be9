"""``Limiter.charge``: what was used is counted, whether it fits or not."""

from __future__ import annotations

import asyncio

import pytest
from limits_rig import Shared

from holdfast.clock import ManualClock
from holdfast.errors import InvalidCheck
from holdfast.limits.counters.memory import MemoryCounters
from holdfast.limits.entry_points import EntryPoints
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.limiter.settings import NodeIdentity
from holdfast.limits.rule_json import LIMIT_MAX
from holdfast.limits.rules import Algorithm, Check, Mode, Rule, RuleSet
from holdfast.message import User
from proof import virtual_loop

HOUR = 3600.0
ANN = ("acme", "tokens", "ann")


def rule(algorithm: Algorithm = "token_bucket", limit: int = 100, mode: Mode = "enforce") -> Rule:
    return Rule("acme", "tokens", algorithm, limit, HOUR, mode=mode)


def limiter_of(
    counters: MemoryCounters, *rules: Rule, clock: ManualClock | None = None, node: str = "a"
) -> Limiter:
    return Limiter(
        counters,
        clock or virtual_loop.LoopClock(),
        rules=RuleSet.of(rules),
        node=NodeIdentity(node),
    )


@pytest.mark.parametrize(
    ("algorithm", "again_after"),
    [("token_bucket", HOUR * 1.02), ("fixed_window", HOUR), ("sliding_window", HOUR * 2)],
)
async def test_overdrawn_subject_is_refused_until_the_excess_has_drained(
    algorithm: Algorithm, again_after: float
) -> None:
    clock = ManualClock()
    limiter = limiter_of(MemoryCounters(clock), rule(algorithm), clock=clock)
    limiter.charge(*ANN, 201)
    refused = await limiter.check(*ANN)
    assert not refused.allowed and refused.retry_after <= again_after
    clock.advance(refused.retry_after - 1)
    assert not (await limiter.check(*ANN)).allowed
    clock.advance(1)
    assert (await limiter.check(*ANN)).allowed
    assert (await limiter.check("acme", "tokens", "bob")).allowed, "others are not concerned"


async def test_overdraft_of_a_bucket_is_visible_to_an_operator() -> None:
    clock = ManualClock()
    limiter = limiter_of(MemoryCounters(clock), rule(), clock=clock)
    limiter.charge(*ANN, 250)
    standing = await limiter.peek(Check(*ANN))
    assert standing is not None and (standing.used, standing.remaining) == (250, 0)


@pytest.mark.parametrize("near", [True, False])
async def test_charge_counts_at_once_or_with_the_batch_of_its_turn(near: bool) -> None:
    counters = MemoryCounters(virtual_loop.LoopClock()) if near else Shared()
    limiter = limiter_of(counters, rule())
    for amount in (30, 30, 50, -20, -20):
        limiter.charge(*ANN, amount)
    if isinstance(counters, Shared):
        await asyncio.sleep(0.01)
        assert len(counters.calls) == 1, "one call for all"
    assert (await limiter.check(*ANN)).remaining == 100 - 70 - 1


async def test_giving_back_ends_a_remembered_refusal_of_this_node() -> None:
    limiter = limiter_of(Shared(), rule())
    limiter.charge(*ANN, 100)
    assert not (await limiter.check(*ANN)).allowed
    assert (await limiter.check(*ANN)).decided_by == "denial_cache"
    limiter.charge(*ANN, -10)
    await asyncio.sleep(0.01)
    assert (await limiter.check(*ANN)).allowed


@pytest.mark.parametrize("mood", ["unavailable", "lost", "silent", "broken"])
async def test_charge_without_an_answer_counts_in_the_local_share(mood: str) -> None:
    counters = Shared()
    async with limiter_of(counters, rule()) as limiter:
        counters.mood = mood
        limiter.charge(*ANN, 150)
        await asyncio.sleep(0.2)
        refused = await limiter.check(*ANN)
        assert (refused.allowed, refused.degraded) == (False, True)
        limiter.charge(*ANN, -100)
        await asyncio.sleep(0.2)
        assert (await limiter.check(*ANN)).allowed


@pytest.mark.parametrize(("amounts", "left"), [((60,), 40), ((60, -20), 60), ((500,), 0)])
async def test_share_passes_its_charges_on_when_the_counters_answer_again(
    amounts: tuple[int, ...], left: int
) -> None:
    counters = Shared()
    async with limiter_of(counters, rule()) as one, limiter_of(counters, rule(), node="b") as other:
        counters.mood = "unavailable"
        for amount in amounts:
            one.charge(*ANN, amount)
            await asyncio.sleep(0.2)
        counters.mood = "well"
        await asyncio.sleep(1.1)
        standing = await other.peek(Check(*ANN))
        assert standing is not None and standing.remaining == left


async def test_what_was_charged_before_an_outage_is_given_back_after_it() -> None:
    counters = Shared()
    async with limiter_of(counters, rule()) as limiter:
        limiter.charge(*ANN, 80)
        await asyncio.sleep(0.1)
        counters.mood = "unavailable"
        limiter.charge(*ANN, -50)
        await asyncio.sleep(0.2)
        counters.mood = "well"
        await asyncio.sleep(1.1)
        standing = await limiter.peek(Check(*ANN))
        assert standing is not None and standing.used == 30


@pytest.mark.parametrize("near", [True, False])
async def test_charge_counts_nothing_without_an_enforced_rule_or_by_holders(near: bool) -> None:
    counters = MemoryCounters(virtual_loop.LoopClock()) if near else Shared()
    for rules in ([], [rule(mode="off")], [rule("concurrency", 1)]):
        limiter = limiter_of(counters, *rules)
        assert not limiter.charge(*ANN, 5)
        await asyncio.sleep(0.01)
        assert (await limiter.check(*ANN)).allowed
    limiter = limiter_of(counters, rule(mode="shadow"))
    assert limiter.charge(*ANN, 100) and limiter.charge(*ANN, 0)
    await asyncio.sleep(0.01)
    shadowed = await limiter.check(*ANN)
    assert (shadowed.allowed, shadowed.exceeded) == (True, True)


@pytest.mark.parametrize(
    ("subject", "amount", "field"),
    [
        ("", 1, "subject"),
        ("a" * 1025, 1, "subject"),
        ("ann", LIMIT_MAX + 1, "amount"),
        ("ann", -LIMIT_MAX - 1, "amount"),
    ],
)
def test_charge_that_no_rule_can_count_is_the_callers_mistake(
    subject: str, amount: int, field: str
) -> None:
    limiter = limiter_of(MemoryCounters(ManualClock()), clock=ManualClock())
    with pytest.raises(InvalidCheck) as raised:
        limiter.charge("acme", "tokens", subject, amount)
    assert raised.value.details["field"] == field


def test_entry_point_charges_every_rule_it_checks() -> None:
    clock = ManualClock()
    rules = [
        Rule("*", f"tokens:{whose}", "fixed_window", 100, HOUR) for whose in ("user", "tenant")
    ]
    limiter = limiter_of(MemoryCounters(clock), *rules, clock=clock)
    EntryPoints(limiter).charge("tokens", User("acme", "ann"), 40)
    EntryPoints(limiter).charge("tokens", User("acme", ""), 30)
    left = [
        decision.remaining
        for check in (Check("acme", "tokens:user", "ann"), Check("acme", "tokens:tenant", "acme"))
        if (decision := limiter.try_check(*check)) is not None
    ]
    assert left == [59, 29]
