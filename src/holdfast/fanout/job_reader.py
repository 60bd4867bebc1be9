"""Makes jobs of the event log: webhooks and assistants read it like this.

The job store commits the reader's position together with the jobs, so a crash neither
repeats nor skips anything. For batches without jobs the position is stored only now and
then: a server with nothing to do must not pay a commit per batch. The first start
begins at the log's end.

Its position is stored as one mark per shard, each on condition of the one before: of
two nodes that read at once, one makes the jobs of an entry, and the other reads on from
the stored position. So that this is rare, a reader runs on the node that holds its
lease. Two marks stand beside them: the epoch base of the log, and a moment up to which
nothing is missing.

A position may be lost: the log was restored from a backup that is older than the jobs,
a failover lost its end, or the log forgot what the reader has not read. Then the reader
never jumps to the log's end. It reads, chat by chat, what the store has since that
moment (``missed``), makes jobs of it, and only then goes on at the end that it took
before. Jobs may be made twice, never left out. It continues under its next name
(``webhooks.1``); the highest name counts.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from holdfast import telemetry
from holdfast.clock import Clock, timestamp
from holdfast.errors import UnreadableEvent, VersionConflict
from holdfast.eventlog.contract import START, EventLog, LogLost, Position
from holdfast.fanout.missed import MissedMessages
from holdfast.message import LogEntry
from holdfast.store.contract import ChatStore
from holdfast.work.contract import ReaderMark, WorkStore
from holdfast.work.job import JobDraft

BATCH = 500
UNMARKED_MAX = 10_000
"""How many entries without jobs a crash may make it read again."""
REST_SECONDS = 0.025
"""From one batch to the next, unless the first was full. A batch is several statements,
whatever its size, and a busy log grows hundreds of times a second.
"""
HELD_POLL_SECONDS = 0.2
"""How often a node without the reader's lease asks whether it has it now."""
CLOCKS_DIFFER_SECONDS = 120.0
"""How far the clocks of nodes, and a message's stamp and its commit, may be apart."""
MOMENT_UNKNOWN_SECONDS = 86_400.0
"""How far a reader looks back that an older version left without a moment."""


_Marks = dict[tuple[str, int], int]


async def stored_marks(jobs: WorkStore, reader: str, shards: int) -> tuple[str, _Marks]:
    """Under which name a reader goes on, and its stored marks there, by row and shard.

    None are stored if it has never begun.
    """
    name, marks = reader, await _marks_of(jobs, reader, shards)
    while later := await _marks_of(jobs, _next_name(name), shards):
        name, marks = _next_name(name), later
    return name, marks


async def _marks_of(jobs: WorkStore, name: str, shards: int) -> _Marks:
    """Empty unless a position is stored under this name."""
    positions = [(name, shard) for shard in range(shards)]
    rows = [*positions, (f"{name}.base", 0), (f"{name}.moment", 0)]
    stored = [(row, await jobs.reader_offset(*row)) for row in rows]
    marks = {row: mark for row, mark in stored if mark is not None}
    return marks if marks.keys() & set(positions) else {}


def _next_name(name: str) -> str:
    reader, _, losses = name.partition(".")
    return f"{reader}.{int(losses or 0) + 1}"


class JobReader(ABC):
    """Runs until cancelled; the node restarts a failed one at its stored position.

    ``reader`` is the name of its position in the job store.
    """

    reader: str

    def __init__(self, log: EventLog, jobs: WorkStore, chats: ChatStore, clock: Clock) -> None:
        self._log, self._jobs, self._chats, self._clock = log, jobs, chats, clock
        self._name, self._unmarked = self.reader, 0
        """Under which it goes on; another one after each loss."""
        self._marks: _Marks = {}
        """The stored marks under its name, by row and shard."""
        self._moment = 0.0
        self._missed: MissedMessages | None = None
        """What is left to read after a loss; kept while the store is in trouble."""
        self._is_at_end = False
        """Whether the last read was not full: the next one would find nothing."""
        self.marked = START
        """The stored position."""
        self.is_held: Callable[[], bool] = lambda: True
        """Whether this node holds the reader's lease."""
        self.held_poll_seconds = HELD_POLL_SECONDS
        self.begun = False
        """Whether its position is stored."""

    @abstractmethod
    async def drafts(self, entries: Sequence[LogEntry], position: Position) -> list[JobDraft]:
        """The jobs of these entries, which follow ``position``. An entry at offset 0
        was read from the store.
        """

    async def run(self) -> None:
        while True:
            if not self.is_held():
                await asyncio.sleep(self.held_poll_seconds)
                continue
            try:
                position = await self.begin()
                while self.is_held():
                    rests_until = self._clock.monotonic() + REST_SECONDS
                    position = await self.advance(position)
                    if self._is_at_end:
                        await self._log.wait(position)
                        await asyncio.sleep(max(0.0, rests_until - self._clock.monotonic()))
            except VersionConflict:
                telemetry.log.info("fanout.reader_overtaken", reader=self.reader)

    async def begin(self) -> Position:
        """The position to start from: the stored one, or else the log's end.

        VersionConflict if other nodes begin at the same time, again and again.
        """
        try:
            self.marked = await self._begin()
        except VersionConflict:
            self.marked = await self._begin()  # which another node has stored
        self.begun = True
        return self.marked

    async def _begin(self) -> Position:
        end, now = await self._log.end(), self._clock.now()
        name, marks = await stored_marks(self._jobs, self.reader, len(end.offsets))
        self._name, self._marks = name, marks
        if not marks:
            self._moment = now
            await self.mark(end)
            return end
        moment = marks.get((f"{name}.moment", 0))
        self._moment = now - MOMENT_UNKNOWN_SECONDS if moment is None else moment / 1000
        offsets = tuple(marks.get((name, shard), 0) for shard in range(len(end.offsets)))
        return Position(offsets, marks.get((f"{name}.base", 0), 0))

    async def advance(self, position: Position) -> Position:
        """Make jobs of the next entries; returns the new position."""
        now, self._is_at_end = self._clock.now(), False
        try:
            entries, reached = await self._log.read(position, BATCH)
        except UnreadableEvent as event:
            # Skip it: no job can be made of it. The fanout reports it.
            reached = position.moved(event.shard, event.offset)
            await self.mark(reached)
            return reached
        except LogLost:
            return await self._make_up(position)
        if len(entries) < BATCH:
            self._is_at_end = True
            self._moment = max(self._moment, now)
        if not entries:
            return reached
        drafts = await self.drafts(entries, position)
        self._unmarked += len(entries)
        if drafts or self._unmarked >= UNMARKED_MAX:
            await self.mark(reached, drafts)
        return reached

    async def _make_up(self, position: Position) -> Position:
        """Make jobs of what the store has since the moment up to which nothing is
        missing; returns the end that the log had before.
        """
        if self._missed is None:
            telemetry.log_lost(self.reader, position.offsets)
            since = timestamp(self._moment - CLOCKS_DIFFER_SECONDS)
            now, end = self._clock.now(), await self._log.end()
            self._missed = MissedMessages(self._chats, since, end, now)
        missed = self._missed
        while (entries := await missed.next()) is not None:
            if drafts := await self.drafts(entries, self.marked):
                await self._jobs.enqueue(drafts)
            missed.done()
        self._name, self._marks, self._moment = _next_name(self._name), {}, missed.began_at
        try:
            await self.mark(missed.end)
        except VersionConflict:
            self._missed = None  # another node has made up for it
            raise
        self._missed = None
        return missed.end

    async def mark(self, position: Position, drafts: Sequence[JobDraft] = ()) -> None:
        """Store the position together with these jobs."""
        marks = {(self._name, shard): offset for shard, offset in enumerate(position.offsets)}
        marks[f"{self._name}.moment", 0] = int(self._moment * 1000)
        if position.base:
            marks[f"{self._name}.base", 0] = position.base
        moved = [
            ReaderMark(*row, mark, self._marks.get(row))
            for row, mark in marks.items()
            if mark != self._marks.get(row)
        ]
        await self._jobs.enqueue(drafts, moved)
        self._marks = marks
        self.marked, self._unmarked = position, 0
