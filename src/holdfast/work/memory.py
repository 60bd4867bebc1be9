"""Jobs in memory: the embedded store without a file and without a thread, for tests and simulations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import apsw

from holdfast.clock import Clock, SystemClock
from holdfast.work.sqlite.embedded import EmbeddedWork
from holdfast.work.sqlite.verbs import MIGRATIONS

T = TypeVar("T")


class MemoryWork(EmbeddedWork):
    """Everything is lost with the process. It runs on the caller's loop, so virtual time works."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(self._inline, self._borrowed, self._inline, clock or SystemClock())
        self._db = apsw.Connection(":memory:")
        self._turn = asyncio.Lock()
        for script in MIGRATIONS:
            self._db.execute(script)

    async def _inline(self, work: Callable[[apsw.Connection], T], /) -> T:
        async with self._borrowed() as db:
            return work(db)

    @asynccontextmanager
    async def _borrowed(self) -> AsyncIterator[apsw.Connection]:
        async with self._turn:
            with self._db:  # a savepoint, undone by whatever the block raises
                yield self._db
