"""The crash part of ``bench/work.py``: how soon a killed worker's jobs are done."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import asyncpg

from holdfast.work.handlers import Context, Handlers
from holdfast.work.job import JobDraft
from holdfast.work.postgres import PostgresWork, WorkerSessionSettings
from holdfast.work.worker import Worker, WorkerSettings

JOBS = 60
SECONDS = 0.5
CHILD = Path(__file__).resolve().parent.parent / "tests" / "support" / "worker_process.py"
QUICK = WorkerSessionSettings(0.2, dead_after_seconds=1.0, no_start_after_seconds=0.7)


async def crash_recovery_rounds(url: str) -> float:
    """60 jobs of half a second are in flight when their worker is killed: how many of
    them run one after another, in the longest chain, until the next worker has done
    them all.
    """
    store = await PostgresWork.open(url, session_settings=QUICK)
    try:
        with tempfile.TemporaryDirectory() as folder:
            gate = Path(folder) / "gate"  # it never opens
            payload = json.dumps({"stream": "", "gate": str(gate), "transaction": False}).encode()
            await store.enqueue([JobDraft("Deed", payload, f"s{n}") for n in range(JOBS)])
            await _killed_while_all_are_in_flight(url, folder)
        return float(await _rounds(store))
    finally:
        await store.close()


async def _killed_while_all_are_in_flight(url: str, folder: str) -> None:
    connection = await asyncpg.connect(url)
    victim = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs meanwhile
        [sys.executable, str(CHILD), url, f"{folder}/log", "victim", "1", "64"],
        stdout=subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(20):
            in_flight = "SELECT cardinality(running) FROM holdfast_work.instance"
            while await connection.fetchval(in_flight) != JOBS:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
    finally:
        victim.kill()
        victim.wait()
        await connection.close()


async def _rounds(store: PostgresWork) -> int:
    handlers, finished = Handlers(), asyncio.Event()
    levels = list[int]()
    """For each job done: how many jobs before it ran one after another."""

    @handlers.handle(dict, type="Deed", stream=lambda _: None)
    async def handle(ctx: Context, deed: dict[str, Any]) -> None:
        level = 1 + max(levels, default=0)
        await asyncio.sleep(SECONDS)
        levels.append(level)
        if len(levels) == JOBS:
            finished.set()

    async with (
        Worker(store, handlers, settings=WorkerSettings(balance_seconds=0.2)).running(),
        asyncio.timeout(60),
    ):
        await finished.wait()
    return max(levels)
