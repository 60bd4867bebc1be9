"""Ids, timestamps, and waiting."""

from __future__ import annotations

import asyncio
import random
from contextlib import closing, suppress

import pytest
import uvloop

from holdfast.clock import (
    TURN_SECONDS,
    Ids,
    ManualClock,
    SharedTimeout,
    Turns,
    timestamp,
    wait_at_most,
)


def test_ids_rise_within_a_millisecond_and_when_the_clock_steps_back() -> None:
    clock = ManualClock()
    ids = Ids(clock, random.Random(1))
    made = [ids.new("msg_") for _ in range(100)]
    clock.advance(-3600)
    made.append(ids.new("msg_"))
    assert made == sorted(made)
    assert len(set(made)) == len(made)


def test_a_busy_millisecond_runs_out_of_nothing() -> None:
    """Two million ids in one millisecond: more than one draw of randomness allows."""
    ids = Ids(ManualClock(), random.Random(1))
    last = ids.new("")
    for _ in range(2**21):
        this = ids.new("")
        assert this > last
        last = this
    assert len(last) == 26


def test_two_makers_do_not_make_the_same_ids() -> None:
    clock = ManualClock()
    makers = [Ids(clock) for _ in range(10)]
    made = [maker.new("") for maker in makers for _ in range(100)]
    assert len(set(made)) == 1000


def test_an_id_is_a_prefix_and_a_ulid() -> None:
    value = Ids(ManualClock(1_469_918_176.385)).new("chat_")
    # the time part of the ULID specification's own example
    assert value.startswith("chat_01ARYZ6S41")
    assert len(value) == len("chat_") + 26


def test_timestamps_are_utc_with_milliseconds() -> None:
    assert timestamp(1_700_000_000.25) == "2023-11-14T22:13:20.250Z"


def test_the_last_instant_of_a_second_is_not_stamped_a_second_late() -> None:
    instants = [1_699_999_999.9996, 1_699_999_999.9999998, 1_700_000_000.0]
    assert list(map(timestamp, instants)) == sorted(map(timestamp, instants))
    assert timestamp(instants[1]) == "2023-11-14T22:13:20.000Z"


async def test_an_event_is_waited_for_so_long_and_no_longer() -> None:
    event, began = asyncio.Event(), asyncio.get_running_loop().time()
    assert not await wait_at_most(event, 3)
    assert asyncio.get_running_loop().time() - began == pytest.approx(3)
    asyncio.get_running_loop().call_later(1, event.set)
    assert await wait_at_most(event, 3)
    assert asyncio.get_running_loop().time() - began == pytest.approx(4)
    assert await wait_at_most(event, 0), "what is there needs no waiting"


async def test_long_work_gives_way_when_its_turn_has_had_its_time_and_not_before() -> None:
    clock, others = ManualClock(), 0
    turns = Turns(clock)

    async def work() -> None:
        for _ in range(12):
            clock.advance(TURN_SECONDS * 0.3)
            await turns.give_way()

    working = asyncio.create_task(work())
    while not working.done():
        await asyncio.sleep(0)
        others += 1
    assert others == 4, "once at the start, and after each four pieces"


async def test_shared_timeout_bounds_each_wait_and_none_between_them() -> None:
    loop, timeout = asyncio.get_running_loop(), SharedTimeout()
    for _ in range(5):
        assert await timeout.wait(asyncio.sleep(0.9, "x"), loop.time() + 1) == "x"
        await asyncio.sleep(3)
    began = loop.time()
    with pytest.raises(TimeoutError):
        await timeout.wait(asyncio.sleep(5), began + 1)
    assert loop.time() == pytest.approx(began + 1)
    assert await timeout.wait(asyncio.sleep(0.5, "again"), loop.time() + 1) == "again"
    timeout.close()


async def test_shared_timeout_that_comes_earlier_than_the_last_one_counts() -> None:
    loop, timeout = asyncio.get_running_loop(), SharedTimeout()
    await timeout.wait(asyncio.sleep(0.1), loop.time() + 60)
    began = loop.time()
    with pytest.raises(TimeoutError):
        await timeout.wait(asyncio.sleep(30), began + 2)
    assert loop.time() == pytest.approx(began + 2)
    timeout.close()


def test_shared_timeout_that_was_over_already_leaves_the_next_wait_alone() -> None:
    async def at_once() -> None:
        pass

    async def wait() -> None:
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        with closing(SharedTimeout()) as timeout:
            await timeout.wait(at_once(), loop.time() - 1)
            loop.call_later(0.01, event.set)
            await timeout.wait_for(event, 5.0)
        assert event.is_set()

    for run in (asyncio.run, uvloop.run):
        run(wait())


async def test_shared_timeout_lets_a_cancellation_through() -> None:
    loop = asyncio.get_running_loop()

    async def wait() -> None:
        timeout = SharedTimeout()
        try:
            await timeout.wait(asyncio.sleep(30), loop.time() + 10)
        finally:
            timeout.close()

    for seconds in (1, 10):  # before its time, and in the same moment
        waiting = asyncio.create_task(wait())
        loop.call_later(seconds, waiting.cancel)
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_shared_timeout_leaves_no_cancellation_behind() -> None:
    loop, timeout = asyncio.get_running_loop(), SharedTimeout()

    async def deaf() -> str:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
        return "late"

    assert await timeout.wait(deaf(), loop.time() + 1) == "late"
    with pytest.raises(TimeoutError):  # it would be a CancelledError
        async with asyncio.timeout(1):
            await asyncio.sleep(30)
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    timeout.close()
