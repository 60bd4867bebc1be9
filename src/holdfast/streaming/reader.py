"""Readers of replies: cursors over the entries, here or in the log.

A cursor gives what is there, waits for more, and stops after the end. A reader at
another node follows the log. The log's writer may die: then the reader itself reports
``worker_lost``, outside the log, because only the producer writes to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from holdfast.clock import Clock
from holdfast.errors import HoldfastError
from holdfast.streaming.live_reply import LiveReply
from holdfast.streaming.pool.leases import NodeLeases
from holdfast.streaming.reply import EntryId, ReplyBegin, ReplyDone, ReplyEntry, ReplyError
from holdfast.streaming.reply_log.contract import LogPage, ReplyLog

BATCH_MAX = 256
"""Entries that a reader gets at once: it bounds the work of one turn."""
SILENT_SECONDS = 10.0
"""After this time without an entry, a reader elsewhere asks whether the reply is still
made: a node that restarts lives on under its name."""

GAP = ReplyError("gap", "entries of this reply are missing; ask again", 503)
WORKER_LOST = ReplyError("worker_lost", "the node that made this reply is gone; ask again", 503)

Entries = Sequence[tuple[EntryId, ReplyEntry]]
_new_id = tuple.__new__
"""Makes an EntryId without a call of Python code."""


class Queued(NamedTuple):
    """The reply waits at this place; ``eta_seconds``: None if nobody can say."""

    position: int
    eta_seconds: float | None


class Lost(NamedTuple):
    """The reply's end is in no log; the reader ends with this error."""

    error: ReplyError


ReaderEvent = Queued | Lost | Entries


class _Waiter:
    """Wakes one reader; a third of an ``asyncio.Event``, and thousands of them wait."""

    __slots__ = ("future", "write")

    def __init__(self) -> None:
        self.future: asyncio.Future[None] | None = None
        """While the reader waits."""
        self.write: Callable[[], bool] | None = None
        """Takes and writes what is new without waking it; False: it cannot."""

    def wake(self) -> None:
        future = self.future
        if future is None or future.done() or (self.write is not None and self.write()):
            return
        future.set_result(None)


class LiveCursor(AsyncIterator[ReaderEvent]):
    """Reads a reply of this node. ``aclose`` or the end detaches it."""

    def __init__(self, reply: LiveReply, after: EntryId | None) -> None:
        self.reply = reply
        self._next = 0 if after is None else after.n + 1
        self._position = 0
        self._news = _Waiter()
        self.is_open = True
        self._loop = asyncio.get_running_loop()
        self._on_news = self._news.wake  # not a method of ours: it must not keep us alive
        reply.watch(self._on_news)

    def write_at_once(self, write: Callable[[], bool]) -> None:
        """While ``anext`` waits and something is new, call ``write``, which may
        ``take`` it; ``anext`` goes on if that returns False."""
        self._news.write = write

    async def __anext__(self) -> ReaderEvent:
        """Cancel-safe: a cancelled call takes nothing."""
        while self.is_open:
            event = self.take()
            if event is not None:
                return event
            if self.reply.end is not None:
                self.close()
                break
            self._news.future = self._loop.create_future()
            try:
                await self._news.future
            finally:
                self._news.future = None
        raise StopAsyncIteration

    def take(self) -> ReaderEvent | None:
        """What is there; None if that is nothing."""
        reply, at = self.reply, self._next
        if at < reply.first or (reply.end is not None and at > reply.visible):
            self.close()
            return Lost(GAP)
        if at < reply.visible:
            epoch, first, entries = reply.epoch, reply.first, reply.entries
            if reply.visible - at == 1:  # nearly always, and half as long as what follows
                self._next = at + 1
                return [(_new_id(EntryId, (epoch, at)), entries[at - first])]
            self._next = min(reply.visible, at + BATCH_MAX)
            return [(EntryId(epoch, n), entries[n - first]) for n in range(at, self._next)]
        place = reply.place
        if place is not None and place.waiting and place.position != self._position:
            self._position = place.position
            return Queued(place.position, place.eta_seconds)
        return None

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._news.write = None
            self.reply.unwatch(self._on_news)

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        # A response whose generator never began is never closed; it must not keep the
        # reply running. Any thread may collect it.
        if self.is_open and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.reply.unwatch, self._on_news)


class LogCursor(AsyncIterator[ReaderEvent]):
    """Reads a reply from the log: made at another node, or ended here before."""

    def __init__(
        self,
        reply_id: str,
        begin: ReplyBegin,
        after: EntryId | None,
        log: ReplyLog,
        leases: NodeLeases,
        clock: Clock,
    ) -> None:
        self._reply_id, self._begin = reply_id, begin
        self._last = after
        self._log, self._leases, self._clock = log, leases, clock
        self._pages = log.follow(reply_id, after)
        self._heard_at = clock.monotonic()
        self._ended = False
        self._open = True
        self._loop = asyncio.get_running_loop()
        leases.reading(reply_id, begin.node)

    async def __anext__(self) -> ReaderEvent:
        while not self._ended:
            try:
                page = await anext(self._pages, None)
            except HoldfastError:
                return self._lose(WORKER_LOST)
            event = await self._event(page)
            if event is not None:
                return event
        raise StopAsyncIteration

    async def _event(self, page: LogPage | None) -> ReaderEvent | None:
        if page is None:
            return self._lose(GAP)
        if page.entries:
            self._heard_at = self._clock.monotonic()
            return self._entries(page.entries)
        if await self._is_lost():
            return self._lose(WORKER_LOST)
        return None

    def _entries(self, entries: Entries) -> ReaderEvent:
        last = self._last
        for entry_id, entry in entries:
            if last is not None and not entry_id.follows(last):
                return self._lose(GAP)
            last = entry_id
            if isinstance(entry, ReplyDone | ReplyError):
                self._ended = True
        self._last = last
        if self._ended:
            self._detach()
        return entries

    async def _is_lost(self) -> bool:
        """Whether the reply's node is dead, or has been silent and does not hold it."""
        producer = self._begin.node
        if not self._leases.knows_since(self._heard_at):
            return False
        if producer not in self._leases.nodes:
            return True
        if self._clock.monotonic() - self._heard_at < SILENT_SECONDS:
            return False
        try:
            return await self._leases.locate(self._reply_id) != producer
        except HoldfastError:
            return False

    def _lose(self, error: ReplyError) -> Lost:
        self._ended = True
        self._detach()
        return Lost(error)

    def _detach(self) -> None:
        """Once: another reader of the same reply here is counted too."""
        if self._open:
            self._open = False
            self._leases.not_reading(self._reply_id)

    async def aclose(self) -> None:
        self._ended = True
        self._detach()
        await self._pages.aclose()

    def __del__(self) -> None:
        if self._open and not self._loop.is_closed():  # as of a LiveCursor
            self._loop.call_soon_threadsafe(self._leases.not_reading, self._reply_id)


ReplyCursor = LiveCursor | LogCursor
