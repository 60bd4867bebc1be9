"""The slow-consumer machine: from a full outbound buffer to a warning, a grace, and
either recovery or a close. (Pure.)

    FLOWING   bodies are queued
       │ above warning (80 %)            → log, once until the buffer has been empty
    FILLING   bodies are queued
       │ above critical (95 %)           → error SLOW_CONSUMER; the grace starts
    SLOW      no body is queued: chats fall behind, only their heads are remembered
       ├ below warning                   → bodies again, behind a resync with the heads
       ├ a new low, 5 % under the last   → the grace starts again
       └ 5 s without one, or 60 s in all → close
    OVER

A client that drains steadily is not slow. Only deliveries count: control frames, pages
and ephemeral frames never make a client slow.
"""

from __future__ import annotations

from enum import Enum, auto

from holdfast.session.settings import OutboundSettings


class Flow(Enum):
    """How the connection takes what is queued for it."""

    FLOWING = auto()
    FILLING = auto()
    SLOW = auto()
    OVER = auto()


class BufferEvent(Enum):
    """What was seen of the buffer or of the time."""

    EMPTIED = auto()
    ABOVE_WARNING = auto()
    ABOVE_CRITICAL = auto()
    BELOW_WARNING = auto()
    NEW_LOW = auto()
    GRACE_OVER = auto()


class SlowConsumerAction(Enum):
    """What the session does about it."""

    NOTHING = auto()
    LOG = auto()
    WARN = auto()
    RECOVER = auto()
    CLOSE = auto()


MOVES: dict[tuple[Flow, BufferEvent], tuple[Flow, SlowConsumerAction]] = {
    (Flow.FLOWING, BufferEvent.ABOVE_WARNING): (Flow.FILLING, SlowConsumerAction.LOG),
    (Flow.FLOWING, BufferEvent.ABOVE_CRITICAL): (Flow.SLOW, SlowConsumerAction.WARN),
    (Flow.FLOWING, BufferEvent.EMPTIED): (Flow.FLOWING, SlowConsumerAction.NOTHING),
    (Flow.FILLING, BufferEvent.ABOVE_WARNING): (Flow.FILLING, SlowConsumerAction.NOTHING),
    (Flow.FILLING, BufferEvent.ABOVE_CRITICAL): (Flow.SLOW, SlowConsumerAction.WARN),
    (Flow.FILLING, BufferEvent.EMPTIED): (Flow.FLOWING, SlowConsumerAction.NOTHING),
    (Flow.SLOW, BufferEvent.BELOW_WARNING): (Flow.FILLING, SlowConsumerAction.RECOVER),
    (Flow.SLOW, BufferEvent.NEW_LOW): (Flow.SLOW, SlowConsumerAction.NOTHING),
    (Flow.SLOW, BufferEvent.GRACE_OVER): (Flow.OVER, SlowConsumerAction.CLOSE),
}


class IllegalMove(AssertionError):
    """A defect: the event cannot happen in the machine's state."""


class SlowConsumer:
    """The machine of one connection. ``fill`` is the fuller of messages and bytes, in
    percent of the buffer.
    """

    __slots__ = ("_low", "_outbound", "_restarted_at", "_warned_at", "flow")

    def __init__(self, outbound: OutboundSettings) -> None:
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
        """When the grace ends, unless there is a new low before; only while slow."""
        return min(
            self._restarted_at + self._outbound.grace_period_seconds,
            self._warned_at + self._outbound.grace_total_seconds,
        )

    def rose_above_warning(self) -> SlowConsumerAction:
        return self._move(BufferEvent.ABOVE_WARNING)

    def rose_above_critical(self, fill: float, now: float) -> SlowConsumerAction:
        action = self._move(BufferEvent.ABOVE_CRITICAL)
        self._low = fill
        self._warned_at = self._restarted_at = now
        return action

    def drained(self, fill: float) -> SlowConsumerAction:
        """Something was taken out of the buffer."""
        if self.flow is Flow.SLOW:
            below = fill < self._outbound.warning_threshold_percent
            return self._move(BufferEvent.BELOW_WARNING) if below else SlowConsumerAction.NOTHING
        return (
            self._move(BufferEvent.EMPTIED)
            if not fill and self.flow is not Flow.OVER
            else SlowConsumerAction.NOTHING
        )

    def lowered(self, fill: float, now: float) -> None:
        """Look for a new low; only while slow."""
        if fill <= self._low - self._outbound.new_low_percent:
            self._move(BufferEvent.NEW_LOW)
            self._low = fill
            self._restarted_at = now

    def passed(self, fill: float, now: float) -> SlowConsumerAction:
        """Time went by while slow: look for a new low, then check the deadline."""
        self.lowered(fill, now)
        return (
            self._move(BufferEvent.GRACE_OVER)
            if now >= self.deadline
            else SlowConsumerAction.NOTHING
        )

    def _move(self, seen: BufferEvent) -> SlowConsumerAction:
        try:
            self.flow, action = MOVES[self.flow, seen]
        except KeyError:
            raise IllegalMove(f"{seen.name} while {self.flow.name}") from None
        return action
