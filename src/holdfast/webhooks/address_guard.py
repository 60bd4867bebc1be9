"""Which addresses a webhook may call: public ones only. (Pure.)

``is_public`` judges the address that the socket connects to, whether it was resolved
from a name or written in the URL. So neither DNS rebinding nor an unusual spelling
(``①27.0.0.1``) gets around it. ``check_url`` merely reports a bad URL early.
"""

from __future__ import annotations

import errno
import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from holdfast.errors import InvalidMessage

URL_LENGTH_MAX = 2000
HOST_LENGTH_MAX = 253
LABEL_LENGTH_MAX = 63
_NAT64 = IPv6Network("64:ff9b::/96")
_NAT64_LOCAL = IPv6Network("64:ff9b:1::/48")
_COMPATIBLE = IPv6Network("::/96")
_PROTOCOLS = IPv4Network("192.0.0.0/24")

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?")
_ENDS_IN_A_NUMBER = re.compile(r"(.*\.)?([0-9]+|0x[0-9a-f]*)\.?")
"""Some resolvers read such a host as an IPv4 address (``2130706433``, ``0x7f.1``)."""


class RefusedAddress(OSError):
    """The address is not public. The error does not name it: that would let a caller
    resolve internal names."""

    def __init__(self) -> None:
        super().__init__(errno.EACCES, "the address is not public")


def is_public(address: str) -> bool:
    """Whether it is a public unicast address; an embedded IPv4 address decides."""
    found: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        if found.is_site_local or found in _NAT64_LOCAL:
            return False
        found = _inner(found) or found
    return (
        found.is_global
        and not found.is_multicast
        and not found.is_reserved
        and found not in _PROTOCOLS
    )


def _inner(address: IPv6Address) -> IPv4Address | None:
    if address in _NAT64 or address in _COMPATIBLE:
        return IPv4Address(address.packed[-4:])
    return (
        address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
    )


def check_url(url: str, *, private_allowed: bool) -> None:
    """InvalidMessage unless a webhook may have this URL.

    It uses the URL parser of the HTTP client that makes the call.
    """
    from yarl import URL  # most servers have no webhook, and it is slow to import

    try:
        parts = URL(url)
    except ValueError:
        raise InvalidMessage("the URL of a webhook is malformed", field="url") from None
    if len(url) > URL_LENGTH_MAX or not parts.raw_host or parts.explicit_port == 0:
        raise InvalidMessage("a webhook needs an absolute URL with a host", field="url")
    if parts.raw_user or parts.raw_password or parts.raw_fragment:
        raise InvalidMessage("a webhook's URL carries no credentials and no fragment", field="url")
    _check_host(parts.raw_host)
    if parts.scheme != "https" and not (parts.scheme == "http" and private_allowed):
        raise InvalidMessage("a webhook's URL begins with https://", field="url")
    if not private_allowed and not _may_be_public(parts.raw_host):
        raise InvalidMessage("a webhook's address must be public", field="url")


def _check_host(host: str) -> None:
    """InvalidMessage if no host can have this name; else only the lookup would fail."""
    try:
        ip_address(host.partition("%")[0])
        return
    except ValueError:
        pass
    name = host.removesuffix(".")
    if len(name) > HOST_LENGTH_MAX:
        raise _impossible(f"it has {len(name)} characters, at most {HOST_LENGTH_MAX} can be")
    for label in name.split("."):
        if not label:
            raise _impossible("it has an empty label")
        if len(label) > LABEL_LENGTH_MAX:
            raise _impossible(
                f"a label has {len(label)} characters, at most {LABEL_LENGTH_MAX} can be"
            )
        if not _LABEL.fullmatch(label):
            raise _impossible(
                f"a label has letters, digits and hyphens between them, unlike {label!r}"
            )
        if label.startswith("xn--") and not _decodes(label):
            raise _impossible(f"the international label {label!r} cannot be decoded")


def _decodes(label: str) -> bool:
    try:
        return not label[4:].encode().decode("punycode").isascii()
    except UnicodeError:
        return False


def _impossible(why: str) -> InvalidMessage:
    return InvalidMessage(f"the host of the URL cannot exist: {why}", field="url")


def _may_be_public(host: str) -> bool:
    """Whether the host is a public address, or a name that may resolve to one."""
    try:
        return "%" not in host and is_public(host)
    except ValueError:
        return not _ENDS_IN_A_NUMBER.fullmatch(host)
