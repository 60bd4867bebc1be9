"""A reply that its owner may read, wherever it is: in memory here, or in the log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from holdfast.clock import Clock
from holdfast.errors import InvalidMessage, RateLimited
from holdfast.streaming.live_reply import LiveReply, ReplyState
from holdfast.streaming.pool.leases import NodeLeases
from holdfast.streaming.reader import BATCH_MAX, Entries, LiveCursor, LogCursor, ReplyCursor
from holdfast.streaming.reply import (
    EntryId,
    ReplyBegin,
    ReplyDone,
    ReplyEnd,
    ReplyEntry,
    ReplyError,
    shown_id,
    was_cut_short,
)
from holdfast.streaming.reply_log.contract import ReplyLog

READERS_MAX = 32
"""Of one reply at one node. Each token is written to each of them, so a thousand
readers of one user took the node from everybody."""
READERS_SECONDS = 2.0
"""The Retry-After of a reader beyond that."""


class ReplySnapshot(NamedTuple):
    """The entries of a reply at a moment, and whether it waits in the queue."""

    entries: Entries
    waiting: bool


class AttachedReply(NamedTuple):
    """A reply to read. ``ended_at`` and ``end``: its end and that entry's id, or None
    while it waits or runs. ``readers``: how many it has at this node.
    """

    reply_id: str
    begin: ReplyBegin
    epoch: int
    state: ReplyState
    end: ReplyEnd | None
    ended_at: EntryId | None
    readers: Callable[[], int]
    open_cursor: Callable[[EntryId | None], ReplyCursor]
    take_snapshot: Callable[[], Awaitable[ReplySnapshot]]

    @property
    def end_shown_at(self) -> EntryId | None:
        """The end's id as readers see it."""
        if self.ended_at is None or self.end is None:
            return None
        return shown_id(self.ended_at, self.end)

    async def snapshot(self) -> ReplySnapshot:
        """What there is now, without waiting."""
        return await self.take_snapshot()

    def entries(self, after: EntryId | None = None) -> ReplyCursor:
        """What comes after an entry, as it comes. InvalidMessage if that entry is of
        another epoch or beyond the end; of a log that was cut short there is the end
        itself. RateLimited if it has too many readers here. Close it, or read it to its
        end.
        """
        if after is not None:
            if after.epoch != self.epoch:
                raise InvalidMessage(f"{after} is no entry of this reply", field="last_event_id")
            if self.ended_at is not None and after.n >= self.ended_at.n:
                if was_cut_short(self.end):
                    after = EntryId(self.epoch, self.ended_at.n - 1)
                elif after != self.ended_at:
                    raise InvalidMessage(f"{after} is beyond the end", field="last_event_id")
        if self.readers() >= READERS_MAX:
            raise RateLimited(
                f"this reply has {READERS_MAX} readers already", retry_after_seconds=READERS_SECONDS
            )
        return self.open_cursor(after)


def attach_live(live: LiveReply) -> AttachedReply:
    """A reply of this node."""

    async def snapshot() -> ReplySnapshot:
        numbers = range(live.first, live.visible)
        entries = [(EntryId(live.epoch, n), live.entries[n - live.first]) for n in numbers]
        return ReplySnapshot(entries, live.state == "waiting")

    return AttachedReply(
        live.reply_id,
        live.begin,
        live.epoch,
        live.state,
        live.end,
        EntryId(live.epoch, live.visible - 1) if live.end is not None else None,
        lambda: live.readers,
        lambda after: LiveCursor(live, after),
        snapshot,
    )


async def attach_log(
    reply_id: str, log: ReplyLog, leases: NodeLeases, clock: Clock
) -> AttachedReply | None:
    """A reply of another node, or one that ended here; None if there is no log.

    Raises what the log raises.
    """
    page = await log.read(reply_id, None, 1)
    begin = page.entries[0][1] if page is not None and page.entries else None
    if page is None or not isinstance(begin, ReplyBegin):
        return None
    last = page.last
    end = await _end_at(reply_id, last, log)

    async def snapshot() -> ReplySnapshot:
        entries = list[tuple[EntryId, ReplyEntry]]()
        while (
            page := await log.read(reply_id, entries[-1][0] if entries else None, BATCH_MAX)
        ) is not None and page.entries:
            entries += page.entries
        return ReplySnapshot(entries, waiting=len(entries) == 1)

    return AttachedReply(
        reply_id,
        begin,
        last.epoch,
        "running" if end is None else "ended",
        end,
        None if end is None else last,
        lambda: leases.readers_here(reply_id),
        lambda after: LogCursor(reply_id, begin, after, log, leases, clock),
        snapshot,
    )


async def _end_at(reply_id: str, last: EntryId, log: ReplyLog) -> ReplyEnd | None:
    """The log's last entry if it is an end."""
    if last.n == 0:
        return None
    page = await log.read(reply_id, EntryId(last.epoch, last.n - 1), 1)
    entries = page.entries if page is not None else ()
    return next((e for _, e in entries if isinstance(e, ReplyDone | ReplyError)), None)
