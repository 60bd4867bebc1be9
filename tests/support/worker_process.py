"""A worker process for tests: ``python worker_process.py URL LOG NAME DEAD_AFTER
[CONCURRENCY]``, with ``sqlite:PATH`` or a URL of PostgreSQL. It logs its runs as JSON
lines.

What a job does is in its payload: how long it takes, which file it waits for, whether
its effect is applied in a transaction (table ``effects``), whether it kills its
process. Without a beat for DEAD_AFTER seconds it is taken over.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from holdfast.work.contract import WorkStore
from holdfast.work.handlers import Context, Handlers
from holdfast.work.job import Policies
from holdfast.work.postgres import PostgresWork, WorkerSessionSettings
from holdfast.work.sqlite import SqliteWork
from holdfast.work.worker import Worker, WorkerSettings


class Deed(msgspec.Struct):
    stream: str
    seconds: float = 0.0
    gate: str = ""
    transaction: bool = True
    kill: bool = False
    fail_attempts: int = 0


async def opened(url: str, dead: float) -> WorkStore:
    if url.startswith("sqlite:"):
        return await SqliteWork.open(Path(url.removeprefix("sqlite:")))
    stuck = max(5.0, dead)
    session = WorkerSessionSettings(
        0.2, dead_after_seconds=dead, no_start_after_seconds=dead * 2 / 3, stuck_after_seconds=stuck
    )
    return await PostgresWork.open(url, session_settings=session, connections_max=12)


async def run_worker(
    url: str, log_path: str, name: str, dead_after: str, concurrency: str = "16"
) -> None:
    store = await opened(url, float(dead_after))
    handlers = Handlers()
    with Path(log_path).open("a", buffering=1) as log:  # noqa: ASYNC230 - one line per run

        @handlers.handle(Deed, stream=lambda deed: deed.stream)
        async def handle(ctx: Context, deed: Deed) -> None:
            if deed.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            started = time.monotonic()
            succeeded = False
            try:
                if deed.seconds:
                    await asyncio.sleep(deed.seconds)
                while deed.gate and not Path(deed.gate).exists():  # noqa: ASYNC110, ASYNC240
                    await asyncio.sleep(0.01)
                if ctx.job.attempt <= deed.fail_attempts:
                    raise RuntimeError("as ordered")
                if deed.transaction:
                    async with ctx.transaction() as connection:
                        insert = "INSERT INTO effects (stream, seq, fence) VALUES ($1, $2, $3)"
                        await connection.execute(insert, deed.stream, ctx.job.seq, ctx.fence)
                succeeded = True
            finally:
                run = [deed.stream, ctx.job.seq, name, started, time.monotonic(), succeeded]
                log.write(json.dumps(run) + "\n")

        runners = int(concurrency)
        settings = WorkerSettings(
            concurrency=runners,
            balance_seconds=0.2,
            poll_max_seconds=0.1,
            jobs_max=max(64, runners),
        )
        policies = Policies.preset("uniform").with_type("Deed", base_seconds=0.01)
        worker = Worker(store, handlers, name=name, settings=settings, policies=policies)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        print("ready", flush=True)
        await worker.run()
    await store.close()


if __name__ == "__main__":
    asyncio.run(run_worker(*sys.argv[1:]))
