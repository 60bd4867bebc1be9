"""A worker that has lost all its runners to handlers that never end, or its own task to
the program around it.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from work_rigs import embedded_work, postgres_work, until

from holdfast.work.handlers import Context, Handlers
from holdfast.work.inspection import Query
from holdfast.work.job import JobDraft, Reason, State
from holdfast.work.watchdog import EXIT_CODE
from holdfast.work.worker import Worker, WorkerSettings

SETTINGS = WorkerSettings(
    concurrency=2,
    stuck_max=1,
    cancel_seconds=0.1,
    balance_seconds=0.2,
    poll_max_seconds=0.05,
    drain_seconds=2,
)
OTHERS = "FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
SESSIONS = "SELECT array_agg(id) FROM holdfast_work.instance"
CONNECTIONS_MAX = 8
STUCK = 3
"""As many as it takes: each beyond stuck_max costs a runner."""


def _handlers(ran: list[int], end: asyncio.Event) -> Handlers:
    handlers = Handlers()

    @handlers.handle(dict, type="Stuck", deadline_seconds=0.1)
    async def hang(ctx: Context, _: dict[str, Any]) -> None:
        while not end.is_set():
            with suppress(asyncio.CancelledError):
                await end.wait()

    @handlers.handle(dict, type="Good")
    async def work(ctx: Context, _: dict[str, Any]) -> None:
        ran.append(ctx.job.seq)

    return handlers


def _good(count: int) -> list[JobDraft]:
    return [JobDraft("Good", b"{}", f"stream-{n}") for n in range(count)]


async def test_worker_without_runners_leaves_its_streams_to_others(
    postgres_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from holdfast.work.postgres import PostgresWork

    ran, end = list[int](), asyncio.Event()
    handlers = _handlers(ran, end)
    async with postgres_work(postgres_server.url, dead_after_seconds=60) as o:
        other = await PostgresWork.open(postgres_server.url)
        async with Worker(o.store, handlers, settings=SETTINGS).running():
            stuck = await o.store.enqueue([JobDraft("Stuck", b"{}")] * STUCK)
            await until(lambda: "work.runners_exhausted" in caplog.text)
            async with Worker(other, handlers, name="healthy", settings=SETTINGS).running():
                await o.store.enqueue(_good(60))
                await until(lambda: len(ran) == 60)
            for entry in await o.store.find(Query(seqs=stuck)):
                assert (entry.state, entry.reason) == (State.RETRY, Reason.TIMEOUT_EXCEEDED)
            end.set()
        await other.close()


@pytest.mark.parametrize("engine", ["memory", "sqlite"])
async def test_worker_joins_again_when_a_stuck_handler_has_ended(
    engine: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ran, end = list[int](), asyncio.Event()
    opened = embedded_work(tmp_path / "work.db" if engine == "sqlite" else None)
    async with opened as o, Worker(o.store, _handlers(ran, end), settings=SETTINGS).running():
        await o.store.enqueue([JobDraft("Stuck", b"{}")] * STUCK)
        await until(lambda: "work.runners_exhausted" in caplog.text)
        await o.store.enqueue(_good(5))
        end.set()
        await until(lambda: len(ran) == 5)
    assert caplog.text.count("work.runners_exhausted") == 1


CHILD = """
import asyncio, sys
from pathlib import Path
from holdfast.work.worker import Worker, WorkerSettings
from holdfast.work.handlers import Handlers
from holdfast.work.sqlite import SqliteWork

async def main(path):
    store, handlers = await SqliteWork.open(Path(path)), Handlers()

    @handlers.handle(dict, type="Stuck", deadline_seconds=0.1)
    async def hang(ctx, _):
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass

    settings = WorkerSettings(concurrency=2, stuck_max=1, cancel_seconds=0.1, stuck_loop_seconds=20)
    await Worker(store, handlers, settings=settings).run()

asyncio.run(main(sys.argv[1]))
"""


async def test_watchdog_ends_a_process_whose_runners_are_all_stuck(tmp_path: Path) -> None:
    async with embedded_work(tmp_path / "work.db") as o:
        stuck = await o.store.enqueue([JobDraft("Stuck", b"{}")] * STUCK)
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, str(tmp_path / "work.db"), stderr=pipe
        )
        _, stderr = await asyncio.wait_for(child.communicate(), 30)
        assert child.returncode == EXIT_CODE, stderr
        assert b"work.runners_exhausted" in stderr
        for entry in await o.store.find(Query(seqs=stuck)):
            assert (entry.reason, entry.attempt, entry.crashes) == (Reason.TIMEOUT_EXCEEDED, 1, 0)


async def test_worker_whose_task_the_program_cancels_is_restarted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ran = list[int]()
    async with embedded_work(None) as o:
        worker = Worker(o.store, _handlers(ran, asyncio.Event()), settings=SETTINGS)
        async with worker.running():
            for wanted in (1, 2, 3):
                await o.store.enqueue(_good(1))
                await until(lambda wanted=wanted: len(ran) == wanted)
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
    assert "work.worker_restarted" in caplog.text


async def test_handler_cancelling_every_task_costs_no_session_and_no_connection(
    postgres_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Of asyncpg it can cancel the tasks in which connections go back to their pool:
    they go back all the same.
    """
    ran, judge, ended = list[int](), asyncio.current_task(), asyncio.Event()
    handlers, asking = _handlers(ran, asyncio.Event()), set[asyncio.Task[Any]]()
    async with postgres_work(postgres_server.url, dead_after_seconds=60) as o:
        admin = await asyncpg.connect(postgres_server.url)

        @handlers.handle(dict, type="Hostile")
        async def cancel_all(ctx: Context, _: dict[str, Any]) -> None:
            for _ in range(10):
                await admin.fetch(f"SELECT pg_terminate_backend(pid) {OTHERS}")
                for _ in range(5):
                    asking.add(asyncio.create_task(o.store.find(Query())))
                    for task in asyncio.all_tasks() - {judge, asyncio.current_task()}:
                        task.cancel()
                    await asyncio.sleep(0.001)
            ended.set()

        async with Worker(o.store, handlers, settings=SETTINGS).running():
            await o.store.enqueue(_good(5))
            await until(lambda: len(ran) == 5)
            session = await admin.fetchval(SESSIONS)
            await o.store.enqueue([JobDraft("Hostile", b"{}")])
            await ended.wait()
            await asyncio.gather(*asking, return_exceptions=True)
            async with asyncio.timeout(10), AsyncExitStack() as stack:
                for _ in range(CONNECTIONS_MAX):
                    await stack.enter_async_context(o.store._pools.calls.acquire())
            await o.store.enqueue(_good(5))
            await until(lambda: len(ran) == 10)
            assert await admin.fetchval(SESSIONS) == session, "it kept its session"
            assert await admin.fetchval(f"SELECT count(*) {OTHERS}") <= 2 * CONNECTIONS_MAX + 3
        await admin.close()
    assert "work.cancellation_refused" in caplog.text and "work.worker_restarted" not in caplog.text


async def test_run_ends_when_its_caller_is_cancelled() -> None:
    ran, sessions = list[int](), list[Any]()
    async with embedded_work(None) as o:
        running = asyncio.create_task(
            Worker(o.store, _handlers(ran, asyncio.Event()), settings=SETTINGS).run()
        )
        await o.store.enqueue(_good(1))
        await until(lambda: ran)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 5)
        store: Any = o.store
        await store._transact(lambda db: sessions.extend(db.execute("SELECT id FROM seat")))
        assert not sessions, "it has left its session"
    assert len(asyncio.all_tasks()) == 1
