"""The durable reader of the log: a job for every message, by the node with the lease.

The reader and the lease are the product's own. The job store is in memory and outlives
the nodes and the failovers of the chats' engine. It records what checker 11 judges: the
job of each commit, made once and in order, and the fence of each act under the lease.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.eventlog.contract import Position
from holdfast.fanout.job_reader import JobReader
from holdfast.message import LogEntry, Message
from holdfast.store.leases.contract import Fence
from holdfast.store.leases.memory import MemoryLeases
from holdfast.verify.history import EffectSeen, Enqueued, Excused, Recorder
from holdfast.work.contract import ReaderMark, overtaken
from holdfast.work.job import JobDraft
from proof.virtual_loop import OWNER

LEASE = "reader.messages"
MOMENT_SECONDS = 0.001


class MessageReader(JobReader):
    """Makes a job of every message."""

    reader = "messages"

    async def drafts(self, entries: Sequence[LogEntry], position: Position) -> list[JobDraft]:
        kind = {True: "missed", False: "read"}
        return [
            JobDraft(kind[entry.offset == 0], entry.what.message_id.encode(), entry.chat_id)
            for entry in entries
            if isinstance(entry.what, Message)
        ]


class SimulatedJobs:
    """The verbs of ``WorkStore`` that a reader uses."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._marks: dict[tuple[str, int], int] = {}
        self._numbers = itertools.count(1)
        self._committed: dict[str, int] = {}
        """The number of each message's commit."""
        self._made: dict[str, bool] = {}
        """The messages with a job, and whether it was made up for, so may come again."""
        self._excused: set[str] = set()
        self.unmade: dict[str, tuple[str, int]] = {}
        """Messages without a job: chat and sequence."""
        self._last_act: tuple[object, Fence] | None = None
        self._next_writer: asyncio.Future[object] | None = None

    def on_commit(self, message: Message) -> None:
        self._committed[message.message_id] = number = next(self._numbers)
        self.unmade[message.message_id] = (message.chat_id, message.sequence)
        self._record.note(Enqueued(stream=message.chat_id, seq=number))

    def excuse(self, message_id: str) -> None:
        """It may have its job or not: the engine lost it, or retention deleted it."""
        self.unmade.pop(message_id, None)
        self._excused.add(message_id)
        self._record.note(Excused(seq=self._committed[message_id]))

    def on_act(self, node: object, fence: Fence) -> None:
        """A node does what only the holder may. An engine that lost its leases starts
        with another base: there nothing but the fence tells holders apart.
        """
        if self._last_act != (node, fence):
            self._last_act = (node, fence)
            stream, number = f"lease at {fence.base}", next(self._numbers)
            self._record.note(Enqueued(stream=stream, seq=number))
            self._record.note(EffectSeen(stream=stream, seq=number, fence=fence.number))

    async def next_writer(self) -> object:
        """The owner of the next write, a moment before it happens."""
        self._next_writer = asyncio.get_running_loop().create_future()
        return await self._next_writer

    async def reader_offset(self, reader: str, shard: int = 0) -> int | None:
        return self._marks.get((reader, shard))

    async def enqueue(
        self, drafts: Sequence[JobDraft], marks: Sequence[ReaderMark] = ()
    ) -> list[int]:
        if self._next_writer is not None and not self._next_writer.done():
            self._next_writer.set_result(OWNER.get())
            await asyncio.sleep(MOMENT_SECONDS)
        if any(self._marks.get((m.reader, m.shard)) != m.replaces for m in marks):
            telemetry.mark("a reader was overtaken: what it made was refused")
            raise overtaken()
        for mark in marks:
            self._marks[mark.reader, mark.shard] = mark.offset
        for draft in drafts:
            self._make(draft)
        return [0] * len(drafts)

    def _make(self, draft: JobDraft) -> None:
        """What is read from the store after a loss may have its job already; and a
        zombie may have read what was lost since.
        """
        message_id, is_missed = draft.payload.decode(), draft.type == "missed"
        if message_id in self._excused:
            return
        if message_id in self._made and (is_missed or self._made[message_id]):
            self._made[message_id] = True
            return
        self._made[message_id] = is_missed
        self.unmade.pop(message_id, None)
        seq = self._committed.get(message_id, 0)
        self._record.note(EffectSeen(stream=draft.stream or "", seq=seq, fence=0))


class SimulatedLeases(MemoryLeases):
    """The leases of all nodes, in the engine that may fail over."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._holders: dict[str, object] = {}

    async def acquire(self, name: str, seconds: float) -> Fence | None:
        fence = await super().acquire(name, seconds)
        node = getattr(OWNER.get(), "name", None)
        if fence is not None and node is not None:
            if self._holders.get(name, node) != node:
                telemetry.mark("a lease moved to another node")
            self._holders[name] = node
        return fence

    async def renew(self, name: str, fence: Fence, seconds: float) -> bool:
        held = await super().renew(name, fence, seconds)
        if not held:
            telemetry.mark("the renewal of a lease that had ended was refused")
        return held

    def fail_over(self, base: int) -> None:
        """The engine lost them all: fences go on under a higher base."""
        self._held = {name: (Fence(base, 0), 0.0) for name in self._held}
