"""What a node remembers of a key so that a check needs no round trip: a denial, a lease, what it saw last. (Pure.)

Every memory is bounded; the key that was put longest ago is forgotten first. All times are monotonic seconds. None of
these values is watched by the garbage collector: they hold no cycles, and there are many of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from msgspec import Struct

from holdfast.limits.algorithms import CounterReading, LimitParams
from holdfast.limits.counters.contract import CounterKey
from holdfast.limits.rules import RuleVersion

T = TypeVar("T")


class LruDict(Generic[T]):
    """At most ``size_max`` values by key; a new key pushes out the one that was new longest ago."""

    __slots__ = ("_size_max", "_values", "get", "renew")

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._values: OrderedDict[CounterKey, T] = OrderedDict()  # a dict looks for its first past all that was removed
        self.get = self._values.get
        self.renew = self._values.move_to_end
        """A key that is known is new again."""

    def put(self, key: CounterKey, value: T) -> None:
        values = self._values
        if key not in values and len(values) >= self._size_max:
            values.popitem(last=False)
        values[key] = value

    def put_last(self, key: CounterKey, value: T) -> None:
        """``put``, and new again if the key was known."""
        self.put(key, value)
        self.renew(key)

    def drop(self, key: CounterKey) -> bool:
        """False if it was not known."""
        return self._values.pop(key, None) is not None

    def first(self) -> tuple[CounterKey, T] | None:
        """What was new longest ago."""
        return next(iter(self._values.items()), None)

    def pop_first(self) -> tuple[CounterKey, T] | None:
        """``first``, which is forgotten."""
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
    """Until ``until`` a cost of ``cost`` or more cannot fit under the version of the rule that ``reading`` names."""

    cost: int
    until: float
    reading: CounterReading

    def stands(self, cost: int, stamp: RuleVersion, now: float) -> bool:
        """Whether it answers for this cost, under the rule of this stamp or an older one."""
        return cost >= self.cost and now < self.until and self.reading.stamp >= stamp


class Lease(Struct, gc=False):
    """Tokens already taken from the counters, to be spent here until ``until``."""

    terms: LimitParams
    tokens: int
    remaining: int
    reset_at: float
    taken_at: float
    until: float


class CacheEntry(Struct, gc=False):
    """What the counters said last about a key, and when they were asked: it seeds the local share.

    ``denial`` and ``lease`` answer the next check where they can.
    """

    reading: CounterReading
    at: float
    denial: Denial | None = None
    lease: Lease | None = None
