"""How many runners and how much memory one destination may use. (Pure.)

A job type may have a cap per destination (``Handlers.handle``); jobs without a stream
have none. While a destination is at its cap, its jobs are not announced, so they occupy
no runner. Three more rules keep slow destinations from starving the others:

- One destination takes at most a quarter of the free runners, so that many slow ones
  leave some to those that are idle now (the *dynamic threshold* of shared-memory
  switches).
- A destination is *new* until its first run ends, and *slow* if its last run took
  longer than ``slow_seconds``. All new and slow ones together leave an eighth of the
  runners to the others.
- The destinations of one *group* (a tenant) leave free an eighth of the runners that
  other groups do not use. The new and slow ones among them get seven eighths of what
  their group may have. So one tenant cannot make the others wait, and a tenant that is
  alone gets almost everything.

Destinations that wait for these rules take turns: new before slow, then group by group,
then the destinations of each group.

All destinations together fill at most half of the memory, so that jobs for slow ones do
not keep others in the store. A *paused* destination gets no runner and no memory: its
jobs wait in the store until it is resumed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from holdfast.work.job import Job

_FREE_RUNNERS_DIVISOR = 4
_RESERVE_DIVISOR = 8
_MEMORY_DIVISOR = 16
PACES_MAX = 10_000
"""How many paces are remembered; the one used longest ago is forgotten first."""


class DestinationPace(IntEnum):
    """How fast a destination is, in the order in which they take turns."""

    QUICK = 0
    NEW = 1
    SLOW = 2


class Paces:
    """The pace of each destination by its last run; lives as long as the worker."""

    def __init__(self, slow_seconds: float = 1.0) -> None:
        self._slow_seconds = slow_seconds
        self._known: OrderedDict[tuple[str, str], DestinationPace] = OrderedDict()

    def of(self, target: tuple[str, str]) -> DestinationPace:
        return self._known.get(target, DestinationPace.NEW)

    def ended(self, target: tuple[str, str], seconds: float) -> None:
        self._known[target] = (
            DestinationPace.SLOW if seconds > self._slow_seconds else DestinationPace.QUICK
        )
        self._known.move_to_end(target)
        if len(self._known) > PACES_MAX:
            self._known.popitem(last=False)


@dataclass(slots=True, eq=False)
class Destination:
    """A destination with jobs in memory or in flight.

    ``in_flight``: its announced jobs. ``began``: when its running jobs started, by
    sequence. ``jobs``, ``bytes``: what waits in memory. ``lines``: the streams whose
    next job waits for this destination.
    """

    type: str
    name: str
    group: str
    pace: DestinationPace
    began: dict[int, float] = field(default_factory=dict)
    in_flight: int = 0
    jobs: int = 0
    bytes: int = 0
    lines: OrderedDict[Any, None] = field(default_factory=OrderedDict)


class Destinations:
    """The destinations that a worker has jobs of; ``caps`` maps job types to caps."""

    def __init__(
        self,
        caps: Mapping[str, int] | None = None,
        runners: int = 100,
        now: Callable[[], float] = lambda: 0.0,
        paces: Paces | None = None,
    ) -> None:
        self._caps, self._runners, self._now, self._paces = (
            dict(caps or {}),
            runners,
            now,
            paces or Paces(),
        )
        self._unproven_max = _without_reserve(runners)
        self.are_capped = bool(self._caps)
        """Checked first for every job: a worker without caps pays nothing for this."""
        self._known: dict[tuple[str, str], Destination] = {}
        self._in_flight = 0
        self._unproven_in_flight = 0
        self._in_flight_of: Counter[tuple[str, bool]] = Counter()
        """By group, and by whether the destination is unproven (new or slow); no zeros.
        """
        self._groups: Mapping[tuple[str, str], str] = {}
        self._turns: dict[DestinationPace, OrderedDict[str, OrderedDict[Destination, None]]] = {
            pace: OrderedDict() for pace in DestinationPace
        }
        """Destinations with waiting lines that may have room, by pace and by group."""
        self.paused: Collection[tuple[str, str]] = frozenset()
        """By type and name; changes only with a rewind, see ``Streams.rewound``."""

    def of(self, job: Job) -> Destination | None:
        """The job's destination; None if its type has no cap, or it has no stream."""
        if not self.is_capped(job):
            return None
        key = (job.type, job.destination)
        if (known := self._known.get(key)) is not None:
            return known
        return Destination(*key, self._groups.get(key, job.destination), self._paces.of(key))

    def regroup(self, groups: Mapping[tuple[str, str], str]) -> None:
        """Set the group of each (type, name); others are groups of their own."""
        self._groups = groups
        for destination in self._known.values():
            self._classify(destination)

    def has_cap(self, job_type: str) -> bool:
        return job_type in self._caps

    def is_capped(self, job: Job) -> bool:
        return job.type in self._caps and job.stream is not None

    def is_paused(self, job: Job) -> bool:
        return (
            bool(self.paused) and (job.type, job.destination) in self.paused and self.is_capped(job)
        )

    def jobs(self, target: tuple[str, str]) -> int:
        """How many jobs of this type and destination wait in memory."""
        found = self._known.get(target)
        return found.jobs if found is not None else 0

    def free(self, destination: Destination) -> int:
        """How many more of its jobs may be in flight; one if its group has none."""
        own, cap = destination.in_flight, self._caps[destination.type]
        group = (
            self._in_flight_of[destination.group, False]
            + self._in_flight_of[destination.group, True]
        )
        group_max = _without_reserve(self._runners - self._in_flight + group)
        free = min(_share(cap, self._runners - self._in_flight + own) - own, group_max - group)
        if destination.pace:
            of_group = _without_reserve(group_max) - self._in_flight_of[destination.group, True]
            of_all = self._unproven_max - self._unproven_in_flight
            free = min(free, of_group, of_all, _share(cap, of_all + own) - own)
        return free

    def memory_of_one(self, most: int) -> int:
        """One destination's share of ``most`` jobs or bytes."""
        return max(1, most // (_MEMORY_DIVISOR + 2 * len(self._known)))

    def beyond(self, jobs: int) -> list[Destination]:
        """The destinations with more than this number of jobs in memory."""
        return [each for each in self._known.values() if each.jobs > jobs]

    def announced(self, destination: Destination) -> None:
        self._count(destination, 1)
        destination.in_flight += 1

    def withdrawn(self, destination: Destination) -> None:
        self._count(destination, -1)
        destination.in_flight -= 1
        self._queue(destination)
        self._forget(destination)

    def started(self, job: Job) -> None:
        """An announced job has a runner and no longer waits in memory."""
        if (destination := self.of(job)) is not None:
            destination.began[job.seq] = self._now()

    def ended(self, job: Job) -> None:
        """A job's run ended: note the pace. The caller withdraws the job next."""
        if (destination := self.of(job)) is not None and (
            began := destination.began.pop(job.seq, None)
        ) is not None:
            self._paces.ended((job.type, job.destination), self._now() - began)
            self._classify(destination)

    def wait(self, destination: Destination, line: Any) -> None:
        """Queue the line until ``next_turn`` returns it."""
        destination.lines[line] = None
        self._queue(destination)

    def leave(self, destination: Destination, line: Any) -> None:
        """Remove the line from the destination's queue."""
        del destination.lines[line]
        if not destination.lines:
            self._unqueue(destination)

    def must_wait(self, destination: Destination) -> bool:
        """Whether the destination has no room, or others come first."""
        pace = destination.pace
        if (
            destination.lines
            or destination.group in self._turns[pace]
            or self.free(destination) <= 0
        ):
            return True
        return pace > 0 and (bool(self._turns[pace]) or bool(self._turns[DestinationPace.NEW]))

    def has_turn(self) -> bool:
        return self._find_turn() is not None

    def next_turn(self) -> Any | None:
        """The line whose turn it is, among those whose destination has room."""
        destination = self._find_turn()
        if destination is None:
            return None
        line, _ = destination.lines.popitem(last=False)
        self._unqueue(destination)
        if destination.lines:
            self._queue(destination)
        turns = self._turns[destination.pace]
        if destination.group in turns:
            turns.move_to_end(destination.group)
        return line

    def kept(self, job: Job) -> None:
        """Count a job that now waits in memory."""
        if (destination := self.of(job)) is not None:
            self._known[job.type, job.destination] = destination
            destination.jobs += 1
            destination.bytes += len(job.payload)

    def dropped(self, job: Job) -> None:
        """Count off a job that no longer waits in memory."""
        if (destination := self.of(job)) is not None:
            destination.jobs -= 1
            destination.bytes -= len(job.payload)
            self._forget(destination)

    def clear_lines(self) -> None:
        """Forget all waiting lines."""
        for turns in self._turns.values():
            turns.clear()
        for destination in self._known.values():
            destination.lines.clear()

    def _forget(self, destination: Destination) -> None:
        """Drop a destination without jobs, so that it costs no memory."""
        if not (destination.in_flight or destination.jobs):
            self._known.pop((destination.type, destination.name), None)

    def _count(self, destination: Destination, jobs: int) -> None:
        unproven = destination.pace > 0
        key = (destination.group, unproven)
        self._in_flight += jobs
        self._unproven_in_flight += jobs * unproven
        self._in_flight_of[key] += jobs
        if not self._in_flight_of[key]:
            del self._in_flight_of[key]

    def _classify(self, destination: Destination) -> None:
        """Recount the destination under its current pace and group."""
        key = (destination.type, destination.name)
        pace, group = self._paces.of(key), self._groups.get(key, destination.name)
        if (pace, group) == (destination.pace, destination.group):
            return
        self._unqueue(destination)
        self._count(destination, -destination.in_flight)
        destination.pace, destination.group = pace, group
        self._count(destination, destination.in_flight)
        self._queue(destination)

    def _queue(self, destination: Destination) -> None:
        if destination.lines:
            self._turns[destination.pace].setdefault(destination.group, OrderedDict())[
                destination
            ] = None

    def _unqueue(self, destination: Destination) -> None:
        turns = self._turns[destination.pace]
        if (queued := turns.get(destination.group)) is not None:
            queued.pop(destination, None)
            if not queued:
                del turns[destination.group]

    def _find_turn(self) -> Destination | None:
        for pace, turns in self._turns.items():
            if pace and self._unproven_in_flight >= self._unproven_max:
                break
            found, empty = None, []
            for group, queued in turns.items():
                if (found := self._first_with_room(queued)) is not None:
                    break
                if not queued:
                    empty.append(group)
            for group in empty:
                del turns[group]
            if found is not None:
                return found
        return None

    def _first_with_room(self, queued: OrderedDict[Destination, None]) -> Destination | None:
        """The first destination with room, dequeuing those that will requeue
        themselves.

        A destination without room requeues when one of its own jobs ends. If it has
        none in flight, its group is full, and so has no room for the others either.
        """
        while queued:
            destination = next(iter(queued))
            if self.free(destination) > 0:
                return destination
            if not destination.in_flight:
                break
            del queued[destination]
        return None


def _share(cap: int, runners: int) -> int:
    """One destination's share of this number of free runners."""
    return max(1, min(cap, runners // _FREE_RUNNERS_DIVISOR))


def _without_reserve(runners: int) -> int:
    """The runners without the eighth that is reserved for others."""
    return max(1, runners * (_RESERVE_DIVISOR - 1) // _RESERVE_DIVISOR)
