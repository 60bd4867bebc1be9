"""Time, randomness and ids, injected everywhere; nothing else in Holdfast asks the system for them.

``now`` is wall-clock time (seconds since the epoch): for people and records. ``monotonic`` is for
durations: it never goes back. A decision must never depend on the wall clock where a duration is meant.
"""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime
from typing import Protocol

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


class Clock(Protocol):
    """Where time comes from."""

    def now(self) -> float:
        """Seconds since the epoch, by the wall clock."""
        ...

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...


class SystemClock:
    """The machine's own clocks."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)


class ManualClock:
    """A clock that moves only when told to, for tests of pure code."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._elapsed = 0.0
        self._start = start

    def now(self) -> float:
        return self._start + self._elapsed

    def monotonic(self) -> float:
        return self._elapsed

    def advance(self, seconds: float) -> None:
        self._elapsed += seconds


class Ids:
    """Makes ids: a prefix that names the kind, then a ULID (48 bits of time, 80 of randomness).

    Ids of one maker rise strictly, also within a millisecond and when the wall clock steps back.
    """

    def __init__(self, clock: Clock, rng: random.Random | None = None) -> None:
        self._clock = clock
        self._rng = rng or random.SystemRandom()
        self._last = 0

    def new(self, prefix: str) -> str:
        value = (int(self._clock.now() * 1000) << 80) | self._rng.getrandbits(80)
        if value <= self._last:
            value = self._last + 1
        self._last = value
        return prefix + _base32(value)


def _base32(value: int) -> str:
    return "".join(_CROCKFORD[(value >> shift) & 31] for shift in range(125, -1, -5))


def timestamp(now: float) -> str:
    """A wall-clock moment as it is stored and sent: RFC 3339, UTC, milliseconds."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{int(now * 1000) % 1000:03d}Z"
