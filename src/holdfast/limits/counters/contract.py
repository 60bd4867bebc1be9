"""What counters promise. Adapters: memory (this process alone), redis (every node of a region).

An *entry* is one question about one or more counters. An entry of one ask admits as many of its equal costs as
fit; an entry of several is all or nothing: all are checked, then all are taken, or none. The keys of one entry
differ. Every call is atomic and happens at one moment, whose time (milliseconds of the counters' own clock) comes
back with the answers.

Errors: ``Unavailable`` means that nothing was counted; ``OutcomeUnknown`` that it may have been, and then the
call must not be made again. A cancelled call is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from holdfast.limits.algorithms import Reading, Terms

KEYS_PER_CALL_MAX = 256


class Ask(NamedTuple):
    """Admit up to ``times`` costs on one counter, then lease ``want`` if far from the limit.

    ``hold`` names the holder where the terms are concurrency; ``cost`` and ``times`` are 1 there.
    """

    key: str
    terms: Terms
    cost: int = 1
    times: int = 1
    want: int = 0
    hold: str = ""


class Adjustment(NamedTuple):
    """Put a counter right without asking: exactly one of the last three is set.

    ``given`` returns what was taken at ``taken_at`` and not spent; ``charged`` adds what was spent elsewhere, also
    beyond the limit; ``released`` ends a hold.
    """

    key: str
    terms: Terms
    given: int = 0
    taken_at: float = 0.0
    charged: int = 0
    released: str = ""


class Taken(NamedTuple):
    """The answers of one call: one tuple of readings per entry, in order."""

    now: float
    readings: list[tuple[Reading, ...]]


class Counters(Protocol):
    """Where what is used is counted."""

    def take_now(self, ask: Ask) -> Reading | None:
        """The answer to a single ask if it needs no I/O; None means: use ``take``."""
        ...

    async def take(self, entries: Sequence[Sequence[Ask]]) -> Taken:
        """Decide every entry, at most ``KEYS_PER_CALL_MAX`` keys in all, in one atomic call."""
        ...

    async def adjust(self, adjustments: Sequence[Adjustment]) -> None:
        """Apply adjustments, at most ``KEYS_PER_CALL_MAX``; where the counter is gone only a charge does anything."""
        ...

    async def announce(self, node: str, ttl_seconds: float) -> int:
        """This node lives for another ``ttl_seconds``; how many nodes do now, this one included."""
        ...

    async def aclose(self) -> None: ...
