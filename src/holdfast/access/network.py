"""Origins, client addresses, and how many connections may be open. (Pure: the caller
brings the time.)

All maps here are bounded; each says what happens at its bound.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address

from holdfast.bounds import positive
from holdfast.resilience import Bucket

Network = IPv4Network | IPv6Network
FORWARDED_HOPS_MAX = 32
ADDRESSES_MAX = 4096
"""Addresses whose group is cached: a connection asks for it three times."""


GIVEN_ONCE = {
    name.lower().encode(): name
    for name in (
        "Host", "Authorization", "Content-Type", "Idempotency-Key", "Origin", "X-Act-As",
        "X-Device-ID", "Sec-WebSocket-Key", "Sec-WebSocket-Version", "Sec-WebSocket-Protocol",
        "Sec-WebSocket-Extensions",
    )
}  # fmt: skip
"""Headers about the caller or the request. A repeated one is ambiguous, and a proxy may
have decided by the other value."""


def joined_headers(
    headers: Iterable[tuple[bytes, bytes]],
) -> tuple[dict[bytes, bytes], list[bytes]]:
    """Header values by name (in lower case, as given), and the repeated names.

    The values of a repeated header are joined as HTTP joins them.
    """
    joined: dict[bytes, bytes] = {}
    repeated = []
    for name, value in headers:
        if name in joined:
            repeated.append(name)
            value = joined[name] + b"," + value
        joined[name] = value
    return joined, repeated


def repeated_header(repeated: Iterable[bytes]) -> str | None:
    """The first of these names (in lower case) that must not be repeated, or None."""
    return next((GIVEN_ONCE[name] for name in repeated if name in GIVEN_ONCE), None)


def origin_allowed(origin: str | None, allowed: Collection[str]) -> bool:
    """Whether a browser page of this origin may open a socket: exact match, no
    patterns.

    A client without an Origin header is no browser, and only its credential counts.
    Sandboxed pages send "null", which is refused unless listed.
    """
    return origin is None or origin in allowed


def client_ip(peer: str, forwarded_for: str, proxies: Collection[Network]) -> str:
    """The address of the client: the nearest hop that is not a declared proxy.

    ``forwarded_for`` is X-Forwarded-For, several joined by commas. It is read from the
    right and only as far as declared proxies vouch for it, because the client can write
    anything to the left of that.
    """
    if not forwarded_for or not _is_within(peer, proxies):
        return peer
    hops = [
        hop.strip() for hop in forwarded_for.rsplit(",", FORWARDED_HOPS_MAX)[-FORWARDED_HOPS_MAX:]
    ]
    address = peer
    while hops and _is_within(address, proxies):
        nearer = hops.pop()
        if _parse(nearer) is None:
            break
        address = nearer
    return address


def _parse(address: str) -> object | None:
    try:
        return ip_address(address)
    except ValueError:
        return None


def _is_within(address: str, networks: Collection[Network]) -> bool:
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped:
        parsed = parsed.ipv4_mapped
    return any(parsed in network for network in networks)


@lru_cache(ADDRESSES_MAX)
def address_group(address: str) -> str:
    """The key by which an address is counted: IPv6 by /64, which one customer holds."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address):
        if parsed.ipv4_mapped:
            return str(parsed.ipv4_mapped)
        return str(IPv6Address(int(parsed) >> 64 << 64)) + "/64"
    return str(parsed)


class Buckets:
    """A token bucket per key, for at most ``keys_max`` keys; then the least recently
    used is forgotten.

    A forgotten key starts with a full bucket again. An attacker with more than
    ``keys_max`` keys is beyond what counting per key can stop.
    """

    def __init__(self, rate_per_second: float, burst: int, keys_max: int = 20_000) -> None:
        if rate_per_second <= 0 or burst < 1 or keys_max < 1:
            raise ValueError(
                "rate_per_second must be greater than 0, burst and keys_max at least 1"
            )
        self._rate = rate_per_second
        self._burst = burst
        self._keys_max = keys_max
        self._buckets: OrderedDict[object, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: object, now: float) -> float:
        """Take one token: 0.0 if allowed, else the seconds to wait."""
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._keys_max:
                self._buckets.popitem(last=False)
            bucket = self._buckets[key] = Bucket(self._rate, self._burst, now)
        else:
            self._buckets.move_to_end(key)
        return bucket.take(now)


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

    connections_max: int = 20_000
    """HTTP connections of this node: all that are no WebSocket (yet). The next: 503 +
    Retry-After before it has asked, and it is closed.
    """
    per_address_max: int = 4_000
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
        if self._addresses[address_group(peer)] >= self._limits.per_address_max and not _is_within(
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
