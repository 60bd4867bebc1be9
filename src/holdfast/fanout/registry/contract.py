"""The seam of the registry. Best effort: no message depends on it.

**Entries.** A device of a user has one connection: the one with the highest ``since``,
in microseconds by the registry's clock. That is when it opened, as its node knows this
clock from the last renewal: a call may be under way for long, and must not displace
what opened meanwhile. If that moment is unknown or in the future, or if an entry of the
user is in the future, the clock was set or is that of a new primary: then the registry
stamps the connection when it is registered, above every ``since`` of the user and every
one that the calling node has seen. So clocks that are wrong displace no newer
connection. A connection that is registered again brings its ``since`` along and keeps
it.

**Displacement.** A registration replaces the device's older connection, and the oldest
device of a user who has too many. The answer names both; the registry also lists them
for their gateway until it unregisters them, so that a lost notification costs one
renewal.

**Liveness.** A gateway renews itself every ``RENEW_SECONDS``. One that did not
for ``LIVE_SECONDS`` is dead, and ``sweep`` removes its connections. Nothing else
expires.

**Loss.** The registry counts the calls by which a gateway changed its connections. A
count that is not the gateway's own shows a flush, writes that a failover lost, an old
copy put back, or a sweep: then the gateway compares all connections with its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple, Protocol

from msgspec import Struct

from holdfast.message import User

RENEW_SECONDS = 5.0
LIVE_SECONDS = 15.0
CONNECTIONS_PER_CALL = 500
"""An engine that serves one call at a time serves others between two such calls."""


class DeviceConnection(NamedTuple):
    """A device's connection to a gateway. ``since`` is 0 until it is registered;
    ``opened``: when it opened by the registry's clock, 0 if its node does not know.
    """

    user: User
    device_id: str
    connection_id: str
    since: int = 0
    opened: int = 0


class Displacement(NamedTuple):
    """A connection that lost its device to a newer one, or was one too many."""

    gateway: str
    connection_id: str


class Registration(Struct, frozen=True):
    """What a registration changed. ``since`` is by connection id; ``online`` are the
    users who had no connection anywhere, and when that changed by the registry's clock.
    """

    since: Mapping[str, int]
    displaced: Sequence[Displacement]
    online: Mapping[User, int]


class Renewal(Struct, frozen=True):
    """The registry's answer to a gateway that lives."""

    changes: int
    """Calls by which the gateway changed its connections, as counted here."""
    displaced: Sequence[str]
    """Its connections that were displaced and that it has not unregistered."""
    gateways: int
    """Gateways that live, this one included."""
    at: int
    """The registry's time, above all that this node was given."""


class Registry(Protocol):
    """Adapters: memory, Redis, PostgreSQL. Every call may raise Unavailable, or
    OutcomeUnknown if it may have happened; every call may be repeated.
    """

    async def register(
        self, gateway: str, connections: Sequence[DeviceConnection], devices_max: int
    ) -> Registration:
        """Record these connections, at most ``CONNECTIONS_PER_CALL``, in this order.

        A user keeps at most ``devices_max`` devices. A connection that is older than
        the device's own is itself displaced.
        """
        ...

    async def unregister(
        self, gateway: str, connections: Sequence[DeviceConnection]
    ) -> Mapping[User, int]:
        """Remove these connections, at most ``CONNECTIONS_PER_CALL``. Which of their
        users have no connection now, and since when by the registry's clock.

        A device that has another connection by now keeps it. The answer is the same for
        a connection that is not recorded any more, so a call may be repeated.
        """
        ...

    async def renew(self, gateway: str) -> Renewal:
        """The gateway lives for ``LIVE_SECONDS`` more."""
        ...

    async def connections_of(self, gateway: str) -> Sequence[DeviceConnection]:
        """Everything that is recorded for a gateway."""
        ...

    async def leave(self, gateway: str) -> Mapping[User, int]:
        """Remove a gateway and all its connections. Which users have none left."""
        ...

    async def sweep(self) -> Mapping[User, int]:
        """Remove the gateways that are dead. Which users have no connection left."""
        ...

    async def gateways_of(self, users: Iterable[User]) -> Mapping[str, Set[User]]:
        """For each gateway, which of ``users`` it holds."""
        ...
