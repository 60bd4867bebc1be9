"""A worker that has nothing to do, is not sure of its lease, or does not know what
became of its call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from work_rigs import until

from holdfast.clock import SystemClock
from holdfast.errors import Unavailable
from holdfast.work.contract import Claimed, ClaimRequest, Report
from holdfast.work.handlers import Context, Handlers
from holdfast.work.sqlite.embedded import EmbeddedSession
from holdfast.work.sqlite.store import MemoryWork
from holdfast.work.worker import Worker, WorkerSettings
from proof.virtual_loop import LoopClock


class Order(msgspec.Struct):
    number: int


class Uncertain(EmbeddedSession):
    """A session whose last heartbeat may be too old."""

    certain = True
    waits: list[float]
    handed: Callable[[Claimed], None] = staticmethod(lambda claimed: None)

    @property
    def may_start(self) -> bool:  # type: ignore[override]
        return self.certain

    async def process(self, report: Report, request: ClaimRequest) -> Claimed:
        claimed = await super().process(report, request)
        self.handed(claimed)
        return claimed

    async def wait(self, timeout_seconds: float) -> bool:
        self.waits.append(timeout_seconds)
        return await super().wait(timeout_seconds)


class Store(MemoryWork):
    """Starts one session of that kind."""

    session: Uncertain

    async def join(self, name: str) -> Any:
        self.session = await super().join(name)  # type: ignore[assignment]
        self.session.__class__ = Uncertain
        self.session.waits = []
        return self.session


async def test_no_job_starts_while_the_lease_is_uncertain() -> None:
    store, handlers, ran = Store(SystemClock()), Handlers(), list[int]()
    handed = asyncio.Event()

    @handlers.handle(Order)
    async def handle(ctx: Context, order: Order) -> None:
        ran.append(order.number)

    settings = WorkerSettings(poll_min_seconds=0.01, poll_max_seconds=0.01)
    async with asyncio.timeout(20), Worker(store, handlers, settings=settings).running():
        await until(lambda: hasattr(store, "session") and store.session.waits)
        store.session.certain = False
        store.session.handed = lambda claimed: handed.set() if claimed.jobs else None
        await store.enqueue([handlers.draft(Order(n)) for n in range(3)])
        await handed.wait()
        looks = len(store.session.waits)
        await until(lambda: len(store.session.waits) > looks + 5)
        assert ran == [], "it holds them, and starts none"
        store.session.certain = True
        await until(lambda: len(ran) == 3)


@pytest.mark.virtual_time
async def test_idle_worker_polls_more_rarely_and_at_once_after_a_wake_up() -> None:
    clock = LoopClock()
    store, handlers, ran = Store(clock), Handlers(), asyncio.Event()

    @handlers.handle(Order)
    async def handle(ctx: Context, order: Order) -> None:
        ran.set()

    async with Worker(store, handlers, clock=clock).running():
        await asyncio.sleep(20)
        waits = list(store.session.waits)
        assert waits[:6] == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64] and set(waits[6:]) == {1.0}
        assert len(waits) < 30, "twenty seconds of nothing cost few calls"
        store.session.waits.clear()
        await store.enqueue([handlers.draft(Order(1))])
        await ran.wait()
        await asyncio.sleep(1)
        assert 0.02 in store.session.waits, "who was just busy looks again soon"


class Failing(EmbeddedSession):
    """The first call with a report of this kind fails before anything is stored."""

    kind, failed = "", False

    async def process(self, report: Report, request: ClaimRequest) -> Claimed:
        if not self.failed and getattr(report, self.kind):
            self.failed = True
            raise Unavailable("the store is unavailable")
        return await super().process(report, request)


def failing(kind: str) -> MemoryWork:
    store = MemoryWork(SystemClock())
    join = store.join

    async def joined(name: str) -> Any:
        session: Any = await join(name)
        session.__class__, session.kind = Failing, kind
        return session

    store.join = joined  # type: ignore[method-assign]
    return store


async def test_enqueued_child_is_stored_although_the_first_report_failed() -> None:
    store, handlers, ran = failing("children"), Handlers(), list[int]()

    @handlers.handle(Order)
    async def handle(ctx: Context, order: Order) -> None:
        ran.append(order.number)
        if order.number < 3:
            ctx.enqueue(handlers.draft(Order(order.number + 1)))

    async with asyncio.timeout(20), Worker(store, handlers).running():
        await store.enqueue([handlers.draft(Order(1))])
        await until(lambda: len(ran) == 3)
    assert ran == [1, 2, 3]


async def test_released_jobs_pass_although_the_first_report_failed() -> None:
    store, handlers, ran = failing("released"), Handlers(), list[int]()
    followers = list[int]()

    @handlers.handle(Order, stream=lambda _: "s")
    async def handle(ctx: Context, order: Order) -> None:
        if order.number == 1:
            ctx.release(*followers)
            raise RuntimeError("later")
        ran.append(order.number)

    followers += (await store.enqueue([handlers.draft(Order(n)) for n in (1, 2)]))[1:]
    async with asyncio.timeout(20), Worker(store, handlers).running():
        await until(lambda: ran == [2])
    (block,) = [blocked.block for blocked in await store.streams()]
    assert block.released_ids == set(followers)


class Stalling(EmbeddedSession):
    """The first call after it has handed out jobs takes two seconds, and fails."""

    handed_out = failed = False

    async def process(self, report: Report, request: ClaimRequest) -> Claimed:
        if self.handed_out and not self.failed:
            self.failed = True
            await asyncio.sleep(2)
            raise Unavailable("the store is unavailable")
        claimed = await super().process(report, request)
        self.handed_out |= bool(claimed.jobs)
        return claimed


@pytest.mark.virtual_time
async def test_job_given_back_for_lack_of_room_keeps_its_order_during_a_rewind() -> None:
    """It would be marked as held behind the back of the new reading, which knows of
    nothing that is held.
    """
    clock = LoopClock()
    store, handlers, ran, go = MemoryWork(clock), Handlers(), list[int](), asyncio.Event()
    join = store.join

    async def joined(name: str) -> Any:
        session: Any = await join(name)
        session.__class__ = Stalling
        return session

    @handlers.handle(Order, stream=lambda _: "s")
    async def handle(ctx: Context, order: Order) -> None:
        await go.wait()
        ran.append(order.number)

    store.join = joined  # type: ignore[method-assign]
    await store.enqueue([handlers.draft(Order(n)) for n in range(20)])
    settings = WorkerSettings(concurrency=4, jobs_max=8)
    async with Worker(store, handlers, settings=settings, clock=clock).running():
        await asyncio.sleep(2.5)  # a memory full of one stream, a failed call, a new reading
        go.set()
        await asyncio.sleep(10)
    assert ran == list(range(20))


async def test_runner_survives_any_number_of_overdue_jobs() -> None:
    store, handlers, ended = MemoryWork(SystemClock()), Handlers(), asyncio.Event()

    @handlers.handle(Order, deadline_seconds=0.05)
    async def handle(ctx: Context, order: Order) -> None:
        if order.number < 3:
            await asyncio.Event().wait()
        ended.set()

    await store.enqueue([handlers.draft(Order(n)) for n in range(4)])
    async with (
        asyncio.timeout(20),
        Worker(store, handlers, settings=WorkerSettings(concurrency=1)).running(),
    ):
        await ended.wait()
