"""What the API stands on: contracts and plain functions, put together by the node."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from holdfast.access import KeyRing, Tokens
from holdfast.bounds import KIB, positive
from holdfast.clock import Clock, Ids
from holdfast.ingest.contract import Durability
from holdfast.ingest.erasure import Erasure
from holdfast.limits.plane import LimitsPlane
from holdfast.message import Outcome, User
from holdfast.session.limits import Pages
from holdfast.sqlite.copies import Copied
from holdfast.store.changes import Act
from holdfast.store.history import History
from holdfast.webhooks.plane import WebhookPlane
from holdfast.wire.frames import Presence, SendBody
from holdfast.work.contract import WorkStore

T = TypeVar("T")


class PresenceView(Struct, frozen=True):
    """Who is online. ``stale``: the source could not be asked; those it could not tell of are left out."""

    users: Sequence[Presence]
    stale: bool = False


class Readiness(Struct, frozen=True):
    """Whether this node can serve, and each dependency's state in a word ("up", "down", "open", …)."""

    ready: bool
    dependencies: Mapping[str, str]


class BackupStep(Struct, frozen=True):
    """What the backup that is being taken is at; the bytes are those of this step."""

    doing: str
    done_bytes: int
    total_bytes: int


class BackupRun(Struct, frozen=True):
    """``step`` is null when no backup is being taken."""

    step: BackupStep | None


class Backup(Struct, frozen=True):
    """A backup that was taken: the folder it lies in on the server, and what it holds."""

    path: str
    size_bytes: int
    taken_at: str
    files: Sequence[Copied]


class Sends(Protocol):
    """Where sends go in, to be grouped with those of the sockets: ``holdfast.ingest.intake.Intake``."""

    def submit(
        self, body: SendBody, sender: User, source: str, deadline: float, answer: Callable[[Outcome], None]
    ) -> None:
        """Take a valid send and answer it exactly once, by ``deadline`` (monotonic)."""
        ...


class Erasing(Protocol):
    """Where a person is erased: ``holdfast.ingest.erasure.Eraser``."""

    async def erase(self, user: User, act: Callable[[], Act], after: int, until: float) -> Erasure:
        """As far as it comes by ``until`` (monotonic)."""
        ...


class AuditLog(Protocol):
    """Where acts that change no chat are recorded: the store."""

    async def record(self, act: Act, action: str, target: str, details: str = "") -> None:
        """On stable storage when it returns."""
        ...


class Recent(Generic[T]):
    """What a source said within the last ``seconds``: however many ask, it is asked one question at a time."""

    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds = seconds
        self._asked: tuple[asyncio.Task[T], float] | None = None

    async def ask(self, source: Callable[[], Coroutine[Any, Any, T]], now: float) -> T:
        """Whoever is cancelled while waiting leaves the question to the others."""
        asked = self._asked
        if asked is None or (asked[0].done() and now - asked[1] >= self._seconds):
            asked = self._asked = (asyncio.create_task(source()), now)
        return await asyncio.shield(asked[0])


class Answers(Protocol):
    """Where the answers to keyed requests are kept: the store."""

    async def begin(self, act: Act) -> str | None:
        """None if the key of ``act`` is new, else the answer that is kept, or "" while there is none."""
        ...

    async def keep(self, act: Act, answer: str | None) -> None:
        """Keep the answer; None gives the key back."""
        ...


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Bounds of the REST surface."""

    body_bytes_max: int = 64 * KIB
    """A longer request body: 413, and it is not read."""
    body_seconds_max: float = 10
    """A body that takes longer to arrive: 400."""
    request_seconds_max: float = 5
    """The deadline of a REST request; everything behind it gets what is left."""
    user_rate_per_second: float = 20
    """REST requests of one user. Above: 429 + Retry-After."""
    user_burst: int = 100
    """So many at once before the rate counts."""
    tenant_rate_per_second: float = 1000
    """REST requests of one tenant. Above: 429 + Retry-After."""
    tenant_burst: int = 2000
    """So many at once before the rate counts."""
    failed_logins_per_minute: int = 600
    """Per address; beyond it a bad credential is answered 429 instead of 401."""
    metrics_without_key: bool = False
    """Serve /metrics to anybody who can reach the port."""
    legacy_rate_limit_headers: bool = False
    """Send X-RateLimit-Limit, -Remaining and -Reset, too, beside RateLimit-Policy and RateLimit."""

    def __post_init__(self) -> None:
        positive(self, *(name for name in self.__slots__ if not isinstance(getattr(self, name), bool)))


@dataclass(frozen=True, slots=True)
class Deps:
    """Everything the API needs."""

    durability: Durability
    sends: Sends
    history: History
    audit_log: AuditLog
    answers: Answers
    erasing: Erasing
    tokens: Tokens
    keys: KeyRing
    presence: Callable[[Sequence[User]], Awaitable[PresenceView]]
    status: Callable[[], Awaitable[Mapping[str, Any]]]
    readiness: Callable[[], Awaitable[Readiness]]
    backup: Callable[[], Awaitable[Backup]]
    backup_step: Callable[[], BackupStep | None]
    clock: Clock
    ids: Ids
    settings: ApiSettings = field(default_factory=ApiSettings)
    content_bytes_max: int = 4096
    """The same limit as on the sockets."""
    pages: Pages = field(default_factory=Pages)
    """The same limits as on the sockets."""
    origins: frozenset[str] = frozenset()
    """Pages of other origins that may call the API; exact, no patterns."""
    proxies: tuple[IPv4Network | IPv6Network, ...] = ()
    """Whose X-Forwarded-For is believed."""
    limits: LimitsPlane | None = None
    """Rules and checks; None: every door but the connection's own bucket is open."""
    work: WorkStore | None = None
    """The jobs of this node; None: it runs without."""
    webhooks: WebhookPlane | None = None
    """Where webhooks go; None: this node sends none."""
    admin_health: Recent[dict[str, str]] = field(default_factory=Recent)
    """What the rules' primary said last: strangers ask for it."""
    key_change: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One change of the key ring at a time."""
