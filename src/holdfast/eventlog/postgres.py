"""The log of many nodes: the store's messages and log events, in commit order by shard.

A position is the last one read in each shard, with the base of all epochs: after a
failover positions may be given again, under another base. The end of a shard is the
last *committed* position, found by an index, never what its sequence has given out.

``wait`` returns when this or another node announces a commit. Announcements may be
lost, and transactions of other programs make none; so it also looks by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from holdfast import telemetry
from holdfast.eventlog.contract import LogLost, Position
from holdfast.message import LogEntry


class _Ends(Protocol):
    """See ``store.postgres.log_reads.LogEnds``."""

    @property
    def base(self) -> int: ...
    @property
    def firsts(self) -> Sequence[int]: ...
    @property
    def ends(self) -> Sequence[int]: ...


class _Page(Protocol):
    """See ``store.postgres.log_reads.LogSlice``."""

    @property
    def base(self) -> int: ...
    @property
    def entries(self) -> Sequence[LogEntry]: ...
    @property
    def firsts(self) -> Mapping[int, int]: ...
    @property
    def reached(self) -> Mapping[int, int]: ...
    @property
    def unknown(self) -> int: ...
    @property
    def is_whole(self) -> bool: ...


class LogSource(Protocol):
    """What the log needs from its store. Positions are by shard."""

    poll_seconds: float

    def on_grown(self, listener: Callable[[], None]) -> None: ...
    async def log_ends(self) -> _Ends: ...
    async def read_log(self, after: Sequence[int], limit: int) -> _Page | None: ...
    async def log_lag(self, after: Sequence[int]) -> int: ...
    async def raise_all_epochs(self, base: int) -> None: ...
    async def raise_epochs(self, reason: str) -> int: ...
    async def forget_log_events(self, before: str, behind: Sequence[int], limit: int) -> int: ...


class PostgresEventLog:
    """See ``holdfast.eventlog.contract.SharedLog``."""

    def __init__(self, source: LogSource) -> None:
        self._source = source
        self._grown = asyncio.Event()
        """A new one for each growth."""
        self._end: tuple[asyncio.Event, Position] | None = None
        """The end of the log, and the growth before which it was read."""
        source.on_grown(self._on_grown)

    async def end(self) -> Position:
        return (await self._look())[0]

    async def read(self, after: Position, limit: int) -> tuple[Sequence[LogEntry], Position]:
        entries: list[LogEntry] = []
        is_whole = False
        while not is_whole and len(entries) < limit:
            grown = self._grown
            page = await self._source.read_log(after.offsets, limit - len(entries))
            if page is None:
                await self._check(after)
                break
            after = self._behind(page, after)
            entries += page.entries
            is_whole = page.is_whole
            if is_whole:
                self._end = (grown, after)
            if page.unknown:
                telemetry.log_entries_unknown(page.unknown)
                break  # the caller keeps this position before more is skipped
        return entries, after

    def _behind(self, page: _Page, after: Position) -> Position:
        """The position behind a page that was read after another one."""
        if page.base != after.base or any(
            after.offset(shard) + 1 < first for shard, first in page.firsts.items()
        ):
            raise LogLost
        for shard, offset in page.reached.items():
            after = after.moved(shard, offset)
        return after

    async def wait(self, after: Position) -> None:
        while True:
            grown = self._grown
            known = self._end
            end = known[1] if known and known[0] is grown else (await self._look())[0]
            if after.is_beyond(end) or end.is_beyond(after):
                return
            try:
                async with asyncio.timeout(self._source.poll_seconds):
                    await grown.wait()
                return
            except TimeoutError:
                self._end = None

    async def lag(self, after: Position) -> int:
        return await self._source.log_lag(after.offsets)

    async def forget_events(self, before: str, behind: Position, limit: int) -> int:
        return await self._source.forget_log_events(before, behind.offsets, limit)

    async def raise_epochs(self, reason: str) -> int:
        return await self._source.raise_epochs(reason)

    async def _check(self, after: Position) -> None:
        """LogLost unless ``after`` is a position of this log. One beyond the end proves
        that commits were lost which a failover did not show: all epochs are raised.
        """
        end, firsts = await self._look()
        if after.base == end.base and after.is_beyond(end):
            await self._source.raise_all_epochs(after.base)
            raise LogLost
        if after.base != end.base or any(
            after.offset(shard) + 1 < first for shard, first in enumerate(firsts)
        ):
            raise LogLost

    async def _look(self) -> tuple[Position, Sequence[int]]:
        """The end of the log, and the first position of each shard that is kept."""
        grown = self._grown
        ends = await self._source.log_ends()
        end = Position(tuple(ends.ends), ends.base)
        self._end = (grown, end)
        return end, ends.firsts

    def _on_grown(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()
