"""A worker's heartbeat, from its own thread and connection, so that a busy event loop
does not look dead.

A *stuck* loop must look dead: the thread stops the heartbeat when the loop has not
ticked for ``stuck_after_seconds``. Then another worker takes over.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from holdfast import telemetry
from holdfast.clock import Clock, start_thread, wait_at_most

Beat = Callable[[], Awaitable[bool]]
"""Sends one heartbeat; False if the store has declared this worker dead."""


class WorkerHeartbeat:
    """Beats every ``interval_seconds`` while the owner's loop ticks.

    ``lost``, ``confirm`` and ``confirmed_age`` may be used from any thread.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[Beat]],
        clock: Clock,
        *,
        interval_seconds: float,
        stuck_after_seconds: float,
    ) -> None:
        self._connect, self._clock = connect, clock
        self._interval, self._stuck_after = interval_seconds, stuck_after_seconds
        self._ticked_at = self._confirmed_at = clock.monotonic()
        self._stopping = threading.Event()
        self.lost = False

    def confirmed_age(self) -> float:
        """Seconds since the last confirmed heartbeat was sent."""
        return self._clock.monotonic() - self._confirmed_at

    def confirm(self, sent_at: float) -> None:
        """Count a successful call that was sent at this time as a heartbeat."""
        self._confirmed_at = max(self._confirmed_at, sent_at)

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Beat until the block is left."""
        self._tick(asyncio.get_running_loop())
        ended = start_thread(lambda: asyncio.run(self._run()), "holdfast-heartbeat")
        try:
            yield
        finally:
            self._stopping.set()
            await wait_at_most(ended, 2 * self._interval + 5)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """A timer, not a task: a handler that cancels all tasks is no stuck loop."""
        self._ticked_at = self._clock.monotonic()
        if not self._stopping.is_set():
            loop.call_later(min(1.0, self._interval), self._tick, loop)

    async def _run(self) -> None:
        while not self._stopping.is_set() and not self.lost:
            try:
                async with self._connect() as beat:
                    await self._beat_on(beat)
            except (OSError, TimeoutError) as error:
                telemetry.log.warning(
                    "work.heartbeat_interrupted", error=str(error) or type(error).__name__
                )
            await self._pause()

    async def _beat_on(self, beat: Beat) -> None:
        while not self._stopping.is_set():
            sent_at = self._clock.monotonic()
            if sent_at - self._ticked_at < self._stuck_after:
                async with asyncio.timeout(2 * self._interval):
                    self.lost = not await beat()
                if self.lost:
                    return
                self.confirm(sent_at)
            await self._pause()

    async def _pause(self) -> None:
        await asyncio.to_thread(self._stopping.wait, self._interval)
