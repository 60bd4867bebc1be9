"""The four counting algorithms, as oracles that ``counters/lua`` repeats in Lua.
(Pure.)

A counter stores what is *used*, never what is left, so a changed limit carries over: 80
used of 100 leaves 420 when the limit is raised to 500. If the limit is lowered, the
used amount is cut to the new capacity: the subject waits for one full counter to drain,
not for all it once used, and raising the limit again does not bring that amount back.

A counter also stores the rule it was last counted by, its algorithm included. A request
with an older rule is decided by the newer one, and the answer says so. The used amount
carries over between algorithms, except to and from ``concurrency``, which counts
something else and starts empty.

Times are milliseconds of one clock. If it steps back, what is used stays used and
drains from there on, so nobody waits for the clock to catch up. A changed window
applies at once, without waiting for the old one to end.

Each algorithm has these steps; only ``take``, ``give`` and ``cap`` change what is used:

- ``settle``  bring the counter to ``now``: drain, or start a new window
- ``room``    how much can be used now
- ``wait``    milliseconds until ``cost`` fits, if nothing else is used
- ``cap``     cut the used amount to the capacity, after a change of the rule
"""

from __future__ import annotations

import math
from typing import Final
from zlib import crc32

from msgspec import Struct, field

from holdfast.limits.rules import Algorithm, Rule, RuleVersion

EPSILON: Final = 1e-6
"""Drained amounts are fractions; a token that is whole but for rounding counts as
whole."""

WAIT_MS_MIN: Final = 1.0
"""A refusal always has a wait, because a wait of 0 means that nothing was refused."""

CODES: Final[dict[Algorithm, int]] = {
    "token_bucket": 1,
    "fixed_window": 2,
    "sliding_window": 3,
    "concurrency": 4,
}


class LimitParams(Struct, frozen=True, gc=False):
    """What a counter needs of a rule; of two versions the newer one decides.

    Versions of two rule stores cannot be compared: there the request's own parameters
    decide. ``store`` identifies the store; 0 stands for any.
    """

    algorithm: Algorithm
    stamp: RuleVersion
    limit: int
    window_ms: float
    capacity: int
    store: int = 0

    def overrule(self, asked: LimitParams) -> bool:
        """Whether a counter counted by these keeps them when asked by others."""
        return self.stamp > asked.stamp and (
            self.store == asked.store or not self.store or not asked.store
        )


def params_of(rule: Rule, stamp: RuleVersion, store: str = "") -> LimitParams:
    """``stamp`` is the version by which the rule is in force."""
    number = crc32(store.encode())  # short, because every counter stores it
    return LimitParams(
        rule.algorithm, stamp, rule.limit, rule.window_seconds * 1000, rule.capacity, number
    )


def begin(now: float, window_ms: float) -> float:
    """When the window containing ``now`` began; written so that Lua computes the same
    bits."""
    return math.floor(now / window_ms) * window_ms


class CounterReading(Struct, frozen=True, gc=False):
    """A counter after a take: how many of the equal costs were admitted, and what is
    left.

    ``wait_ms`` is the wait of the first refused cost, 0 if none was refused. ``limit``,
    ``stamp`` and ``capacity`` are those of the rule that decided.
    """

    admitted: int
    remaining: int
    reset_ms: float
    wait_ms: float
    leased: int
    limit: int
    stamp: RuleVersion
    capacity: int


class Counter(Struct, gc=False):
    """One subject's use of one rule.

    There may be a million of them, none in a cycle, so they are exempt from garbage
    collection.
    """

    params: LimitParams

    def agree(self, params: LimitParams, now: float) -> None:
        """Count by these parameters, of our algorithm, from now on, unless ours are
        newer."""
        ours = self.params
        if params is ours or ours.overrule(params):
            return
        self.params = params
        if params.stamp != ours.stamp or params.store != ours.store:
            self.settle(now)
            self.cap(now)

    def total(self, now: float) -> float:
        """What a settled counter has used."""
        raise NotImplementedError

    def cap(self, now: float) -> None:
        raise NotImplementedError

    def settle(self, now: float) -> None:
        raise NotImplementedError

    def room(self, now: float) -> float:
        raise NotImplementedError

    def wait(self, now: float, cost: int) -> float:
        raise NotImplementedError

    def reset(self, now: float) -> float:
        """Milliseconds until nothing is used."""
        raise NotImplementedError

    def take(self, now: float, cost: float) -> None:
        """Use ``cost``, even beyond the room: what has already happened is charged this
        way. A negative cost gives back, down to 0 used."""
        raise NotImplementedError

    def take_ahead(self, now: float, cost: int) -> None:
        """``take`` in a copy, to look ahead."""
        self.take(now, cost)

    def admit(self, params: LimitParams, now: float, cost: int) -> CounterReading:
        """``take`` for one cost; overridden where there is a faster way."""
        return take(self, params, now, cost)

    def give(self, now: float, amount: int, taken_at: float) -> None:
        """Return ``amount`` of what was taken at ``taken_at``, but nothing that has
        drained since."""
        raise NotImplementedError


class TokenBucket(Counter, gc=False):
    """``capacity`` at once, drained at limit ÷ window."""

    used: float = 0.0
    at: float = 0.0

    def settle(self, now: float) -> None:
        if now > self.at:
            self.used = max(
                0.0, self.used - (now - self.at) * self.params.limit / self.params.window_ms
            )
        self.at = now

    def total(self, now: float) -> float:
        return self.used

    def cap(self, now: float) -> None:
        self.used = min(self.used, self.params.capacity)

    def room(self, now: float) -> float:
        return self.params.capacity - self.used

    def wait(self, now: float, cost: int) -> float:
        return (self.used + cost - self.params.capacity) * self.params.window_ms / self.params.limit

    def reset(self, now: float) -> float:
        return self.used * self.params.window_ms / self.params.limit

    def take(self, now: float, cost: float) -> None:
        self.used = max(0.0, self.used + cost)

    def admit(self, params: LimitParams, now: float, cost: int) -> CounterReading:
        """The steps above in one: embedded servers call this for every frame."""
        if params is not self.params:
            self.agree(params, now)
            params = self.params
        limit, window_ms, capacity = params.limit, params.window_ms, params.capacity
        used = self.used
        if now > self.at:
            used -= (now - self.at) * limit / window_ms
            if used < 0.0:
                used = 0.0
        self.at = now
        room = capacity - used + EPSILON
        if cost > room:
            self.used = used
            return reading(self, now, 0, cost)
        self.used = used = used + cost
        left = capacity - used + EPSILON
        return CounterReading(
            1,
            int(left) if left > 0 else 0,
            used * window_ms / limit,
            0.0,
            0,
            limit,
            params.stamp,
            capacity,
        )

    def give(self, now: float, amount: int, taken_at: float) -> None:
        drained = max(0.0, now - taken_at) * self.params.limit / self.params.window_ms
        self.used = max(0.0, self.used - max(0.0, amount - drained))


class FixedWindow(Counter, gc=False):
    """``limit`` per window. If the length changes, all current use counts in the new
    window."""

    used: float = 0
    begins: float = 0.0
    ends: float = 0.0

    def settle(self, now: float) -> None:
        if now >= self.ends:
            self.used = 0
        if (
            now >= self.ends
            or now < self.begins
            or self.ends != self.begins + self.params.window_ms
        ):
            self.begins = begin(now, self.params.window_ms)
            self.ends = self.begins + self.params.window_ms

    def total(self, now: float) -> float:
        return self.used

    def cap(self, now: float) -> None:
        self.used = min(self.used, self.params.limit)

    def room(self, now: float) -> float:
        return self.params.limit - self.used

    def wait(self, now: float, cost: int) -> float:
        return self.ends - now

    def reset(self, now: float) -> float:
        return self.ends - now if self.used else 0.0

    def take(self, now: float, cost: float) -> None:
        self.used = max(0.0, self.used + cost)

    def give(self, now: float, amount: int, taken_at: float) -> None:
        if taken_at >= self.begins:
            self.used = max(0, self.used - amount)


class SlidingWindow(Counter, gc=False):
    """``limit`` in any window, estimated.

    The last window's use fades as the current one proceeds, as if it had been spread
    evenly. If it came at the window's end, up to twice the limit falls into one
    window's span.
    """

    start: float = 0.0
    length: float = 0.0
    used: float = 0.0
    previous: float = 0.0

    def __post_init__(self) -> None:
        self.length = self.params.window_ms

    def settle(self, now: float) -> None:
        elapsed = now - self.start
        if elapsed >= self.length:
            self.previous = self.used if elapsed < 2 * self.length else 0.0
            self.used = 0.0
            self.start = begin(now, self.length)
        if elapsed < 0 or self.length != self.params.window_ms:
            self._begin_anew(now)

    def _begin_anew(self, now: float) -> None:
        """Count all current use in a new window; if the clock stepped back, nothing has
        faded."""
        self.used = self.used + self._faded(now)
        self.previous = 0.0
        self.length = self.params.window_ms
        self.start = begin(now, self.length)

    def _faded(self, now: float) -> float:
        return self.previous * (1 - max(0.0, now - self.start) / self.length)

    def total(self, now: float) -> float:
        return self.used + self._faded(now)

    def cap(self, now: float) -> None:
        """Cut the last window first."""
        self.used = min(self.used, self.params.limit)
        self.previous = min(
            self.previous,
            (self.params.limit - self.used) / (1 - max(0.0, now - self.start) / self.length),
        )

    def room(self, now: float) -> float:
        return self.params.limit - self.used - self._faded(now)

    def wait(self, now: float, cost: int) -> float:
        left = self.params.limit - self.used - cost
        if left >= 0:
            return self.start + self.length * (1 - left / self.previous) - now
        begins = self.start + self.length
        return begins + self.length * max(0.0, 1 - (self.params.limit - cost) / self.used) - now

    def reset(self, now: float) -> float:
        windows = 2 if self.used else 1
        return self.start + windows * self.length - now if self.used or self.previous else 0.0

    def take(self, now: float, cost: float) -> None:
        self.used = max(0.0, self.used + cost)

    def give(self, now: float, amount: int, taken_at: float) -> None:
        if taken_at >= self.start:
            self.used = max(0.0, self.used - amount)


class Concurrency(Counter, gc=False):
    """At most ``limit`` holders at a time; an unreleased hold ends after the window."""

    holders: dict[str, float] = field(default_factory=dict)
    at: float = 0.0

    def settle(self, now: float) -> None:
        if now < self.at:
            back = self.at - now
            self.holders = {hold: until - back for hold, until in self.holders.items()}
        self.at = now
        if self.holders:
            self.holders = {hold: until for hold, until in self.holders.items() if until > now}

    def cap(self, now: float) -> None:
        """Holders keep their holds, even above a lower limit."""

    def room(self, now: float) -> float:
        return self.params.limit - len(self.holders)

    def wait(self, now: float, cost: int) -> float:
        """Until enough of the earliest holds expire; they may be released before."""
        over = len(self.holders) + cost - self.params.limit
        return sorted(self.holders.values())[over - 1] - now if over > 0 else 0.0

    def reset(self, now: float) -> float:
        return max(self.holders.values(), default=now) - now

    def take(self, now: float, cost: float) -> None:
        """A request by an older rule of another algorithm cannot release a hold, so it
        takes none."""

    def take_ahead(self, now: float, cost: int) -> None:
        """Add ``cost`` unnamed holders."""
        until = now + self.params.window_ms
        self.holders = {**self.holders, **{f"new {place}": until for place in range(cost)}}

    def hold(self, now: float, hold: str) -> None:
        """Begin a hold, or renew it for another window."""
        self.holders[hold] = now + self.params.window_ms

    def release(self, hold: str) -> bool:
        """False if there is no such hold."""
        return self.holders.pop(hold, None) is not None


COUNTERS: Final[dict[Algorithm, type[Counter]]] = {
    "token_bucket": TokenBucket,
    "fixed_window": FixedWindow,
    "sliding_window": SlidingWindow,
    "concurrency": Concurrency,
}


def carried_over(counter: Counter, params: LimitParams, now: float) -> Counter:
    """The counter to continue with: itself, or one of the newer algorithm with the same
    use."""
    ours = counter.params
    if params.algorithm == ours.algorithm or ours.overrule(params):
        return counter
    after = COUNTERS[params.algorithm](params)
    if params.algorithm != "concurrency" and ours.algorithm != "concurrency":
        counter.settle(now)
        after.settle(now)
        after.take(now, counter.total(now))
        after.cap(now)
    return after


def peek(counter: Counter, params: LimitParams, now: float, cost: int) -> bool:
    """Whether ``cost`` would be admitted. Settles the counter and uses nothing."""
    counter.agree(params, now)
    counter.settle(now)
    return cost <= counter.room(now) + EPSILON


def take(
    counter: Counter,
    params: LimitParams,
    now: float,
    cost: int,
    times: int = 1,
    want: int = 0,
    spent: int = 0,
) -> CounterReading:
    """Admit as many of ``times`` equal costs as fit; then lease ``want`` if far from
    the limit.

    Far means that a tenth of the capacity stays free after the lease: near the limit
    every check is exact. ``spent`` of the costs are used whether they fit or not. A
    negative cost always fits.
    """
    counter.agree(params, now)
    counter.settle(now)
    room = counter.room(now) + EPSILON
    admitted = times
    if cost * times > room and cost > 0:
        admitted = max(0, math.floor(room / cost))
    if admitted or spent:
        counter.take(now, cost * max(admitted, spent))
    leased = 0
    if want and room - cost * times - want >= counter.params.capacity / 10:
        counter.take(now, want)
        leased = want
    return reading(counter, now, admitted, cost if admitted < times else 0, leased)


def hold(
    counter: Concurrency, params: LimitParams, now: float, name: str, spent: int = 0
) -> CounterReading:
    """Admit one holder if there is room; an existing hold is renewed and never refused.

    A hold that already passed (``spent``) is added even without room.
    """
    counter.agree(params, now)
    counter.settle(now)
    fits = name in counter.holders or counter.room(now) >= 1
    if fits or spent:
        counter.hold(now, name)
    return reading(counter, now, int(fits), int(not fits))


def reading(
    counter: Counter, now: float, admitted: int, refused_cost: int, leased: int = 0
) -> CounterReading:
    """What a settled counter says. A cost above the capacity of a newer rule waits a
    window."""
    params = counter.params
    wait = 0.0
    if refused_cost:
        wait = (
            counter.wait(now, refused_cost) if refused_cost <= params.capacity else params.window_ms
        )
        wait = max(WAIT_MS_MIN, wait)
    remaining = max(0, math.floor(counter.room(now) + EPSILON))
    reset = counter.reset(now)
    return CounterReading(
        admitted, remaining, reset, wait, leased, params.limit, params.stamp, params.capacity
    )
