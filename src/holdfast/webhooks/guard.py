"""Which addresses a webhook may call: public ones, checked when the connection is made, not when the URL is given.

A name that resolves to a private address, now or later, is refused at connect time: what was checked is what is
connected to, so a name that changes its mind in between (DNS rebinding) gains nothing.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

from holdfast.errors import InvalidMessage

URL_LENGTH_MAX = 2000
_NAT64 = IPv6Network("64:ff9b::/96")
_NAT64_LOCAL = IPv6Network("64:ff9b:1::/48")
_COMPATIBLE = IPv6Network("::/96")
_PROTOCOLS = IPv4Network("192.0.0.0/24")


class RefusedAddress(OSError):
    """The address is not public."""


def is_public(address: str) -> bool:
    """Whether it is a public unicast address; one that carries an IPv4 address is judged by that."""
    found: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        if found.is_site_local or found in _NAT64_LOCAL:
            return False
        found = _inner(found) or found
    return found.is_global and not found.is_multicast and not found.is_reserved and found not in _PROTOCOLS


def _inner(address: IPv6Address) -> IPv4Address | None:
    if address in _NAT64 or address in _COMPATIBLE:
        return IPv4Address(address.packed[-4:])
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)


def check_url(url: str, *, private_allowed: bool) -> None:
    """InvalidMessage unless it is an URL a webhook may have."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidMessage("the URL of a webhook is malformed", field="url") from None
    if len(url) > URL_LENGTH_MAX or not parts.hostname or port == 0:
        raise InvalidMessage("a webhook needs an absolute URL with a host", field="url")
    if parts.username or parts.password or parts.fragment:
        raise InvalidMessage("a webhook's URL carries no credentials and no fragment", field="url")
    if parts.scheme != "https" and not (parts.scheme == "http" and private_allowed):
        raise InvalidMessage("a webhook's URL begins with https://", field="url")
    if not private_allowed and _is_private_literal(parts.hostname):
        raise InvalidMessage("a webhook's address must be public", field="url")


def _is_private_literal(host: str) -> bool:
    try:
        return not is_public(host)
    except ValueError:
        return False
