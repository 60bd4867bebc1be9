"""Jobs in memory: the embedded store without a file and without a thread, for tests and simulations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import apsw

from holdfast.clock import Clock, SystemClock
from holdfast.work.embedded import MIGRATIONS
from holdfast.work.embedded_store import EmbeddedWork

T = TypeVar("T")


class MemoryWork(EmbeddedWork):
    """Everything is lost with the process. It runs on the caller's loop, so virtual time works."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(self._inline, clock or SystemClock())
        self._db = apsw.Connection(":memory:")
        for script in MIGRATIONS:
            self._db.execute(script)

    async def _inline(self, work: Callable[[apsw.Connection], T], /) -> T:
        self._db.execute("SAVEPOINT act")
        try:
            result = work(self._db)
        except BaseException:
            self._db.execute("ROLLBACK TO act")
            raise
        finally:
            self._db.execute("RELEASE act")
        return result
