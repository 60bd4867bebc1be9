"""Heartbeats: is the client alive, and does it lack a message? (Pure.)

The heads in the store are compared with what was queued. A heartbeat names each chat
whose head has been above its ``through`` for some seconds, longer than a delivery
takes. So a skipped delivery is always found, even the last one of a chat. A device
whose acks stay behind what was written gets one resync, then a close.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.message import Cursor
from holdfast.session.progress import ChatProgress
from holdfast.session.settings import TimeoutSettings

_Chats = dict[str, ChatProgress]


class Transmission(NamedTuple):
    """How far the written bytes have come.

    ``unsent``: bytes still in this process. ``unacknowledged``: 0 if the peer's machine
    has taken everything. ``acknowledged``: changes whenever it takes more.
    """

    unsent: int = 0
    unacknowledged: int = 0
    acknowledged: int = 0

    @classmethod
    def of_buffer(cls, unsent: int) -> Transmission:
        """For systems that show only our own buffer."""
        return cls(unsent, unsent, -unsent)


NOTHING_WAITS = Transmission()


class HeartbeatTimer:
    """When to send a heartbeat, whether its answer is late, which chats lag."""

    __slots__ = ("_arrived", "_asked_at", "_lagging_since", "_seen", "_timeouts", "due")

    def __init__(self, timeouts: TimeoutSettings, first: float) -> None:
        self._timeouts = timeouts
        self.due = first
        self._asked_at: float | None = None
        self._seen = NOTHING_WAITS
        self._arrived = 0
        """Bytes acknowledged before the last heartbeat but one, surely delivered."""
        self._lagging_since: dict[str, float] | None = None

    def answered(self) -> bool:
        """The client sent something, so it is alive; whether an answer was awaited."""
        asked, self._asked_at = self._asked_at is not None, None
        return asked

    @property
    def deadline(self) -> float | None:
        """When the awaited answer is late; None if none is awaited."""
        return (
            None
            if self._asked_at is None
            else self._asked_at + self._timeouts.heartbeat_timeout_seconds
        )

    def late(self, now: float, sent: Transmission) -> bool:
        """Whether the answer is overdue.

        A heartbeat must arrive before it can be answered. So its time starts again as
        long as bytes are on their way and the peer's machine takes more. That machine
        may be a proxy in front of a slow link, so what it took lately extends the time,
        too.
        """
        deadline = self.deadline
        if deadline is None or now < deadline:
            return False
        before, self._seen = self._seen, sent
        if sent.acknowledged != before.acknowledged and (
            before.unacknowledged or sent.unacknowledged
        ):
            self._asked_at = now
            return False
        on_its_way = 0 if sent.unacknowledged else max(sent.acknowledged - self._arrived, 0)
        slow, longest = (
            self._timeouts.slow_link_bytes_per_second,
            self._timeouts.slow_link_seconds_max,
        )
        return now >= deadline + min(on_its_way / slow, longest)

    def knows(self, chat_id: str, progress: ChatProgress, head: Cursor) -> bool:
        """Whether ``compare`` would change nothing."""
        known = progress.head
        if head.epoch != progress.epoch or head.sequence > known:
            return False
        lagging = self._lagging_since
        return (known > progress.through) == (lagging is not None and chat_id in lagging)

    def compare(self, chat_id: str, progress: ChatProgress, head: Cursor, now: float) -> None:
        """Note if the store has more than was queued; may advance the heartbeat."""
        progress.on_head(head)
        lagging = self._lagging_since
        if progress.head <= progress.through:
            if lagging is not None:
                lagging.pop(chat_id, None)
        elif lagging is None or chat_id not in lagging:
            if lagging is None:
                lagging = self._lagging_since = {}
            lagging[chat_id] = now
            self.due = min(self.due, now + self._timeouts.behind_before_heads_seconds)

    def ask(
        self, chats: _Chats, now: float, sent: Transmission, chats_max: int
    ) -> dict[str, tuple[int, int]]:
        """The heads for the heartbeat sent now.

        At most ``chats_max``; the others follow in the next ones, which come soon.
        """
        self.due = now + self._timeouts.heartbeat_interval_seconds
        if self._asked_at is None:
            self._asked_at, self._arrived, self._seen = now, self._seen.acknowledged, sent
        lagging = self._lagging_since or {}
        still = {
            c: since
            for c, since in lagging.items()
            if c in chats and chats[c].head > chats[c].through
        }
        self._lagging_since = still or None
        wait = self._timeouts.behind_before_heads_seconds
        if young := [since for since in still.values() if since + wait > now]:
            self.due = min(self.due, min(young) + wait)
        behind = [c for c, since in still.items() if since + wait <= now]
        if len(behind) > chats_max:
            behind = behind[:chats_max]
            self.due = min(self.due, now + wait)
            still.update((c, still.pop(c)) for c in behind)
        return {c: (chats[c].epoch, chats[c].head) for c in behind}


class _Stale(NamedTuple):
    since: float
    acked: int
    resynced: bool


class StaleAcks:
    """Finds chats whose acks stay behind what was written, at each heartbeat."""

    __slots__ = ("_stale", "_timeouts")

    def __init__(self, timeouts: TimeoutSettings) -> None:
        self._timeouts = timeouts
        self._stale: dict[str, _Stale] | None = None

    def check(self, chats: _Chats, now: float) -> tuple[list[str], bool]:
        """Chats that need a resync now; whether one of them had a resync before."""
        before = self._stale or {}
        stale: dict[str, _Stale] = {}
        resync: list[str] = []
        diverged = False
        for chat_id, progress in chats.items():
            if progress.acked >= progress.through:
                continue
            known = before.get(chat_id)
            if known is None or progress.acked != known.acked:
                known = _Stale(now, progress.acked, resynced=False)
            elif now - known.since >= self._timeouts.stale_acks_seconds:
                diverged = diverged or known.resynced
                resync.append(chat_id)
                known = _Stale(now, progress.acked, resynced=True)
            stale[chat_id] = known
        self._stale = stale or None
        return resync, diverged
