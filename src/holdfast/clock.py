"""Time, randomness and ids, injected everywhere; nothing else in Holdfast asks the system for them.

``now`` is wall-clock time (seconds since the epoch): for people and records. ``monotonic`` is for
durations: it never goes back. A decision must never depend on the wall clock where a duration is meant.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Protocol

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [first + second for first in _CROCKFORD for second in _CROCKFORD]
"""Ten bits as two characters."""
TURN_SECONDS = 0.005
"""How long work that can be cut may keep the loop to itself."""


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

    Ids of one maker rise strictly, also within a millisecond and when the wall clock steps back. Randomness is drawn
    once per millisecond; the ids made within it count on from there, which is what makes them cheap.
    """

    _COUNTED_BITS = 20

    def __init__(self, clock: Clock, rng: random.Random | None = None) -> None:
        self._clock = clock
        self._rng = rng or random.SystemRandom()
        self._millisecond = -1
        self._high = 0
        self._stem = ""
        self._low = 0

    def new(self, prefix: str) -> str:
        millisecond = int(self._clock.now() * 1000)
        if millisecond > self._millisecond:
            self._millisecond = millisecond
            # One draw for both: each may be a system call.
            self._begin(*divmod(self._rng.getrandbits(60 + self._COUNTED_BITS - 1), 1 << self._COUNTED_BITS - 1))
        else:
            self._low += 1
            if self._low >> self._COUNTED_BITS:
                self._begin(self._high + 1, 0)
        low = self._low
        return f"{prefix}{self._stem}{_PAIRS[low >> 10]}{_PAIRS[low & 1023]}"

    def _begin(self, high: int, low: int) -> None:
        self._high = high
        self._low = low
        value = (self._millisecond << 60) + high
        self._stem = "".join(_PAIRS[(value >> shift) & 1023] for shift in range(100, -1, -10))


class Turns:
    """Long work on the loop, cut into turns, so that a send and a health check do not wait for all of it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends = clock.monotonic() + TURN_SECONDS

    async def give_way(self) -> None:
        """Between two pieces of the work: let the others run if this turn has had its time. Cancel-safe."""
        if self._clock.monotonic() >= self._ends:
            await asyncio.sleep(0)
            self._ends = self._clock.monotonic() + TURN_SECONDS


async def wait_at_most(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event for so long; whether it came. Cancel-safe."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def start_thread(work: Callable[[], None], name: str) -> asyncio.Event:
    """Run ``work`` in a daemon thread; the event is set when it has ended.

    Nothing of it waits in the loop's own executor, which others' work may fill for as long as it likes.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            work()
        finally:
            with suppress(RuntimeError):  # the loop is closed, and with it everybody who could wait
                loop.call_soon_threadsafe(end)

    def end() -> None:
        thread.join()  # it has nothing left to do
        ended.set()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return ended


def timestamp(now: float) -> str:
    """A wall-clock moment as it is stored and sent: RFC 3339, UTC, milliseconds."""
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
