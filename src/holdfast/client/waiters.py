"""The callers that wait until a message is on disk, or has its outcome.

Each caller has a future of its own, so cancelling one affects no other.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from holdfast.client.events import Sent
from holdfast.client.outbox import OutboxEntry

T = TypeVar("T")


class Unsettled:
    """A message neither acked nor refused; ``on_disk``: in the state file."""

    __slots__ = ("entry", "on_disk", "sent", "stored")

    def __init__(self, entry: OutboxEntry, on_disk: bool = False) -> None:
        self.entry = entry
        self.on_disk = on_disk
        self.stored: Waiters[bool] = Waiters()
        self.sent: Waiters[Sent] = Waiters()


class Waiters(Generic[T]):
    """The callers that wait for one outcome."""

    __slots__ = ("_futures",)

    def __init__(self) -> None:
        self._futures: set[asyncio.Future[T]] = set()

    async def wait(self) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._futures.add(future)
        try:
            return await future
        finally:
            self._futures.discard(future)

    def resolve(self, outcome: T | Exception) -> bool:
        """Give every caller the outcome; return whether there was any."""
        waiting = [future for future in self._futures if not future.done()]
        for future in waiting:
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        return bool(waiting)
