"""The engines that the nodes of a cluster share, by URL. (Pure: values.)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qs, urlsplit

from holdfast.drivers.redis_url import check_redis_url

_HERE = frozenset({"", "localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What several nodes share."""

    postgres: str = ""
    """One PostgreSQL for all nodes: chats, their log, API keys, revocations, webhook
    endpoints; and, unless ``work.url`` and ``limits.rules_url`` say otherwise, jobs and
    rules. ``postgresql://user@host/database?sslmode=verify-full``. Left empty: this
    node keeps everything in its state directory.
    """
    redis: str = ""
    """One Redis for all nodes: who is online where, typing and receipts between nodes,
    and the pool of AI replies; and, unless ``streaming.replies_url`` and
    ``limits.counters_url`` say otherwise, the replies themselves and the counters of
    limits. ``redis://``, ``rediss://`` or ``redis+sentinel://``. Left empty:
    ``cluster.postgres``, if it is set, knows who is online; each node counts by itself
    and has a pool of its own.
    """
    failover: Literal["undeclared", "lossless"] = "undeclared"
    """``lossless``: you promise that a failover of PostgreSQL loses no commit
    (synchronous replication); then chats keep their epochs, and sends are refused while
    there is no synchronous standby. Otherwise every failover raises all epochs, and
    clients read their chats again.
    """

    def __post_init__(self) -> None:
        if self.postgres:
            check_postgres_url(self.postgres)
        if self.redis:
            check_redis_url(self.redis)
        if self.failover == "lossless" and not self.postgres:
            raise ValueError("failover is about cluster.postgres, which is not set")


def check_postgres_url(url: str) -> None:
    """ValueError if it is no URL of PostgreSQL, or would send everything in clear text
    to another machine without saying so.
    """
    if not url.startswith(("postgresql://", "postgres://")):
        raise ValueError("postgres must begin with postgresql://")
    try:
        address = urlsplit(url)
        asked, hosts = parse_qs(address.query), _hosts(address.netloc)
    except ValueError:
        raise ValueError("postgres is no URL: percent-encode the password") from None
    hosts += [host for value in asked.get("host", ()) for host in value.split(",")]
    remote = [host for host in hosts if host not in _HERE and not host.startswith("/")]
    if remote and "sslmode" not in asked:
        raise ValueError(
            f"postgres is on another machine ({remote[0]}): add ?sslmode=verify-full, or"
            " ?sslmode=disable if the network is yours alone"
        )


def _hosts(netloc: str) -> list[str]:
    """The hosts of ``user:password@host:port,host:port``."""
    found = []
    for each in netloc.rpartition("@")[2].split(","):
        host = each[1:].partition("]")[0] if each.startswith("[") else each.partition(":")[0]
        found.append(host)
    return found
