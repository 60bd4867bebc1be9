"""Breaker, backoff and token bucket: when to try. (Pure: the caller brings the time.)

All times are monotonic seconds. ``DependencyBreaker`` wraps a ``Breaker`` for one
dependency: it takes the time from a ``Clock`` and reports each change of state, so that
operators see it.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

from holdfast.bounds import positive
from holdfast.clock import Clock
from holdfast.errors import Unavailable


class BreakerState(Enum):
    """CLOSED → OPEN after failures; → HALF_OPEN after a rest; then a probe decides."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a breaker opens, and for how long."""

    failure_threshold: int = 5
    """Failures within the window that open the breaker."""
    failure_window_seconds: float = 30
    """How far back failures count."""
    open_duration_seconds: float = 30
    """Seconds of refusals (SERVICE_UNAVAILABLE + retry_after_seconds) before a probe.
    """
    half_open_probe_count: int = 1
    """Probes that must succeed to close the breaker; a failed one opens it again.
    """
    min_failure_ratio: float = 0.5
    """The failures must also be this share of the calls; 0 opens by the count alone."""

    def __post_init__(self) -> None:
        positive(
            self,
            "failure_threshold",
            "half_open_probe_count",
            "failure_window_seconds",
            "open_duration_seconds",
        )
        if not 0 <= self.min_failure_ratio <= 1:
            raise ValueError("min_failure_ratio must be between 0 and 1")


class Breaker:
    """Stops asking a dependency that fails. Only infrastructure failures count: never a
    caller's mistake.

    Every ``admit`` that said yes must be followed by exactly one ``success``,
    ``failure`` or ``neither``. The window is kept in ten slices, so its cost does not
    grow with the rate.
    """

    _SLICES = 10

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._state = BreakerState.CLOSED
        self._open_until = 0.0
        self._probes = 0
        self._probe_successes = 0
        self._slices: deque[list[int]] = deque(maxlen=self._SLICES)

    def state(self, now: float) -> BreakerState:
        if self._state is BreakerState.OPEN and now >= self._open_until:
            return BreakerState.HALF_OPEN
        return self._state

    def admit(self, now: float) -> bool:
        """Whether the call may go out now."""
        match self.state(now):
            case BreakerState.CLOSED:
                return True
            case BreakerState.OPEN:
                return False
            case BreakerState.HALF_OPEN:
                if self._state is BreakerState.OPEN:
                    self._state = BreakerState.HALF_OPEN
                    self._probes = self._probe_successes = 0
                if self._probes >= self._settings.half_open_probe_count:
                    return False
                self._probes += 1
                return True

    def would_admit(self, now: float) -> bool:
        """What ``admit`` would answer; nothing is counted."""
        if self._state is BreakerState.HALF_OPEN:
            return self._probes < self._settings.half_open_probe_count
        return self.state(now) is not BreakerState.OPEN

    def retry_after(self, now: float) -> float:
        """How long a refused caller should wait."""
        return max(self._open_until - now, 1.0)

    def success(self, now: float) -> None:
        if self._state is BreakerState.HALF_OPEN:
            self._probe_successes += 1
            if self._probe_successes >= self._settings.half_open_probe_count:
                self._state = BreakerState.CLOSED
                self._slices.clear()
        elif self._state is BreakerState.CLOSED:
            self._slice(now)[1] += 1

    def failure(self, now: float) -> None:
        if self._state is BreakerState.HALF_OPEN:
            self._open(now)
        elif self._state is BreakerState.CLOSED:
            self._slice(now)[2] += 1
            oldest = self._slice_number(now) - self._SLICES + 1
            recent = [s for s in self._slices if s[0] >= oldest]
            failures = sum(s[2] for s in recent)
            calls = failures + sum(s[1] for s in recent)
            if (
                failures >= self._settings.failure_threshold
                and failures >= self._settings.min_failure_ratio * calls
            ):
                self._open(now)

    def close(self) -> None:
        """Another proof than a call was found that the dependency works."""
        self._state = BreakerState.CLOSED
        self._slices.clear()

    def neither(self) -> None:
        """The call proves nothing: it was cancelled, or was the caller's mistake."""
        if self._state is BreakerState.HALF_OPEN:
            # it may have gone out before the breaker opened
            self._probes = max(self._probes - 1, 0)

    def _open(self, now: float) -> None:
        self._state = BreakerState.OPEN
        self._open_until = now + self._settings.open_duration_seconds
        self._slices.clear()

    def _slice_number(self, now: float) -> int:
        return int(now / self._settings.failure_window_seconds * self._SLICES)

    def _slice(self, now: float) -> list[int]:
        """The current slice: [number, successes, failures]."""
        number = self._slice_number(now)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append([number, 0, 0])
        return self._slices[-1]


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds before try n+1: doubled from ``initial`` to ``cap``, full jitter."""

    initial_seconds: float
    cap_seconds: float

    def delay(self, failures: int, rng: random.Random, at_least: float | None = None) -> float:
        """The wait after ``failures`` ≥ 1 failures: anywhere between 0 and the bound.

        ``at_least`` is what the failing side asks for. It asks every client for the
        same wait, so up to a quarter is added to spread them. While failures go on, the
        bound grows beyond ``at_least``: that thins out a storm of retries.
        """
        jitter = rng.random() * self.bound(failures)
        return jitter if at_least is None else max(jitter, at_least * (1 + rng.random() / 4))

    def bound(self, failures: int) -> float:
        return min(self.cap_seconds, self.initial_seconds * 2.0 ** min(failures - 1, 60))


RETRY_AFTER_SECONDS_MAX = 3600.0


_HTTP_DATES = ("%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %d %H:%M:%S %Y")
"""RFC 9110: senders use the first form, receivers accept all three."""


def retry_after_seconds(header: str, now: float) -> float | None:
    """The wait that a ``Retry-After`` asks for, in seconds, at most an hour.

    The header holds seconds or a date; None if it is neither.

    ``now`` is seconds since the epoch, by the wall clock.
    """
    if header.isdecimal():
        return min(float(header), RETRY_AFTER_SECONDS_MAX)
    for form in _HTTP_DATES:
        try:
            at = datetime.strptime(header, form).replace(tzinfo=UTC).timestamp()
        except ValueError:
            continue
        return min(max(at - now, 0.0), RETRY_AFTER_SECONDS_MAX)
    return None


class Bucket:
    """A token bucket: ``burst`` at once, ``rate`` per second after that."""

    __slots__ = ("_at", "_burst", "_rate", "_tokens")

    def __init__(self, rate_per_second: float, burst: int, now: float) -> None:
        self._rate = rate_per_second
        self._burst = float(burst)
        self._tokens = float(burst)
        self._at = now

    def take(self, now: float) -> float:
        """Take one token: 0.0. If there is none: the seconds until there is."""
        if now > self._at:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
            self._at = now
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / self._rate


class Buckets:
    """A token bucket per key, for at most ``keys_max`` keys; then the least recently
    used is forgotten.

    A forgotten key starts with a full bucket again. An attacker with more than
    ``keys_max`` keys is beyond what counting per key can stop.
    """

    def __init__(self, rate_per_second: float, burst: int, keys_max: int = 20_000) -> None:
        if rate_per_second <= 0 or burst < 1 or keys_max < 1:
            raise ValueError(
                "rate_per_second must be greater than 0, burst and keys_max at least 1"
            )
        self._rate = rate_per_second
        self._burst = burst
        self._keys_max = keys_max
        self._buckets: OrderedDict[object, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: object, now: float) -> float:
        """Take one token: 0.0 if allowed, else the seconds to wait."""
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._keys_max:
                self._buckets.popitem(last=False)
            bucket = self._buckets[key] = Bucket(self._rate, self._burst, now)
        else:
            self._buckets.move_to_end(key)
        return bucket.take(now)


HANGING_RETRY_SECONDS = 1.0
"""A hanging call may end at any moment, and then the next may go out at once."""


ReportState = Callable[[str, bool, str, bool], None]
"""Called with the dependency's name, whether its last call succeeded, the breaker's
state, and whether that state changed."""


class DependencyBreaker:
    """Decides whether a call to one dependency may go out, and learns how it ended.

    Every admission must be followed by exactly one of ``succeeded``, ``failed`` and
    ``learned_nothing``. Only infrastructure failures are failures: a refusal, a full
    quota or a halted chat proves that the dependency works. ``refusal`` is the text of
    the error while the breaker is open. A call that hangs past its deadline holds the
    breaker open: no call goes out after it, so no other call could fail and open it.

    Without calls the breaker learns nothing, so its owner probes an idle dependency;
    see ``worked_since_asked``.
    """

    def __init__(
        self,
        dependency: str,
        refusal: str,
        settings: BreakerSettings,
        clock: Clock,
        report: ReportState,
        retry_seconds_max: float = math.inf,
    ) -> None:
        """``retry_seconds_max``: callers are asked to wait no longer, because the owner
        looks for recovery.
        """
        self._retry_seconds_max = retry_seconds_max
        self._dependency = dependency
        self._refusal = refusal
        self._breaker = Breaker(settings)
        self._clock = clock
        self._report = report
        self._shown: BreakerState | None = None
        self._up: bool | None = None
        self._open_since: float | None = None
        self._hanging = False
        self._worked = False
        self._why = ""
        self._show(up=True)  # it was opened a moment ago

    @property
    def state(self) -> BreakerState:
        return BreakerState.OPEN if self._hanging else self._breaker.state(self._clock.monotonic())

    @property
    def open_seconds(self) -> float:
        """How long it has not been closed; a failed probe does not reset this."""
        return 0.0 if self._open_since is None else self._clock.monotonic() - self._open_since

    @property
    def trouble(self) -> str | None:
        """Why the last call failed; None if it did not."""
        return None if self._up else self._why

    def worked_since_asked(self) -> bool:
        """Whether a call succeeded since the last time this was asked.

        If not, the owner tries one: so a failure shows without traffic, and so does
        its end.
        """
        worked, self._worked = self._worked, False
        return worked

    def refusal(self) -> Unavailable | None:
        """Admit the call and return None, or return why it is refused."""
        if self._hanging:
            return Unavailable(self._refusal, retry_after_seconds=HANGING_RETRY_SECONDS)
        now = self._clock.monotonic()
        admitted = self._breaker.admit(now)
        self._show()
        if admitted:
            return None
        wait = min(self._breaker.retry_after(now), self._retry_seconds_max)
        return Unavailable(self._refusal, retry_after_seconds=round(wait, 1))

    def hangs(self, hanging: bool) -> None:
        """Whether a call goes on past its deadline."""
        self._hanging = hanging
        self._show()

    def succeeded(self) -> None:
        self._worked = True
        self._breaker.success(self._clock.monotonic())
        self._show(up=True)

    def failed(self, why: str) -> None:
        """``why`` in words for an operator."""
        self._why = why
        self._breaker.failure(self._clock.monotonic())
        self._show(up=False)

    def learned_nothing(self) -> None:
        self._breaker.neither()

    @property
    def is_resting(self) -> bool:
        """Calls are refused although none hangs."""
        return not self._hanging and self.state is BreakerState.OPEN

    def recovered(self) -> None:
        """Its owner has asked beside the breaker, and was answered."""
        self._breaker.close()
        self._show(up=True)

    def _show(self, up: bool | None = None) -> None:
        """Report a change, and only a change: every group of sends calls this."""
        state = self.state
        if up in (None, self._up) and state is self._shown:
            return
        self._up = self._up if up is None else up
        if state is BreakerState.CLOSED:
            self._open_since = None
        elif self._open_since is None:
            self._open_since = self._clock.monotonic()
        moved = self._shown not in (None, state)
        self._shown = state
        self._report(self._dependency, bool(self._up), state.value, moved)
