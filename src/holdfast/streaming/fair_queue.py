"""The pool of active generations and its fair queue, as a state machine. (Pure.)

``pool/lua/pool.lua`` does the same in Redis, and a test compares the two call by call.
Times are whole milliseconds and come with every call. Every call

1. returns grants that were not confirmed in time, and frees what dead nodes had,
2. carries out its operations in order,
3. ends with the grant loop.

Whose turn it is: ``fair_rings``. ``total`` counts over all pools.

**Invariant.** After a call: if ``total`` and a pool have room, then nobody below its
limit waits for that pool at a node that gets grants. Exceptions: the call passed over
16 entries of nodes that get none, or granted 1,000; or the pool is new, and waits 3 s
for its nodes to announce themselves.

**Passed over.** An entry whose node gets no grants is set aside when its turn comes. It
returns to its old place in its user's list with its node's next heartbeat. So a node
that is dead, but not yet known to be, delays others by 16 entries of each call, and
never by time.

Every operation takes constant time (in the sorted sets of Redis, a logarithm). A
heartbeat takes what was set aside for its node, what is read and what it asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from holdfast.streaming.fair_rings import FairRings, QueueEntry, QueueNode, QueueUser
from holdfast.streaming.pool.contract import (
    CONFIRM_SECONDS,
    DEAD_SECONDS,
    FRESH_SECONDS,
    PASSED_OVER_MAX,
    QUIET_SECONDS,
    READ_SECONDS,
    REBUILD_SECONDS,
    SWEEP_MAX,
    Admit,
    Admitted,
    CancelElsewhere,
    Confirm,
    FullCause,
    Locate,
    Move,
    NodeBeat,
    PoolAnswer,
    PoolOperation,
    PoolRequest,
    PoolSizes,
    PoolView,
    QueueBounds,
    Release,
)

CONFIRM_MS: Final = int(CONFIRM_SECONDS * 1000)
DEAD_MS: Final = int(DEAD_SECONDS * 1000)
FRESH_MS: Final = int(FRESH_SECONDS * 1000)
QUIET_MS: Final = int(QUIET_SECONDS * 1000)
READ_MS: Final = int(READ_SECONDS * 1000)
REBUILD_MS: Final = int(REBUILD_SECONDS * 1000)
RATE_BUCKET_MS: Final = 5_000
RATE_BUCKETS: Final = 6
RATE_GRANTS_MIN: Final = 5
"""Fewer grants in the last 30 s are no rate."""

FreedCause = Literal["node_dead", "unconfirmed", "unannounced"]


class FairQueue:
    """See the module. ``rebuilds``: whether it waits for announcements at first.

    ``wakes`` collects (node, reply id, is cancel) and ``freed`` what was taken from
    nodes, by cause, until the caller clears them.
    """

    def __init__(self, sizes: PoolSizes, bounds: QueueBounds, *, rebuilds: bool = True) -> None:
        self._sizes = sizes
        self._bounds = bounds
        self._rebuilds = rebuilds
        self.pool_id = ""
        self._now_ms = self._skew_ms = 0
        self._nobody_dead_until_ms = self._no_grants_until_ms = 0
        self._nodes: dict[str, QueueNode] = {}
        self._entries: dict[str, QueueEntry] = {}
        self._rings = FairRings()
        self._passed_over = self._granted = 0
        self._has_freed = False
        self._rate: dict[int, int] = {}
        self.wakes: list[tuple[str, str, bool]] = []
        self.freed: dict[FreedCause, int] = {}

    def call(self, node: str, operations: Sequence[PoolOperation], now_ms: int) -> list[PoolAnswer]:
        self._begin(now_ms)
        self._sweep()
        answers = [self._carry_out(node, operation) for operation in operations]
        self._grant()
        return answers

    def beat(self, node: str, beat: NodeBeat, now_ms: int) -> PoolView:
        self._begin(now_ms)
        me = self._on_heartbeat(node)
        for reply_id, producer in beat.reading.items():
            if producer in self._nodes:
                self._nodes[producer].read[reply_id] = self._now_ms
        same = beat[:4] == (me.leases, me.leases_sum, me.waiting, me.waiting_sum)
        self._grant()
        return self._view(me, same, beat.positions_of)

    def announce(
        self,
        node: str,
        leases: Sequence[PoolRequest],
        waiting: Sequence[PoolRequest],
        now_ms: int,
    ) -> PoolView:
        self._begin(now_ms)
        me = self._on_heartbeat(node)
        announced = {request.reply_id for request in (*leases, *waiting)}
        for reply_id in sorted(me.entries.keys() - announced):
            self._forget(me.entries[reply_id])
            self._count_freed("unannounced")
        for request in leases:
            entry = self._announced(me, request)
            if entry is not None and entry.state != "leased":
                self._rings.change(entry, "leased")
        for request in waiting:
            self._announce_waiting(me, request)
        self._grant()
        return self._view(me, True, ())

    def leave(self, node: str, now_ms: int) -> None:
        self._begin(now_ms)
        self._sweep()
        if node in self._nodes:
            for reply_id in sorted(self._nodes[node].entries):
                self._forget(self._entries[reply_id])
            del self._nodes[node]
        self._grant()

    # Time

    def _begin(self, now_ms: int) -> None:
        """Time never goes back. A step ahead looks like a pause, and is treated so."""
        self._skew_ms = max(self._skew_ms, self._now_ms - now_ms)
        now_ms += self._skew_ms
        if not self.pool_id:
            self.pool_id = str(now_ms)
            self._no_grants_until_ms = now_ms + REBUILD_MS * self._rebuilds
        elif now_ms - self._now_ms > QUIET_MS:
            self._nobody_dead_until_ms = now_ms + DEAD_MS
        self._now_ms = now_ms
        self._passed_over = self._granted = 0
        self._has_freed = False

    def _sweep(self) -> None:
        """Return late grants and free the ids of dead nodes, up to ``SWEEP_MAX``."""
        swept = 0
        for _, node in sorted(self._nodes.items()):
            while node.granted and swept < SWEEP_MAX:
                entry = next(iter(node.granted.values()))
                if entry.granted_until_ms > self._now_ms:
                    break
                node.is_blocked = True
                self._take_back(entry)
                swept += 1
        while swept < SWEEP_MAX and (dead := self._next_dead()) is not None:
            for reply_id in sorted(dead.entries)[: SWEEP_MAX - swept]:
                self._forget(dead.entries[reply_id])
                self._count_freed("node_dead")
                swept += 1
            if not dead.entries:
                del self._nodes[dead.name]

    def _take_back(self, entry: QueueEntry) -> None:
        """A late grant: to the head of its list, its user to the tail of the ring."""
        self._rings.change(entry, "waiting", at_head=True)
        self._rings.delay_user(entry)
        self._has_freed = True
        self._count_freed("unconfirmed")

    def _next_dead(self) -> QueueNode | None:
        """The node whose heartbeat is the oldest, if that is too old."""
        if self._now_ms < self._nobody_dead_until_ms:
            return None
        node = min(self._nodes.values(), key=lambda each: (each.beat_ms, each.name), default=None)
        return node if node and self._now_ms - node.beat_ms > DEAD_MS else None

    def _on_heartbeat(self, name: str) -> QueueNode:
        """The node gets grants, and what was set aside for it returns. It is not dead,
        but its late grants are taken back first.
        """
        node = self._node(name)
        node.beat_ms = self._now_ms
        self._sweep()
        node.is_blocked = False
        self._rings.put_back(node)
        return node

    def _gets_grants(self, node: QueueNode) -> bool:
        return not node.is_blocked and self._now_ms - node.beat_ms <= FRESH_MS

    # Operations

    def _carry_out(self, node: str, operation: PoolOperation) -> PoolAnswer:
        match operation:
            case Admit(request):
                return self._admit(self._node(node), request)
            case Confirm(reply_id):
                return self._confirm(self._own(node, reply_id))
            case Move(reply_id, pool):
                return self._move(self._own(node, reply_id), pool)
            case Release(reply_id):
                return self._release(self._own(node, reply_id))
            case CancelElsewhere(reply_id, producer):
                return self._cancel(self._own(producer, reply_id))
            case Locate(reply_id):
                entry = self._entries.get(reply_id)
                return entry.node.name if entry else ""

    def _admit(self, node: QueueNode, request: PoolRequest) -> Admitted:
        """An id that is here already keeps its state; another node's is taken over."""
        self._grant_what_was_freed()
        known = self._entries.get(request.reply_id)
        if known is not None and known.node is node:
            return self._answer(known)
        if known is not None:
            self._forget(known)
        user = self._rings.user_of(request)
        full = None if self._may_lease(user, request.pool) else self._full(user, request)
        if full is not None:
            self._rings.forget_if_idle(user)
            return Admitted(False, full=full)
        entry = self._add(request, node, user)
        return self._lease_or_wait(entry, at_head=request.head)

    def _confirm(self, entry: QueueEntry | None) -> bool:
        if entry is not None and entry.state == "granted":
            self._rings.change(entry, "leased")
        return entry is not None and entry.state == "leased"

    def _move(self, entry: QueueEntry | None, pool: str) -> Admitted:
        """What it gives up is free for others only after its own try."""
        self._grant_what_was_freed()
        if entry is None:
            return Admitted(False)
        if entry.pool != pool:
            self._take_out(entry)
            entry.pool = pool
            return self._lease_or_wait(entry, at_head=True)
        return self._answer(entry)

    def _release(self, entry: QueueEntry | None) -> bool:
        if entry is not None:
            self._forget(entry)
        return entry is not None

    def _cancel(self, entry: QueueEntry | None) -> bool:
        if entry is not None:
            entry.node.cancels.add(entry.reply_id)
            self.wakes.append((entry.node.name, entry.reply_id, True))
        return entry is not None

    def _announce_waiting(self, node: QueueNode, request: PoolRequest) -> None:
        entry = self._announced(node, request)
        if entry is None:
            return
        if entry.state == "leased":
            self._begin_grant(entry)
        elif entry.state == "gone":
            self._rings.change(entry, "waiting", at_head=request.head)

    def _announced(self, node: QueueNode, request: PoolRequest) -> QueueEntry | None:
        """The entry, new or not, as the request has it; None: it is another node's."""
        entry = self._entries.get(request.reply_id)
        if entry is not None and entry.node is not node:
            return None
        user = self._rings.user_of(request)
        if entry is not None and (entry.pool != request.pool or entry.user is not user):
            self._forget(entry)
            entry, user = None, self._rings.user_of(request)
        return entry or self._add(request, node, user)

    # The answer to an admission

    def _may_lease(self, user: QueueUser, pool: str) -> bool:
        """By the invariant nobody who may run waits for this pool; where it has an
        exception, they go first.
        """
        return (
            self._now_ms >= self._no_grants_until_ms
            and user.is_below_limit
            and self._has_room(pool)
            and not self._rings.has_waiting(pool)
        )

    def _has_room(self, pool: str) -> bool:
        rings, sizes = self._rings, self._sizes
        return rings.active_total < sizes.total and rings.active.get(pool, 0) < sizes.of(pool)

    def _full(self, user: QueueUser, request: PoolRequest) -> FullCause | None:
        rings, bounds = self._rings, self._bounds
        if not request.capped:
            return None
        if user.waiting >= (request.waiting_max or bounds.waiting_per_user):
            return "user"
        if rings.waiting_of_tenant.get(user.tenant, 0) >= bounds.waiting_per_tenant:
            return "tenant"
        return "queue" if rings.waiting_total >= bounds.waiting_max else None

    def _lease_or_wait(self, entry: QueueEntry, *, at_head: bool) -> Admitted:
        if self._may_lease(entry.user, entry.pool):
            self._rings.change(entry, "leased")
            return Admitted(True)
        self._rings.change(entry, "waiting", at_head=at_head)
        return Admitted(False, self._rings.newest_position(entry, at_head=at_head))

    def _answer(self, entry: QueueEntry) -> Admitted:
        """To an id that was here already."""
        if entry.state == "leased":
            return Admitted(True)
        return Admitted(False, dict(self._rings.positions([entry]))[entry.reply_id])

    # The grant loop

    def _grant_what_was_freed(self) -> None:
        if self._has_freed:
            self._grant()

    def _grant(self) -> None:
        self._has_freed = False
        if self._now_ms < self._no_grants_until_ms:
            return
        while self._passed_over < PASSED_OVER_MAX and self._granted < SWEEP_MAX:
            entry = self._rings.next_entry(self._has_room)
            if entry is None:
                return
            if self._gets_grants(entry.node):
                self._granted += 1
                self._begin_grant(entry)
                self._rings.end_turn(entry)
                bucket = self._now_ms // RATE_BUCKET_MS
                self._rate[bucket] = self._rate.get(bucket, 0) + 1
            else:
                self._passed_over += 1
                self._rings.change(entry, "set_aside")

    def _begin_grant(self, entry: QueueEntry) -> None:
        self._rings.change(entry, "granted")
        entry.granted_until_ms = self._now_ms + CONFIRM_MS
        self.wakes.append((entry.node.name, entry.reply_id, False))

    # Entries

    def _own(self, node: str, reply_id: str) -> QueueEntry | None:
        entry = self._entries.get(reply_id)
        return entry if entry is not None and entry.node.name == node else None

    def _node(self, name: str) -> QueueNode:
        if name not in self._nodes:
            self._nodes[name] = QueueNode(name, self._now_ms)
        return self._nodes[name]

    def _add(self, request: PoolRequest, node: QueueNode, user: QueueUser) -> QueueEntry:
        entry = QueueEntry(request.reply_id, node, user, request.pool)
        self._entries[entry.reply_id] = node.entries[entry.reply_id] = entry
        return entry

    def _take_out(self, entry: QueueEntry) -> None:
        self._has_freed = self._has_freed or entry.is_active
        self._rings.change(entry, "gone")

    def _forget(self, entry: QueueEntry) -> None:
        self._take_out(entry)
        del self._entries[entry.reply_id], entry.node.entries[entry.reply_id]
        entry.node.cancels.discard(entry.reply_id)
        self._rings.forget_if_idle(entry.user)

    def _count_freed(self, cause: FreedCause) -> None:
        self.freed[cause] = self.freed.get(cause, 0) + 1

    # What a node is answered

    def _view(self, node: QueueNode, same: bool, positions_of: Sequence[str]) -> PoolView:
        node.read = {id_: at for id_, at in node.read.items() if self._now_ms - at <= READ_MS}
        known = (node.entries.get(reply_id) for reply_id in positions_of)
        asked = [entry for entry in known if entry is not None and entry.state == "waiting"]
        return PoolView(
            pool_id=self.pool_id,
            same=same,
            granted=list(node.granted),
            nodes=sorted(self._nodes),
            read_elsewhere=sorted(node.read),
            cancels=sorted(node.cancels),
            active=dict(self._rings.active),
            waiting=dict(self._rings.waiting),
            positions=dict(self._rings.positions(asked)),
            grants_per_second=self._grants_per_second(),
        )

    def _grants_per_second(self) -> float:
        bucket = self._now_ms // RATE_BUCKET_MS
        for old in [each for each in self._rate if each <= bucket - RATE_BUCKETS]:
            del self._rate[old]
        grants = sum(self._rate.values())
        span_ms = (RATE_BUCKETS - 1) * RATE_BUCKET_MS + self._now_ms % RATE_BUCKET_MS
        return grants * 1000 / span_ms if grants >= RATE_GRANTS_MIN else 0.0
