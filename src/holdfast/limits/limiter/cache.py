"""What a node remembers of a key so that a check needs no round trip. (Pure.)

*Denials and readings.* ``CacheEntry`` holds the counters' last reading of a key, a
denial that still answers, and the key's lease.

*Leases* are tokens taken from the counters along with a check and spent here without
asking again. They are charged when they are taken, so the limit holds whatever happens
to them. Tokens left at the end of a lease are given back for other nodes to use. The
first check of a key gets a small lease, later ones a full lease, and a key never has
two at a time.

*Holds* are the grants of concurrency rules. A rule may be changed, switched off or
overridden while a hold lasts, so ``HoldRegistry`` remembers the counter that granted
it.

Everything is bounded: the key that was put first is evicted first. An evicted lease
stays charged. Times are monotonic seconds. The structs are exempt from garbage
collection, because they are many and form no cycles.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from msgspec import Struct

from holdfast.clock import Ids
from holdfast.limits.algorithms import CounterReading, LimitParams
from holdfast.limits.counters.contract import Adjustment, CounterKey
from holdfast.limits.rules import Check, RuleVersion

T = TypeVar("T")


class LruDict(Generic[T]):
    """At most ``size_max`` values by key; a new key evicts the oldest one."""

    __slots__ = ("_size_max", "_values", "get", "renew")

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        # a dict scans past all removed keys for its first
        self._values: OrderedDict[CounterKey, T] = OrderedDict()
        self.get = self._values.get
        self.renew = self._values.move_to_end
        """Makes a known key the newest."""

    def put(self, key: CounterKey, value: T) -> None:
        values = self._values
        if key not in values and len(values) >= self._size_max:
            values.popitem(last=False)
        values[key] = value

    def put_last(self, key: CounterKey, value: T) -> None:
        """``put``, and make the key the newest."""
        self.put(key, value)
        self.renew(key)

    def drop(self, key: CounterKey) -> bool:
        """False if the key is unknown."""
        return self._values.pop(key, None) is not None

    def first(self) -> tuple[CounterKey, T] | None:
        """What was new longest ago."""
        return next(iter(self._values.items()), None)

    def pop_first(self) -> tuple[CounterKey, T] | None:
        """Remove and return ``first``."""
        return self._values.popitem(last=False) if self._values else None

    def clear(self) -> None:
        self._values.clear()

    def items(self) -> Iterator[tuple[CounterKey, T]]:
        return iter(list(self._values.items()))

    def values(self) -> Iterator[T]:
        return iter(self._values.values())

    def __len__(self) -> int:
        return len(self._values)


class Denial(Struct, frozen=True, gc=False):
    """Until ``until``, ``cost`` or more does not fit, by the rule of ``reading``."""

    cost: int
    until: float
    reading: CounterReading

    def stands(self, cost: int, stamp: RuleVersion, now: float) -> bool:
        """Whether it answers for this cost, under this rule version or an older one."""
        return cost >= self.cost and now < self.until and self.reading.stamp >= stamp


class Lease(Struct, gc=False):
    """Tokens already taken from the counters, to be spent here until ``until``."""

    params: LimitParams
    tokens: int
    remaining: int
    reset_at: float
    taken_at: float
    until: float


class CacheEntry(Struct, gc=False):
    """What the counters last said about a key, and when they were asked.

    It is the starting point of the local share. ``denial`` and ``lease`` answer later
    checks.
    """

    reading: CounterReading
    at: float
    denial: Denial | None = None
    lease: Lease | None = None


FIRST_LEASE = 4
"""Tokens leased with a subject's first check: most subjects make only a few."""


class TokenLeases:
    """The leases of one node. ``taken_at`` is in the counters' own time."""

    def __init__(self, keys_max: int, seconds: float) -> None:
        self._keys_max = keys_max
        self._seconds = seconds
        self._leases: LruDict[Lease] = LruDict(keys_max)
        self._left_over: list[Adjustment] = []

    @property
    def stock(self) -> int:
        """Tokens leased and not yet spent."""
        return sum(lease.tokens for lease in self._leases.values())

    def wanted(self, known: CacheEntry | None, whole: int, now: float) -> int:
        """How many tokens to take along with the next check."""
        # older than any lease it can have had
        if known is None or known.at < now - 2 * self._seconds:
            return min(FIRST_LEASE, whole)
        lease = known.lease
        return 0 if lease is not None and lease.tokens > 0 and now < lease.until else whole

    def begin(
        self, key: CounterKey, known: CacheEntry, params: LimitParams, taken_at: float, now: float
    ) -> None:
        """Start the lease that ``known``'s reading brought, and end the one before."""
        if known.lease is not None:
            self._end(key, known.lease)
        reading: CounterReading = known.reading
        reset_at, until = now + reading.reset_ms / 1000, known.at + self._seconds
        known.lease = Lease(params, reading.leased, reading.remaining, reset_at, taken_at, until)
        self._leases.put_last(key, known.lease)

    def forget(self, key: CounterKey) -> None:
        """Drop a lease without a return: its counter was reset.

        The caller drops the key's ``CacheEntry`` as well.
        """
        self._leases.drop(key)

    def ended(self, now: float, all_of_them: bool = False) -> list[Adjustment]:
        """End the leases that are over; return what is left of them, once."""
        while (oldest := self._leases.first()) is not None and (
            all_of_them or now >= oldest[1].until
        ):
            self._end(*oldest)
            self._leases.drop(oldest[0])
        left_over, self._left_over = self._left_over, []
        return left_over

    def _end(self, key: CounterKey, lease: Lease) -> None:
        if lease.tokens and len(self._left_over) < self._keys_max:
            self._left_over.append(
                Adjustment(key, lease.params, given=lease.tokens, taken_at=lease.taken_at)
            )
        lease.tokens = 0


class HoldRegistry:
    """The counter of each hold asked for here, at most ``size_max``.

    For an evicted hold the limiter uses the current rule.
    """

    def __init__(self, ids: Ids, size_max: int) -> None:
        self._ids = ids
        self._counters: LruDict[tuple[CounterKey, LimitParams]] = LruDict(size_max)

    def new_hold_id(self, key: CounterKey, params: LimitParams) -> str:
        """The id of a new hold that is about to be requested."""
        hold_id = self._ids.new("hld_")
        self._counters.put(("", hold_id), (key, params))
        return hold_id

    def counter_of(self, check: Check, hold_id: str) -> tuple[CounterKey, LimitParams] | None:
        """The counter that granted a hold; None if unknown or of another subject."""
        found = self._counters.get(("", hold_id))
        if found is None:
            return None
        prefix, subject = found[0]
        return (
            found
            if subject == check.subject and prefix.startswith(f"{{{check.tenant}}}:")
            else None
        )

    def end(self, hold_id: str) -> tuple[CounterKey, LimitParams] | None:
        """Forget a hold that is released; its counter, if it is known here."""
        found = self._counters.get(("", hold_id))
        self._counters.drop(("", hold_id))
        return found
