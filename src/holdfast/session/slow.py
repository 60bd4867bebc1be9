"""The slow-consumer machine: from a full outbound buffer to a warning, a grace, and either recovery or a close. (Pure.)

    FLOWING   bodies are queued
       │ above warning (80 %)                       → log, once until the buffer has been empty
    FILLING   bodies are queued
       │ above critical (95 %)                      → error SLOW_CONSUMER on the control lane, the grace starts
    SLOW      no body is queued: the chats fall behind and only their heads are remembered
       ├ below warning                              → bodies again, behind one resync with those heads
       ├ a new low, at least 5 % under the last     → the grace starts again: who drains steadily is not slow
       └ 5 s without a new low, or 60 s in all      → close
    OVER

Only deliveries count. Control frames, pages and ephemeral frames never make a client slow.
"""

from __future__ import annotations

from enum import Enum, auto

from holdfast.session.limits import Outbound


class Flow(Enum):
    """How the connection takes what is queued for it."""

    FLOWING = auto()
    FILLING = auto()
    SLOW = auto()
    OVER = auto()


class Seen(Enum):
    """What was seen of the buffer or of the time."""

    EMPTIED = auto()
    ABOVE_WARNING = auto()
    ABOVE_CRITICAL = auto()
    BELOW_WARNING = auto()
    NEW_LOW = auto()
    GRACE_OVER = auto()


class Action(Enum):
    """What the session does about it."""

    NOTHING = auto()
    LOG = auto()
    WARN = auto()
    RECOVER = auto()
    CLOSE = auto()


MOVES: dict[tuple[Flow, Seen], tuple[Flow, Action]] = {
    (Flow.FLOWING, Seen.ABOVE_WARNING): (Flow.FILLING, Action.LOG),
    (Flow.FLOWING, Seen.ABOVE_CRITICAL): (Flow.SLOW, Action.WARN),
    (Flow.FLOWING, Seen.EMPTIED): (Flow.FLOWING, Action.NOTHING),
    (Flow.FILLING, Seen.ABOVE_WARNING): (Flow.FILLING, Action.NOTHING),
    (Flow.FILLING, Seen.ABOVE_CRITICAL): (Flow.SLOW, Action.WARN),
    (Flow.FILLING, Seen.EMPTIED): (Flow.FLOWING, Action.NOTHING),
    (Flow.SLOW, Seen.BELOW_WARNING): (Flow.FILLING, Action.RECOVER),
    (Flow.SLOW, Seen.NEW_LOW): (Flow.SLOW, Action.NOTHING),
    (Flow.SLOW, Seen.GRACE_OVER): (Flow.OVER, Action.CLOSE),
}


class IllegalMove(AssertionError):
    """A defect: the session showed the machine something that cannot be in its state."""


class SlowConsumer:
    """The machine of one connection. ``fill`` is the fuller of messages and bytes, in percent of the buffer."""

    __slots__ = ("_low", "_outbound", "_restarted_at", "_warned_at", "flow")

    def __init__(self, outbound: Outbound) -> None:
        self._outbound = outbound
        self.flow = Flow.FLOWING
        self._low = 0.0
        self._warned_at = 0.0
        self._restarted_at = 0.0

    @property
    def slow(self) -> bool:
        return self.flow is Flow.SLOW

    @property
    def deadline(self) -> float:
        """When the grace is over, unless there is a new low by then; only while slow."""
        return min(
            self._restarted_at + self._outbound.grace_period_seconds,
            self._warned_at + self._outbound.grace_total_seconds,
        )

    def rose_above_warning(self) -> Action:
        return self._move(Seen.ABOVE_WARNING)

    def rose_above_critical(self, fill: float, now: float) -> Action:
        action = self._move(Seen.ABOVE_CRITICAL)
        self._low = fill
        self._warned_at = self._restarted_at = now
        return action

    def drained(self, fill: float) -> Action:
        """Something was taken out of the buffer."""
        if self.flow is Flow.SLOW:
            below = fill < self._outbound.warning_threshold_percent
            return self._move(Seen.BELOW_WARNING) if below else Action.NOTHING
        return self._move(Seen.EMPTIED) if not fill and self.flow is not Flow.OVER else Action.NOTHING

    def lowered(self, fill: float, now: float) -> None:
        """Look for a new low; only while slow."""
        if fill <= self._low - self._outbound.new_low_percent:
            self._move(Seen.NEW_LOW)
            self._low = fill
            self._restarted_at = now

    def passed(self, fill: float, now: float) -> Action:
        """Time went by while slow. A new low is looked for before the deadline is judged."""
        self.lowered(fill, now)
        return self._move(Seen.GRACE_OVER) if now >= self.deadline else Action.NOTHING

    def _move(self, seen: Seen) -> Action:
        try:
            self.flow, action = MOVES[self.flow, seen]
        except KeyError:
            raise IllegalMove(f"{seen.name} while {self.flow.name}") from None
        return action
