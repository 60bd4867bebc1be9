"""An endpoint as a value, a call of it, and its answer.

``routes`` is the table of endpoints; routing, OpenAPI and the reference pages read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from holdfast.access.principal import AnyScope, Principal
from holdfast.api.deps import ApiDeps
from holdfast.clock import Clock
from holdfast.errors import InvalidMessage, OutcomeUnknown, Refused, Unavailable

T = TypeVar("T")

CallerKind = Literal["anybody", "user", "tenant", "operator"]
"""user: a user token, or a tenant key that names a user. tenant: a tenant key.
operator: an admin key.
"""

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
class Answer:
    """``body`` is encoded as JSON unless it is bytes already; ``status`` None: the
    endpoint's usual one.
    """

    body: object = None
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    media_type: str = "application/json"


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
    deadline_seconds: float | None = None
    """Where ``api.request_seconds_max`` is not enough."""
    on_invalid_input: Callable[[InvalidMessage], Refused] = _unchanged
    """Turns the error of an invalid query or body into this endpoint's own."""

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def writes(self) -> bool:
        return self.method not in ("GET", "HEAD")
