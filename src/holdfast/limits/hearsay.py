"""What doorbells told and the log has not shown yet: how far ahead it is, and how long it is believed. (Pure.)

A ring may be ahead of whoever we read from, because a replica lags. It cannot be for ever: a reader tells up to which
moment it knows everything, and a place of the log that was rung for before that moment and is not there then is not of
our log. Two databases that are copies of one ring by one name.
"""

from __future__ import annotations

HEARSAY_SECONDS = 60.0
"""How long a ring is believed by itself. More than the clocks of a primary and its replica can differ: how far a
replica lags is told by them."""

_LogPosition = tuple[int, int]
"""An epoch and a ``seq`` in its log."""


class PendingNotifications:
    """``last`` is the furthest place that was rung for. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.last: _LogPosition = (0, 0)
        self._awaited: tuple[_LogPosition, float] | None = None

    def seq(self, epoch: int) -> int:
        """The furthest place in the log of this epoch; 0 if what was heard is of another."""
        return self.last[1] if self.last[0] == epoch else 0

    def heard(self, place: _LogPosition, cursor: _LogPosition, now: float) -> None:
        """A ring brought what is at this place; we have read up to the cursor."""
        self.last = max(self.last, place)
        if self._awaited is None and place > cursor:
            self._awaited = (place, now)

    def overdue(self, head: _LogPosition, known_at: float, now: float) -> bool:
        """Whether a place that was rung for is still not in a log whose reader should know it by now.

        One place is awaited at a time; when the log reaches it, the furthest is next. So rings that go on and on
        neither put the day off nor bring it nearer.
        """
        if self._awaited is None:
            return False
        place, since = self._awaited
        if place > head:
            return known_at > since + HEARSAY_SECONDS
        self._awaited = (self.last, now) if self.last > head else None
        return False

    def forget(self, place: _LogPosition) -> None:
        """We have read everything up to here, and believe nothing beyond it."""
        self.last, self._awaited = place, None
