"""Jobs in memory: the embedded store without a file and without a thread, for tests and simulations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import apsw

from holdfast.clock import Clock, SystemClock
from holdfast.errors import Unavailable
from holdfast.work.sqlite.embedded import EmbeddedWork
from holdfast.work.sqlite.verbs import MIGRATIONS

T = TypeVar("T")


class MemoryWork(EmbeddedWork):
    """Everything is lost with the process. It runs on the caller's loop, so virtual time works."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(self._inline, self._borrowed, self._inline, clock or SystemClock())
        self._db = apsw.Connection(":memory:")
        self._turn = asyncio.Lock()
        self._loan: object | None = None
        for script in MIGRATIONS:
            self._db.execute(script)

    async def _inline(self, work: Callable[[apsw.Connection], T], /) -> T:
        async with self._borrowed() as db:
            return work(db)

    @asynccontextmanager
    async def _borrowed(self) -> AsyncIterator[apsw.Connection]:
        await self._turn.acquire()
        loan = self._loan = object()
        self._db.execute("BEGIN")
        try:
            yield self._db
            if self._loan is not loan:
                raise Unavailable("the transaction was ended: its run is over")
        except BaseException:
            self._end(loan, "ROLLBACK")
            raise
        self._end(loan, "COMMIT")

    def recall(self) -> None:
        self._end(self._loan, "ROLLBACK")

    def aside(self, work: Callable[[apsw.Connection], None]) -> None:
        """There is nothing to record: everything ends with the process."""

    def _end(self, loan: object | None, how: str) -> None:
        """Once for each loan: whoever comes second finds it ended."""
        if loan is not None and self._loan is loan:
            self._loan = None
            try:
                if self._db.in_transaction:
                    self._db.execute(how)
            finally:
                self._turn.release()
