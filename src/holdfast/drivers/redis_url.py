"""Addresses of Redis in settings: one server, or a service behind Sentinel. (Pure.)

    redis://[user:password@]host[:port]/db         rediss://… with TLS, unix://path?db=0
    redis+sentinel://[user:password@]host[:port],host[:port]/service[/db]

User and password are those of the Redis servers. Sentinels with credentials of their
own get them from ``?sentinel_username=…&sentinel_password=…``. ``rediss+sentinel://``
is TLS to the sentinels and to the servers. Passwords may be in files instead:
``?password_file=…&sentinel_password_file=…``.

Without TLS a server on another machine is refused, unless the URL says that this is
meant: ``?sslmode=disable``.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

SERVER_SCHEMES = ("redis", "rediss", "unix")
SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
SENTINEL_PORT = 26379
OWN_OPTIONS = ("sslmode", "password_file", "sentinel_password_file")
"""Those in the query that are ours; the others are redis-py's."""
_HERE = frozenset({"", "localhost", "127.0.0.1", "::1"})


class SentinelAddress(NamedTuple):
    """Sentinels, their service, and how to reach its servers.

    ``server_url`` holds an address that is replaced by the current primary's.
    """

    sentinels: tuple[tuple[str, int], ...]
    service: str
    server_url: str
    username: str | None
    password: str | None


def check_redis_url(url: str) -> None:
    """ValueError if it is not a valid address.

    The error quotes no part of the URL, which may be part of a password.
    """
    scheme = url.partition("://")[0]
    if scheme in SENTINEL_SCHEMES:
        service = sentinel_address(split_options(url)[0])
        assert service is not None
        _check_encrypted(url, [host for host, _ in service.sentinels])
        return
    if "://" not in url or scheme not in SERVER_SCHEMES:
        raise ValueError(
            "a URL of Redis begins with redis://, rediss://, unix://, redis+sentinel:// or"
            " rediss+sentinel://"
        )
    try:
        port = urlsplit(url).port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError(
            "the URL of Redis has no valid port; characters such as / # ? @ in a password are"
            " written as %XX"
        )
    if scheme != "unix":
        _check_encrypted(url, [urlsplit(url).hostname or ""])


def is_this_machine(host: str) -> bool:
    return host in _HERE or host.startswith("/")


def _check_encrypted(url: str, hosts: list[str]) -> None:
    mode = split_options(url)[1].get("sslmode")
    if mode not in (None, "disable"):
        raise ValueError("sslmode of a URL of Redis can only be disable; TLS is rediss://")
    remote = not all(map(is_this_machine, hosts))
    if remote and mode is None and not url.startswith("rediss"):
        raise ValueError(
            "Redis is on another machine and would get everything in clear text: use rediss://"
            " (rediss+sentinel://), or add ?sslmode=disable if the network is yours alone"
        )


def split_options(url: str) -> tuple[str, dict[str, str]]:
    """The URL without our own options, and these."""
    before, mark, query = url.partition("?")
    given = [each.partition("=") for each in query.split("&") if each]
    ours = {name: unquote(value) for name, _, value in given if name in OWN_OPTIONS}
    rest = "&".join("".join(each) for each in given if each[0] not in OWN_OPTIONS)
    return (f"{before}{mark}{rest}" if rest else before), ours


def sentinel_address(url: str) -> SentinelAddress | None:
    """None if the URL names a server directly. ValueError as ``check_redis_url``."""
    scheme, _, rest = url.partition("://")
    if scheme not in SENTINEL_SCHEMES:
        return None
    rest, _, query = rest.partition("?")
    address, _, path = rest.partition("/")
    credentials, at, hosts = address.rpartition("@")
    service, _, db = path.partition("/")
    if not service or not (db or "0").isdecimal():
        raise ValueError(
            "after the sentinels of a redis+sentinel:// URL come /service and, if it is not 0, /db"
        )
    options = dict(parse_qsl(query))
    username, password = (
        options.pop("sentinel_username", None),
        options.pop("sentinel_password", None),
    )
    server = (
        f"{scheme.partition('+')[0]}://{credentials}{at}sentinel/{db or 0}?{urlencode(options)}"
    )
    sentinels = tuple(_sentinel(host) for host in hosts.split(","))
    return SentinelAddress(sentinels, unquote(service), server, username, password)


def secrets_of(url: str) -> list[str]:
    """Every password in the URL, percent-encoded and decoded; the longest first."""
    _, _, rest = url.partition("://")
    written = [rest.rpartition("@")[0].partition(":")[2]]
    query = rest.partition("?")[2].split("&")
    written += [
        value
        for name, _, value in (each.partition("=") for each in query)
        if name.endswith("password")
    ]
    return sorted(
        {secret for each in written if each for secret in (each, unquote(each))},
        key=len,
        reverse=True,
    )


def _sentinel(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if address.endswith("]") or not colon:  # an IPv6 address in brackets, or a name alone
        host, port = address, str(SENTINEL_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError("the sentinels of a redis+sentinel:// URL are host:port,host:port")
    return host.strip("[]"), int(port)
