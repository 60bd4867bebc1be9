"""Two workers on one SQLite file: the second says who has it, waits, and takes over when the first is gone."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from work_stores import until

from holdfast.work.contract import SeatTaken
from holdfast.work.coordinator import Worker, WorkerSettings
from holdfast.work.handling import Context, Handlers
from holdfast.work.job import Draft
from holdfast.work.sqlite import SqliteWork

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


def test_the_second_worker_of_a_file_waits_until_the_first_has_died(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        path, ran, handlers = tmp_path / "work.db", asyncio.Event(), Handlers()

        @handlers.handle(dict, type="Good")
        async def work(ctx: Context, _: dict[str, Any]) -> None:
            ran.set()

        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, str(path), stdout=pipe)
        assert child.stdout is not None and await child.stdout.readline() == b"joined\n"
        store = await SqliteWork.open(path)
        with pytest.raises(SeatTaken, match=f"process {child.pid} runs the jobs of work.db"):
            await store.join("second")
        await store.enqueue([Draft("Good", b"{}")])
        async with Worker(store, handlers, settings=WorkerSettings(poll_max_seconds=0.05)).running():
            await until(lambda: "work.seat_taken" in caplog.text)
            assert not ran.is_set() and caplog.text.count("work.seat_taken") == 1
            child.kill()
            await child.wait()
            await until(ran.is_set)
        await store.close()

    asyncio.run(main())


def test_a_seat_is_free_for_others_when_its_worker_has_left(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = await SqliteWork.open(tmp_path / "work.db"), await SqliteWork.open(tmp_path / "work.db")
        seat = await one.join("one")
        with pytest.raises(SeatTaken, match=f"process {os.getpid()} "):
            await two.join("two")
        again = await one.join("one again")
        await seat.leave()
        with pytest.raises(SeatTaken):
            await two.join("two")
        await again.leave()
        await two.join("two")
        await two.close()
        await (await one.join("one")).leave()
        await one.close()

    asyncio.run(main())
