"""Keeps one lease for a node, as long as the engine answers.

The holder counts from the moment it *sent* its last successful renewal, on its own
monotonic clock, and stops after two thirds of the lease. The engine counted from a
later moment, when the renewal arrived. So the holder has stopped before anybody else
can start, unless its clock runs at less than two thirds of the engine's speed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.errors import HoldfastError
from holdfast.store.leases.contract import Fence, Leases

LEASE_SECONDS = 5.0
BEAT_SECONDS = 1.0
HELD_PART = 2 / 3


class HeldLease:
    """``run`` asks for the lease and renews it until cancelled; then it releases it.
    ``repeat`` also does the work of the one that holds it.
    """

    def __init__(
        self,
        leases: Leases,
        name: str,
        clock: Clock,
        lease_seconds: float = LEASE_SECONDS,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self._leases = leases
        self._name = name
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._beat_seconds = beat_seconds
        self._fence: Fence | None = None
        self._until = 0.0

    @property
    def fence(self) -> Fence | None:
        """The fence while this node holds the lease; ask again after every wait."""
        return self._fence if self._clock.monotonic() < self._until else None

    async def run(self) -> None:
        try:
            while True:
                await self._beat()
                await asyncio.sleep(self._beat_seconds)
        finally:
            await self._release()

    async def repeat(
        self,
        seconds: float,
        work: Callable[[], Awaitable[None]],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """``run``, and do the work every ``seconds`` while this node holds the lease. A
        round that fails, or takes as long itself, is given up until the next.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self.run())
            while True:
                await asyncio.sleep(seconds)
                if self.fence is None:
                    continue
                try:
                    async with asyncio.timeout(seconds):
                        await work()
                except (HoldfastError, TimeoutError) as error:
                    on_failure(error)

    async def _beat(self) -> None:
        sent_at = self._clock.monotonic()
        try:
            async with asyncio.timeout(self._lease_seconds * HELD_PART):
                if self._fence is not None and not await self._leases.renew(
                    self._name, self._fence, self._lease_seconds
                ):
                    self._fence = None
                    telemetry.log.warning("store.lease_lost", lease=self._name)
                if self._fence is None:
                    sent_at = self._clock.monotonic()
                    self._fence = await self._leases.acquire(self._name, self._lease_seconds)
        except (HoldfastError, TimeoutError):
            return  # until two thirds of the lease are over, the last answer counts
        self._until = sent_at + self._lease_seconds * HELD_PART

    async def _release(self) -> None:
        fence, self._fence = self._fence, None
        if fence is None:
            return
        try:
            async with asyncio.timeout(self._beat_seconds):
                await self._leases.release(self._name, fence)
        except (HoldfastError, TimeoutError):
            return  # it ends by itself
