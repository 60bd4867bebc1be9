"""Time, randomness and ids, injected everywhere, so that a simulation can own them.

``now`` is wall-clock time (seconds since the epoch), for people and records.
``monotonic`` never goes back and is for durations: a decision about a duration must not
use the wall clock.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Protocol, TypeVar

T = TypeVar("T")
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [first + second for first in _CROCKFORD for second in _CROCKFORD]
"""Ten bits as two characters."""
_SHIFTS = range(100, -1, -10)
TURN_SECONDS = 0.005
"""How long divisible work may run before it lets the loop go on."""


class Clock(Protocol):
    """The source of time."""

    def now(self) -> float:
        """Seconds since the epoch, by the wall clock."""
        ...

    def monotonic(self) -> float:
        """Seconds since some fixed time; never goes back."""
        ...


class SystemClock:
    """The machine's own clocks."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)


class ManualClock:
    """A clock that moves only by ``advance``, for tests of pure code."""

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
    """Makes ids: a prefix for the kind, then a ULID (48 bits of time, 80 random bits).

    The ids of one maker rise strictly, also within a millisecond and when the wall
    clock steps back. Random bits are drawn once per millisecond; later ids of that
    millisecond count up from there, which makes them cheap.
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
            # One draw for both, because a draw may be a system call.
            self._begin(
                *divmod(
                    self._rng.getrandbits(60 + self._COUNTED_BITS - 1), 1 << self._COUNTED_BITS - 1
                )
            )
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
        self._stem = "".join([_PAIRS[(value >> shift) & 1023] for shift in _SHIFTS])


class Turns:
    """Divides long work on the loop, so that sends and health checks do not wait for
    it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends = clock.monotonic() + TURN_SECONDS

    async def give_way(self) -> None:
        """Call between two pieces: lets the loop run if this turn took long.

        Cancel-safe.
        """
        if self._clock.monotonic() >= self._ends:
            await asyncio.sleep(0)
            self._ends = self._clock.monotonic() + TURN_SECONDS


async def wait_at_most(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most so long; returns whether it was set. Cancel-safe."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


class SharedTimeout:
    """Bounds one wait after another of one task with a single timer.

    A stream waits for each of its tokens; an ``asyncio.timeout`` for each would be an
    eighth of what a token costs. Close it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task = asyncio.current_task()
        self._armed_for = self.due = 0.0
        """``due``: when the wait is over; may be set to a later time meanwhile."""
        self._is_waiting = self._has_expired = False

    async def wait(self, awaited: Awaitable[T], due: float) -> T:
        """Its result; TimeoutError if it takes until ``due``, in the loop's time."""
        task = self._task
        assert task is not None
        cancels = task.cancelling()
        self.due, self._is_waiting = due, True
        try:
            if self._timer is None or self._armed_for > due:
                self._arm(due)
            return await awaited
        except asyncio.CancelledError as error:
            if self._has_expired and task.cancelling() - 1 <= cancels:
                raise TimeoutError from error
            raise
        finally:
            if self._has_expired:
                task.uncancel()
            self._is_waiting = self._has_expired = False

    async def wait_within(self, awaited: Awaitable[T], seconds: float) -> T:
        return await self.wait(awaited, self._loop.time() + seconds)

    def move(self, due: float) -> None:
        """End the wait at another time, also at an earlier one."""
        self.due = due
        if self._is_waiting and self._armed_for > due:
            self._arm(due)

    async def wait_for(self, event: asyncio.Event, seconds: float) -> None:
        """Wait for an event, at most so long. Cancel-safe."""
        if not event.is_set():
            with suppress(TimeoutError):
                await self.wait_within(event.wait(), seconds)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, due: float) -> None:
        self.close()
        self._armed_for = due  # uvloop's handle of a time in the past does not know it
        self._timer = self._loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if not self._is_waiting:
            return  # the next wait arms it again
        if self._loop.time() < self.due:
            self._arm(self.due)
        else:
            self._has_expired = True
            assert self._task is not None
            self._task.cancel()


def start_thread(work: Callable[[], None], name: str) -> asyncio.Event:
    """Run ``work`` in a daemon thread; the event is set when it has ended.

    It does not use the loop's executor, which other work may fill for any time.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            work()
        finally:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(end)

    def end() -> None:
        thread.join()  # it is about to end
        ended.set()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return ended


def timestamp(now: float) -> str:
    """A wall-clock time as stored and sent: RFC 3339, UTC, milliseconds."""
    return (
        datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        + "Z"
    )
