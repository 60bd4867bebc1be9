"""Negative controls of checker 11: workers on the real embedded store.

One variant is correct, the others have one deliberate defect each. All run the same
seeded scenario: streams of jobs, handlers that fail at random, workers that are killed,
and workers whose session another takes over while they run (zombies). Effects are rows
in the store's own database, written in the handler's transaction. Only the correct
variant keeps every promise of checker 11.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import apsw
import msgspec

from holdfast.verify.history import EffectSeen, Enqueued, Excused, Header, History, Ran, Recorder
from holdfast.work.contract import Claimed, ClaimRequest, Report
from holdfast.work.failures import JobFailed
from holdfast.work.handlers import Context, Handlers
from holdfast.work.inspection import Query
from holdfast.work.job import FailureAction, Job, Policies, Reason
from holdfast.work.sqlite.store import MemoryWork
from holdfast.work.sqlite.verbs import SQL
from holdfast.work.worker import Worker, WorkerSettings
from proof.virtual_loop import LoopClock, run

SEEDS = range(1, 9)
DEAF_SECONDS = 1.0
ENOUGH_SECONDS = 120
"""The correct variant needs a few; a broken one may never end."""
SETTINGS = WorkerSettings(concurrency=6, jobs_max=24, per_stream_max=4, drain_seconds=2)
POLICIES = Policies().with_type("Deed", strikes_max=1000, base_seconds=0.5, cap_seconds=4.0)


class Deed(msgspec.Struct):
    stream: str
    number: int


Apply = Callable[["JobScenario", Context, Deed], Any]


@dataclass
class JobScenario:
    """One run of the scenario; ``ledger`` is the resource: a table beside the jobs."""

    seed: int
    store: MemoryWork
    apply: Apply
    clock: LoopClock
    rng: random.Random
    record: Recorder
    workers: list[asyncio.Task[None]] = field(default_factory=list)
    sessions: list[Any] = field(default_factory=list)
    hearing: dict[int, asyncio.Event] = field(default_factory=dict)

    async def play(self) -> History:
        self._listen_to_sessions()
        async with self.store.transaction() as db:
            db.execute("CREATE TABLE ledger (stream TEXT, seq INTEGER, fence INTEGER)")
        handlers = self._handlers()
        worker = self._start(handlers)
        for number in range(50):
            drafts = [handlers.draft(Deed(f"s{self.rng.randrange(4)}", number)) for _ in range(2)]
            for draft, seq in zip(drafts, await self.store.enqueue(drafts), strict=True):
                self.record.note(Enqueued(draft.stream or "", seq))
            await asyncio.sleep(self.rng.choice([0, 0.01, 0.2]))
            if number % 10 == 9:
                if number % 20 == 9:
                    self._make_zombie(worker)
                else:
                    self.workers[-1].cancel()
                worker = self._start(handlers)
        await self._until_done()
        return await self._history()

    def _make_zombie(self, worker: Worker) -> None:
        """Start no more jobs; notice the successor after the running ones end."""
        hearing = self.hearing[self.sessions[-1].instance] = asyncio.Event()
        asyncio.get_running_loop().call_later(DEAF_SECONDS, hearing.set)
        worker.stop()
        self.store.on_left()  # its lock is lost, so the next worker does not wait for it

    def _listen_to_sessions(self) -> None:
        plain = self.store.join

        async def join(name: str) -> Any:
            session: Any = await plain(name)
            process = session.process

            async def process_when_hearing(report: Report, request: ClaimRequest) -> Claimed:
                if session.instance in self.hearing:
                    await self.hearing[session.instance].wait()
                claimed: Claimed = await process(report, request)
                return claimed

            session.process = process_when_hearing
            self.sessions.append(session)
            return session

        self.store.join = join  # type: ignore[method-assign]

    def _start(self, handlers: Handlers) -> Worker:
        name = f"w{len(self.workers)}"
        worker = Worker(
            self.store,
            handlers,
            name=name,
            policies=POLICIES,
            settings=SETTINGS,
            clock=self.clock,
            rng=self.rng,
        )
        self.workers.append(asyncio.create_task(worker.run()))
        return worker

    def _handlers(self) -> Handlers:
        handlers = Handlers()

        @handlers.handle(Deed, stream=lambda deed: deed.stream)
        async def do(ctx: Context, deed: Deed) -> None:
            started = self.clock.monotonic()
            await asyncio.sleep(self.rng.choice([0, 0.001, 0.05, 0.3]))
            if self.rng.random() < 0.1:
                raise RuntimeError("by chance")
            if deed.number % 17 == 3 and ctx.job.attempt == 1:
                raise JobFailed(Reason.VALIDATION_FAILURE, "not like this")
            await self.apply(self, ctx, deed)
            self.record.note(
                Ran(
                    deed.stream,
                    ctx.job.seq,
                    str(ctx.session.instance),
                    started,
                    self.clock.monotonic(),
                )
            )

        return handlers

    async def _until_done(self) -> None:
        for _ in range(ENOUGH_SECONDS):
            if not await self.store.find(Query(), 1):
                break
            await asyncio.sleep(1)
        for worker in self.workers:
            worker.cancel()
        await asyncio.gather(*self.workers, return_exceptions=True)

    async def _history(self) -> History:
        for dead in await self.store.dead(Query(), 1000):
            self.record.note(Excused(dead.seq))
        async with self.store.transaction() as db:
            for stream, seq, fence in db.execute(
                "SELECT stream, seq, fence FROM ledger ORDER BY rowid"
            ):
                self.record.note(EffectSeen(str(stream), int(str(seq)), int(str(fence))))
        return self.record.history()


def _write(db: apsw.Connection, ctx: Context, deed: Deed) -> None:
    db.execute("INSERT INTO ledger VALUES (?, ?, ?)", (deed.stream, ctx.job.seq, ctx.fence))


async def inside(scenario: JobScenario, ctx: Context, deed: Deed) -> None:
    """As the guide says: effect and completion in one transaction."""
    async with ctx.transaction() as db:
        _write(db, ctx, deed)


async def outside(scenario: JobScenario, ctx: Context, deed: Deed) -> None:
    """The effect in its own transaction: a crash before completion repeats it."""
    async with scenario.store.transaction() as db:
        _write(db, ctx, deed)
    await asyncio.sleep(0.05)


async def after(scenario: JobScenario, ctx: Context, deed: Deed) -> None:
    """Completion first: a crash in between loses the effect."""
    async with ctx.transaction():
        pass
    await asyncio.sleep(0.05)
    async with scenario.store.transaction() as db:
        _write(db, ctx, deed)


class UnfencedCompletion(MemoryWork):
    """The design document's: completion is not fenced, so a zombie and its successor
    both apply the effect.
    """

    async def join(self, name: str) -> Any:
        session: Any = await super().join(name)

        @asynccontextmanager
        async def transaction(job: Job) -> AsyncIterator[apsw.Connection]:
            async with self._lend() as db:
                yield db
                db.execute(SQL["complete"], (job.seq,))
                db.execute(SQL["lift"], (job.seq,))

        session.transaction = transaction
        return session


class ReleasedDeadLetters(MemoryWork):
    """The design document's: a dead letter is "completed with status 0 to prevent
    re-claiming", which makes it claimable."""

    async def join(self, name: str) -> Any:
        session: Any = await super().join(name)
        plain = session.process

        async def process(report: Report, request: ClaimRequest) -> Claimed:
            claimed: Claimed = await plain(report, request)
            for failed in report.failed:
                if failed.verdict.action is FailureAction.DEAD:
                    await self._transact(partial(_make_claimable, seq=failed.seq))
            return claimed

        session.process = process
        return session


def _make_claimable(db: apsw.Connection, seq: int) -> None:
    columns = [str(row[1]) for row in db.execute("PRAGMA table_info(job)")]
    chosen = ", ".join("0" if name == "state" else name for name in columns)
    db.execute(
        f"INSERT INTO job ({', '.join(columns)}) SELECT {chosen} FROM dead WHERE seq = ?", (seq,)
    )
    db.execute(SQL["notice"])


class UnorderedClaims(MemoryWork):
    """A free worker takes the next job of any stream, one at a time."""

    async def join(self, name: str) -> Any:
        session: Any = await super().join(name)
        plain = session.process

        async def process(report: Report, request: ClaimRequest) -> Claimed:
            claimed: Claimed = await plain(report, request)
            claimed.jobs = [msgspec.structs.replace(job, stream=None) for job in claimed.jobs]
            return claimed

        session.process = process
        return session


@dataclass(frozen=True, slots=True)
class JobControl:
    """A variant of the scenario; ``red``: the only checkers it must turn red."""

    name: str
    store: Callable[[LoopClock], MemoryWork] = MemoryWork
    apply: Apply = inside
    red: frozenset[int] = frozenset({11})


WHOLE = JobControl("whole", red=frozenset())
JOB_CONTROLS = [
    JobControl("a zombie's completion is believed", UnfencedCompletion),
    JobControl("release of a dead letter", ReleasedDeadLetters),
    JobControl("a claim that ignores streams", UnorderedClaims),
    JobControl("effects outside the transaction", apply=outside),
    JobControl("effects after the completion", apply=after),
]


def play_jobs(seed: int, control: JobControl) -> History:
    """The same history for the same seed and control."""

    async def play() -> History:
        clock = LoopClock()
        record = Recorder(Header(seed=seed, notes={"control": control.name}))
        scenario = JobScenario(
            seed, control.store(clock), control.apply, clock, random.Random(seed), record
        )
        return await scenario.play()

    return run(play(), seed=seed)
