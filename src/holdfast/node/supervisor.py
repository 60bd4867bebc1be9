"""Restarts background tasks: what runs beside the sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from holdfast import telemetry
from holdfast.errors import HoldfastError

GAUGES_SECONDS = 5.0
"""The pause between two refreshes of the gauges."""
RESTART_SECONDS = 1.0
"""The pause before a background task that ended is started again."""


@asynccontextmanager
async def background_task(name: str, run: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run a background task while the block runs; restart it whenever it ends.

    So a part recovers by itself, and the others do not notice.
    """
    telemetry.part_started(name)
    task = asyncio.create_task(_again(name, run), name=f"holdfast-{name}")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _again(name: str, run: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await run()
        except HoldfastError as error:
            telemetry.log.warning("node.role_interrupted", role=name, error=str(error))
        except Exception as error:
            telemetry.defect(name, error)
        await asyncio.sleep(RESTART_SECONDS)
