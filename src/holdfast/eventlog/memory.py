"""A log in memory: the reference, and the log of the simulation. Not durable."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence

from holdfast.eventlog.contract import START, LogLost, Position
from holdfast.message import LogEntry


class MemoryEventLog:
    """See ``holdfast.eventlog.contract``.

    Register ``committed`` with a store's ``on_commit`` to make the log the store's
    commit order.
    """

    def __init__(self) -> None:
        self._entries: list[LogEntry] = []
        self._offsets: list[int] = []
        self._grown = asyncio.Event()

    async def end(self) -> Position:
        return START.moved(0, self._end)

    async def read(self, after: Position, limit: int) -> tuple[Sequence[LogEntry], Position]:
        if after.offset(0) > self._end:
            raise LogLost
        first = bisect_right(self._offsets, after.offset(0))
        entries = self._entries[first : first + limit]
        return entries, after.moved(0, entries[-1].offset) if entries else after

    async def wait(self, after: Position) -> None:
        while self._end <= after.offset(0):
            await self._grown.wait()

    async def lag(self, after: Position) -> int:
        return max(self._end - after.offset(0), 0)

    def committed(self, entries: Sequence[LogEntry]) -> None:
        """Append entries at the offsets the store gave them."""
        self._entries.extend(entries)
        self._offsets.extend(entry.offset for entry in entries)
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    @property
    def _end(self) -> int:
        return self._offsets[-1] if self._offsets else 0
