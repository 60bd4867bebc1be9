"""What a pool of active generations answers.

A *lease* is the right to generate one reply. Leases and waiting requests belong to
nodes: a node that stops heartbeating loses both. A reply that cannot run now waits in
the *fair queue*: fair between tenants, then between users (``fair_queue`` has the
rules).

A node sends operations in batches, one batch for each turn of its loop. Every batch
ends with the grant loop. A *grant* is a lease that its node has not confirmed yet: the
node learns of it by a wake-up or by its next heartbeat, and runs the reply only after
``Confirm`` was answered with True.

Every operation is about a reply's id and may be repeated: the outcome of a call whose
answer was lost is unknown, and the next heartbeat brings both sides to the same lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

DEFAULT_POOL = "default"
"""The pool of every provider without ``concurrency_max``."""

BEAT_SECONDS = 1.0
"""How often a node sends its heartbeat."""
FRESH_SECONDS = 2.5
"""A node gets grants while its last heartbeat is not older than this."""
DEAD_SECONDS = 10.0
"""A node that has not sent a heartbeat for this time is dead; its ids are freed."""
CONFIRM_SECONDS = 2.0
"""A grant that is not confirmed within this time returns to the head of its list."""
QUIET_SECONDS = 2.0
"""After this time without any call nobody is dead for the next ``DEAD_SECONDS``."""
REBUILD_SECONDS = 3.0
"""A new pool (flushed, or just created) grants nothing for this time."""
PASSED_OVER_MAX = 16
"""Entries of nodes without grants that one call may pass over."""
SWEEP_MAX = 1_000
"""Ids that one call grants, and ids of dead nodes or late grants that it frees; the
next call goes on.
"""
READ_SECONDS = 3.0
"""A reply counts as read at another node for this time after that node's heartbeat."""
POSITIONS_MAX = 256
"""Places in the queue that a node asks for with one heartbeat."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How many generations may be active at once, over all nodes."""

    total: int = 10_000
    """Generations at once, over all nodes and providers. Beyond: requests wait."""
    per_user: int = 3
    """The same for one user, unless the rule ``replies:active`` says otherwise."""


PoolState = Literal["healthy", "degraded", "critical", "exhausted"]


def pool_state(active: int, size: int) -> PoolState:
    """How full a pool is: from 70 %, 90 % and 100 % on it has another name."""
    used = active / size
    if used < 0.7:
        return "healthy"
    return "degraded" if used < 0.9 else "critical" if used < 1 else "exhausted"


class PoolSizes(NamedTuple):
    """The most leases: ``total`` over all pools, and of each provider's own pool."""

    total: int
    providers: Mapping[str, int] = {}

    def of(self, pool: str) -> int:
        return self.providers.get(pool, self.total)

    def share(self, nodes: int) -> PoolSizes:
        """What each of ``nodes`` may use alone, rounded up."""
        return PoolSizes(
            -(-self.total // nodes),
            {name: -(-size // nodes) for name, size in self.providers.items()},
        )


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """How many requests may wait, over all nodes."""

    waiting_max: int = 10_000
    waiting_per_tenant: int = 5_000
    waiting_per_user: int = 10

    def share(self, nodes: int) -> QueueBounds:
        """What each of ``nodes`` may use alone, rounded up."""
        return QueueBounds(*(-(-getattr(self, name) // nodes) for name in self.__slots__))


class PoolRequest(NamedTuple):
    """A reply that wants to run. ``user_limit``: active replies of this user; 0: no
    limit of its own. ``capped``: whether ``QueueBounds`` apply (not to assistants).
    ``head``: at the head of its user's list.
    """

    reply_id: str
    tenant: str
    user: str
    user_limit: int
    pool: str = DEFAULT_POOL
    capped: bool = True
    head: bool = False
    waiting_max: int = 0
    """The most requests of this user that may wait; 0: as in ``QueueBounds``."""


class Admit(NamedTuple):
    """Run it or let it wait. → Admitted"""

    request: PoolRequest


class Confirm(NamedTuple):
    """The node is about to run a granted reply. → bool: whether it may"""

    reply_id: str


class Move(NamedTuple):
    """Release the lease and wait at the head of the user's list for another pool, in
    one step. → Admitted
    """

    reply_id: str
    pool: str


class Release(NamedTuple):
    """The reply ended, or its client left: forget the id, leased or waiting. → bool:
    whether it was there
    """

    reply_id: str


class CancelElsewhere(NamedTuple):
    """Ask the node that makes a reply to cancel it. → bool: whether it was asked"""

    reply_id: str
    node: str


class Locate(NamedTuple):
    """→ str: the node that holds a lease or a place for this reply, or "" """

    reply_id: str


PoolOperation = Admit | Confirm | Move | Release | CancelElsewhere | Locate
FullCause = Literal["queue", "tenant", "user"]


class Admitted(NamedTuple):
    """``leased``: it may run, without ``Confirm`` if the answer came in time.
    ``position``: its place in the queue, from 1. ``full``: neither, and why.
    """

    leased: bool
    position: int = 0
    full: FullCause | None = None


PoolAnswer = Admitted | bool | str


class NodeBeat(NamedTuple):
    """A node's heartbeat: counts and sums of the CRC-32 of its ids, and which replies
    of other nodes (reply id → node) are read here. A grant counts as waiting until it
    is confirmed.
    """

    leases: int
    leases_sum: int
    waiting: int
    waiting_sum: int
    reading: Mapping[str, str] = {}
    positions_of: Sequence[str] = ()
    """Waiting ids whose place is asked for, at most ``POSITIONS_MAX``."""


class PoolView(NamedTuple):
    """The answer to a heartbeat."""

    pool_id: str
    """Changes when the pool was lost and begun again."""
    same: bool
    """Whether the pool has the ids that the heartbeat described. If not: announce."""
    granted: Sequence[str]
    """This node's grants that wait for ``Confirm``."""
    nodes: Sequence[str]
    """The living nodes, this one included."""
    read_elsewhere: Sequence[str]
    """This node's replies that were read at another node in the last 3 s."""
    cancels: Sequence[str]
    """This node's replies that another node asked to cancel; until they are
    released.
    """
    active: Mapping[str, int]
    """Leases by pool."""
    waiting: Mapping[str, int]
    """Waiting requests by pool."""
    positions: Mapping[str, int]
    """The places in the queue that were asked for, of ids that wait."""
    grants_per_second: float
    """Over the last 30 s; 0 if fewer than 5."""


class PoolStatus(NamedTuple):
    """For ``/admin/status``, by pool. The state of ``default`` is that of the total,
    which counts over all pools; of a node that goes on alone, that of its share.
    """

    active: Mapping[str, int]
    depth: Mapping[str, int]
    state: Mapping[str, PoolState]
    nodes: Sequence[str]
    shared_up: bool


class Pool(Protocol):
    """One pool for all nodes. Raises Unavailable (nothing was done) or OutcomeUnknown.

    Cancelling a call leaves its outcome unknown.
    """

    async def check(self) -> None:
        """BadSetting if its server answers and cannot be used; called at startup."""
        ...

    async def call(self, node: str, operations: Sequence[PoolOperation]) -> Sequence[PoolAnswer]:
        """Carry out the operations in order; one answer for each."""
        ...

    def call_at_once(
        self, node: str, operations: Sequence[PoolOperation]
    ) -> Sequence[PoolAnswer] | None:
        """The same without waiting, if the pool is in this process; None if not."""
        ...

    async def beat(self, node: str, beat: NodeBeat) -> PoolView: ...

    async def announce(
        self, node: str, leases: Sequence[PoolRequest], waiting: Sequence[PoolRequest]
    ) -> PoolView:
        """Replace what the pool has of this node by its own lists, in their order. An
        id announced as waiting that is leased here becomes a grant.
        """
        ...

    async def leave(self, node: str) -> None:
        """The node stops as planned: free its ids at once."""
        ...

    def listen(
        self, node: str, on_grant: Callable[[str], None], on_cancel: Callable[[str], None]
    ) -> None:
        """Call one with a reply's id when the node should confirm or cancel it.

        Wake-ups may be lost or repeated: a heartbeat has the truth.
        """
        ...

    async def close(self) -> None: ...
