"""A worker on virtual time against a store that fails, loses answers and dies: seeded, judged by checker 11.

The store's faults are of the two kinds that matter: nothing happened, or it happened and the answer was lost. Neither
may lose, double or reorder a job while the process lives; a killed process may repeat what it had in flight.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest
from virtual import LoopClock, run

from holdfast.errors import InternalError, OutcomeUnknown, ServerBusy, Unavailable
from holdfast.verify.jobs import Effect, Enqueued, JobHistory, Ran, effects_once_in_order
from holdfast.work.contract import Claimed, Query, Report, Want
from holdfast.work.coordinator import Worker, WorkerSettings
from holdfast.work.handling import Context, Handlers
from holdfast.work.job import Policies
from holdfast.work.memory import MemoryWork

SEEDS_PER_BLOCK = 8


class Deed(msgspec.Struct):
    stream: str
    number: int


class FaultyWork(MemoryWork):
    """Its seats' calls fail now and then, before or after they were carried out."""

    def __init__(self, clock: LoopClock, rng: random.Random, rate: float) -> None:
        super().__init__(clock)
        self._chance, self._rate = rng, rate

    async def join(self, name: str) -> Any:
        seat = await super().join(name)
        plain = seat.process

        async def process(report: Report, want: Want) -> Claimed:
            await asyncio.sleep(self._chance.uniform(0, 0.01))
            fate = self._chance.random()
            if fate < self._rate:
                raise self._chance.choice([Unavailable, ServerBusy])("before")
            claimed = await plain(report, want)
            if fate < 2 * self._rate:
                raise self._chance.choice([OutcomeUnknown, InternalError])("after")
            await asyncio.sleep(self._chance.uniform(0, 0.01))
            return claimed

        seat.process = process  # type: ignore[method-assign]
        return seat


async def world(seed: int, *, rate: float, kills: bool) -> JobHistory:
    rng, clock, history = random.Random(seed), LoopClock(), JobHistory()
    store, handlers = FaultyWork(clock, rng, rate), Handlers()

    @handlers.handle(Deed, stream=lambda deed: deed.stream)
    async def handle(ctx: Context, deed: Deed) -> None:
        started, succeeded = clock.monotonic(), False
        try:
            await asyncio.sleep(rng.choice([0, 0, 0.001, 0.05]))
            if rng.random() < 0.1:
                raise rng.choice([RuntimeError("by chance"), ConnectionError("away"), TimeoutError()])
            history.effects.append(Effect(deed.stream, ctx.job.seq, ctx.fence))
            succeeded = True
        finally:
            history.runs.append(Ran(deed.stream, ctx.job.seq, "w", started, clock.monotonic(), succeeded))

    settings = WorkerSettings(concurrency=6, jobs_max=24, per_stream_max=4, drain_seconds=2)
    policies = Policies().with_type("Deed", strikes_max=1000, base_seconds=0.5, cap_seconds=4.0)

    def worker() -> asyncio.Task[None]:
        made = Worker(store, handlers, settings=settings, policies=policies, clock=clock, rng=rng)
        return asyncio.create_task(made.run())

    task = worker()
    for number in range(60):
        drafts = [handlers.draft(Deed(f"s{rng.randrange(5)}", number)) for _ in range(rng.choice([1, 3]))]
        seqs = await store.enqueue(drafts)
        history.enqueued += [Enqueued(d.stream or "", seq) for d, seq in zip(drafts, seqs, strict=True)]
        await asyncio.sleep(rng.choice([0, 0.01, 0.2]))
        if kills and rng.random() < 0.05:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            task = worker()
    async with asyncio.timeout(3600):
        while True:
            if not await store.find(Query(), 1):
                break
            await asyncio.sleep(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return history


@pytest.mark.parametrize("block", range(3))
def test_a_store_that_fails_and_loses_answers_costs_no_job_its_place(block: int) -> None:
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        history = run(world(seed, rate=0.1, kills=False), seed=seed)
        verdict = effects_once_in_order(history)
        assert verdict.ok, f"seed {seed}\n{verdict}"


def test_a_cancelled_worker_repeats_at_most_what_it_had_in_flight() -> None:
    for seed in range(SEEDS_PER_BLOCK):
        history = run(world(seed, rate=0.05, kills=True), seed=seed)
        assert {e.seq for e in history.effects} == {e.seq for e in history.enqueued}, f"seed {seed}"
        history.runs, repeated = [], {}
        for effect in history.effects:
            repeated.setdefault(effect.seq, effect)
        history.effects = list(repeated.values())
        verdict = effects_once_in_order(history)
        assert verdict.ok, f"seed {seed}\n{verdict}"
