"""A worker process for tests: ``python work_child.py URL LOG NAME``. It logs its runs as JSON lines.

What a job does is in its payload: how long it takes, whether its effect is applied in a transaction (table
``effects``), whether it kills its process.
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

from holdfast.work.coordinator import Worker, WorkerSettings
from holdfast.work.handling import Context, Handlers
from holdfast.work.job import Policies
from holdfast.work.postgres import PostgresWork
from holdfast.work.postgres_seat import SeatSettings


class Deed(msgspec.Struct):
    stream: str
    seconds: float = 0.0
    transaction: bool = True
    kill: bool = False
    fail_attempts: int = 0


async def main(url: str, log_path: str, name: str) -> None:
    seat = SeatSettings(beat_seconds=0.2, no_start_after_seconds=1.0, dead_after_seconds=1.5, stuck_after_seconds=5.0)
    store = await PostgresWork.open(url, seat_settings=seat, connections_max=12)
    handlers = Handlers()
    with Path(log_path).open("a", buffering=1) as log:  # noqa: ASYNC230 - a log line per run, in a test

        @handlers.handle(Deed, stream=lambda deed: deed.stream)
        async def handle(ctx: Context, deed: Deed) -> None:
            if deed.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            started = time.monotonic()
            succeeded = False
            try:
                if deed.seconds:
                    await asyncio.sleep(deed.seconds)
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

        settings = WorkerSettings(concurrency=16, balance_seconds=0.2, poll_max_seconds=0.1, jobs_max=64)
        policies = Policies.preset("seed").with_type("Deed", base_seconds=0.01)
        worker = Worker(store, handlers, name=name, settings=settings, policies=policies)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        print("ready", flush=True)
        await worker.run()
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
