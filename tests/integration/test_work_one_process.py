"""Two workers on one embedded store: the second says who has it, waits, and takes over
when the first is gone.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from work_rigs import embedded_work, until

from holdfast.errors import InternalError
from holdfast.work.contract import SessionTaken
from holdfast.work.handlers import Context, Handlers
from holdfast.work.job import JobDraft
from holdfast.work.sqlite import SqliteWork
from holdfast.work.sqlite.session_lock import SessionLock
from holdfast.work.worker import Worker, WorkerSettings

CHILD = """
import asyncio, sys
from pathlib import Path
from holdfast.work.sqlite import SqliteWork

async def main(path):
    store = await SqliteWork.open(Path(path))
    await store.join("first")
    print("joined", flush=True)
    await asyncio.sleep(60)

asyncio.run(main(sys.argv[1]))
"""


async def test_second_worker_of_a_file_waits_until_the_first_has_died(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, ran, handlers = tmp_path / "work.db", asyncio.Event(), Handlers()

    @handlers.handle(dict, type="Good")
    async def work(ctx: Context, _: dict[str, Any]) -> None:
        ran.set()

    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, str(path), stdout=pipe
    )
    assert child.stdout is not None and await child.stdout.readline() == b"joined\n"
    store = await SqliteWork.open(path)
    with pytest.raises(SessionTaken, match=f"process {child.pid} runs the jobs of work.db"):
        await store.join("second")
    await store.enqueue([JobDraft("Good", b"{}")])
    async with Worker(store, handlers, settings=WorkerSettings(poll_max_seconds=0.05)).running():
        await until(lambda: "work.session_taken" in caplog.text)
        assert not ran.is_set() and caplog.text.count("work.session_taken") == 1
        child.kill()
        await child.wait()
        await until(ran.is_set)
    await store.close()


async def test_session_is_free_when_its_worker_has_left(tmp_path: Path) -> None:
    one, two = (
        await SqliteWork.open(tmp_path / "work.db"),
        await SqliteWork.open(tmp_path / "work.db"),
    )
    session = await one.join("one")
    with pytest.raises(SessionTaken, match=f"process {os.getpid()} "):
        await two.join("two")
    await session.leave()
    await two.join("two")
    await two.close()
    await (await one.join("one")).leave()
    await one.close()


@pytest.mark.parametrize("engine", ["memory", "sqlite"])
async def test_second_worker_of_a_store_waits_until_the_first_has_left(
    engine: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handlers, ran = Handlers(), list[int]()

    @handlers.handle(dict, type="Good")
    async def work(ctx: Context, _: dict[str, Any]) -> None:
        ran.append(ctx.fence)

    async with embedded_work(tmp_path / "work.db" if engine == "sqlite" else None) as o:
        first = Worker(o.store, handlers, name="first")
        async with first.running():
            await o.store.enqueue([JobDraft("Good", b"{}")])
            await until(lambda: ran)
            with pytest.raises(
                SessionTaken, match="the worker 'first' runs the jobs of this store"
            ):
                await o.store.join("by hand")
            async with Worker(o.store, handlers, name="second").running():
                await until(lambda: "work.session_taken" in caplog.text)
                await o.store.enqueue([JobDraft("Good", b"{}")] * 20)
                await until(lambda: len(ran) == 21)
                assert len(set(ran)) == 1, "the first kept its session"
                first.stop()
                await o.store.enqueue([JobDraft("Good", b"{}")])
                await until(lambda: len(set(ran)) == 2)
    assert "work.lease_lost" not in caplog.text


async def test_failed_join_leaves_the_session_free(tmp_path: Path) -> None:
    one, two = (
        await SqliteWork.open(tmp_path / "work.db"),
        await SqliteWork.open(tmp_path / "work.db"),
    )
    with pytest.raises(InternalError):
        await one.join(object())  # type: ignore[arg-type]
    for store in (one, two):
        await (await store.join("worker")).leave()
        await store.close()


def test_forked_child_does_not_keep_the_session_lock(tmp_path: Path) -> None:
    lock, other = SessionLock(tmp_path / "work.db"), SessionLock(tmp_path / "work.db")
    lock.take()
    started, started_by_child = os.pipe()
    waits, ends = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ends)
        os.write(started_by_child, b"1")
        os.read(waits, 1)
        os._exit(0)
    try:
        os.read(started, 1)
        with pytest.raises(SessionTaken):
            other.take()  # the parent has it still
        lock.release()
        other.take()
        other.release()
    finally:
        for descriptor in (ends, waits, started, started_by_child):
            os.close(descriptor)
        os.waitpid(child, 0)
