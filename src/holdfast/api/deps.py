"""What the node gives the API: contracts and plain functions.

And the API's settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from holdfast.access.keys import KeyRing
from holdfast.access.revocations.in_force import RevocationsInForce
from holdfast.access.tickets import ReplyTickets
from holdfast.access.tokens import Tokens
from holdfast.bounds import KIB, positive
from holdfast.clock import Clock, Ids
from holdfast.drivers.cluster import ROLES
from holdfast.drivers.sqlite.file_copy import CopiedFile
from holdfast.eventlog.contract import SharedLog
from holdfast.fanout.dead_letters import DeadLetters
from holdfast.history.history import ChatHistory
from holdfast.ingest.contract import Durability, Sends
from holdfast.ingest.erasure import Eraser
from holdfast.limits.composition import LimitsParts
from holdfast.message import User
from holdfast.session.settings import PageSettings
from holdfast.store.contract import ChatStore, HaltedChats, Records
from holdfast.store.nodes.contract import DatabaseView, LeaseView
from holdfast.streaming.body_bytes import BodyBytes
from holdfast.streaming.parts import StreamingParts
from holdfast.streaming.usage_store.contract import UsageStore
from holdfast.telemetry.notices import AlertView, Silence
from holdfast.telemetry.objectives import MeasuredObjective
from holdfast.webhooks.alert_sinks import SinkStatus
from holdfast.webhooks.parking import ParkedStatus
from holdfast.webhooks.parts import WorkParts
from holdfast.wire.frames import Presence

T = TypeVar("T")
_Record = Callable[[], Awaitable[None]]
"""Writes to the audit log."""


class PresenceView(Struct, frozen=True):
    """Who is online. ``stale``: the source could not be asked; users that it did not
    report are left out.
    """

    users: Sequence[Presence]
    stale: bool = False


class Readiness(Struct, frozen=True):
    """Whether this node can serve, and each dependency's state: "up", "down", …"""

    ready: bool
    dependencies: Mapping[str, str]


class ClusterNode(Struct, frozen=True):
    """A living node. ``connections``: of PostgreSQL, which it may take at most.
    ``age_seconds``: since it renewed its record, every 5 s.
    """

    name: str
    version: str
    roles: Sequence[str]
    address: str
    clients: int
    lag: int
    connections: int
    age_seconds: float
    settings_digest: str


class ClusterNodeGone(Struct, frozen=True):
    """A node that ended without a planned stop, or hangs: it renewed its record last at
    ``since``. It is named for an hour, or until a node of its name is back.
    """

    name: str
    version: str
    address: str
    since: str
    age_seconds: float


class RegistryView(Struct, frozen=True):
    """Where nodes look up who is connected where, and whether it answers."""

    engine: str
    state: str
    detail: str


class DeadByReason(Struct, frozen=True):
    """How many dead letters there are, by reason; null if their store does not say."""

    fanout: Mapping[str, int] | None
    jobs: Mapping[str, int] | None


class Disk(Struct, frozen=True):
    bytes: int
    free_bytes: int


class NodeStatus(Struct, frozen=True):
    """A node, first what is wrong with it. ``unknown``: what is null because its store
    did not answer in time. ``dead_letters``: the newest of fanout.
    """

    ok: bool
    alerts: Sequence[AlertView]
    pending: Sequence[AlertView]
    halted_chats: HaltedChats | None
    dead_by_reason: DeadByReason
    disk: Disk
    unknown: Sequence[str]
    version: str
    node_id: str
    started_at: str
    ready: bool
    dependencies: Mapping[str, str]
    trouble: Mapping[str, str]
    connections: int
    users: int
    nodes: Mapping[str, Any] | None
    sends_waiting: int
    hot_chats: Mapping[str, int]
    hot_messages_per_minute: int
    fanout_lag: int | None
    dead_letters: Sequence[Mapping[str, Any]]
    issuers: Mapping[str, Any]
    limits: Mapping[str, Any]
    webhooks: ParkedStatus
    replies: Mapping[str, Any]
    settings: Mapping[str, str]


class ClusterStatus(Struct, frozen=True):
    """All living nodes, as ``node_id`` sees them, and what they share.

    ``differing_settings``: by path and node, null where it is the default. ``database``
    is null for a node that is alone, and if it does not answer.
    """

    node_id: str
    nodes: Sequence[ClusterNode]
    gone: Sequence[ClusterNodeGone]
    differing_settings: Mapping[str, Mapping[str, str | None]]
    database: DatabaseView | None
    registry: RegistryView
    leases: Sequence[LeaseView]
    problems: Sequence[str]


class BackupStep(Struct, frozen=True):
    """What the backup that is being taken is at; the bytes are those of this step."""

    doing: str
    done_bytes: int
    total_bytes: int


class BackupRun(Struct, frozen=True):
    """``step`` is null when no backup is being taken."""

    step: BackupStep | None


class Backup(Struct, frozen=True):
    """A complete backup: its folder on the server, and what it holds."""

    path: str
    size_bytes: int
    taken_at: str
    files: Sequence[CopiedFile]


class Recent(Generic[T]):
    """Caches a source's answer for ``seconds``.

    Concurrent callers share one question.
    """

    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds = seconds
        self._asked: tuple[asyncio.Task[T], float] | None = None

    async def ask(self, source: Callable[[], Coroutine[Any, Any, T]], now: float) -> T:
        """A cancelled caller leaves the question running for the others."""
        asked = self._asked
        if asked is None or (asked[0].done() and now - asked[1] >= self._seconds):
            asked = self._asked = (asyncio.create_task(source()), now)
        return await asyncio.shield(asked[0])


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Bounds of the REST surface."""

    body_bytes_max: int = 64 * KIB
    """A longer request body: 413, and it is not read."""
    body_seconds_max: float = 10
    """A body that takes longer to arrive: 400."""
    request_seconds_max: float = 5
    """The deadline of a REST request; everything behind it gets what is left."""
    failed_logins_per_minute: int = 600
    """Per address; beyond it a bad credential is answered 429 instead of 401."""
    unauthenticated_per_minute: int = 1200
    """Requests without a credential, per address (IPv6: per /64). Above: 429 +
    Retry-After. This machine and declared proxies may always ask for health.
    """
    unauthenticated_burst: int = 300
    """How many of them may come at once before the rate counts."""
    metrics_without_key: bool = False
    """Serve /metrics to anybody who can reach the port."""
    legacy_rate_limit_headers: bool = False
    """Also send X-RateLimit-Limit, -Remaining and -Reset.
    """

    def __post_init__(self) -> None:
        positive(
            self, *(name for name in self.__slots__ if not isinstance(getattr(self, name), bool))
        )


class Alerts(Protocol):
    """The alerts of this node; implemented by ``node.alerts``."""

    @property
    def alerts(self) -> Sequence[AlertView]: ...

    @property
    def silences(self) -> Sequence[Silence]: ...

    @property
    def sinks(self) -> Sequence[SinkStatus]: ...

    def objectives(self) -> Sequence[MeasuredObjective]: ...

    async def silence(
        self,
        alert: str,
        seconds: float,
        reason: str,
        by: str,
        record: Callable[[], Awaitable[None]],
    ) -> Silence: ...

    async def end_silence(self, alert: str, record: Callable[[], Awaitable[None]]) -> Silence: ...

    async def test(self, names: Sequence[str]) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class ApiDeps:
    """Everything the API needs."""

    durability: Durability
    sends: Sends
    history: ChatHistory
    chats: ChatStore
    shared_log: SharedLog | None
    """Of a cluster: an operator may raise all epochs there."""
    records: Records
    """For audit records that change no chat, and for the kept answers of keyed
    requests; everything else goes through the other parts."""
    eraser: Eraser
    limits: LimitsParts
    work: WorkParts
    streaming: StreamingParts
    body_bytes: BodyBytes
    usage: UsageStore
    alerts: Alerts
    tokens: Tokens
    keys: KeyRing
    revocations: RevocationsInForce
    disconnect: Callable[[User, str | None], int]
    """Closes a user's connections, or one device's; returns how many."""
    dead_letters: DeadLetters
    """Of fanout; those of jobs are in ``work``."""
    compare_chats: Callable[[Sequence[str]], None]
    """Makes the sessions of these chats compare with the store, on every node; of all
    chats if there are none."""
    presence: Callable[[Sequence[User]], Awaitable[PresenceView]]
    status: Callable[[], Awaitable[NodeStatus]]
    cluster: Callable[[], Awaitable[ClusterStatus]]
    readiness: Callable[[], Readiness]
    backup: Callable[[], Awaitable[Backup]] | None
    """Of the state directory; None in a cluster, where it holds no chats."""
    backup_step: Callable[[], BackupStep | None]
    clock: Clock
    ids: Ids
    node_id: str
    settings: ApiSettings = field(default_factory=ApiSettings)
    roles: tuple[str, ...] = ROLES
    """Requests of other roles are refused: another node serves them."""
    content_bytes_max: int = 4096
    """The same limit as on the sockets."""
    pages: PageSettings = field(default_factory=PageSettings)
    """The same limits as on the sockets."""
    origins: frozenset[str] = frozenset()
    """Pages of other origins that may call the API; exact, no patterns."""
    proxies: tuple[IPv4Network | IPv6Network, ...] = ()
    """Proxies whose X-Forwarded-For is trusted."""
    admin_health: Recent[dict[str, str]] = field(default_factory=Recent)
    """The rule store's last answer; cached, because anybody may ask for it."""

    tickets: ReplyTickets = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tickets", ReplyTickets(self.tokens, self.keys, self.clock))
