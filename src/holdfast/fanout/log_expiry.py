"""Forgets old events of a shared log: creations of chats and raised epochs.

Messages stay as long as their chats keep them; events have no other use than to be
read. They are kept for ``KEPT_SECONDS``, and until every reader whose position is
stored has read them. A gateway's feed that is further behind than that reads the store
instead (``LogLost``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast import telemetry
from holdfast.clock import Clock, timestamp
from holdfast.eventlog.contract import Position, SharedLog
from holdfast.fanout.job_reader import stored_marks
from holdfast.store.leases.contract import Leases
from holdfast.store.leases.held import HeldLease
from holdfast.work.contract import WorkStore

KEPT_SECONDS = 86_400.0
SWEEP_SECONDS = 600.0
FORGOTTEN_AT_ONCE = 500
PAUSE_SECONDS = 0.05
"""Between two commits: each locks the shards it changes."""
LEASE = "log expiry"


class LogExpiry:
    """``run`` must be running on every node; the one with the lease forgets."""

    def __init__(
        self,
        log: SharedLog,
        jobs: WorkStore,
        readers: Sequence[str],
        leases: Leases,
        clock: Clock,
    ) -> None:
        """``readers``: the names under which positions may be stored."""
        self._log, self._jobs, self._readers = log, jobs, readers
        self._clock = clock
        self._lease = HeldLease(leases, LEASE, clock)

    async def run(self) -> None:
        await self._lease.repeat(SWEEP_SECONDS, self.sweep, _on_failure)

    async def sweep(self) -> None:
        """Forget everything that is old enough now. Raises what the stores raise."""
        before = timestamp(self._clock.now() - KEPT_SECONDS)
        behind = await self._behind()
        while True:
            if not await self._log.forget_events(before, behind, FORGOTTEN_AT_ONCE):
                return
            await asyncio.sleep(PAUSE_SECONDS)

    async def _behind(self) -> Position:
        """The least position of all readers, in each shard."""
        end = await self._log.end()
        least = list(end.offsets)
        for reader in self._readers:
            name, marks = await stored_marks(self._jobs, reader, len(least))
            if marks:
                least = [min(of, marks.get((name, n), 0)) for n, of in enumerate(least)]
        return Position(tuple(least), end.base)


def _on_failure(error: Exception) -> None:
    telemetry.log.warning("fanout.log_expiry_failed", error=str(error) or "it took too long")
