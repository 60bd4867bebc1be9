"""The virtual loop that the other tests and the simulation stand on."""

from __future__ import annotations

import asyncio
import time
from contextvars import copy_context

import pytest

from proof.virtual_loop import OWNER, Deadlock, LoopClock, VirtualLoop, run


def test_an_hour_of_timers_takes_no_time() -> None:
    async def hour() -> float:
        for _ in range(3600):
            await asyncio.sleep(1)
        return LoopClock().monotonic()

    before = time.monotonic()
    assert run(hour()) == pytest.approx(3600)
    assert time.monotonic() - before < 5


def test_a_timeout_does_not_overtake_a_thread() -> None:
    async def threaded() -> str:
        async with asyncio.timeout(0.001):
            return await asyncio.to_thread(lambda: time.sleep(0.05) or "done")

    assert run(threaded()) == "done"


def test_wait_that_nothing_can_end_is_an_error() -> None:
    async def stuck() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):
        run(stuck())


async def race(tasks: int = 8) -> list[int]:
    order: list[int] = []

    async def runner(n: int) -> None:
        await asyncio.sleep(0)
        order.append(n)

    await asyncio.gather(*(runner(n) for n in range(tasks)))
    return order


def test_a_seed_shuffles_the_tasks_of_a_turn_and_repeats_itself() -> None:
    orders = {seed: run(race(), seed=seed) for seed in range(5)}
    assert all(sorted(order) == list(range(8)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) > 1
    assert orders == {seed: run(race(), seed=seed) for seed in range(5)}
    assert run(race()) == list(range(8))


def test_plain_callbacks_keep_their_order_under_a_seed() -> None:
    async def callbacks() -> list[int]:
        order: list[int] = []
        for n in range(20):
            asyncio.get_running_loop().call_soon(order.append, n)
        await asyncio.sleep(1)
        return order

    assert run(callbacks(), seed=3) == list(range(20))


def test_seeded_runs_are_the_same_each_time_also_where_they_use_threads() -> None:
    """The moment a thread ended once decided how the loop shuffled what came next."""

    def run_once() -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []

        async def one(number: int) -> None:
            for step in range(20):
                seen.append((number, await asyncio.to_thread(abs, step)))
                with pytest.raises(ZeroDivisionError):
                    await asyncio.to_thread(lambda: 1 // 0)

        async def all_five() -> None:
            await asyncio.gather(*(one(number) for number in range(5)))

        run(all_five(), seed=7)
        return seen

    first = run_once()
    assert len(first) == 100 and first != sorted(first)
    assert all(run_once() == first for _ in range(5))


@pytest.mark.parametrize("seed", [None, 1])
def test_paused_owner_runs_nothing_and_goes_on_where_it_was(seed: int | None) -> None:
    """Its timers, its tasks that wait for others, and calls into it: all wait."""

    async def story() -> list[tuple[str, float]]:
        loop, clock, seen = asyncio.get_running_loop(), LoopClock(), list[tuple[str, float]]()
        assert isinstance(loop, VirtualLoop)
        its_own, event = copy_context(), asyncio.Event()
        its_own.run(OWNER.set, "node")

        async def tick(name: str) -> None:
            for _ in range(3):
                await asyncio.sleep(1)
                seen.append((name, clock.monotonic()))

        async def wait() -> None:
            await event.wait()
            seen.append(("woken", clock.monotonic()))

        tasks = [
            loop.create_task(tick("node"), context=its_own.copy()),
            loop.create_task(wait(), context=its_own.copy()),
            loop.create_task(tick("other")),
        ]
        await asyncio.sleep(1.5)
        loop.pause("node")
        loop.call_later(0.1, event.set)
        loop.call_soon(seen.append, ("called", 0.0), context=its_own)
        cancelled = loop.call_later(0.2, seen.append, ("never", 0.0), context=its_own)
        loop.call_later(0.3, cancelled.cancel)
        await asyncio.sleep(8.5)
        loop.resume("node")
        await asyncio.wait(tasks)
        return seen

    seen = run(story(), seed)
    assert seen[:4] == [("node", 1.0), ("other", 1.0), ("other", 2.0), ("other", 3.0)]
    assert sorted(seen[4:]) == [("called", 0.0), ("node", 10.0), ("node", 11.0), ("woken", 10.0)]
