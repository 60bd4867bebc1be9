"""What counters promise. Adapters: memory (this process alone), redis (every node of a region).

An *entry* is one question about one or more counters. An entry of one ask admits as many of its equal costs as
fit; an entry of several is all or nothing: all are checked, then all are taken, or none. The keys of one entry
differ. Every call is atomic and happens at one moment, whose time (milliseconds of the counters' own clock) comes
back with the answers.

Errors: ``Unavailable`` means that nothing was counted; ``OutcomeUnknown`` that it may have been, and then the
call must not be made again. A cancelled call is unknown.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from holdfast.limits.algorithms import CounterReading, LimitParams
from holdfast.limits.rules import Rule

KEYS_PER_CALL_MAX = 256
NODE_NAMES_MAX = 256
"""Names of nodes that are told and kept; among more than these the remainder of a limit is given to nobody."""

CounterKey = tuple[str, str]
"""A counter: (tenant and rule, as ``key_prefix`` writes them; subject)."""


def key_prefix(tenant: str, rule: Rule) -> str:
    """What the names of a rule's counters begin with; a rule for all tenants counts each apart.

    The algorithm is not in it: a counter outlives a change of the algorithm, and its value tells by which it counts.
    """
    return f"{{{tenant}}}:{rule.label}:"


class CounterRequest(Struct, gc=False):
    """Admit up to ``times`` costs on one counter, then lease ``want`` if far from the limit.

    ``hold`` names the holder where the terms are concurrency; ``cost`` and ``times`` are 1 there. ``spent`` of the
    ``times`` were let through before they were asked for: they are taken whether they fit or not, so that the wait
    that is told covers them. Only where the entry is this ask alone.
    """

    key: CounterKey
    terms: LimitParams
    cost: int = 1
    times: int = 1
    want: int = 0
    hold: str = ""
    spent: int = 0


class Adjustment(NamedTuple):
    """Put a counter right without asking: exactly one of ``given``, ``charged``, ``released`` and ``held`` is set.

    ``given`` returns what was taken at ``taken_at`` and not spent; ``charged`` adds what was spent elsewhere, as far
    as there is room: a debt never costs more than the rule grants at once. ``released`` ends a hold; ``held`` begins
    one that was granted elsewhere and has ``held_ms`` left, also beyond the limit.
    """

    key: CounterKey
    terms: LimitParams
    given: int = 0
    taken_at: float = 0.0
    charged: int = 0
    released: str = ""
    held: str = ""
    held_ms: float = 0.0


class CounterResponse(NamedTuple):
    """The answers of one call: one tuple of readings per entry, in order."""

    now: float
    readings: list[tuple[CounterReading, ...]]


class NodesAnnounced(NamedTuple):
    """How many nodes live, this one included; their names in order, at most ``NODE_NAMES_MAX``; and the counters that
    were reset since this node last announced itself, by ``Counters.name``."""

    nodes: int
    names: tuple[str, ...]
    resets: frozenset[bytes] = frozenset()


class CountersTrouble(NamedTuple):
    """Why shared counters did not answer: a word of a closed set, and what was said, without a secret."""

    reason: str
    detail: str


class Counters(Protocol):
    """Where what is used is counted."""

    immediate: bool
    """Whether ``take_now`` and ``look_now`` answer: the counters are in this process."""

    def take_trouble(self) -> CountersTrouble | None:
        """Why a call failed since this was last asked; None if none did."""
        ...

    def take_now(
        self, key: CounterKey, terms: LimitParams, cost: int, hold: str = "", times: int = 1
    ) -> CounterReading:
        """The answer to one ask, without I/O. Only where the counters are immediate."""
        ...

    def look_now(self, key: CounterKey, terms: LimitParams, count: int) -> CounterReading | None:
        """None if ``count`` costs of 1 fit now, else how many do; nothing is taken. As ``take_now``."""
        ...

    def take(self, entries: Sequence[Sequence[CounterRequest]]) -> Awaitable[CounterResponse]:
        """Decide every entry, at most ``KEYS_PER_CALL_MAX`` keys in all, in one atomic call. Without entries it tells
        whether the counters answer."""
        ...

    async def adjust(self, adjustments: Sequence[Adjustment]) -> int:
        """Apply at most ``KEYS_PER_CALL_MAX`` adjustments; how many found what they put right.

        A gift whose counter is gone or counts by another version does not, nor a release whose hold is over.
        """
        ...

    async def reset(self, key: CounterKey) -> bool:
        """Forget what this counter has used; False if it was not there. Others hear of it when they next announce."""
        ...

    def name(self, key: CounterKey) -> bytes:
        """What ``Announced.resets`` calls this counter."""
        ...

    async def announce(self, node: str, ttl_seconds: float) -> NodesAnnounced:
        """This node lives for another ``ttl_seconds``; who does now."""
        ...

    async def aclose(self) -> None: ...
