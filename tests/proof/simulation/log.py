"""The event log of all nodes, and what one of them reads of it.

``ShardedLog`` is as PostgreSQL's: shards, positions that rise and are not dense, and a
base of all epochs, which a failover raises. ``FaultyLog`` is the log as a feed sees it:
lost, repeated, or with entries of a dead past. PostgreSQL's does none of that but lose
a position. Logs of other clusters do: readers and publishers repeat entries, and a
publisher that was cut off brings entries of an epoch that is over.
"""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from holdfast.eventlog.contract import EventLog, LogLost, Position
from holdfast.message import AllEpochsRaised, EpochRaised, LogEntry, LogEvent, Message
from proof.faults import Fault, FaultPlan
from proof.simulation.options import Options

LOSE_LOG = "lose_log"
ALL = 10**6
STRIDE = 512
"""Positions that a commit draws; it uses the first ones, as many as it has entries."""


class SavedLog(NamedTuple):
    """A copy, as a standby has it."""

    shards: list[list[LogEntry]]
    ends: list[int]


class ShardedLog:
    """See ``holdfast.eventlog.contract.EventLog``."""

    def __init__(self, shards: int) -> None:
        self.base = 0
        self._shards: list[list[LogEntry]] = [[] for _ in range(shards)]
        self._ends = [0] * shards
        self._drawn = [0] * shards
        self._grown = asyncio.Event()
        self._on_changed()

    # --- the store's side -------------------------------------------------------------

    def draw(self, shard: int) -> int:
        """The position before those of one commit."""
        drawn = self._drawn[shard]
        self._drawn[shard] += STRIDE
        return drawn

    def append(self, shard: int, entries: Sequence[LogEntry], drawn: int | None = None) -> None:
        """One commit becomes visible."""
        drawn = self.draw(shard) if drawn is None else drawn
        kept = self._shards[shard]
        for number, entry in enumerate(entries, start=1):
            kept.append(replace(entry, shard=shard, offset=drawn + number))
        kept.sort(key=_offset)
        self._ends[shard] = max(self._ends[shard], kept[-1].offset)
        self._drawn[shard] = max(self._drawn[shard], kept[-1].offset)
        self._on_changed()

    def remove(self, is_gone: Callable[[LogEntry], bool]) -> None:
        """Remove the entries of deleted messages. The end does not fall."""
        for kept in self._shards:
            kept[:] = [entry for entry in kept if not is_gone(entry)]

    def raise_all(self, base: int, *, moves_base: bool) -> None:
        """Tell every shard. ``moves_base``: no position of before is one of this log."""
        if moves_base:
            self.base = base
        for shard in range(len(self._shards)):
            raised: LogEvent = AllEpochsRaised(base)
            self.append(shard, [LogEntry(shard, 0, "", "", 0, raised)])

    def saved(self) -> SavedLog:
        return SavedLog([list(kept) for kept in self._shards], list(self._ends))

    def put_back(self, saved: SavedLog) -> None:
        """Go back; positions that were given since will be given again."""
        self._shards, self._ends = saved.shards, saved.ends
        self._drawn = list(saved.ends)
        self._on_changed()

    # --- the readers' side ------------------------------------------------------------

    @property
    def last(self) -> Position:
        return self._last

    def _on_changed(self) -> None:
        self._last = Position(tuple(self._ends), self.base)
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    async def end(self) -> Position:
        return self.last

    async def read(self, after: Position, limit: int) -> tuple[Sequence[LogEntry], Position]:
        if after == self.last:
            return (), after
        if after.is_beyond(self.last):
            raise LogLost
        found: list[LogEntry] = []
        for shard, kept in enumerate(self._shards):
            if self._ends[shard] > after.offset(shard):
                first = bisect_right(kept, after.offset(shard), key=_offset)
                found += kept[first : first + limit - len(found)]
        if len(found) < limit:
            return found, self.last  # behind removed entries too
        for entry in found:
            after = after.moved(entry.shard, entry.offset)
        return found, after

    async def wait(self, after: Position) -> None:
        while after == self.last:
            await self._grown.wait()

    async def lag(self, after: Position) -> int:
        last = self.last
        return sum(last.offset(s) - after.offset(s) for s in range(len(self._shards)))


def _offset(entry: LogEntry) -> int:
    return entry.offset


class FaultyLog:
    """The faults end when the plan heals."""

    def __init__(self, log: EventLog, plan: FaultPlan, options: Options) -> None:
        self._log, self._plan = log, plan
        self._rng = random.Random(options.seed + 4)
        self._repeats, self._zombies = options.log_repeats, options.log_zombies
        self.end, self.wait, self.lag = log.end, log.wait, log.lag

    async def read(self, after: Position, limit: int) -> tuple[Sequence[LogEntry], Position]:
        entries, reached = await self._log.read(after, limit)
        if not entries or self._plan.healed.is_set():
            return entries, reached
        if self._plan.next(LOSE_LOG)[0] is not Fault.NONE:
            with self._plan.during(LOSE_LOG, Fault.FAIL):
                raise LogLost
        disturbed: list[LogEntry] = []
        for entry in entries:
            if self._rng.random() < self._repeats:
                disturbed += await self._some_event_before(after)
            if entry.epoch > 1 and self._rng.random() < self._zombies:
                disturbed += _zombie(entry)
            disturbed.append(entry)
        return disturbed, reached

    async def _some_event_before(self, after: Position) -> list[LogEntry]:
        everything, _ = await self._log.read(Position(base=after.base), ALL)
        past = [entry for entry in everything if _is_event(entry) and after.includes(entry)]
        return [self._rng.choice(past)] if past else []


def _is_event(entry: LogEntry) -> bool:
    """Texts that are repeated concern nobody: each session has its own place."""
    return not isinstance(entry.what, Message | EpochRaised) or (
        isinstance(entry.what, Message) and entry.what.kind == "event"
    )


def _zombie(entry: LogEntry) -> list[LogEntry]:
    """Another message under the same number, in the epoch before."""
    if not isinstance(entry.what, Message):
        return []
    lost = replace(
        entry.what,
        message_id=f"{entry.what.message_id}_lost",
        kind="text",
        client_message_id=None,
        content="committed by the old primary, and lost with it",
    )
    return [replace(entry, epoch=entry.epoch - 1, what=lost)]
