"""How often a proof is repeated: in full by ``make torture``, a tenth in ``make test``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
IS_LONG = os.environ.get("TORTURE", "") not in ("", "0")
AT_ONCE = 5
"""Runs that mostly wait go side by side."""


def times(long: int) -> int:
    """This many in the long tier, else a tenth, rounded up."""
    return long if IS_LONG else -(-long // 10)


async def repeat(
    count: int, run: Callable[[int], Awaitable[T]], seconds_max: float, at_once: int = AT_ONCE
) -> list[T]:
    """The results of so many runs, some of them side by side; each may take so long."""
    places = asyncio.Semaphore(at_once)

    async def one(number: int) -> T:
        async with places, asyncio.timeout(seconds_max):
            return await run(number)

    async with asyncio.TaskGroup() as runs:
        tasks = [runs.create_task(one(number)) for number in range(count)]
    return [task.result() for task in tasks]


async def side_by_side(*proofs: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Proofs that mostly wait, at the same time; one by one in the long tier, where
    each has runs side by side itself.
    """
    if IS_LONG:
        for proof in proofs:
            await proof()
        return
    async with asyncio.TaskGroup() as group:
        for proof in proofs:
            group.create_task(proof())
