"""A reply in the memory of the node that makes it.

This memory is the reply: the producer appends entries, and every reader, the client
that asked for it too, is a cursor over them. Entries of the end are held back until the
log has them, so that no reader sees an end that a crash could take back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Literal

from holdfast import telemetry
from holdfast.bounds import MIB
from holdfast.streaming.pool.places import PoolPlace
from holdfast.streaming.reply import (
    ReplyBegin,
    ReplyDone,
    ReplyEnd,
    ReplyEntry,
    ReplyError,
)
from holdfast.streaming.reply_log.writer import NotResumableCause

ReplyState = Literal["waiting", "running", "ended"]
ENTRY_BYTES = 120
"""What an entry costs in memory besides its chunk."""
KEPT_BYTES_MAX = 4 * MIB
"""Of a reply whose log is lost. Beyond it the oldest entries are dropped, and a reader
that still needed them ends with ``gap``."""
REPLY_BYTES_MAX = 32 * MIB
"""Of a whole reply; a provider that sends more is cut off."""


class LiveReply:
    """Entries, who watches them, and how the reply is stopped.

    ``visible``: how many entries readers may see. ``end``: the end, once visible.
    ``resumable``: whether the log can still give it to another node, or after a restart
    of this one. ``size_bytes``: of all entries; ``kept_bytes``: of those still here.
    ``first``: the number of the oldest entry that is still here.
    """

    def __init__(
        self, reply_id: str, begin: ReplyBegin, epoch: int, arrived_at: float = 0.0
    ) -> None:
        """``arrived_at``: when its request came (monotonic)."""
        self.reply_id = reply_id
        self.arrived_at = arrived_at
        self.begin = begin
        self.epoch = epoch
        self.resumable = False
        self.entries: list[ReplyEntry] = [begin]
        self.visible = 1
        self.first = 0
        self.size_bytes = self.kept_bytes = ENTRY_BYTES
        self.state: ReplyState = "waiting"
        self.end: ReplyEnd | None = None
        self.place: PoolPlace | None = None
        self.task: asyncio.Task[None] | None = None
        self.has_begun = False
        """Its task has made its first step: a task cancelled before that runs no code,
        so nobody would release its lease or end it."""
        self._position = 0
        self.stop_cause: ReplyError | None = None
        """Why it is being stopped; set before its task is cancelled."""
        self.has_token = False
        self.is_ending = False
        """Its end is decided; nothing stops it any more."""
        self._watchers: dict[Callable[[], None], bool] = {}
        """Called when there is something new; whether the watcher is a reader."""
        self._callbacks: tuple[Callable[[], None], ...] = ()
        """Those of the watchers, which may change while they are called."""
        self.on_stopped: Callable[[], None] = lambda: None
        """Called when it is stopped before its task has begun."""
        self.on_unread: Callable[[], None] = lambda: None
        """Called when the last reader has left."""
        self.unread_timer: asyncio.TimerHandle | None = None
        """Cancels the reply if nobody reads it by then."""

    # --- readers

    def watch(self, callback: Callable[[], None], *, reader: bool = True) -> None:
        self._watchers[callback] = reader
        self._callbacks = tuple(self._watchers)

    def unwatch(self, callback: Callable[[], None]) -> None:
        was_reader = self._watchers.pop(callback, False)
        self._callbacks = tuple(self._watchers)
        if was_reader and not self.readers:
            self.on_unread()

    @property
    def readers(self) -> int:
        return sum(self._watchers.values())

    # --- the producer

    def append(self, entries: Iterable[ReplyEntry]) -> None:
        """Add entries that readers may see at once. (``hold`` and ``notify``, without
        calls, because it comes with every token.)
        """
        size = 0
        for entry in entries:
            self.entries.append(entry)
            size += ENTRY_BYTES + len(getattr(entry, "chunk", b""))
        self.size_bytes += size
        self.kept_bytes += size
        if self.kept_bytes > KEPT_BYTES_MAX and not self.resumable:
            self._drop_oldest()
        self.visible = self.first + len(self.entries)
        for callback in self._callbacks:
            callback()

    def hold(self, entries: Iterable[ReplyEntry]) -> None:
        """Add entries that readers may not see yet."""
        size = 0
        for entry in entries:
            self.entries.append(entry)
            size += ENTRY_BYTES + len(getattr(entry, "chunk", b""))
        self.size_bytes += size
        self.kept_bytes += size
        if self.kept_bytes > KEPT_BYTES_MAX and not self.resumable:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        dropped = 0
        while self.kept_bytes > KEPT_BYTES_MAX // 2:
            self.kept_bytes -= ENTRY_BYTES + len(getattr(self.entries[dropped], "chunk", b""))
            dropped += 1
        del self.entries[:dropped]
        self.first += dropped

    @property
    def next(self) -> int:
        """The number of the next entry."""
        return self.first + len(self.entries)

    def show_end(self, missing: ReplyError) -> None:
        """Let readers see everything. ``missing``: the end if none was added."""
        if not isinstance(self.entries[-1], ReplyDone | ReplyError):
            self.hold([missing])
        last = self.entries[-1]
        assert isinstance(last, ReplyDone | ReplyError)
        self.visible = self.next
        self.state, self.end = "ended", last
        self.notify()

    def set_state(self, state: ReplyState) -> None:
        self.state = state
        self.notify()

    def notify_position(self) -> None:
        """Let readers know if its place in the queue has changed."""
        place = self.place
        if place is not None and place.waiting and place.position != self._position:
            self._position = place.position
            self.notify()

    def notify(self) -> None:
        for callback in self._callbacks:
            callback()

    def stop(self, cause: ReplyError) -> bool:
        """End the reply with this error; False if it is ending already."""
        if self.stop_cause is not None or self.is_ending:
            return False
        self.stop_cause = cause
        if self.task is not None and self.has_begun:
            self.task.cancel()
        else:
            self.on_stopped()
        return True

    # --- the log

    def on_superseded(self) -> None:
        """Another node makes a newer epoch of this reply."""
        self.stop(ReplyError("superseded", "another node makes this reply now", 409))

    def on_not_resumable(self, cause: NotResumableCause) -> None:
        """The log will not have everything, or too late; the reply goes on."""
        self.resumable = False
        telemetry.reply_not_resumable(cause)
