"""The event log: the order on which every node agrees. Adapters: memory, sqlite,
postgres.

A log has one or more shards, and all entries of a chat are in one of them. Offsets rise
in commit order within a shard, not always by one, and between two entries of one chat
nothing of that chat is missing. An embedded log has shard 0 only.

Besides messages the log has entries without a sequence (``message.LogEvent``): the
creation of a chat and the raise of an epoch, each in the commit that it is about.

Reading is at-least-once: each reader keeps its own ``Position`` and moves it after it
has acted; the log stores no positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from holdfast.message import LogEntry


class LogLost(Exception):
    """What follows a position cannot be read: the position is gone from the log, beyond
    its end, or of another epoch base. Take the log's end, and what was missed from the
    store.
    """


class Position(Struct, frozen=True):
    """How far a reader has read: the offset of its last entry in each shard. (Pure.)

    Only readers and logs look inside. Positions compare shard by shard; two of them
    have no order as a whole.
    """

    offsets: tuple[int, ...] = (0,)
    """By shard; 0 is before the first entry."""
    base: int = 0
    """The epoch base of the log, if it has one: a failover may lose entries, and gives
    their offsets to others under a higher base.
    """

    def offset(self, shard: int) -> int:
        return self.offsets[shard] if shard < len(self.offsets) else 0

    def moved(self, shard: int, offset: int) -> Position:
        """This position with another offset in one shard."""
        offsets = [*self.offsets, *(0 for _ in range(len(self.offsets), shard + 1))]
        offsets[shard] = offset
        return Position(tuple(offsets), self.base)

    def includes(self, entry: LogEntry) -> bool:
        return entry.offset <= self.offset(entry.shard)

    def is_beyond(self, end: Position) -> bool:
        """Whether this is no position before ``end`` in the same log: a shard is read
        further, or the base is another.
        """
        return self.base != end.base or any(
            offset > end.offset(shard) for shard, offset in enumerate(self.offsets)
        )


START = Position()
"""Before the first entry of every shard."""


class EventLog(Protocol):
    """The read side of the log."""

    async def end(self) -> Position:
        """The position of the newest entries; ``START`` if there is none."""
        ...

    async def read(self, after: Position, limit: int) -> tuple[Sequence[LogEntry], Position]:
        """Up to ``limit`` entries past ``after``, in order, and the position behind
        them.

        Fewer than ``limit``: nothing that can be read followed them at that moment. It
        may be empty, also if the position moved: entries without a sequence of a
        kind that this version does not know are left out and counted. Raises LogLost,
        Unavailable if the log cannot be read now, and UnreadableEvent if the first
        entry cannot be decoded. An undecodable entry further on ends the result before
        it, so that the next read raises.
        """
        ...

    async def wait(self, after: Position) -> None:
        """Return when an entry past ``after`` may exist. Cancel-safe.

        It may return early, never late. A reader reads before it waits: only ``read``
        says that ``after`` is lost.
        """
        ...

    async def lag(self, after: Position) -> int:
        """How many entries follow ``after``, at most: offsets may skip numbers."""
        ...


class SharedLog(EventLog, Protocol):
    """A log of several nodes. It does not keep entries without a sequence for good."""

    async def forget_events(self, before: str, behind: Position, limit: int) -> int:
        """Forget at most ``limit`` of them that are older than a moment and not past
        ``behind``. How many; repeat until 0. A position before them is lost then.
        """
        ...

    async def raise_epochs(self, reason: str) -> int:
        """Raise the epochs of all chats, although nothing shows that commits were lost;
        the new base. Unavailable if it is not known whether that happened.
        """
        ...


class CommitSource(Protocol):
    """What an embedded log, which has one shard, needs from its store."""

    def on_commit(self, listener: Callable[[Sequence[LogEntry]], None]) -> None:
        """Call ``listener`` on the event loop after each commit, with the entries it
        added to the log.

        It is called with no entries when copies may be out of date: stored messages
        lost their content (redaction, retention), or the outcome of a write is unknown.
        In that case it is called when the write ends and again with the next write
        whose outcome is known.
        """
        ...

    async def log_end(self) -> int:
        """The offset of the newest entry ever committed; 0 if there is none."""
        ...

    async def log_after(self, after: int, limit: int) -> Sequence[LogEntry]:
        """Up to ``limit`` entries past an offset, in commit order."""
        ...
