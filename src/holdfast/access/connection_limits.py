"""How many connections may be open. (Pure.)

All maps here are bounded; each says what happens at its bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from holdfast.access.network import Network, address_group, is_within
from holdfast.bounds import positive


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections may be open at once. (How many per user is the session's:
    the oldest makes room.)
    """

    connections_max: int = 100_000
    """Connections of this node. The next handshake: 503 + Retry-After."""
    per_address_max: int = 10_000
    """Of one address (IPv6: of one /64). The next handshake: 503 + Retry-After.
    """
    per_tenant_max: int = 100_000
    """Connections of one tenant. The next handshake: 503 + Retry-After."""

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)


class ConnectionCounts:
    """Open connections by address and by tenant, at most ``connections_max``
    entries."""

    def __init__(self, limits: ConnectionLimits | None = None) -> None:
        self._limits = limits or ConnectionLimits()
        self._addresses: Counter[str] = Counter()
        self._tenants: Counter[str] = Counter()
        self.total = 0

    def open(self, address: str, tenant: str) -> str | None:
        """Count one more, or count nothing and return which limit is reached.

        ``tenant`` "" means not known yet.
        """
        group = address_group(address)
        if self.total >= self._limits.connections_max:
            return f"this node holds its {self._limits.connections_max} connections"
        if self._addresses[group] >= self._limits.per_address_max:
            return f"this address holds its {self._limits.per_address_max} connections"
        if full := self._full(tenant):
            return full
        self._addresses[group] += 1
        self._tenants[tenant] += 1
        self.total += 1
        return None

    def identify(self, tenant: str) -> str | None:
        """Count a connection for its tenant, now known, or return the limit reached."""
        if full := self._full(tenant):
            return full
        self._tenants[tenant] += 1
        _less(self._tenants, "")
        return None

    def close(self, address: str, tenant: str) -> None:
        """A connection that ``open`` counted has ended."""
        self.total -= 1
        _less(self._addresses, address_group(address))
        _less(self._tenants, tenant)

    def _full(self, tenant: str) -> str | None:
        """The limit a tenant has reached. Connections whose tenant is not known yet are
        bounded by address and by the time to authenticate."""
        if not tenant or self._tenants[tenant] < self._limits.per_tenant_max:
            return None
        return f"this tenant holds its {self._limits.per_tenant_max} connections"


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """How many connections may speak HTTP at once: all that have not become a
    WebSocket, kept or new.
    """

    connections_max: int = 32_000
    """HTTP connections of this node: all that are no WebSocket (yet). The next: 503 +
    Retry-After before it has asked, and it is closed.
    """
    per_address_max: int = 10_000
    """HTTP connections from one address (IPv6: one /64), as the socket shows it:
    X-Forwarded-For comes with a request, later. Not for declared proxies, whose
    connections serve many people; bound those at the proxy. The next: 503 +
    Retry-After, closed.
    """

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)


class HttpCounts:
    """Open HTTP connections by the peer's address: their users are not known yet.

    Connections of a declared proxy serve many users, so only the total bounds them.
    """

    def __init__(self, limits: HttpLimits, proxies: Collection[Network] = ()) -> None:
        self._limits = limits
        self._proxies = proxies
        self._addresses: Counter[str] = Counter()
        self.total = 0

    def open(self, peer: str) -> str | None:
        """Count one more, or count nothing and return which limit is reached."""
        if self.total >= self._limits.connections_max:
            return f"this node holds its {self._limits.connections_max} HTTP connections"
        if self._addresses[address_group(peer)] >= self._limits.per_address_max and not is_within(
            peer, self._proxies
        ):
            return f"this address holds its {self._limits.per_address_max} HTTP connections"
        self._addresses[address_group(peer)] += 1
        self.total += 1
        return None

    def close(self, peer: str) -> None:
        """A connection that ``open`` counted has ended or become a WebSocket."""
        self.total -= 1
        _less(self._addresses, address_group(peer))


def _less(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if counts[key] <= 0:
        del counts[key]
