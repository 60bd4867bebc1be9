"""What counters promise. Adapters: memory (one process), redis (the nodes of a region).

An *entry* is one question about one or more counters. An entry with one request admits
as many of its equal costs as fit. An entry with several is all or nothing: all are
checked, then all are taken or none. The keys of an entry differ. Every call is atomic
and happens at one moment, whose time (milliseconds of the counters' own clock) comes
with the answer.

Errors: ``Unavailable`` means that nothing was counted. ``OutcomeUnknown`` means that it
may have been, and the call must not be repeated. The outcome of a cancelled call is
unknown.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from holdfast.limits.algorithms import CounterReading, LimitParams
from holdfast.limits.rules import Rule

KEYS_PER_CALL_MAX = 256
CHECK_AGAIN_SECONDS = 10.0
"""How often shared counters check that their server is still fit, unless tuned."""
NODE_NAMES_MAX = 256
"""Node names reported and kept. With more nodes, the remainder of a limit is not
used."""

CounterKey = tuple[str, str]
"""A counter: (tenant and rule, as written by ``key_prefix``; subject)."""


def key_prefix(tenant: str, rule: Rule) -> str:
    """The start of the names of a rule's counters; each tenant is counted separately.

    The algorithm is not part of it: a counter survives a change of the algorithm, and
    its value names the one it counts by.
    """
    return f"{{{tenant}}}:{rule.label}:"


class CounterRequest(Struct, gc=False):
    """Admit up to ``times`` costs on one counter, then lease ``want`` if it has room.

    Far from the limit only: see ``algorithms.take``. ``hold`` names the holder for a
    concurrency rule, where ``cost`` and ``times`` are 1. ``spent`` of the ``times``
    passed before they were counted: they are taken whether they fit or not, so that the
    reported wait covers them. It needs an entry of its own. So does a negative
    ``cost``, which gives back.
    """

    key: CounterKey
    params: LimitParams
    cost: int = 1
    times: int = 1
    want: int = 0
    hold: str = ""
    spent: int = 0


class Adjustment(NamedTuple):
    """A correction: one of ``given``, ``charged``, ``released`` and ``held`` is set.

    ``given`` returns what was taken at ``taken_at`` and not spent. ``charged`` adds
    what was spent elsewhere, as far as there is room: a debt never costs more than the
    rule grants at once. If it is negative, it gives back. ``released`` ends a hold.
    ``held`` adds one that was granted elsewhere and has ``held_ms`` left, even beyond
    the limit.
    """

    key: CounterKey
    params: LimitParams
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
    """The live nodes, this one included, and what was reset since its last call.

    ``names`` are in order, at most ``NODE_NAMES_MAX``; ``resets`` are as
    ``Counters.name``.
    """

    nodes: int
    names: tuple[str, ...]
    resets: frozenset[bytes] = frozenset()


class CountersTrouble(NamedTuple):
    """Why shared counters did not answer: one of a few reasons, and a detail, no
    secrets."""

    reason: str
    detail: str


class Counters(Protocol):
    """Where use is counted."""

    in_process: bool
    """Whether they are in this process, so that ``take_now`` and ``peek_now``
    answer."""

    def take_trouble(self) -> CountersTrouble | None:
        """Why a call failed since this was last asked; None if none did."""
        ...

    def take_now(
        self, key: CounterKey, params: LimitParams, cost: int, hold: str = "", times: int = 1
    ) -> CounterReading:
        """Answer one request without I/O. Only for counters in this process."""
        ...

    def peek_now(self, key: CounterKey, params: LimitParams, count: int) -> CounterReading | None:
        """None if ``count`` costs of 1 fit now, else how many do. Takes nothing.

        Only for counters in this process.
        """
        ...

    def charge_now(self, key: CounterKey, params: LimitParams, amount: int) -> None:
        """Use ``amount``, even beyond the limit; a negative amount gives back.

        Only for counters in this process.
        """
        ...

    def take(self, entries: Sequence[Sequence[CounterRequest]]) -> Awaitable[CounterResponse]:
        """Decide all entries, at most ``KEYS_PER_CALL_MAX`` keys, in one atomic call.

        Without entries it only finds out whether the counters answer.
        """
        ...

    async def adjust(self, adjustments: Sequence[Adjustment]) -> int:
        """Apply at most ``KEYS_PER_CALL_MAX`` adjustments; return how many took effect.

        A return does not if its counter is gone or counts by another version, nor a
        release if its hold is over.
        """
        ...

    async def reset(self, key: CounterKey) -> bool:
        """Forget what this counter has used; False if it does not exist.

        Other nodes learn of it when they next announce themselves.
        """
        ...

    def name(self, key: CounterKey) -> bytes:
        """What ``NodesAnnounced.resets`` calls this counter."""
        ...

    async def announce(self, node: str, ttl_seconds: float) -> NodesAnnounced:
        """Keep this node alive for another ``ttl_seconds``; return the live nodes."""
        ...

    async def aclose(self) -> None: ...
