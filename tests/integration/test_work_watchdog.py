"""Handlers that end their process, or are stuck in synchronous code until it is ended:
who is blamed, who is free.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from work_rigs import ManualWorker, Opened, draft, embedded_work, postgres_work, until

from holdfast.work.contract import Report
from holdfast.work.handlers import Context, Handlers
from holdfast.work.inspection import Query
from holdfast.work.job import FailureAction, FailureVerdict, JobDraft, Reason, State
from holdfast.work.sqlite.store import MemoryWork
from holdfast.work.watchdog import EXIT_CODE, Watchdog
from holdfast.work.worker import Worker, WorkerSettings

SECONDS = 0.5
CHILD = f"""
import asyncio, sys, time
from pathlib import Path
from holdfast.work.worker import Worker, WorkerSettings
from holdfast.work.handlers import Handlers
from holdfast.work.postgres import PostgresWork
from holdfast.work.sqlite import SqliteWork

async def main(where):
    store = await (PostgresWork.open(where) if "://" in where else SqliteWork.open(Path(where)))
    handlers, waiting = Handlers(), asyncio.Event()

    @handlers.handle(dict, type="Wait")
    async def wait(ctx, _):
        waiting.set()
        await asyncio.sleep(60)

    @handlers.handle(dict, type="Stuck")
    async def stuck_handler(ctx, payload):
        await waiting.wait()
        if payload["inside"]:
            async with ctx.transaction():
                time.sleep(60)
        time.sleep(60)

    await Worker(store, handlers, settings=WorkerSettings(stuck_loop_seconds={SECONDS})).run()

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("inside", ["false", "true"], ids=["handler", "transaction"])
@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
async def test_stuck_loop_ends_its_process_with_70_and_records_the_reason(
    engine: str, inside: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    where = (
        str(tmp_path / "work.db")
        if engine == "sqlite"
        else request.getfixturevalue("postgres_server").url
    )

    async with (
        embedded_work(tmp_path / "work.db") if engine == "sqlite" else postgres_work(where)
    ) as o:
        payload = b'{"inside":%s}' % inside.encode()
        innocent, stuck = await o.store.enqueue(
            [JobDraft("Wait", b"{}"), JobDraft("Stuck", payload)]
        )
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, where, stderr=pipe
        )
        _, stderr = await asyncio.wait_for(child.communicate(), 60)
        assert child.returncode == EXIT_CODE == 70, stderr
        assert b"work.loop_stuck" in stderr and b"in stuck_handler" in stderr
        (entry,) = await o.store.find(Query(seqs=[stuck]))
        assert (entry.state, entry.reason, entry.error_type) == (
            State.RETRY,
            Reason.TIMEOUT_EXCEEDED,
            "LoopStuck",
        )
        assert (entry.attempt, entry.strikes, entry.crashes) == (1, 1, 1)
        assert "in stuck_handler" in entry.trace
        (other,) = await o.store.find(Query(seqs=[innocent]))
        assert (other.state, other.attempt, other.crashes) == (
            State.READY,
            0,
            0,
        ), "nobody else is to blame"
        await _taken_at_once(o.store, innocent)


async def _taken_at_once(store: Any, seq: int) -> None:
    """Without waiting for the lease of the dead one, which is 20 s."""
    handlers, ran = Handlers(), asyncio.Event()

    @handlers.handle(dict, type="Wait")
    async def wait(ctx: Context, _: dict[str, Any]) -> None:
        assert (ctx.job.seq, ctx.job.suspect) == (seq, False)
        ran.set()

    async with Worker(store, handlers, settings=WorkerSettings(poll_max_seconds=0.05)).running():
        await asyncio.wait_for(ran.wait(), 10)


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
async def test_crash_of_a_stuck_loop_counts_although_its_failure_is_reported(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A failure alone would leave a suspect one crash: it did not kill its worker."""
    where = (
        tmp_path / "work.db"
        if engine == "sqlite"
        else request.getfixturevalue("postgres_server").url
    )

    async with embedded_work(where) if engine == "sqlite" else postgres_work(where) as o:
        (seq,) = await o.store.enqueue([draft()])
        for crashes in (0, 1, 2):
            await o.pass_time(86400)
            manual = await ManualWorker.join(o.store)
            await manual.turn()
            assert manual.jobs[seq].crashes == crashes
            failed = manual.failure(seq)
            if crashes == 2:
                failed = replace(
                    failed,
                    verdict=FailureVerdict(FailureAction.DEAD, Reason.POISON_MESSAGE, strike=True),
                )
            await asyncio.to_thread(manual.session.report_before_exit, Report(failed=[failed]), seq)
            await o.kill(manual.session)
        (dead,) = await o.store.dead(Query())
        assert (dead.crashes, dead.attempt, dead.strikes) == (3, 3, 3)


async def test_third_process_that_a_job_ends_makes_it_poison() -> None:
    store, handlers, failures = MemoryWork(), Handlers(), list[Any]()
    worker = Worker(store, handlers)

    @handlers.handle(dict, type="Stuck")
    async def handle(ctx: Context, _: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        failures.append(worker._runner.culprit(loop, 30, "the stack"))

    await store.enqueue([JobDraft("Stuck", b"{}"), JobDraft("Stuck", b"{}")])
    store._db.execute("UPDATE job SET crashes = 2 WHERE seq = 2")
    async with worker.running():
        await until(lambda: len(failures) == 2)
    reasons = {failed.seq: failed.verdict.reason for failed in failures}
    assert reasons == {1: Reason.TIMEOUT_EXCEEDED, 2: Reason.POISON_MESSAGE}


async def test_watchdog_spares_a_busy_loop_and_ends_a_stuck_one_if_its_report_hangs() -> None:
    ended, said, blocked = list[int](), list[str](), threading.Event()

    def report(stack: str) -> None:
        said.append(stack)
        blocked.wait()

    async with Watchdog(0.3, report, ended.append, report_seconds_max=0.2).watching():
        for _ in range(40):
            time.sleep(0.02)  # noqa: ASYNC251 - busy, not stuck
            await asyncio.sleep(0)
        assert not ended
        time.sleep(0.8)  # noqa: ASYNC251 - stuck
        await until(lambda: ended)
    blocked.set()
    assert ended == [EXIT_CODE] and "time.sleep(0.8)" in said[0]


PAUSED = """
import asyncio
from holdfast.work.watchdog import Watchdog

async def main():
    async with Watchdog(0.5, print).watching():
        print("ready", flush=True)
        await asyncio.sleep(1)

asyncio.run(main())
"""


def test_stopped_and_continued_process_is_not_stuck() -> None:
    child = subprocess.Popen([sys.executable, "-c", PAUSED], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGSTOP)
    time.sleep(1.2)  # that long it is stopped
    child.send_signal(signal.SIGCONT)
    assert child.wait(20) == 0
    child.stdout.close()


EXITS = """
import asyncio, os, sys
from pathlib import Path
from holdfast.work.worker import Worker
from holdfast.work.handlers import Handlers
from holdfast.work.postgres import PostgresWork
from holdfast.work.sqlite import SqliteWork

async def main(where):
    store = await (PostgresWork.open(where) if "://" in where else SqliteWork.open(Path(where)))
    handlers = Handlers()

    @handlers.handle(dict, type="Exit")
    async def handle(ctx, _):
        os._exit(3)

    await Worker(store, handlers).run()

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
async def test_handler_that_ends_its_process_is_a_crash_of_its_job(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    where = (
        str(tmp_path / "work.db")
        if engine == "sqlite"
        else request.getfixturevalue("postgres_server").url
    )

    async with (
        embedded_work(tmp_path / "work.db") if engine == "sqlite" else postgres_work(where)
    ) as o:
        (seq,) = await o.store.enqueue([JobDraft("Exit", b"{}")])
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", EXITS, where)
        assert await asyncio.wait_for(child.wait(), 60) == 3
        async with Worker(
            o.store, Handlers(), settings=WorkerSettings(poll_max_seconds=0.05)
        ).running():
            await until(lambda: _crashed(o, seq))


async def _crashed(o: Opened, seq: int) -> bool:
    (entry,) = await o.store.find(Query(seqs=[seq]))
    return entry.crashes == 1 and entry.error_type in ("ProcessDied", "UnknownType")
