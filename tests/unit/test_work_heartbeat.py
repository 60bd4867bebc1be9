"""Heartbeats: a busy loop beats, a stuck one does not; an old lease starts nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from holdfast.clock import ManualClock, SystemClock
from holdfast.work.postgres.heartbeat import Beat, WorkerHeartbeat


class Store:
    """Counts beats; ``alive`` False: it refuses them; ``unavailable``: it fails."""

    def __init__(self) -> None:
        self.beats: list[float] = []
        self.alive, self.unavailable = True, False

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Beat]:
        if self.unavailable:
            raise OSError("unavailable")
        yield self._beat

    async def _beat(self) -> bool:
        if self.unavailable:
            raise OSError("unavailable")
        self.beats.append(time.monotonic())
        return self.alive


def heartbeat(store: Store, stuck_after: float = 0.25) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        store.connect, SystemClock(), interval_seconds=0.02, stuck_after_seconds=stuck_after
    )


async def until(condition: object, seconds: float = 10) -> None:
    assert callable(condition)
    async with asyncio.timeout(seconds):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


def beats_on() -> bool:
    return any(thread.name == "holdfast-heartbeat" for thread in threading.enumerate())


@pytest.mark.real_time
async def test_heartbeat_beats_while_the_loop_ticks_and_ends_with_the_block() -> None:
    store = Store()
    async with heartbeat(store).beating():
        await until(lambda: len(store.beats) > 5)
    assert not beats_on(), "it ended with the block"


@pytest.mark.real_time
async def test_handler_that_cancels_every_task_does_not_stop_the_heartbeat() -> None:
    store = Store()
    async with heartbeat(store, stuck_after=0.1).beating():
        await until(lambda: bool(store.beats))
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        cancelled_at = time.monotonic()
        await until(lambda: store.beats[-1] > cancelled_at + 0.2)


class Watched(ManualClock):
    """Counts how often it is looked at; the heartbeat does so before each beat."""

    looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return super().monotonic()


def block_until(condition: Callable[[], bool]) -> None:
    """The loop is stuck meanwhile, which is what is tested."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.real_time
async def test_busy_loop_beats_and_a_stuck_one_does_not() -> None:
    store, clock = Store(), Watched()
    beating = WorkerHeartbeat(store.connect, clock, interval_seconds=0.02, stuck_after_seconds=0.25)
    async with beating.beating():
        await until(lambda: len(store.beats) > 2)
        clock.advance(0.2)
        before = len(store.beats)
        # one that is busy for less than the bound is alive
        block_until(lambda: len(store.beats) > before + 2)
        clock.advance(0.2)
        looks = clock.looks
        block_until(lambda: clock.looks > looks + 2)  # a beat that had begun before is over
        looks, during = clock.looks, len(store.beats)
        block_until(lambda: clock.looks > looks + 5)
        assert len(store.beats) == during, "a loop that is stuck longer is not"
        await until(lambda: len(store.beats) > during)


@pytest.mark.real_time
async def test_age_of_the_last_confirmed_beat_grows_during_a_store_outage() -> None:
    store = Store()
    beating = heartbeat(store)
    async with beating.beating():
        await until(lambda: len(store.beats) > 2)
        store.unavailable = True
        await until(lambda: beating.confirmed_age() > 0.2)
        store.unavailable = False
        await until(lambda: beating.confirmed_age() < 0.1)


@pytest.mark.real_time
async def test_heartbeat_refused_by_the_store_marks_the_session_lost() -> None:
    store = Store()
    beating = heartbeat(store)
    async with beating.beating():
        await until(lambda: bool(store.beats))
        store.alive = False
        await until(lambda: beating.lost)
        await until(lambda: not beats_on())
