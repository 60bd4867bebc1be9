"""The node's side of usage: ends count at once, running runs are noted each second.

While the store fails, ended runs wait here and are counted when it works again: a run
counts once however often it is sent. Beyond ``WAITING_MAX`` they are lost, and that is
counted and logged.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import islice

from holdfast import telemetry
from holdfast.clock import SharedTimeout
from holdfast.errors import HoldfastError
from holdfast.streaming.usage_store.contract import RunUsage, UsageStore

WAITING_MAX = 10_000
NOTE_SECONDS = 1.0
"""How often the running runs are noted, and a failed call is repeated."""
COMMIT_SECONDS = 0.025
"""Between two commits of ends: each takes 0.3 ms of processor time, so ends that come
closer share one. The first one after a pause does not wait."""
CALL_RUNS_MAX = 500
"""Runs in one call: other writes wait for its commit."""


class UsageBuffer:
    """Counts the runs of a node. ``run`` must run; ``running`` gives its runs so far.

    ``lost``: how many ended runs were not counted and never will be.
    """

    def __init__(
        self,
        store: UsageStore,
        running: Callable[[], Sequence[RunUsage]],
        *,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        self._store = store
        self._running = running
        self._waiting_max = waiting_max
        self._waiting: deque[RunUsage] = deque()
        self._has_ended = asyncio.Event()
        self._counted = self._stored = 0
        self._waiters: dict[asyncio.Future[None], int] = {}
        """Each waits until as many runs are stored as had been counted before it."""
        self._failing = False
        self.lost = 0
        self.trouble: str | None = None
        """Why the last call of the store failed; None if it did not."""

    def count(self, ended: RunUsage) -> None:
        if len(self._waiting) < self._waiting_max:
            self._waiting.append(ended)
            self._counted += 1
            self._has_ended.set()
            return
        if not self.lost:
            telemetry.log.error("streaming.usage_lost", waiting=self._waiting_max)
        self.lost += 1

    async def stored(self, seconds_max: float) -> None:
        """Wait until every run counted so far is in the store, unless that fails or
        takes longer.
        """
        if self._failing or self._stored >= self._counted:
            return
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters[waiter] = self._counted
        timer = loop.call_later(seconds_max, _wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            del self._waiters[waiter]

    async def run(self) -> None:
        """Count and note until it is cancelled. It may be run again."""
        loop = asyncio.get_running_loop()
        note_at, commit_at = loop.time() + NOTE_SECONDS, 0.0
        with closing(SharedTimeout()) as timeout:
            while True:
                await timeout.wait_for(self._has_ended, note_at - loop.time())
                if (early_seconds := commit_at - loop.time()) > 0:
                    await asyncio.sleep(early_seconds)
                commit_at = loop.time() + COMMIT_SECONDS
                try:
                    await self.flush()
                    if loop.time() >= note_at:
                        await self._note()
                    self.trouble = None
                except HoldfastError as error:
                    self.trouble = error.message
                    telemetry.log.warning("streaming.usage_delayed", error=error.message)
                    await asyncio.sleep(NOTE_SECONDS)
                if loop.time() >= note_at:
                    note_at = loop.time() + NOTE_SECONDS

    async def flush(self) -> None:
        """Count every run that waits. Raises what the store raises; repeat then."""
        self._has_ended.clear()
        try:
            while self._waiting:
                some = list(islice(self._waiting, CALL_RUNS_MAX))
                await self._store.count(some)
                for _ in some:
                    self._waiting.popleft()
                self._stored += len(some)
                self._wake(self._stored)
        finally:
            self._failing = bool(self._waiting)
            if self._failing:
                self._has_ended.set()
                self._wake(self._counted)

    def _wake(self, through: int) -> None:
        for waiter, awaited in self._waiters.items():
            if awaited <= through:
                _wake(waiter)

    async def _note(self) -> None:
        running = self._running()
        for at in range(0, len(running), CALL_RUNS_MAX):
            await self._store.note(running[at : at + CALL_RUNS_MAX])


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
