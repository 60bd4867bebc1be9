"""Which deadline closes a connection, and when the next one is due. (Pure.)"""

from __future__ import annotations

from holdfast.session.heartbeat import HeartbeatTimer, StaleAcks, Transmission
from holdfast.session.outbound import OutboundBuffer
from holdfast.session.requests import Overload
from holdfast.session.settings import TimeoutSettings
from holdfast.wire.close_codes import CloseReason

_ROTATION_SPREAD = 0.05


class Lifetime:
    """One connection's timers; its outbound buffer and its pulls have their own."""

    __slots__ = ("_rotates_at", "_timeouts", "expires_at", "heartbeat", "overload", "stale_acks")

    def __init__(
        self, timeouts: TimeoutSettings, now: float, expires_at: float | None, spread: float
    ) -> None:
        """``expires_at``: of the token. ``spread``: 0 to 1, random per connection."""
        self._timeouts = timeouts
        self._rotates_at = now + timeouts.rotation_seconds * (1 + _ROTATION_SPREAD * spread)
        self.expires_at = expires_at
        self.heartbeat = HeartbeatTimer(
            timeouts, now + timeouts.heartbeat_interval_seconds * (1 - spread / 2)
        )
        self.stale_acks = StaleAcks(timeouts)
        self.overload = Overload()

    def end(self, now: float, sent: Transmission, deliveries: OutboundBuffer) -> CloseReason | None:
        """Why the connection must close now; None if it need not."""
        if self.expires_at is not None and now >= self.expires_at:
            return CloseReason.TOKEN_EXPIRED
        if deliveries.end_grace_if_due(now):
            return CloseReason.SLOW_CONSUMER
        if self.heartbeat.late(now, sent):
            return CloseReason.IDLE_TIMEOUT
        if now >= self._rotates_at:
            return CloseReason.ROTATION
        return CloseReason.OVERLOADED if self.overload.judge(self._timeouts, now) else None

    @property
    def next(self) -> float:
        """When the next of these timers is due."""
        soonest = min(self._rotates_at, self.heartbeat.due)
        for time in (self.expires_at, self.heartbeat.deadline, self.overload.due(self._timeouts)):
            if time is not None and time < soonest:
                soonest = time
        return soonest
