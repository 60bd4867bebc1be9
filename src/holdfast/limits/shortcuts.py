"""What a node remembers so that a check needs no round trip: denials, leases, and what it saw last. (Pure.)

Every memory is bounded; the key that is known longest is forgotten first. All times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from holdfast.limits.algorithms import Reading, Terms
from holdfast.limits.counters.contract import Key
from holdfast.limits.rules import Stamp

T = TypeVar("T")


class Bounded(Generic[T]):
    """At most ``size_max`` values by key; a new key pushes out the one that was new longest ago."""

    __slots__ = ("_size_max", "_values", "get")

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._values: dict[Key, T] = {}
        self.get = self._values.get

    def put(self, key: Key, value: T) -> None:
        values = self._values
        if key not in values and len(values) >= self._size_max:
            del values[next(iter(values))]
        values[key] = value

    def drop(self, key: Key) -> None:
        self._values.pop(key, None)

    def items(self) -> Iterator[tuple[Key, T]]:
        return iter(list(self._values.items()))

    def clear(self) -> None:
        self._values.clear()

    def __len__(self) -> int:
        return len(self._values)


class Denial(NamedTuple):
    """Until ``until`` a cost of ``cost`` or more cannot fit under this version of the rule."""

    stamp: Stamp
    cost: int
    until: float
    reading: Reading


class Lease:
    """Tokens already taken from the counters, to be spent here until ``until``."""

    __slots__ = ("remaining", "reset_at", "taken_at", "terms", "tokens", "until")

    def __init__(self, terms: Terms, reading: Reading, taken_at: float, now: float, until: float) -> None:
        self.terms = terms
        self.tokens = reading.leased
        self.remaining = reading.remaining
        self.reset_at = now + reading.reset_ms / 1000
        self.taken_at = taken_at
        self.until = until


class Seen(NamedTuple):
    """What the counters said last about a key: it seeds the local share, and says that the key is in use."""

    reading: Reading
    at: float
