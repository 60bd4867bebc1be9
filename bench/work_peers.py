"""The peers of ``bench/work.py``, each as its documentation runs it: fill an empty
queue, drain it, jobs per second.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import asyncpg

GRAPHILE = "graphile-worker@0.16"
GRAPHILE_CONCURRENCY = 24
_KEPT = tempfile.TemporaryDirectory(prefix="holdfast-bench-")


class PeerMissing(Exception):
    """It cannot be measured here; the text says why."""


@contextmanager
def _imported() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise PeerMissing(
            f"{error.name} is not installed: see the group 'bench' in pyproject.toml"
        ) from error


async def pgqueuer(url: str, total: int, batch: int) -> float:
    """Its documented benchmark: five queue managers with a connection each."""
    with _imported():
        from pgqueuer.db import AsyncpgDriver
        from pgqueuer.qm import QueueManager
        from pgqueuer.queries import Queries
        from pgqueuer.types import QueueExecutionMode

    connections = [await asyncpg.connect(url) for _ in range(6)]
    try:
        queries = Queries.from_asyncpg_connection(connections[0])
        await queries.install()
        for start in range(0, total, 500):
            count = min(500, total - start)
            await queries.enqueue(["fetch"] * count, [b"{}"] * count, [0] * count)
        managers = [
            QueueManager(Queries(AsyncpgDriver(connection))) for connection in connections[1:]
        ]
        done = 0
        for manager in managers:

            @manager.entrypoint("fetch")
            async def fetch(_job: Any) -> None:
                nonlocal done
                await asyncio.sleep(0)
                done += 1

        gc.collect()
        started = time.perf_counter()
        await asyncio.gather(
            *(m.run(batch_size=batch, mode=QueueExecutionMode.drain) for m in managers)
        )
        seconds = time.perf_counter() - started
        assert done == total, f"pgqueuer handled {done} of {total}"
        return total / seconds
    finally:
        for connection in connections:
            await connection.close()


async def procrastinate(url: str, total: int) -> float:
    with _imported():
        from procrastinate import App, PsycopgConnector

    app = App(connector=PsycopgConnector(conninfo=url))
    done = 0

    @app.task(name="fetch")
    async def fetch() -> None:
        nonlocal done
        await asyncio.sleep(0)
        done += 1

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        await fetch.batch_defer_async(*({} for _ in range(total)))
        gc.collect()
        started = time.perf_counter()
        await app.run_worker_async(
            concurrency=100, wait=False, install_signal_handlers=False, listen_notify=False
        )
        seconds = time.perf_counter() - started
    assert done == total, f"procrastinate handled {done} of {total}"
    return total / seconds


async def graphile(url: str, total: int) -> float:
    """Graphile Worker on Node, one process, installed once into a temporary folder."""
    command = ["node", "--expose-gc", "graphile.mjs", url, str(total), str(GRAPHILE_CONCURRENCY)]
    folder = await asyncio.to_thread(_graphile_folder)
    return float(await asyncio.to_thread(_output, command, folder))


@cache
def _graphile_folder() -> Path:
    if shutil.which("npm") is None or shutil.which("node") is None:
        raise PeerMissing("node and npm are not on this machine")
    folder = Path(_KEPT.name)
    shutil.copy(Path(__file__).parent / "graphile.mjs", folder)
    _output(
        ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), GRAPHILE], folder
    )
    return folder


def _output(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode != 0:
        raise PeerMissing(
            f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}"
        )
    return done.stdout
