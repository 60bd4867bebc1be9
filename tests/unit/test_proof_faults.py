"""Each fault does what it says, to the caller and behind it."""

from __future__ import annotations

import asyncio
import random

import pytest

from holdfast.errors import OutcomeUnknown, RateLimited, Unavailable
from proof.faults import Fault, FaultPlan, Odds, faulty


class Counter:
    """The smallest contract: what was done stays done."""

    def __init__(self) -> None:
        self.done: list[str] = []

    async def add(self, what: str) -> int:
        self.done.append(what)
        return len(self.done)

    def size(self) -> int:
        return len(self.done)


def scripted(*faults: Fault, seconds_max: float = 0.0) -> FaultPlan:
    return FaultPlan(
        random.Random(1), odds={"add": Odds(seconds_max=seconds_max)}, script={"add": list(faults)}
    )


@pytest.mark.real_time
async def test_a_failed_call_was_not_made() -> None:
    inner = Counter()
    with pytest.raises(Unavailable):
        await faulty(inner, scripted(Fault.FAIL)).add("x")
    assert inner.done == []


@pytest.mark.real_time
async def test_a_throttled_call_was_not_made_and_says_when_to_come_back() -> None:
    inner = Counter()
    with pytest.raises(RateLimited) as refused:
        await faulty(inner, scripted(Fault.THROTTLE)).add("x")
    assert inner.done == [] and refused.value.retry_after_seconds == 1.0


@pytest.mark.real_time
async def test_a_lost_reply_leaves_the_effect() -> None:
    inner = Counter()
    with pytest.raises(OutcomeUnknown):
        await faulty(inner, scripted(Fault.LOST_REPLY)).add("x")
    assert inner.done == ["x"]


@pytest.mark.real_time
async def test_a_hanging_call_ends_only_by_its_callers_deadline_or_by_healing() -> None:
    inner, plan = Counter(), scripted(Fault.HANG, Fault.HANG)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(faulty(inner, plan).add("x"), 0.01)
    assert inner.done == []
    waiting = asyncio.ensure_future(faulty(inner, plan).add("y"))
    await asyncio.sleep(0)
    plan.heal()
    assert await waiting == 1 and inner.done == ["y"]


@pytest.mark.real_time
async def test_late_replies_change_their_order_but_effects_do_not() -> None:
    inner, finished = Counter(), []
    first = faulty(inner, scripted(Fault.LATE_REPLY, seconds_max=0.01))

    async def one(what: str) -> None:
        await first.add(what)
        finished.append(what)

    await asyncio.gather(one("x"), one("y"))
    assert inner.done == ["x", "y"] and finished == ["y", "x"]


@pytest.mark.real_time
async def test_verb_that_is_not_async_passes_through() -> None:
    assert faulty(Counter(), scripted(Fault.FAIL)).size() == 0


def test_one_seed_is_one_sequence_of_faults_and_healing_ends_it() -> None:
    async def draw(seed: int) -> list[Fault]:
        plan = FaultPlan(random.Random(seed), odds={"*": Odds(fail=0.3, hang=0.2, lost_reply=0.2)})
        drawn = [plan.next("append")[0] for _ in range(50)]
        assert plan.injected() == sum(fault is not Fault.NONE for fault in drawn)
        plan.heal()
        assert plan.next("append")[0] is Fault.NONE
        return drawn

    assert asyncio.run(draw(3)) == asyncio.run(draw(3)) != asyncio.run(draw(4))


def test_odds_beyond_certainty_are_refused() -> None:
    with pytest.raises(ValueError, match="odds"):
        Odds(fail=0.7, hang=0.7)
