"""A log in memory: the reference, and the log of the simulation. Not durable."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence

from holdfast.message import LogEntry


class MemoryEventLog:
    """See ``holdfast.eventlog.contract``.

    Register ``committed`` with a store's ``on_commit`` to make the log the store's
    commit order.
    """

    def __init__(self) -> None:
        self._entries: list[LogEntry] = []
        self._positions: list[int] = []
        self._grown = asyncio.Event()

    async def end(self) -> int:
        return self._positions[-1] if self._positions else 0

    async def read(self, after: int, limit: int) -> Sequence[LogEntry]:
        first = bisect_right(self._positions, after)
        return self._entries[first : first + limit]

    async def wait(self, after: int) -> None:
        while not self._positions or self._positions[-1] <= after:
            await self._grown.wait()

    def committed(self, entries: Sequence[LogEntry]) -> None:
        """Append entries at the positions the store gave them."""
        self._entries.extend(entries)
        self._positions.extend(entry.position for entry in entries)
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()
