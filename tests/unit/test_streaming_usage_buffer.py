"""The node's buffer of usage: ends count at once, and survive a store that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from holdfast.errors import OutcomeUnknown, Unavailable
from holdfast.streaming.usage_store.buffer import COMMIT_SECONDS, UsageBuffer
from holdfast.streaming.usage_store.contract import RunUsage, UsageKey, UsageQuery, UsageRow
from holdfast.streaming.usage_store.memory import MemoryUsage

KEY = UsageKey("2026-11-17", "acme", "ann", "gpt", "scripted")


class FaultyUsage(MemoryUsage):
    def __init__(self) -> None:
        super().__init__()
        self.before: Exception | None = None
        self.after: Exception | None = None
        self.noted: list[int] = []
        self.commits = 0

    async def count(self, ended: Sequence[RunUsage]) -> None:
        if self.before is not None:
            raise self.before
        self.commits += 1
        await super().count(ended)
        if self.after is not None:
            raise self.after

    async def note(self, running: Sequence[RunUsage]) -> None:
        self.noted.append(len(running))
        await super().note(running)

    async def row(self) -> UsageRow | None:
        return next(iter(await self.rows(UsageQuery("2000-01-01", "2099-01-01"))), None)


def run(run_id: str) -> RunUsage:
    return RunUsage(run_id, KEY, 2, 1, False)


@asynccontextmanager
async def running(buffer: UsageBuffer) -> AsyncIterator[None]:
    task = asyncio.create_task(buffer.run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_end_counts_at_once() -> None:
    store = FaultyUsage()
    buffer = UsageBuffer(store, list)
    async with running(buffer):
        buffer.count(run("a"))
        await asyncio.sleep(0.001)
        assert await store.row() == UsageRow(KEY, 1, 2, 1, 0)


async def test_ends_that_come_together_share_a_commit() -> None:
    store, loop = FaultyUsage(), asyncio.get_running_loop()
    buffer = UsageBuffer(store, list)
    async with running(buffer):
        seconds = []
        for number in range(10):
            began = loop.time()
            buffer.count(run(f"r{number}"))
            waiting = asyncio.ensure_future(buffer.stored(1.0))
            waiting.add_done_callback(lambda _, began=began: seconds.append(loop.time() - began))
            await asyncio.sleep(0.01)
        await asyncio.sleep(COMMIT_SECONDS)
    assert seconds[0] == 0, "the first one does not wait"
    assert len(seconds) == 10 and max(seconds) <= COMMIT_SECONDS + 1e-9
    assert store.commits == 5  # 10 ends in 100 ms, one commit in 25


async def test_running_runs_are_noted_every_second_also_between_ends() -> None:
    store = FaultyUsage()
    buffer = UsageBuffer(store, lambda: [run(f"r{n}") for n in range(1200)])
    async with running(buffer):
        for n in range(33):
            await asyncio.sleep(0.1)
            buffer.count(run(f"end{n}"))
    assert store.noted == [500, 500, 200] * 3


async def test_ends_wait_while_the_store_fails_and_count_once() -> None:
    store = FaultyUsage()
    buffer = UsageBuffer(store, list)
    async with running(buffer):
        for store.before, store.after in ((Unavailable("full"), None), (None, OutcomeUnknown(""))):
            buffer.count(run(f"a{store.before}"))
            await asyncio.sleep(5)
            assert buffer.trouble == ("full" if store.before else "")
        store.before = store.after = None
        await asyncio.sleep(2)
        assert buffer.trouble is None
        row = await store.row()
        assert row is not None
        assert row.replies == 2
        assert buffer.lost == 0


async def test_ends_beyond_the_bound_are_counted_as_lost() -> None:
    store = FaultyUsage()
    store.before = Unavailable("full")
    buffer = UsageBuffer(store, list)
    for n in range(10_003):
        buffer.count(run(str(n)))
    assert buffer.lost == 3
    store.before = None
    await buffer.flush()
    row = await store.row()
    assert row is not None
    assert row.replies == 10_000
