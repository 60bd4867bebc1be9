"""The engines that the nodes of a cluster share, by URL, and the roles of a node.
(Pure: values.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qs, urlsplit

from holdfast.drivers.redis_url import check_redis_url, is_this_machine
from holdfast.errors import InvalidMessage, Unavailable

ROLES = ("gateway", "ingest", "streaming", "work", "admin")
"""What a node can do, and what one that is alone does."""
_WITH_KAFKA = frozenset({"relay", "fanout"})


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
            check_postgres_url("postgres", self.postgres)
        if self.redis:
            check_redis_url(self.redis)
        if self.failover == "lossless" and not self.postgres:
            raise ValueError("failover is about cluster.postgres, which is not set")

    def check_others(self, roles: tuple[str, ...], work_url: str, rules_url: str) -> None:
        """ValueError if other settings cannot work with these."""
        if not self.postgres:
            if set(roles) != set(ROLES):
                raise ValueError(
                    "server.roles needs cluster.postgres: a node that is alone has every role"
                )
            return
        for name, url, why in (
            ("work.url", work_url, "whichever node reads the log next repeats all webhooks"),
            ("limits.rules_url", rules_url, "each node has rules of its own"),
        ):
            if url == "sqlite:":
                raise ValueError(
                    f"{name} is a file of one node (sqlite:), and cluster.postgres is set: then"
                    f" {why}; leave {name} out"
                )


def check_roles(roles: tuple[str, ...]) -> None:
    """ValueError unless a node can have these and no others."""
    known = f"the roles are {', '.join(ROLES)}"
    if not roles:
        raise ValueError(f"roles names none: {known}")
    for role in roles:
        if role in _WITH_KAFKA:
            raise ValueError(
                f"the role {role} comes with Kafka, which this version does not have: take it out"
            )
        if role not in ROLES:
            raise ValueError(f"there is no role {role}: {known}")
        if roles.count(role) > 1:
            raise ValueError(f"the role {role} is named twice")
    if "gateway" in roles and "ingest" not in roles:
        raise ValueError(
            "the role gateway needs ingest: a node stores what its own connections send"
        )


class MissingRole(Unavailable):
    """Other nodes serve the request, and a proxy may try them; here it fails again."""

    retryable = False


def missing_role(role: str) -> MissingRole:
    return MissingRole(f"this node does not have the role {role} (server.roles): ask another node")


def backups_are_those_of_postgres() -> InvalidMessage:
    """Why a node of a cluster takes no backup of its files, and puts none in place."""
    return InvalidMessage(
        "this is a node of a cluster, whose chats are in PostgreSQL: back it up with its own"
        " tools (pg_dump, pg_basebackup), and copy access.tokens.secret_file; after a restore run"
        " `holdfast chat raise-epochs`, so that clients read their chats again"
    )


def check_postgres_url(name: str, url: str) -> None:
    """ValueError if it is no URL of PostgreSQL, or would send everything in clear text
    to another machine without saying so. ``name``: of the setting.
    """
    if not url.startswith(("postgresql://", "postgres://")):
        raise ValueError(f"{name} must begin with postgresql://")
    try:
        address = urlsplit(url)
        asked, hosts = parse_qs(address.query), _hosts(address.netloc)
    except ValueError:
        raise ValueError(
            f"{name} is no URL: a port is a number, and characters such as / # ? @ in a password"
            " are written as %XX"
        ) from None
    hosts += [host for value in asked.get("host", ()) for host in value.split(",")]
    remote = [host for host in hosts if not is_this_machine(host)]
    if remote and "sslmode" not in asked:
        raise ValueError(
            f"{name} is on another machine ({remote[0]}): add ?sslmode=verify-full, or"
            " ?sslmode=disable if the network is yours alone"
        )


def _hosts(netloc: str) -> list[str]:
    """The hosts of ``user:password@host:port,host:port``. ValueError if a port is none:
    it may be part of a password.
    """
    found = []
    for each in netloc.rpartition("@")[2].split(","):
        host, _, port = each.rpartition("]") if each.startswith("[") else each.partition(":")
        if port.removeprefix(":") and not port.removeprefix(":").isdecimal():
            raise ValueError
        found.append(host.removeprefix("["))
    return found
