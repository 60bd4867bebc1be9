"""Roles: what runs beside the sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from holdfast import telemetry
from holdfast.errors import HoldfastError

GAUGES_SECONDS = 5.0
RESTART_SECONDS = 1.0
"""How long a role that ended by an error rests before it is started again."""


@asynccontextmanager
async def role(name: str, run: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run it while the block runs, again whenever it ends: its plane heals by itself, and the others never notice."""
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
            telemetry.log.warning("role_interrupted", role=name, error=str(error))
        except Exception as error:
            telemetry.defect(name, error)
        await asyncio.sleep(RESTART_SECONDS)
