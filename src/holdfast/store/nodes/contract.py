"""The seam of node records, which live in the engine of the data.

A name belongs to one living node: jobs, leases and the audit log name nodes. A record
is renewed every ``RENEW_SECONDS``, and counts for ``LIVE_SECONDS``. One that was
neither renewed nor ended is of a node that is gone. A record also says how many
connections of the database its node may take, so that a node is refused for which there
are too few, before it takes those of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from msgspec import Struct

RENEW_SECONDS = 5.0
LIVE_SECONDS = 15.0
GONE_SECONDS = 3600.0
"""A node that is gone is named for this long, or until a node of its name is back."""

Role = Literal["gateway", "ingest", "streaming", "work", "admin"]
"""What a node does; see ``holdfast.settings.ServerSettings.roles``."""


class NodeRecord(Struct, frozen=True):
    """What the other nodes and an operator know of a node."""

    name: str
    version: str
    roles: tuple[str, ...]
    address: str
    connections: int
    """Of the database: how many it may take at most."""
    clients: int
    """WebSocket connections that are open."""
    lag: int
    """Entries of the log that it has not read yet."""
    settings: Mapping[str, str]
    """Those that nodes should share and that are not at their defaults, without
    secrets."""
    digest: str
    """Of the same settings."""


class LivingNode(Struct, frozen=True):
    """``age_seconds``: since its record was renewed."""

    record: NodeRecord
    age_seconds: float


class GoneNode(Struct, frozen=True):
    """A node that ended without a planned stop, or hangs. ``record``: its last, renewed
    at ``since``, which was ``age_seconds`` ago.
    """

    record: NodeRecord
    since: str
    age_seconds: float


class ConnectionSum(NamedTuple):
    """Connections of the database: what all living nodes may take, and what the server
    has for them.
    """

    wanted: int
    available: int


class LeaseView(Struct, frozen=True):
    """A lease that somebody holds."""

    name: str
    holder: str
    seconds_left: float


class DatabaseView(Struct, frozen=True):
    """The database of a cluster as a node has found it."""

    version: str
    system: str
    """The server's system identifier, and the timeline that it writes."""
    timeline: int
    epoch_base: int
    """The base of all epochs: it rises when commits may be lost."""
    failover: Literal["undeclared", "lossless"]
    standbys: str
    """``synchronous_standby_names`` of the server."""
    connections: ConnectionSum


class Nodes(Protocol):
    """Adapters: memory, PostgreSQL. Every call may raise Unavailable."""

    async def join(self, record: NodeRecord) -> None:
        """Take the record's name, until ``leave`` or the end of the process.

        BadSetting if another living node has it, or if the database has too few
        connections for all nodes; nothing is kept then.
        """
        ...

    async def renew(self, record: NodeRecord) -> ConnectionSum | None:
        """The node lives for ``LIVE_SECONDS`` more; None if it has no database.

        BadSetting if its name was lost to another node: the connection that held it
        broke, and the other one was first.
        """
        ...

    async def leave(self) -> None:
        """End the record; harmless if it is repeated."""
        ...

    async def living(self) -> Sequence[LivingNode]:
        """By name."""
        ...

    async def gone(self) -> Sequence[GoneNode]:
        """By name; those that did not ``leave``."""
        ...

    async def leases(self) -> Sequence[LeaseView]:
        """By name; those that nodes hold now."""
        ...

    async def database(self) -> DatabaseView | None:
        """None if the node has no database that others share."""
        ...
