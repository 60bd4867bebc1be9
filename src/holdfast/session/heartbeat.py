"""Heartbeats: is the client there, and does it lack something nobody pushed? (Pure.)

The store's heads are compared with what was queued. A chat whose head has stayed above its ``through`` for
some seconds (not merely on its way) is named in a heartbeat, so a skipped delivery is always found, the
last one of a chat too. A device whose acks stay behind what was written gets one resync, then a close.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.message import Cursor
from holdfast.session.progress import ChatProgress
from holdfast.session.settings import TimeoutSettings

Places = dict[str, ChatProgress]
SLOW_LINK_BYTES_PER_SECOND = 2_500
SLOW_LINK_SECONDS_MAX = 120.0
"""A client behind a proxy is given the time that what was written for it takes at 20 kbit/s, two minutes at most."""


class Transmission(NamedTuple):
    """How far what was written has come.

    ``unsent``: bytes that have not left the process. ``unacknowledged``: 0 if the far machine has taken everything.
    ``acknowledged``: changes whenever it has taken more.
    """

    unsent: int = 0
    unacknowledged: int = 0
    acknowledged: int = 0

    @classmethod
    def of_buffer(cls, unsent: int) -> Transmission:
        """Where only our own buffer can be seen."""
        return cls(unsent, unsent, -unsent)


NOTHING_WAITS = Transmission()


class HeartbeatTimer:
    """When to ask, and whether the answer is late."""

    __slots__ = ("_arrived", "_asked_at", "_lagging_since", "_seen", "_timeouts", "due")

    def __init__(self, timeouts: TimeoutSettings, first: float) -> None:
        self._timeouts = timeouts
        self.due = first
        self._asked_at: float | None = None
        self._seen = NOTHING_WAITS
        self._arrived = 0
        """What had been acknowledged at the heartbeat before the last one: so much surely reached the client."""
        self._lagging_since: dict[str, float] | None = None

    def answered(self) -> bool:
        """Something was read from the client: it is there. Whether it had been asked."""
        asked, self._asked_at = self._asked_at is not None, None
        return asked

    @property
    def deadline(self) -> float | None:
        """When an answer must have come, if one is awaited."""
        return None if self._asked_at is None else self._asked_at + self._timeouts.heartbeat_timeout_seconds

    def late(self, now: float, sent: Transmission) -> bool:
        """Whether the answer is overdue.

        A heartbeat cannot be answered before it has arrived, so its time begins again as long as there is something to
        take before it and the far machine takes it. That machine may be a proxy: what it took lately may still be on
        its way over a slow link, and has the time that it needs there.
        """
        deadline = self.deadline
        if deadline is None or now < deadline:
            return False
        before, self._seen = self._seen, sent
        if sent.acknowledged != before.acknowledged and (before.unacknowledged or sent.unacknowledged):
            self._asked_at = now
            return False
        on_its_way = 0 if sent.unacknowledged else max(sent.acknowledged - self._arrived, 0)
        return now >= deadline + min(on_its_way / SLOW_LINK_BYTES_PER_SECOND, SLOW_LINK_SECONDS_MAX)

    def knows(self, chat_id: str, place: ChatProgress, head: Cursor) -> bool:
        """Whether ``compare`` would change nothing."""
        heard = place.heard
        if head.epoch != place.epoch or head.sequence > heard:
            return False
        lagging = self._lagging_since
        return (heard > place.through) == (lagging is not None and chat_id in lagging)

    def compare(self, chat_id: str, place: ChatProgress, head: Cursor, now: float) -> None:
        """Note whether the store has more than was queued; the next heartbeat then comes in time to name the chat."""
        place.meet(head)
        lagging = self._lagging_since
        if place.heard <= place.through:
            if lagging is not None:
                lagging.pop(chat_id, None)
        elif lagging is None or chat_id not in lagging:
            if lagging is None:
                lagging = self._lagging_since = {}
            lagging[chat_id] = now
            self.due = min(self.due, now + self._timeouts.behind_before_heads_seconds)

    def ask(self, places: Places, now: float, sent: Transmission, chats_max: int) -> dict[str, tuple[int, int]]:
        """A heartbeat is sent now; the heads it names. Of more than ``chats_max`` the others come soon, in turn."""
        self.due = now + self._timeouts.heartbeat_interval_seconds
        if self._asked_at is None:
            self._asked_at, self._arrived, self._seen = now, self._seen.acknowledged, sent
        lagging = self._lagging_since or {}
        still = {c: since for c, since in lagging.items() if c in places and places[c].heard > places[c].through}
        self._lagging_since = still or None
        wait = self._timeouts.behind_before_heads_seconds
        if young := [since for since in still.values() if since + wait > now]:
            self.due = min(self.due, min(young) + wait)
        behind = [c for c, since in still.items() if since + wait <= now]
        if len(behind) > chats_max:
            behind = behind[:chats_max]
            self.due = min(self.due, now + wait)
            still.update((c, still.pop(c)) for c in behind)
        return {c: (places[c].epoch, places[c].heard) for c in behind}


class _Stale(NamedTuple):
    since: float
    acked: int
    resynced: bool


class StaleAcks:
    """Chats whose acks stay behind what was written; looked at with each heartbeat."""

    __slots__ = ("_stale", "_timeouts")

    def __init__(self, timeouts: TimeoutSettings) -> None:
        self._timeouts = timeouts
        self._stale: dict[str, _Stale] | None = None

    def check(self, places: Places, now: float) -> tuple[list[str], bool]:
        """The chats that need a resync now, and whether one of them had its resync and it did not help."""
        before = self._stale or {}
        stale: dict[str, _Stale] = {}
        resync: list[str] = []
        diverged = False
        for chat_id, place in places.items():
            if place.acked >= place.through:
                continue
            known = before.get(chat_id)
            if known is None or place.acked != known.acked:
                known = _Stale(now, place.acked, resynced=False)
            elif now - known.since >= self._timeouts.stale_acks_seconds:
                diverged = diverged or known.resynced
                resync.append(chat_id)
                known = _Stale(now, place.acked, resynced=True)
            stale[chat_id] = known
        self._stale = stale or None
        return resync, diverged
