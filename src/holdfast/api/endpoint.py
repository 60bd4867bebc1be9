"""An endpoint or a web page as a value, a call of an endpoint, and its answer.

``routes`` is the table of both; ``app``, OpenAPI and the reference pages read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from holdfast.access.principal import AnyScope, Principal
from holdfast.api.deps import ApiDeps
from holdfast.clock import Clock
from holdfast.errors import InvalidMessage, OutcomeUnknown, Refused, Unavailable
from holdfast.limits.entry_points import EntryPoint
from holdfast.streaming.body_bytes import ReservedBytes

T = TypeVar("T")

CallerKind = Literal["anybody", "user", "owner", "tenant", "operator"]
"""user: a user token, or a tenant key that names a user. owner: the same, or a tenant
key for itself. tenant: a tenant key. operator: an admin key.
"""

ErrorShape = Literal["holdfast", "openai", "problem"]
"""How an endpoint's errors look: ours, OpenAI's, or those of RFC 9457."""

KeyRule = Literal["none", "optional", "required", "kept"]
"""Whether the endpoint takes an Idempotency-Key. ``optional``: its answer is stored in
the same commit as its effect; ``kept``: stored separately (``api.idempotency``)."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request, authenticated and decoded."""

    principal: Principal
    path: Mapping[str, str]
    query: Any
    body: Any
    key: str | None
    fingerprint: str
    """Distinguishes a retry from another request under the same key."""
    clock: Clock
    deadline: float
    """When it must be answered (monotonic): one deadline for all its work."""
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the node stops. A streamed answer then ends itself, or is cut."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Those that the endpoint reads, if they were sent, by the endpoint's names."""
    reservation: ReservedBytes | None = None
    """Of an endpoint with ``reserve``: the endpoint hands it on or frees it."""

    @property
    def seconds_left(self) -> float:
        return self.deadline - self.clock.monotonic()

    async def in_time(self, source: Awaitable[T]) -> T:
        """The result of a read; Unavailable after the deadline."""
        try:
            async with asyncio.timeout(self.seconds_left):
                return await source
        except TimeoutError:
            raise Unavailable("no answer in time", retry_after_seconds=1.0) from None

    async def done_in_time(self, doing: Awaitable[T]) -> T:
        """The result of a change.

        OutcomeUnknown after the deadline: it may still happen.
        """
        try:
            async with asyncio.timeout(self.seconds_left):
                return await doing
        except TimeoutError:
            raise OutcomeUnknown(
                "no answer in time; it may have been done: look before you repeat it"
            ) from None


@dataclass(frozen=True, slots=True)
class StreamBounds:
    """The bounds of a streamed answer beside its endpoint's ``deadline_seconds``.

    The next piece is asked for when the last one has left, so a slow reader slows its
    own endpoint and nothing else.
    """

    first_piece_seconds: float = 2.0
    """How long status and headers wait for the first piece; then the answer starts
    without one. An error before that is an ordinary error response; a later one cuts
    the connection."""
    unread_seconds_max: float = 30.0
    """How long the client may leave a piece unread before the connection is cut."""
    drain_seconds: float = 20.0
    """How long a running answer may go on after the node began to stop."""
    idle_piece: bytes = b""
    """Sent whenever nothing else was for ``idle_seconds``; empty: nothing."""
    idle_seconds: float = 15.0


@dataclass(frozen=True, slots=True)
class Answer:
    """``status`` None: the endpoint's usual one."""

    body: object = None
    """Encoded as JSON unless it is bytes already. A streaming endpoint may give an
    asynchronous iterator of bytes."""
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    media_type: str = "application/json"
    stream: StreamBounds | None = None
    """Bounds of this answer, where they are not those of its endpoint."""


_Run = Callable[[ApiDeps, Call], Awaitable[Answer]]


def _unchanged(wrong: InvalidMessage) -> Refused:
    return wrong


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of the table."""

    method: str
    path: str
    run: _Run
    summary: str
    caller: CallerKind
    scope: AnyScope | None = None
    body: type | None = None
    query: type | None = None
    answer: Any = None
    status: int = 200
    key: KeyRule = "none"
    secret: str = ""
    """The secret field of the answer: shown once, never stored."""
    note: str = ""
    also: Mapping[int, str] = field(default_factory=dict)
    """Other statuses that are not errors, with their meaning."""
    media_type: str = "application/json"
    errors: frozenset[int] = frozenset()
    """Statuses of errors that only this endpoint has."""
    body_bytes_max: int | None = None
    """Where bodies may be longer than ``api.body_bytes_max``."""
    body_seconds_max: float | None = None
    """Where bodies may take longer to arrive than ``api.body_seconds_max``."""
    raw: bool = False
    """The endpoint gets the body as bytes; ``body`` only describes it."""
    reserve: Callable[[ApiDeps, Principal, int], ReservedBytes] | None = None
    """Refuses a body without room before it is read; its bytes count as they come."""
    headers: tuple[str, ...] = ()
    """The headers that only this endpoint reads."""
    entry_point: EntryPoint = "rest"
    """Whose rules count the request; an operator's request counts as ``admin``."""
    ticket: bool = False
    """Whether a reply's ticket in the query is a credential here."""
    error_shape: ErrorShape = "holdfast"
    deadline_seconds: float | None = None
    """Where ``api.request_seconds_max`` is not enough."""
    stream: StreamBounds | None = None
    """Set where the answer may be streamed. Such an endpoint has a deadline of its own
    and handles its Idempotency-Key itself."""
    on_invalid_input: Callable[[InvalidMessage], Refused] = _unchanged
    """Turns the error of an invalid query or body into this endpoint's own."""

    on_refused: Callable[[Exception], None] | None = None
    """Called for an authenticated request that is refused before the endpoint runs."""

    def __post_init__(self) -> None:
        if self.stream is not None and self.deadline_seconds is None:
            raise ValueError(f"{self.path}: a streamed answer needs deadline_seconds")

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def role(self) -> str | None:
        """The role of the nodes that serve it; None: all nodes do."""
        if self.path.startswith("/admin/"):
            return "admin"
        return {"owner": "streaming", "user": "ingest", "tenant": "ingest"}.get(self.caller)

    @property
    def writes(self) -> bool:
        return self.method not in ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class WebPage:
    """One page or file of the table: open to anybody, built once, cached."""

    path: str
    media_type: str
    body: Callable[[Sequence[Endpoint]], bytes]
    """Builds the page from the endpoints that are served; called once, on a thread."""
    csp: str = "default-src 'none'; frame-ancestors 'none'"
    """What the page may load and run, as its Content-Security-Policy."""
    cache: str = "public, max-age=300"
    """How long a reader may keep it without asking again, as its Cache-Control."""
