"""The node's side of the log: writes what its replies have grown by.

A begin and an end are written at once, the rest every ``flush_seconds``, with one call
for all replies. One call is in flight at a time, so the entries of a reply arrive in
order.

The log answers where a reply's log ends, and the writer goes on behind that:

- the same epoch: its own repeat after a lost answer, or a tail that a failover of the
  log lost, which is sent again from memory;
- a newer epoch: another node makes the reply now, and this one must stop;
- no log, or only an older epoch: the log was lost, and the reply cannot be resumed.

A failed call changes nothing here: the same entries are sent again until the log
answers. So no entry is written twice and none is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal, Protocol

from holdfast import telemetry
from holdfast.clock import wait_at_most
from holdfast.errors import HoldfastError, OutcomeUnknown
from holdfast.streaming.reply import (
    EntryId,
    ReplyBegin,
    ReplyDelta,
    ReplyDone,
    ReplyEntry,
    ReplyError,
    ReplyUsage,
)
from holdfast.streaming.reply_log.contract import (
    LOG_BYTES_MAX,
    LOG_ENTRIES_MAX,
    Appended,
    LogAppend,
    ReplyLog,
)

END_SECONDS = 1.0
"""How long a reply's end waits for the log before it is shown as not resumable."""
LATE_SECONDS = 30.0
"""How long an end that was late is still offered to the log."""
RETRY_SECONDS = 0.1
"""The pause after a call that failed."""
CALL_ENTRIES_MAX = 2_000
"""Entries in one call: Redis serves nobody else meanwhile."""

NotResumableCause = Literal["bounds", "lost", "late"]
"""Longer than a log may be; the log was lost; its end came too late."""


class LoggedReply(Protocol):
    """A reply in the memory of the node that makes it, as the writer sees it.

    ``entries[n]`` is entry n; the writer reads entries again until the log has them.
    """

    @property
    def reply_id(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def entries(self) -> Sequence[ReplyEntry]: ...

    def on_superseded(self) -> None:
        """Another node began a newer epoch: stop, and write no more."""
        ...

    def on_not_resumable(self, cause: NotResumableCause) -> None:
        """The log will not have the whole reply, or not in time. Comes at most once;
        the reply itself goes on.
        """
        ...


class _Logged:
    """How far the log of a reply is.

    ``next``: the first entry that the log may not have. ``gap_at``: where the log ends
    with ``gap``, because the reply does not fit. ``end``: whether the log has the end.
    """

    __slots__ = ("bytes", "end", "gap_at", "next", "reply", "reported", "timer")

    def __init__(self, reply: LoggedReply) -> None:
        self.reply = reply
        self.next = 1
        self.bytes = _size(reply.entries[0])
        self.gap_at: int | None = None
        self.end: asyncio.Future[bool] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.reported = False

    def report(self, cause: NotResumableCause) -> None:
        if not self.reported:
            self.reported = True
            self.reply.on_not_resumable(cause)

    def unwritten(self, entries_max: int) -> Sequence[ReplyEntry]:
        """The next entries to write, within the bounds of a log.

        Where the bounds are is decided once: a repeated call sends the same entries.
        """
        entries = self.reply.entries[self.next : self.next + entries_max]
        if self.gap_at is None:
            fitting = self._fitting(entries)
            if fitting < len(entries):
                self.gap_at = self.next + fitting
        if self.gap_at is None or self.next + len(entries) <= self.gap_at:
            return entries
        return [*entries[: self.gap_at - self.next], _GAP]

    def _fitting(self, entries: Sequence[ReplyEntry]) -> int:
        """How many of the entries fit, with one more for ``gap``."""
        size = self.bytes
        for at, entry in enumerate(entries):
            size += _size(entry)
            if size > LOG_BYTES_MAX or self.next + at >= LOG_ENTRIES_MAX - 1:
                return at
        return len(entries)


def _before(entry_id: EntryId) -> EntryId:
    return EntryId(entry_id.epoch, entry_id.n - 1)


_GAP = ReplyError("gap", "the reply is longer than its log may be")


def _size(entry: ReplyEntry) -> int:
    """The most bytes that an entry takes in a log, roughly."""
    match entry:
        case ReplyDelta(chunk=chunk):
            return len(chunk) + 32
        case ReplyUsage(chunk=chunk):
            return len(chunk) + 64
        case ReplyBegin(request=request):
            return len(request) + 512
        case ReplyError(message=message, body=body):
            return len(message) + len(body) + 64
        case ReplyDone():
            return 32


class LogWriter:
    """Writes the replies of a node to their logs. ``run`` must run."""

    def __init__(self, log: ReplyLog, *, end_seconds: float = END_SECONDS) -> None:
        self._log = log
        self._end_seconds = end_seconds
        self._replies: dict[str, _Logged] = {}
        self._grown: dict[_Logged, None] = {}
        self._has_grown = asyncio.Event()
        self._urgent = asyncio.Event()
        self.trouble: str | None = None
        """Why the last call of the log failed; None if it did not."""

    async def begin(self, reply: LoggedReply) -> int:
        """Write entry 0 and return the epoch, which ``reply.epoch`` must be then.

        Unavailable or OutcomeUnknown: there is no log to go on with. LogEnded: there is
        a whole reply already.
        """
        begin = reply.entries[0]
        assert isinstance(begin, ReplyBegin)
        try:
            async with asyncio.timeout(self._end_seconds):
                epoch = await self._log.begin(reply.reply_id, begin)
        except TimeoutError:
            silent = OutcomeUnknown("the log of replies does not answer")
            self._failed(silent)
            raise silent from None
        except HoldfastError as error:
            self._failed(error)
            raise
        self.trouble = None
        self._replies[reply.reply_id] = _Logged(reply)
        return epoch

    def appended(self, reply: LoggedReply) -> None:
        """There are new entries, but not the end."""
        logged = self._replies.get(reply.reply_id)
        if logged is not None and logged.reply is reply:
            self._grown[logged] = None
            self._has_grown.set()

    async def end(self, reply: LoggedReply) -> bool:
        """The last entry is the end: True if the log has it, False if it has not within
        a second or never will.

        Cancel-safe: the entries are written all the same.
        """
        logged = self._replies.get(reply.reply_id)
        if logged is None or logged.reply is not reply:
            return False
        if logged.end is None:
            loop = asyncio.get_running_loop()
            logged.end = loop.create_future()
            logged.timer = loop.call_later(LATE_SECONDS, self._forget, logged)
        self._grown[logged] = None
        self._has_grown.set()
        self._urgent.set()
        try:
            async with asyncio.timeout(self._end_seconds):
                return await asyncio.shield(logged.end)
        except TimeoutError:
            logged.report("late")
            return False

    def forget(self, reply: LoggedReply) -> None:
        """Write no more of a reply that stops without an end."""
        logged = self._replies.get(reply.reply_id)
        if logged is not None and logged.reply is reply:
            self._forget(logged)

    async def run(self) -> None:
        """Write until it is cancelled. It may be run again."""
        while True:
            await self._has_grown.wait()
            await wait_at_most(self._urgent, self._log.flush_seconds)
            self._urgent.clear()
            await self._flush()

    async def _flush(self) -> None:
        """Write what has grown; what did not fit or was refused stays to be written."""
        batch = self._next_batch()
        try:
            answers = await self._log.append([append for _, append in batch]) if batch else ()
        except HoldfastError as error:
            self._failed(error)
            await asyncio.sleep(RETRY_SECONDS)
            self._urgent.set()
            return
        self.trouble = None
        telemetry.reply_log_written(sum(answer.bytes_stored for answer in answers))
        for (logged, append), answer in zip(batch, answers, strict=True):
            self._settle(logged, append, answer)
        if not self._grown:
            self._has_grown.clear()
        elif any(logged.end is not None for logged in self._grown):
            self._urgent.set()

    def _next_batch(self) -> list[tuple[_Logged, LogAppend]]:
        batch: list[tuple[_Logged, LogAppend]] = []
        room = CALL_ENTRIES_MAX
        for logged in list(self._grown):
            entries = logged.unwritten(room)
            first = EntryId(logged.reply.epoch, logged.next)
            batch.append((logged, LogAppend(logged.reply.reply_id, first, entries)))
            room -= len(entries)
            if room <= 0:
                break
        return batch

    def _settle(self, logged: _Logged, append: LogAppend, answer: Appended) -> None:
        if self._replies.get(append.reply_id) is not logged:
            return  # it was forgotten meanwhile
        reply, last = logged.reply, answer.last
        if last is not None and last.epoch > reply.epoch:
            self._forget(logged)
            reply.on_superseded()
        elif last is not None and last == EntryId(reply.epoch, logged.gap_at or -1):
            self._forget(logged, "bounds")
        elif last is None or last.epoch < reply.epoch or last == _before(append.first):
            self._forget(logged, "lost")  # or it has an end that is not from here
        else:
            self._go_on(logged, answer.bytes_stored, last.n + 1)

    def _go_on(self, logged: _Logged, bytes_stored: int, following: int) -> None:
        reply = logged.reply
        # Nothing written: an earlier call had. Count its entries at their largest.
        logged.bytes += bytes_stored or sum(map(_size, reply.entries[logged.next : following]))
        logged.next = following
        if following < len(reply.entries):
            return
        self._grown.pop(logged, None)
        if logged.end is not None:
            logged.end.set_result(True)
            self._forget(logged)

    def _forget(self, logged: _Logged, cause: NotResumableCause | None = None) -> None:
        """Write no more of it; ``cause``: because it will not be resumable."""
        if self._replies.get(logged.reply.reply_id) is logged:
            del self._replies[logged.reply.reply_id]
        self._grown.pop(logged, None)
        if logged.timer is not None:
            logged.timer.cancel()
        if logged.end is not None and not logged.end.done():
            logged.end.set_result(False)
        if cause is not None:
            logged.report(cause)

    def _failed(self, error: HoldfastError) -> None:
        """Log the first failure of a series."""
        if self.trouble is None:
            telemetry.log.warning("streaming.log_append_failed", error=error.message)
        self.trouble = error.message
