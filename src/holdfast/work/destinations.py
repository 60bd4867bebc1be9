"""How much of a worker one destination may use: runners and memory. (Pure.)

A job type may have a cap per destination (``Handlers.handle``). A job of a destination that has reached its cap is not
announced, so it holds no runner. Nor does one destination take more than a quarter of the free runners, so that many
slow ones leave some to those that are idle now (the *dynamic threshold* of shared-memory switches); and all of them
together fill half of the memory, so that what waits for slow ones keeps nothing else in the store. Jobs without a
stream have no cap.

A *paused* destination has no runner and no memory at all: its jobs wait in the store until it is resumed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.work.job import Job

_FREE_RUNNERS_DIVISOR = 4
_MEMORY_DIVISOR = 16


@dataclass(slots=True, eq=False)
class Destination:
    """``in_flight``: jobs that are announced. ``jobs`` and ``bytes``: what waits in memory. ``lines``: the streams
    whose next job waits until fewer are in flight."""

    type: str
    name: str
    in_flight: int = 0
    jobs: int = 0
    bytes: int = 0
    lines: OrderedDict[Any, None] = field(default_factory=OrderedDict)


class Destinations:
    """The destinations a worker has jobs of. ``caps`` are by job type; a type that is not in it has none."""

    def __init__(self, caps: Mapping[str, int] | None = None, runners: int = 100) -> None:
        self._caps, self._runners = dict(caps or {}), runners
        self.are_capped = bool(self._caps)
        """Asked before anything else on the way of every job: where no type has a cap, none of this costs anything."""
        self._known: dict[tuple[str, str], Destination] = {}
        self._in_flight = 0
        self.paused: Collection[tuple[str, str]] = frozenset()
        """By type and name; changed only when everything is read again, see ``Streams.rewound``."""

    def of(self, job: Job) -> Destination | None:
        """None: the job has no cap, because its type has none or because it has no stream."""
        if not self.is_capped(job):
            return None
        return self._known.get((job.type, job.destination)) or Destination(job.type, job.destination)

    def has_cap(self, job_type: str) -> bool:
        return job_type in self._caps

    def is_capped(self, job: Job) -> bool:
        return job.type in self._caps and job.stream is not None

    def is_paused(self, job: Job) -> bool:
        return bool(self.paused) and (job.type, job.destination) in self.paused and self.is_capped(job)

    def jobs(self, target: tuple[str, str]) -> int:
        """How many jobs of this type and destination wait in memory."""
        found = self._known.get(target)
        return found.jobs if found is not None else 0

    def free(self, destination: Destination) -> int:
        """How many more of its jobs may be in flight; one always may."""
        others = self._in_flight - destination.in_flight
        cap = min(self._caps[destination.type], (self._runners - others) // _FREE_RUNNERS_DIVISOR)
        return max(1, cap) - destination.in_flight

    def memory_of_one(self, most: int) -> int:
        """How much of ``most`` jobs or bytes one destination may fill."""
        return max(1, most // (_MEMORY_DIVISOR + 2 * len(self._known)))

    def beyond(self, jobs: int) -> list[Destination]:
        """The destinations with more than so many jobs in memory."""
        return [each for each in self._known.values() if each.jobs > jobs]

    def announced(self, destination: Destination) -> None:
        self._in_flight += 1
        destination.in_flight += 1

    def withdrawn(self, destination: Destination) -> None:
        self._in_flight -= 1
        destination.in_flight -= 1
        self._forget(destination)

    def kept(self, job: Job) -> None:
        """The job waits in memory."""
        if (destination := self.of(job)) is not None:
            self._known[job.type, job.destination] = destination
            destination.jobs += 1
            destination.bytes += len(job.payload)

    def dropped(self, job: Job) -> None:
        """The job waits in memory no longer."""
        if (destination := self.of(job)) is not None:
            destination.jobs -= 1
            destination.bytes -= len(job.payload)
            self._forget(destination)

    def clear_lines(self) -> None:
        """No stream waits for a destination any more."""
        for destination in self._known.values():
            destination.lines.clear()

    def _forget(self, destination: Destination) -> None:
        """A destination without jobs costs no memory."""
        if not (destination.in_flight or destination.jobs):
            self._known.pop((destination.type, destination.name), None)
