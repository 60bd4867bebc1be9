"""Job stores for tests: each adapter, opened empty, with a way to let time pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast.clock import SystemClock
from holdfast.work.contract import (
    ACTS_KEPT_MAX,
    Claimed,
    ClaimRequest,
    Failed,
    Report,
    Rewound,
    WorkerSession,
    WorkStore,
)
from holdfast.work.job import PARTITIONS, Block, Failure, Job, JobDraft, Policies, Reason, decide
from holdfast.work.sqlite import SqliteWork
from holdfast.work.sqlite.store import MemoryWork

QUICK = {
    "beat_seconds": 0.2,
    "no_start_after_seconds": 1.0,
    "dead_after_seconds": 1.5,
    "stuck_after_seconds": 2.0,
}
TEST_SECONDS_MAX = 120.0
"""A test that takes longer hangs."""


@dataclass
class Opened:
    """An open store, and ways to let time pass and to kill a session."""

    store: WorkStore
    pass_time: Callable[[float], Awaitable[None]]
    kill: Callable[[WorkerSession], Awaitable[None]]
    """End a session as a crash would: nothing is reported, the lease runs out."""


Opener = Callable[..., Any]
WORK_STORES = ("memory", "sqlite", "postgres")


def opener_of(request: pytest.FixtureRequest, folder: Path) -> Opener:
    """How to open the store that a fixture with ``WORK_STORES`` as params names."""
    if request.param == "memory":
        return lambda **options: embedded_work(None, **options)
    if request.param == "sqlite":
        return lambda **options: embedded_work(folder / "work.db", **options)
    server = request.getfixturevalue("postgres_server")
    return lambda **options: postgres_work(server.url, **options)


@asynccontextmanager
async def postgres_work(
    url: str, acts_kept_max: int = ACTS_KEPT_MAX, **session: float
) -> AsyncIterator[Opened]:
    from holdfast.work.postgres import PostgresWork, WorkerSessionSettings

    connection = await asyncpg.connect(url)
    await connection.execute("DROP SCHEMA IF EXISTS holdfast_work CASCADE")
    settings = WorkerSessionSettings(**{**QUICK, **session})
    store = await PostgresWork.open(url, session_settings=settings, acts_kept_max=acts_kept_max)

    sessions: list[Any] = []
    join = store.join

    async def remembered(name: str) -> Any:
        sessions.append(await join(name))
        return sessions[-1]

    store.join = remembered  # type: ignore[method-assign]

    async def pass_time(seconds: float) -> None:
        await connection.execute(
            "UPDATE holdfast_work.job SET due_at = due_at - $1 * interval '1 second',"
            " created_at = created_at - $1 * interval '1 second'",
            seconds,
        )
        await connection.execute(
            "UPDATE holdfast_work.seen SET seen_at = seen_at - $1 * interval '1 second'", seconds
        )
        await connection.execute(
            "UPDATE holdfast_work.breaker SET open_until = open_until - $1 * interval '1 second'",
            seconds,
        )

    async def kill(session: Any) -> None:
        await session.stop_heartbeat()
        await connection.execute(
            "UPDATE holdfast_work.instance SET beat_at = beat_at - interval '1 minute' WHERE id"
            " = $1",
            session.instance,
        )

    try:
        async with asyncio.timeout(TEST_SECONDS_MAX):
            yield Opened(store, pass_time, kill)
    finally:
        await asyncio.gather(*(session.stop_heartbeat() for session in sessions))
        for session in sessions:
            session._terminate_connections()
        await store.close()
        await connection.close()


class ShiftedClock(SystemClock):
    """The machine's clock, moved on by hand."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def now(self) -> float:  # type: ignore[override]
        return SystemClock.now() + self.ahead


@asynccontextmanager
async def embedded_work(
    path: Path | None, acts_kept_max: int = ACTS_KEPT_MAX
) -> AsyncIterator[Opened]:
    clock = ShiftedClock()
    store = (
        MemoryWork(clock, acts_kept_max=acts_kept_max)
        if path is None
        else await SqliteWork.open(path, clock, acts_kept_max=acts_kept_max)
    )

    async def pass_time(seconds: float) -> None:
        clock.ahead += seconds

    async def kill(session: Any) -> None:
        """Its process ends without leaving: the next session finds its record."""
        store.on_left()

    try:
        async with asyncio.timeout(TEST_SECONDS_MAX):
            yield Opened(store, pass_time, kill)
    finally:
        await store.close()


@dataclass
class ManualWorker:
    """A worker that a test drives: it reports what the test says."""

    session: WorkerSession
    policies: Policies = field(default_factory=lambda: Policies.preset("uniform"))
    jobs: dict[int, Job] = field(default_factory=dict)
    rewound: Rewound = field(default_factory=Rewound)

    @classmethod
    async def join(
        cls, store: WorkStore, name: str = "hand", policies: Policies | None = None
    ) -> ManualWorker:
        manual = cls(await store.join(name), policies or Policies.preset("uniform"))
        await manual.session.owners()
        await manual.session.take(range(PARTITIONS))
        await manual.rewind()
        return manual

    async def rewind(self) -> Sequence[Block]:
        """The next turn reads from the start, and the backlogs that may be free."""
        self.rewound = await self.session.rewind()
        return self.rewound.blocks

    async def turn(
        self,
        want: int = 100,
        *,
        starting: int = 0,
        backlogs: dict[str, int] | None = None,
        **report: Any,
    ) -> list[int]:
        """One process call; returns the claimed sequences in order, backlogs too."""
        claimed = await self.call(want, starting=starting, backlogs=backlogs, **report)
        return [job.seq for job in [*claimed.backlog, *claimed.jobs]]

    async def call(
        self,
        want: int = 100,
        *,
        starting: int = 0,
        backlogs: dict[str, int] | None = None,
        **report: Any,
    ) -> Claimed:
        rewound, self.rewound = self.rewound, Rewound()
        asked = {**dict.fromkeys(rewound.backlogs, 0), **(backlogs or {})}
        wanted = ClaimRequest(jobs=want, starting=starting, backlogs=asked)
        claimed = await self.session.process(Report(**report), wanted)
        claimed.backlog = [
            j for j in claimed.backlog if not any(b.holds(j.seq, j.type) for b in rewound.blocks)
        ]
        self.jobs.update({job.seq: job for job in [*claimed.backlog, *claimed.jobs]})
        return claimed

    def failure(
        self,
        seq: int,
        reason: Reason = Reason.HANDLER_EXCEPTION,
        *,
        stages: int = 0,
        error: str = "boom",
    ) -> Failed:
        import random

        job, what = self.jobs[seq], Failure(reason, "ValueError", error, "trace", "print")
        verdict = decide(job, what, self.policies.lookup(job.type, reason), random.Random(1))
        return Failed(seq, job.attempt, verdict, what, stages)


def draft(
    stream: str | None = "s", type: str = "order", payload: bytes = b"{}", **more: Any
) -> JobDraft:
    return JobDraft(type, payload, stream, **more)


async def until(condition: Any) -> None:
    """Wait for something a real server must bring about."""
    async with asyncio.timeout(60):
        while True:
            result = condition()
            if await result if asyncio.iscoroutine(result) else result:
                return
            await asyncio.sleep(0.01)


async def steps_of(store: MemoryWork, call: Awaitable[Any]) -> int:
    """The cost of a call, in tens of steps of SQLite's machine."""
    counted = 0

    def count() -> bool:
        nonlocal counted
        counted += 1
        return False

    store._db.set_progress_handler(count, 10)
    await call
    store._db.set_progress_handler(None)
    return counted
