"""What a node remembers of a key so that a check needs no round trip: a denial, a lease, what it saw last. (Pure.)

Every memory is bounded; the key that was put longest ago is forgotten first. All times are monotonic seconds. None of
these values is watched by the garbage collector: they hold no cycles, and there are many of them.

The leases of one node: tokens taken from the counters with a check and spent here without asking. (Pure.)

A lease is charged when it is taken, so whatever becomes of it the limit holds; what is left when it ends is given back
so that other nodes can have it. Who asks for the first time gets a little, who asks again a whole lease, and nobody
two at a time. Memory: as many leases as keys are remembered; one that is pushed out stays charged.

The holds of concurrency rules that were asked for here: of which counter each is.

A rule may be changed, switched off or overtaken by a more specific one while somebody holds; what was granted is given
back, and renewed, where it was granted. (Pure.)
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


FIRST_LEASE = 4
"""Tokens leased with a subject's first check: enough for the few that most subjects ask."""


class Leases:
    """Times are monotonic seconds, except ``taken_at``, which is the counters' own."""

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
        """How many tokens to take with the next check."""
        if known is None or known.at < now - 2 * self._seconds:  # longer than the lease it may have lived on
            return min(FIRST_LEASE, whole)
        lease = known.lease
        return 0 if lease is not None and lease.tokens > 0 and now < lease.until else whole

    def begin(self, key: CounterKey, known: CacheEntry, terms: LimitParams, taken_at: float, now: float) -> None:
        """What ``known`` has just been told was leased to it; what is left of its last lease ends."""
        if known.lease is not None:
            self._end(key, known.lease)
        reading: CounterReading = known.reading
        reset_at, until = now + reading.reset_ms / 1000, known.at + self._seconds
        known.lease = Lease(terms, reading.leased, reading.remaining, reset_at, taken_at, until)
        self._leases.put_last(key, known.lease)

    def forget(self, key: CounterKey) -> None:
        """What was taken is not charged any more, and not given back. Its ``Known`` is forgotten, too."""
        self._leases.drop(key)

    def ended(self, now: float, all_of_them: bool = False) -> list[Adjustment]:
        """End what is over, and say once what there is to give back."""
        while (oldest := self._leases.first()) is not None and (all_of_them or now >= oldest[1].until):
            self._end(*oldest)
            self._leases.drop(oldest[0])
        left_over, self._left_over = self._left_over, []
        return left_over

    def _end(self, key: CounterKey, lease: Lease) -> None:
        if lease.tokens and len(self._left_over) < self._keys_max:
            self._left_over.append(Adjustment(key, lease.terms, given=lease.tokens, taken_at=lease.taken_at))
        lease.tokens = 0


class Holds:
    """At most ``size_max``; of one that was forgotten today's rule is asked."""

    def __init__(self, ids: Ids, size_max: int) -> None:
        self._ids = ids
        self._places: LruDict[tuple[CounterKey, LimitParams]] = LruDict(size_max)

    def ask(self, key: CounterKey, terms: LimitParams) -> str:
        """The name of a hold that is about to be asked for."""
        hold = self._ids.new("hld_")
        self._places.put(("", hold), (key, terms))
        return hold

    def place(self, check: Check, hold: str) -> tuple[CounterKey, LimitParams] | None:
        """Where it was asked for; None if it is not known here, or not this subject's."""
        found = self._places.get(("", hold))
        if found is None:
            return None
        prefix, subject = found[0]
        return found if subject == check.subject and prefix.startswith(f"{{{check.tenant}}}:") else None

    def end(self, hold: str) -> tuple[CounterKey, LimitParams] | None:
        """It is given back; where it was asked for, if that is known here."""
        found = self._places.get(("", hold))
        self._places.drop(("", hold))
        return found
