"""A worker on virtual time against a store that fails, loses answers and dies: seeded,
judged by checker 11.

The store's faults are of the two kinds that matter: nothing happened, or it happened
and the answer was lost. Neither may lose, double or reorder a job while the process
lives; a killed process, or one that lost its session while it ran, may repeat what it
had in flight. Some messages come from outside, and some of these twice.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import msgspec
from result_counts import tally

from holdfast.errors import InternalError, OutcomeUnknown, ServerBusy, Unavailable
from holdfast.verify.checkers.jobs import (
    EffectSeen,
    Enqueued,
    JobHistory,
    Ran,
    effects_once_in_order,
)
from holdfast.work.contract import Claimed, ClaimRequest, Report
from holdfast.work.handlers import Context, Handlers
from holdfast.work.inspection import Query
from holdfast.work.job import Policies
from holdfast.work.sqlite.store import MemoryWork
from holdfast.work.worker import Worker, WorkerSettings
from proof.coverage_marks import collected
from proof.results import Row
from proof.virtual_loop import LoopClock, run

FAULTY_SEEDS = 24
DEADLY_SEEDS = 12


class Deed(msgspec.Struct):
    stream: str
    number: int


class FaultyWork(MemoryWork):
    """The calls of its sessions fail now and then, before or after they take effect."""

    def __init__(self, clock: LoopClock, rng: random.Random, rate: float) -> None:
        super().__init__(clock)
        self._chance, self._rate = rng, rate

    async def join(self, name: str) -> Any:
        # a new session replaces the last one, as if that worker were dead and did not
        # know it
        self.on_left()
        session = await super().join(name)
        plain = session.process

        async def process(report: Report, request: ClaimRequest) -> Claimed:
            await asyncio.sleep(self._chance.uniform(0, 0.01))
            fate = self._chance.random()
            if fate < self._rate:
                raise self._chance.choice([Unavailable, ServerBusy])("before")
            claimed = await plain(report, request)
            if fate < 2 * self._rate:
                raise self._chance.choice([OutcomeUnknown, InternalError])("after")
            await asyncio.sleep(self._chance.uniform(0, 0.01))
            return claimed

        session.process = process  # type: ignore[method-assign]
        return session


async def world(seed: int, *, rate: float, kills: bool) -> JobHistory:
    """``kills``: workers are killed, or lose their session while they run."""
    rng, clock, history = random.Random(seed), LoopClock(), JobHistory()
    store, handlers = FaultyWork(clock, rng, rate), Handlers()
    began, outage = clock.monotonic(), rng.uniform(0, 4)

    @handlers.handle(Deed, stream=lambda deed: deed.stream)
    async def handle(ctx: Context, deed: Deed) -> None:
        started, succeeded = clock.monotonic(), False
        try:
            await asyncio.sleep(rng.choice([0, 0, 0.001, 0.05]))
            if outage <= clock.monotonic() - began < outage + 2:
                raise ConnectionError("unavailable")
            if rng.random() < 0.1:
                raise rng.choice(
                    [RuntimeError("by chance"), ConnectionError("unavailable"), TimeoutError()]
                )
            history.effects.append(EffectSeen(deed.stream, ctx.job.seq, ctx.fence))
            succeeded = True
        finally:
            history.runs.append(
                Ran(deed.stream, ctx.job.seq, "w", started, clock.monotonic(), succeeded)
            )

    settings = WorkerSettings(concurrency=6, jobs_max=24, per_stream_max=4, drain_seconds=2)
    policies = Policies().with_type("Deed", strikes_max=1000, base_seconds=0.5, cap_seconds=4.0)

    def new_worker() -> tuple[Worker, asyncio.Task[None]]:
        made = Worker(store, handlers, settings=settings, policies=policies, clock=clock, rng=rng)
        return made, asyncio.create_task(made.run())

    worker, task = new_worker()
    zombies: list[asyncio.Task[None]] = []
    for number in range(60):
        drafts = [
            handlers.draft(Deed(f"s{rng.randrange(5)}", number)) for _ in range(rng.choice([1, 3]))
        ]
        drafts.append(handlers.draft(Deed("s0", number), source="shop", source_id=str(number // 2)))
        seqs = await store.enqueue(drafts)
        history.enqueued += [
            Enqueued(d.stream or "", seq) for d, seq in zip(drafts, seqs, strict=True) if seq
        ]
        await asyncio.sleep(rng.choice([0, 0.01, 0.2]))
        if kills and rng.random() < 0.05:
            if rng.random() < 0.5:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                zombies.append(task)
                worker.stop()
            worker, task = new_worker()
    async with asyncio.timeout(3600):
        while True:
            if not await store.find(Query(), 1):
                break
            await asyncio.sleep(1)
    task.cancel()
    await asyncio.gather(task, *zombies, return_exceptions=True)
    return history


def test_jobs_keep_their_order_under_store_faults_and_kills() -> None:
    began, broken = time.perf_counter(), list[str]()
    with collected() as reached:
        for seed in range(FAULTY_SEEDS):
            verdict = effects_once_in_order(run(world(seed, rate=0.1, kills=False), seed=seed))
            broken += [] if verdict.ok else [f"seed {seed}\n{verdict}"]
        for seed in range(FAULTY_SEEDS, FAULTY_SEEDS + DEADLY_SEEDS):
            verdict = effects_once_in_order(
                without_repetitions(run(world(seed, rate=0.05, kills=True), seed=seed))
            )
            broken += [] if verdict.ok else [f"seed {seed}\n{verdict}"]
    print(*broken, sep="\n")
    tally(
        Row(
            name="simulation of jobs",
            how=(
                "a worker on virtual time; the store fails or loses answers, workers die or lose"
                " their session"
            ),
            runs=FAULTY_SEEDS + DEADLY_SEEDS,
            failures=len(broken),
            requirement="checker 11; only what was in flight when a worker ended may come twice",
            seed=f"0..{FAULTY_SEEDS + DEADLY_SEEDS - 1}",
            seconds=time.perf_counter() - began,
        ),
        reached,
    )


def without_repetitions(history: JobHistory) -> JobHistory:
    """The first effect of each job: whoever dies may repeat what it had in flight, if
    nothing makes it exactly once.
    """
    first: dict[int, EffectSeen] = {}
    for effect in history.effects:
        first.setdefault(effect.seq, effect)
    return JobHistory(history.enqueued, [], list(first.values()))
