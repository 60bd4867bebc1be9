"""How much work one connection may cause, before and after authentication. (Pure.)

The rates of ``Requests`` bound accepted frames, but a refusal costs work, too. So every
frame is counted here, whatever its result. Above the rate the socket is not read until
the bucket is refilled: the client's kernel fills up and TCP slows it down. A client
that stays above the rate is closed.
"""

from __future__ import annotations

from holdfast.session.settings import InboundSettings


class WorkRate:
    """A token bucket that may go below zero, as a whole read is handled at once."""

    __slots__ = ("_at", "_inbound", "_paused_at", "_pauses", "_tokens")

    def __init__(self, inbound: InboundSettings, now: float) -> None:
        self._inbound = inbound
        self._tokens = float(inbound.work_rate_limit_burst)
        self._at = now
        self._paused_at: float | None = None
        self._pauses: list[tuple[float, float]] | None = None
        """Earlier pauses of reading, within the window."""

    @property
    def paused(self) -> bool:
        """Whether the socket must not be read."""
        return self._paused_at is not None

    def spend(self, work: int, now: float) -> bool:
        """Count ``work`` frames; whether reading must pause from now on."""
        self._refill(now)
        self._tokens -= work
        if self._tokens >= 0 or self._paused_at is not None:
            return False
        self._paused_at = now
        return True

    def resume(self, now: float) -> bool:
        """Whether a paused socket may be read again."""
        if self._paused_at is None:
            return False
        self._refill(now)
        if self._tokens < 0:
            return False
        self._pauses = [*self._recent(now), (self._paused_at, now)]
        self._paused_at = None
        return True

    def is_exceeded(self, now: float) -> bool:
        """Whether reading was paused for so much of the window that it must close."""
        since = now - self._inbound.work_pause_window_seconds
        paused = sum(end - max(start, since) for start, end in self._recent(now))
        if self._paused_at is not None:
            paused += now - self._paused_at
        return paused >= self._inbound.work_pause_seconds_max

    def _recent(self, now: float) -> list[tuple[float, float]]:
        since = now - self._inbound.work_pause_window_seconds
        return [pause for pause in self._pauses or () if pause[1] > since]

    def _refill(self, now: float) -> None:
        if now > self._at:
            gained = (now - self._at) * self._inbound.work_rate_limit_per_second
            self._tokens = min(float(self._inbound.work_rate_limit_burst), self._tokens + gained)
            self._at = now
