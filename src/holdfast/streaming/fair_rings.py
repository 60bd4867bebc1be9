"""Who is active, who waits, and whose turn it is. (Pure.)

Each pool (``default``, or a provider's own) has a ring of tenants; each tenant there a
ring of its users that wait for this pool and are below their limit; each user a list of
entries, oldest first. A turn takes the first entry of the first user of the first
tenant; then the user and the tenant go to the tail of their rings. So it is fair
between tenants, then between users. Pools with waiting users form a ring too: a full
pool delays nobody who waits for another.

A user's limit counts over all pools. A user that reaches it leaves every ring, and
comes back at the tails. Counting and placing happen in one step, ``change``, in
constant time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Literal
from zlib import crc32

from holdfast.streaming.pool.contract import PoolRequest

EntryState = Literal["gone", "waiting", "set_aside", "granted", "leased"]
"""``set_aside``: its turn came while its node gets no grants. ``granted``: active, but
not confirmed.
"""


_Tenants = OrderedDict[str, "OrderedDict[str, QueueUser]"]
"""Tenant → its users that wait and are below their limit, by name."""


class QueueUser:
    """A user of a tenant with something active or waiting."""

    __slots__ = ("active", "limit", "lists", "name", "tenant", "waiting")

    def __init__(self, tenant: str, name: str) -> None:
        self.tenant = tenant
        self.name = name
        self.active = 0
        self.limit = 0
        self.waiting = 0
        self.lists: dict[str, OrderedDict[str, QueueEntry]] = {}
        """Pool → what waits there, in the order of ``place``."""

    @property
    def is_below_limit(self) -> bool:
        return not self.limit or self.active < self.limit


class QueueNode:
    """A node, what it has, and when it last sent a heartbeat."""

    __slots__ = (
        "beat_ms", "cancels", "entries", "granted", "is_blocked", "leases", "leases_sum", "name",
        "read", "set_aside", "waiting", "waiting_sum",
    )  # fmt: skip

    def __init__(self, name: str, now_ms: int) -> None:
        self.name = name
        self.beat_ms = now_ms
        self.is_blocked = False
        """It let a grant expire: none until its next heartbeat."""
        self.entries: dict[str, QueueEntry] = {}
        self.granted: dict[str, QueueEntry] = {}
        """The oldest grant first."""
        self.set_aside: dict[str, QueueEntry] = {}
        self.leases = self.leases_sum = self.waiting = self.waiting_sum = 0
        self.read: dict[str, int] = {}
        """Its replies that are read at other nodes, and when that was last reported."""
        self.cancels: set[str] = set()


class QueueEntry:
    """A reply that runs or waits."""

    __slots__ = ("crc", "granted_until_ms", "node", "place", "pool", "reply_id", "state", "user")

    def __init__(self, reply_id: str, node: QueueNode, user: QueueUser, pool: str) -> None:
        self.reply_id = reply_id
        self.node = node
        self.user = user
        self.pool = pool
        self.crc = crc32(reply_id.encode())
        self.state: EntryState = "gone"
        self.place = 0
        self.granted_until_ms = 0

    @property
    def is_active(self) -> bool:
        return self.state in ("granted", "leased")


class FairRings:
    """See the module."""

    def __init__(self) -> None:
        self.active: dict[str, int] = {}
        """By pool."""
        self.waiting: dict[str, int] = {}
        self.waiting_of_tenant: dict[str, int] = {}
        self.active_total = self.waiting_total = 0
        self._users: dict[tuple[str, str], QueueUser] = {}
        self._rings: OrderedDict[str, _Tenants] = OrderedDict()
        """By pool. No ring is empty."""
        self._head = self._tail = 0

    def user_of(self, request: PoolRequest) -> QueueUser:
        """The user, with the limit of this request from now on."""
        key = request.tenant, request.user
        user = self._users.get(key)
        if user is None:
            user = self._users[key] = QueueUser(*key)
        if user.limit != request.user_limit:
            user.limit = request.user_limit
            self._place_in_rings(user)
        return user

    def forget_if_idle(self, user: QueueUser) -> None:
        if not user.active and not user.waiting:
            self._users.pop((user.tenant, user.name), None)

    def has_waiting(self, pool: str) -> bool:
        """Whether somebody below its limit waits for this pool."""
        return pool in self._rings

    def next_entry(self, has_room: Callable[[str], bool]) -> QueueEntry | None:
        """Whose turn it is, among the pools that have room."""
        pool = next((pool for pool in self._rings if has_room(pool)), None)
        if pool is None:
            return None
        users = next(iter(self._rings[pool].values()))
        return next(iter(next(iter(users.values())).lists[pool].values()))

    def change(self, entry: QueueEntry, state: EntryState, *, at_head: bool = False) -> None:
        """To another state, with all that both states count."""
        self._leave(entry)
        entry.state = state
        if state == "waiting":
            self._join_list(entry, at_head)
        elif state == "granted":
            entry.node.granted[entry.reply_id] = entry
        elif state == "set_aside":
            entry.node.set_aside[entry.reply_id] = entry
        self._count(entry, 1)
        self._place_in_rings(entry.user)

    def put_back(self, node: QueueNode) -> None:
        """What was set aside returns to its old places in the lists, and its users to
        the tails in the order of the turns that they missed.
        """
        entries = list(node.set_aside.values())
        node.set_aside.clear()
        for entry in entries:
            entry.state = "waiting"
            entry.user.lists.setdefault(entry.pool, OrderedDict())[entry.reply_id] = entry
        for waits in {id(waits := e.user.lists[e.pool]): waits for e in entries}.values():
            for entry in sorted(waits.values(), key=lambda each: each.place):
                waits.move_to_end(entry.reply_id)
        for entry in entries:
            self._place_in_rings(entry.user)

    def end_turn(self, entry: QueueEntry) -> None:
        """Its pool, tenant and user go to the tails, as far as they still wait."""
        ring = self._rings.get(entry.pool)
        if ring is not None:
            self._rings.move_to_end(entry.pool)
            if entry.user.tenant in ring:
                ring.move_to_end(entry.user.tenant)
                self.delay_user(entry)

    def delay_user(self, entry: QueueEntry) -> None:
        """Its user goes to the tail of its tenant's ring, if it is there."""
        users = self._tenants(entry.pool).get(entry.user.tenant)
        if users is not None and entry.user.name in users:
            users.move_to_end(entry.user.name)

    def newest_position(self, entry: QueueEntry, *, at_head: bool) -> int:
        """Of the entry that has just come, to the head or to the tail."""
        return self._position(entry, 1 if at_head else len(entry.user.lists[entry.pool]))

    def positions(self, entries: Iterable[QueueEntry]) -> Iterator[tuple[str, int]]:
        """What does not wait in its list will be the first there."""
        ranks: dict[int, dict[str, int]] = {}
        for entry in entries:
            rank = 1
            if entry.state == "waiting":
                waits = entry.user.lists[entry.pool]
                if id(waits) not in ranks:
                    ranks[id(waits)] = {each: rank for rank, each in enumerate(waits, 1)}
                rank = ranks[id(waits)][entry.reply_id]
            yield entry.reply_id, self._position(entry, rank)

    def _position(self, entry: QueueEntry, rank: int) -> int:
        """At most how many grants its pool gives up to its own, if nobody else comes:
        one of each tenant, for each user of its tenant, for each of its list.
        """
        tenants = self._tenants(entry.pool)
        users = tenants.get(entry.user.tenant, ())
        turns = max(1, len(tenants)) * max(1, len(users)) * rank
        return max(1, min(turns, self.waiting.get(entry.pool, 0)))

    def _tenants(self, pool: str) -> _Tenants:
        return self._rings.get(pool) or OrderedDict()

    def _leave(self, entry: QueueEntry) -> None:
        self._count(entry, -1)
        if entry.state == "waiting":
            del entry.user.lists[entry.pool][entry.reply_id]
        elif entry.state == "granted":
            del entry.node.granted[entry.reply_id]
        elif entry.state == "set_aside":
            del entry.node.set_aside[entry.reply_id]

    def _join_list(self, entry: QueueEntry, at_head: bool) -> None:
        if at_head:
            self._head -= 1
            entry.place = self._head
        else:
            self._tail += 1
            entry.place = self._tail
        waits = entry.user.lists.setdefault(entry.pool, OrderedDict())
        waits[entry.reply_id] = entry
        waits.move_to_end(entry.reply_id, last=not at_head)

    def _count(self, entry: QueueEntry, by: int) -> None:
        """A grant is active, but its node knows it as waiting until it confirms."""
        if entry.state == "gone":
            return
        user, node = entry.user, entry.node
        if entry.is_active:
            self.active_total += by
            user.active += by
            _add(self.active, entry.pool, by)
        else:
            self.waiting_total += by
            user.waiting += by
            _add(self.waiting, entry.pool, by)
            _add(self.waiting_of_tenant, user.tenant, by)
        if entry.state == "leased":
            node.leases += by
            node.leases_sum += by * entry.crc
        else:
            node.waiting += by
            node.waiting_sum += by * entry.crc

    def _place_in_rings(self, user: QueueUser) -> None:
        """Each pool's ring has the user if it waits there and is below its limit."""
        for pool, waits in sorted(user.lists.items(), key=lambda each: each[0]):
            if waits and user.is_below_limit:
                tenants = self._rings.setdefault(pool, OrderedDict())
                tenants.setdefault(user.tenant, OrderedDict()).setdefault(user.name, user)
            else:
                self._leave_ring(pool, user)
            if not waits:
                del user.lists[pool]

    def _leave_ring(self, pool: str, user: QueueUser) -> None:
        tenants = self._tenants(pool)
        if user.name not in tenants.get(user.tenant, ()):
            return
        del tenants[user.tenant][user.name]
        if not tenants[user.tenant]:
            del tenants[user.tenant]
        if not tenants:
            del self._rings[pool]


def _add(counts: dict[str, int], name: str, by: int) -> None:
    """What counts to zero is forgotten."""
    count = counts.get(name, 0) + by
    if count:
        counts[name] = count
    else:
        del counts[name]
