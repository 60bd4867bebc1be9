"""Workers on a shared store whose connections break, statement by statement and by
chance: nothing is stuck or doubled.

``test_work_faults`` does the same with one embedded worker on virtual time. Here
several workers come and go on a real PostgreSQL, so that partitions move while the
answers about them are lost.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import msgspec
import pytest
from work_rigs import Opened, postgres_work, until

from engines import Server
from holdfast.drivers.statements import statements
from holdfast.verify.checkers.jobs import (
    EffectSeen,
    Enqueued,
    JobHistory,
    Ran,
    effects_once_in_order,
)
from holdfast.work.handlers import Context, Handlers
from holdfast.work.inspection import Query
from holdfast.work.job import Policies, Stage, State
from holdfast.work.worker import Worker, WorkerSettings
from proof.faults import Fault, FaultPlan, Odds, faulty

NAMES = {text: name for name, text in statements("holdfast.work.postgres").items()}
PATIENT = {"no_start_after_seconds": 4.0, "dead_after_seconds": 6.0, "stuck_after_seconds": 8.0}
"""A worker that is delayed for a second or two is not declared dead."""
CALLS = (
    "process",
    "bury_dead",
    "blocks",
    "backlogs",
    "open_breakers",
    "alive",
    "owners",
    "take",
    "give",
    "bury_left",
)
SETTINGS = WorkerSettings(
    concurrency=8, balance_seconds=0.1, poll_max_seconds=0.05, drain_seconds=10, jobs_max=32
)
POLICIES = Policies(store_retry_seconds=0.05).with_type(
    "Deed", strikes_max=1000, base_seconds=0.01, cap_seconds=0.05, feeds_breaker=False
)


class Deed(msgspec.Struct):
    stream: str


class Breaking:
    """A connection that the plan loses before or after a named statement."""

    def __init__(self, connection: Any, plan: FaultPlan) -> None:
        self._connection, self._plan = connection, plan

    def __getattr__(self, method: str) -> Any:
        async def call(statement: str, *values: Any, **more: Any) -> Any:
            fault, seconds = self._plan.next(NAMES[statement])
            if fault is Fault.FAIL:
                raise asyncpg.ConnectionDoesNotExistError("injected: before")
            answer = await getattr(self._connection, method)(statement, *values, **more)
            if fault is Fault.LOST_REPLY:
                raise asyncpg.ConnectionDoesNotExistError("injected: after")
            await asyncio.sleep(seconds if fault is Fault.DELAY else 0)
            return answer

        return call


def breaking(session: Any, plan: FaultPlan) -> Any:
    """The session with faults on its connections, and around ``step``."""
    plain = session._call

    @asynccontextmanager
    async def call() -> AsyncIterator[Any]:
        async with plain() as connection:
            yield Breaking(connection, plan)

    session._call = call
    return faulty(session, FaultPlan(plan.rng, odds={"step": Odds(fail=0.05, lost_reply=0.05)}))


class World:
    """Workers that come and go, and what became of the jobs."""

    def __init__(self, opened: Opened, plan: FaultPlan) -> None:
        self.store, self.history, self.handlers = opened.store, JobHistory(), Handlers()
        self._kept: set[int] = set()
        self.gate, self.waiting = asyncio.Event(), set[int]()
        self.gate.set()
        join = self.store.join

        async def disturbed(name: str) -> Any:
            return breaking(await join(name), plan)

        self.store.join = disturbed  # type: ignore[method-assign]
        self.handlers.handle(Deed, stream=lambda deed: deed.stream)(self._handle)

    async def _handle(self, ctx: Context, deed: Deed) -> None:
        """The effect is a step: its bit is lost when ``step`` fails, so the resource
        knows the job's key.
        """
        started, succeeded = time.monotonic(), False
        self.waiting.add(ctx.job.seq)
        await self.gate.wait()

        async def effect() -> None:
            if ctx.key not in self._kept:
                self._kept.add(ctx.key)
                self.history.effects.append(EffectSeen(deed.stream, ctx.job.seq, ctx.fence))

        try:
            await ctx.step(Stage.USER, effect)
            succeeded = True
        finally:
            ran = Ran(
                deed.stream,
                ctx.job.seq,
                str(ctx.session.instance),
                started,
                time.monotonic(),
                succeeded,
            )
            self.history.runs.append(ran)

    def worker(self) -> Any:
        return Worker(self.store, self.handlers, settings=SETTINGS, policies=POLICIES).running()

    async def enqueue(self, streams: int) -> None:
        drafts = [self.handlers.draft(Deed(f"s{n}")) for n in range(streams)]
        seqs = await self.store.enqueue(drafts)
        self.history.enqueued += [
            Enqueued(d.stream or "", seq) for d, seq in zip(drafts, seqs, strict=True)
        ]

    async def shared_by(self, workers: int) -> None:
        """Until this number of workers owns every partition."""
        owners = (
            "SELECT count(owner) = 256 AND count(DISTINCT owner) = $1 FROM holdfast_work.partition"
        )
        pool = self.store._pools.calls  # type: ignore[attr-defined]
        await until(lambda: pool.fetchval(owners, workers))

    async def done(self) -> None:
        await until(self._nothing_left)

    async def _nothing_left(self) -> bool:
        return not await self.store.find(Query(), 1)

    def judge(self) -> None:
        verdict = effects_once_in_order(self.history)
        assert verdict.ok, verdict


@asynccontextmanager
async def lossy_world(server: Server, plan: FaultPlan) -> AsyncIterator[World]:
    """A world whose calls meet the faults of the plan; judged at the end."""
    async with postgres_work(server.url, **PATIENT) as opened:
        world = World(opened, plan)
        yield world
        world.judge()


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.LOST_REPLY])
@pytest.mark.parametrize("call", CALLS)
async def test_failed_call_or_lost_response_leaves_no_stream_unserved(
    postgres_server: Server, call: str, fault: Fault
) -> None:
    plan = FaultPlan(random.Random(1), script={call: [fault]})
    async with lossy_world(postgres_server, plan) as world:
        await world.enqueue(60)
        async with world.worker():
            await world.shared_by(1)
            async with world.worker():
                await world.shared_by(2)
                await world.enqueue(60)
                await world.done()
            await world.shared_by(1)
            await world.enqueue(60)
            await world.done()
        assert not plan.script[call], "the fault was not met"


async def test_leaving_worker_reports_although_other_calls_fail(
    postgres_server: Server,
) -> None:
    plan = FaultPlan(random.Random(1), odds={})
    async with lossy_world(postgres_server, plan) as world:
        async with world.worker():
            await world.shared_by(1)
            world.gate.clear()
            await world.enqueue(5)
            await until(lambda: len(world.waiting) == 5)
            plan.odds["alive"] = Odds(fail=1.0)
            await until(lambda: plan.injected() > 2)
            world.gate.set()
        assert await world.store.find(Query(state=State.READY)) == [], "what ended was reported"


@pytest.mark.parametrize("seed", range(3))
async def test_workers_join_and_leave_while_responses_are_lost(
    postgres_server: Server, seed: int
) -> None:
    rng = random.Random(seed)
    odds = Odds(fail=0.08, lost_reply=0.08, delay=0.1, seconds_max=0.05)
    plan = FaultPlan(rng, odds=dict.fromkeys(CALLS, odds))
    async with lossy_world(postgres_server, plan) as world:
        async with world.worker():
            for _ in range(4):
                async with world.worker(), world.worker():
                    await world.enqueue(50)
                    await asyncio.sleep(rng.choice([0.0, 0.2, 0.4]))
                await world.enqueue(50)
            plan.heal()
            await world.done()
        assert plan.injected() > 10
