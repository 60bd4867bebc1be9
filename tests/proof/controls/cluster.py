"""Parts of several nodes that break a promise: order of commits, locks, leases."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from msgspec.structs import replace

from holdfast.clock import Clock
from holdfast.ingest.durability import StoreDurability
from holdfast.message import Acked, Draft, LogEntry, Message, Outcome, Page, User
from holdfast.store.leases.memory import MemoryLeases
from holdfast.store.memory import MemoryStore
from holdfast.store.numbering import GroupState
from proof.controls.stores import Around
from proof.simulation.disk import SimulatedDisk

SHARDS = 4
COMMIT_SECONDS_MAX = 0.3


class LateLogDisk(SimulatedDisk):
    """Its texts are in the log when a node says so, after their commit."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(shards=SHARDS))
        self._unpublished: dict[str, LogEntry] = {}
        self.store.publish = self._publish_later  # type: ignore[attr-defined]

    def publish(self, entries: Sequence[LogEntry]) -> None:
        rest: list[LogEntry] = []
        for entry in entries:
            if isinstance(entry.what, Message) and entry.what.kind == "text":
                self._unpublished[entry.what.message_id] = entry
            else:
                rest.append(entry)
        if rest or not entries:
            super().publish(rest)

    async def _publish_later(self, message_ids: Sequence[str]) -> None:
        for message_id in message_ids:
            super().publish([self._unpublished.pop(message_id)])


class PublishesWhatItAcks(StoreDurability):
    """Publishes after the commit. The answer to a commit may be lost; its retry is then
    answered from the key, and never published.

    Red: 9. 11 follows: no reader of the log makes a job of it.
    """

    async def persist(self, drafts: Sequence[Draft], deadline: float) -> list[Outcome]:
        outcomes = await super().persist(drafts, deadline)
        acks = [each for each in outcomes if isinstance(each, Acked) and not each.deduplicated]
        await self._store.publish([ack.message.message_id for ack in acks])  # type: ignore[attr-defined]
        return outcomes


class PagesWithHoles(Around):
    """Every other page lacks a message in its middle.

    Red: 4. 9 follows and cannot be kept green: a page is authoritative, so its client
    never asks for what it lacks.
    """

    _reads = 0

    async def read_after(
        self, chat_id: str, after: int, limit: int, bytes_max: int, reader: User | None = None
    ) -> Page:
        page: Page = await self._store.read_after(chat_id, after, limit, bytes_max, reader)
        self._reads += 1
        if self._reads % 2 or len(page.messages) < 3:
            return page
        return replace(page, messages=[*page.messages[:1], *page.messages[2:]])


class UnlockedDisk(SimulatedDisk):
    """Draws positions without the lock of their shard, which is held until the commit.
    So a commit may become visible behind a reader that has passed its position.

    Red: 11: its messages have no job. No client misses them: sessions see the gap.
    """

    def __init__(self) -> None:
        super().__init__(_UnlockedStore(self))
        self.drawn: int | None = None

    def publish(self, entries: Sequence[LogEntry]) -> None:
        drawn, self.drawn = self.drawn, None
        if entries and drawn is not None:
            self.log.append(self.store.lane(entries[0].chat_id), entries, drawn)
        else:
            super().publish(entries)


class _UnlockedStore(MemoryStore):
    def __init__(self, disk: UnlockedDisk) -> None:
        super().__init__(shards=SHARDS)
        self._disk, self._rng = disk, random.Random(1)

    async def append(self, group: Sequence[Draft]) -> list[Outcome]:
        drawn = self._disk.log.draw(self.lane(group[0].chat_id))
        await asyncio.sleep(self._rng.uniform(0, COMMIT_SECONDS_MAX))
        self._disk.drawn = drawn
        return await super().append(group)


class SnapshotStore(MemoryStore):
    """Reads the members in the statement that waits for the chat's lock: as they were
    when it began to wait.
    """

    def __init__(self) -> None:
        super().__init__(shards=SHARDS)
        self._rng = random.Random(1)
        self._snapshot: GroupState | None = None

    async def append(self, group: Sequence[Draft]) -> list[Outcome]:
        snapshot = self._group_state(group)
        await asyncio.sleep(self._rng.uniform(0, COMMIT_SECONDS_MAX))
        self._snapshot = snapshot
        try:
            return await super().append(group)
        finally:
            self._snapshot = None

    def _group_state(self, group: Sequence[Draft]) -> GroupState:
        known = super()._group_state(group)
        if self._snapshot is not None:
            known.members, known.muted = self._snapshot.members, self._snapshot.muted
        return known


class WallClockLeases(MemoryLeases):
    """A lease ends by the wall clock of whoever looks at it.

    Red: 11, two nodes act under it at once.
    """

    def __init__(self, leases: MemoryLeases, clock: Clock) -> None:
        super().__init__(_WallClock(clock))
        self._held = leases._held


class _WallClock:
    def __init__(self, clock: Clock) -> None:
        self.now = self.monotonic = clock.now
