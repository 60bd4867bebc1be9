"""A bound on concurrent work that serves waiting tenants in turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from holdfast.errors import ServerBusy

GOLDEN_RATIO = 0.618034
"""The fractional parts of its multiples spread evenly between 0 and 1."""
ROUNDS_MAX = 15
"""Bounds the retry delay, in multiples of the longest wait: 30 s by default."""


class FairSemaphore:
    """At most ``limit`` at once. A free slot goes to the next tenant in turn.

    A waiter therefore waits behind its own tenant, and for one slot of each other
    tenant, however many waiters those have. After ``max_wait_seconds`` it gets
    SERVER_BUSY.

    The number of waiters is bounded by the callers: a connection reads one page at a
    time. Each refused caller gets a retry time of its own. The times spread over as
    long as the remaining waiters would take at the present pace; callers that return
    together would only be refused together again.
    """

    def __init__(self, what: str, limit: int, max_wait_seconds: float) -> None:
        self._what = what
        self._limit = limit
        self._max_wait_seconds = max_wait_seconds
        self._free = limit
        self._turns: dict[str, deque[asyncio.Future[None]]] = {}
        """The waiters of each tenant; the tenant whose turn is next comes first."""
        self._waiting = 0
        self._given = 0
        self._refused = 0

    @asynccontextmanager
    async def one(self, tenant: str, seconds: float) -> AsyncIterator[None]:
        """Hold one slot; ``seconds`` may shorten the wait. Cancel-safe."""
        if self._free:
            self._free -= 1  # the usual case, without a timer
        else:
            await self._wait(tenant, min(self._max_wait_seconds, seconds))
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant: str, seconds: float) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.setdefault(tenant, deque()).append(place)
        given_before = self._given
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():
                self._pass_on()  # the slot arrived in the same moment
            if isinstance(error, TimeoutError):
                retry_after = self._when_to_return(self._given - given_before)
                message = f"too many {self._what} at once; try again"
                raise ServerBusy(
                    message, retry_after_seconds=retry_after, limit=self._limit
                ) from None
            raise
        finally:
            self._waiting -= 1

    def _pass_on(self) -> None:
        """Give the slot to the next waiter, skipping those that gave up."""
        while self._turns:
            tenant, waiting = next(iter(self._turns.items()))
            del self._turns[tenant]
            place = waiting.popleft()
            if waiting:
                self._turns[tenant] = waiting  # behind the others
            if not place.done():
                place.set_result(None)
                self._given += 1
                return
        self._free += 1

    def _when_to_return(self, given: int) -> float:
        self._refused += 1
        even = self._refused * GOLDEN_RATIO % 1
        rounds = min(self._waiting / max(given, 1), ROUNDS_MAX)
        return round(self._max_wait_seconds * (0.5 + even * max(rounds, 1)), 2)
