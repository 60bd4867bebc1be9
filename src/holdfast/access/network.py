"""Headers, origins and client addresses of a request. (Pure.)"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address

Network = IPv4Network | IPv6Network
FORWARDED_HOPS_MAX = 32
ADDRESSES_MAX = 4096
"""Addresses whose group is cached: a connection asks for it three times."""


GIVEN_ONCE = {
    name.lower().encode(): name
    for name in (
        "Host", "Authorization", "Content-Type", "Idempotency-Key", "Origin", "X-Act-As",
        "X-Device-ID", "Sec-WebSocket-Key", "Sec-WebSocket-Version", "Sec-WebSocket-Protocol",
        "Sec-WebSocket-Extensions", "X-API-Key", "Last-Event-ID", "Prefer",
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
    if not forwarded_for or not is_within(peer, proxies):
        return peer
    hops = [
        hop.strip() for hop in forwarded_for.rsplit(",", FORWARDED_HOPS_MAX)[-FORWARDED_HOPS_MAX:]
    ]
    address = peer
    while hops and is_within(address, proxies):
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


def is_within(address: str, networks: Collection[Network]) -> bool:
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
