"""Makes jobs of the event log: webhooks and assistants read it like this.

The job store commits the reader's position together with the jobs, so a crash neither
repeats nor skips anything. For batches without jobs the position is stored only now and
then: a server with nothing to do must not pay a commit per batch. The first start
begins at the log's end.

Its position is stored as one mark per shard, each on condition of the one before: of
two nodes that read at once, one makes the jobs of an entry, and the other reads on from
the stored position. So that this is rare, a reader runs on the node that holds its
lease.

A position beyond the log's end means that
the chats were restored from a backup, and the jobs, in another database, were not. The
entries of the restored log had jobs before, so the reader begins at the log's end. It
continues under its next name (``webhooks.1``); the highest name counts.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from holdfast.errors import UnreadableEvent, VersionConflict
from holdfast.eventlog.contract import START, EventLog, Position
from holdfast.message import LogEntry
from holdfast.telemetry import log
from holdfast.work.contract import ReaderMark, WorkStore
from holdfast.work.job import JobDraft

BATCH = 500
UNMARKED_MAX = 10_000
"""How many entries without jobs a crash may make it read again."""
HELD_POLL_SECONDS = 0.2
"""How often a node without the reader's lease asks whether it has it now."""


class JobReader(ABC):
    """Runs until cancelled; the node restarts a failed one at its stored position.

    ``reader`` is the name of its position in the job store.
    """

    reader: str

    def __init__(self, log: EventLog, jobs: WorkStore) -> None:
        self._log, self._jobs = log, jobs
        self._name, self._unmarked = self.reader, 0
        self._marks: Sequence[int | None] = (None,)
        """The stored marks of the shards."""
        self.marked = START
        """The stored position."""
        self.is_held: Callable[[], bool] = lambda: True
        """Whether this node holds the reader's lease."""
        self.begun = False
        """Whether its position is stored."""

    @abstractmethod
    async def drafts(self, entries: Sequence[LogEntry], position: Position) -> list[JobDraft]:
        """The jobs of these entries, which follow ``position``."""

    async def run(self) -> None:
        while True:
            if not self.is_held():
                await asyncio.sleep(HELD_POLL_SECONDS)
                continue
            try:
                position = await self.begin()
                while self.is_held():
                    await self._log.wait(position)
                    if self.is_held():
                        position = await self.advance(position)
            except VersionConflict:
                log.info("fanout.reader_overtaken", reader=self.reader)

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
        end = await self._log.end()
        restores, position = 0, await self._stored(self.reader, end)
        while (later := await self._stored(f"{self.reader}.{restores + 1}", end)) is not None:
            restores, position = restores + 1, later
        if position is not None and position.is_beyond(end):
            log.warning(
                "fanout.log_restored",
                reader=self.reader,
                detail="the log ends before the reader's position",
                end=list(end.offsets),
                position=list(position.offsets),
            )
            restores, position = restores + 1, None
        self._name = f"{self.reader}.{restores}" if restores else self.reader
        if position is None:
            position, self._marks = end, [None] * len(end.offsets)
            await self.mark(position)
        return position

    async def _stored(self, name: str, end: Position) -> Position | None:
        """The stored position of a reader of all shards that the log has."""
        marks = [await self._jobs.reader_offset(name, n) for n in range(len(end.offsets))]
        if all(mark is None for mark in marks):
            return None
        self._marks = marks
        return Position(tuple(mark or 0 for mark in marks), end.base)

    async def advance(self, position: Position) -> Position:
        """Make jobs of the next entries; returns the new position."""
        try:
            entries, reached = await self._log.read(position, BATCH)
        except UnreadableEvent as event:
            # Skip it: no job can be made of it. The fanout reports it.
            reached = position.moved(event.shard, event.offset)
            await self.mark(reached)
            return reached
        if not entries:
            return reached
        drafts = await self.drafts(entries, position)
        self._unmarked += len(entries)
        if drafts or self._unmarked >= UNMARKED_MAX:
            await self.mark(reached, drafts)
        return reached

    async def mark(self, position: Position, drafts: Sequence[JobDraft] = ()) -> None:
        """Store the position together with these jobs."""
        marks = [
            ReaderMark(self._name, shard, offset, replaces)
            for shard, (offset, replaces) in enumerate(
                zip(position.offsets, self._marks, strict=True)
            )
            if offset != replaces
        ]
        await self._jobs.enqueue(drafts, marks)
        self._marks = position.offsets
        self.marked, self._unmarked = position, 0
