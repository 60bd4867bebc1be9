"""The embedded event log: the store's messages and log events in commit order.

The newest entries are also kept in memory, the *tail*, so that a reader that keeps up
never reads from disk; a reader that has fallen behind reads the table. A redaction
empties the tail, so that nothing redacted is read from memory. So does a write with an
unknown outcome: its messages may be in the table although no commit announced them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

from holdfast.bounds import MIB
from holdfast.eventlog.contract import START, CommitSource, LogLost, Position
from holdfast.message import LogEntry, Message

TAIL_ENTRIES_MAX = 4_096
TAIL_CONTENT_BYTES_MAX = 16 * MIB
"""Beyond either bound the oldest half of the tail is dropped. No settings: a reader
further behind reads the table, and nothing else changes.
"""

_offset = attrgetter("offset")


class SqliteEventLog:
    """See ``holdfast.eventlog.contract.EventLog``. There is nothing to publish: a
    committed message is its own entry.
    """

    def __init__(
        self,
        source: CommitSource,
        entries_max: int = TAIL_ENTRIES_MAX,
        content_bytes_max: int = TAIL_CONTENT_BYTES_MAX,
    ) -> None:
        self._source = source
        self._entries_max = entries_max
        self._content_bytes_max = content_bytes_max
        self._tail: list[LogEntry] = []
        self._tail_bytes = 0
        self._floor: int | None = None
        """Every entry past this offset is in the tail; None if the tail is empty."""
        self._end: int | None = None
        """None: the table must be asked."""
        self._grown = asyncio.Event()
        source.on_commit(self._committed)

    async def end(self) -> Position:
        return START.moved(0, await self._end_offset())

    async def _end_offset(self) -> int:
        while self._end is None:
            grown = self._grown
            end = await self._source.log_end()
            if grown is self._grown:  # else a commit came meanwhile, and this end may be older
                self._end = end
        return self._end

    async def read(self, after: Position, limit: int) -> tuple[Sequence[LogEntry], Position]:
        offset = after.offset(0)
        entries: Sequence[LogEntry]
        if self._floor is None or offset < self._floor:
            entries = await self._source.log_after(offset, limit)
        else:
            first = bisect_right(self._tail, offset, key=_offset)
            entries = self._tail[first : first + limit]
        if (
            not entries
            and offset > await self._end_offset()
            and offset > await self._source.log_end()  # a commit may not be announced yet
        ):
            raise LogLost
        return entries, after.moved(0, entries[-1].offset) if entries else after

    async def wait(self, after: Position) -> None:
        if await self._end_offset() <= after.offset(0):
            await self._grown.wait()

    async def lag(self, after: Position) -> int:
        return max(await self._end_offset() - after.offset(0), 0)

    def _committed(self, entries: Sequence[LogEntry]) -> None:
        if entries:
            self._append(entries)
        else:
            self._tail, self._tail_bytes, self._floor, self._end = [], 0, None, None
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def _append(self, entries: Sequence[LogEntry]) -> None:
        if self._floor is None:
            self._floor = entries[0].offset - 1
        self._tail.extend(entries)
        self._tail_bytes += _content_bytes(entries)
        self._end = entries[-1].offset
        if len(self._tail) > self._entries_max or self._tail_bytes > self._content_bytes_max:
            self._forget(max(len(self._tail) // 2, len(self._tail) - self._entries_max))

    def _forget(self, count: int) -> None:
        """Drop the oldest ``count`` entries of the tail."""
        self._floor = self._tail[count - 1].offset
        del self._tail[:count]
        self._tail_bytes = _content_bytes(self._tail)


def _content_bytes(entries: Sequence[LogEntry]) -> int:
    return sum(len(entry.what.content) for entry in entries if isinstance(entry.what, Message))
