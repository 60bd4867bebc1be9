"""Admission: what a request for a reply must pass before it runs or waits.

In this order: the node is not stopping, the model exists, the payer's rates and tokens
(the API has asked the rates of HTTP requests already), the node's memory, the pool. A
request that cannot run now waits; only the caller's own limits (429), a full queue and
a full memory (503) refuse it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct, field

from holdfast import telemetry
from holdfast.errors import HoldfastError, NotFound, RateLimited, Unavailable
from holdfast.streaming.pool.contract import FullCause, PoolRequest
from holdfast.streaming.pool.leases import NodeLeases
from holdfast.streaming.pool.places import PoolPlace, QueueFull
from holdfast.streaming.providers.routing import Routing
from holdfast.streaming.reply import Owner, Payer, ReplyKind, Surface
from holdfast.streaming.settings import StreamingSettings

FULL_RETRY_SECONDS = 5.0
"""The Retry-After of a full queue."""
FULL_USER_RETRY_SECONDS = 2.0
FULL_TEXTS: Mapping[FullCause, str] = {
    "queue": "too many requests wait for a model",
    "tenant": "too many requests of this tenant wait for a model",
    "user": "too many of your requests wait already",
}


class BodyReservation(Protocol):
    """The bytes of a request's body, counted until the reply needs it no longer."""

    def free(self) -> None:
        """May be called more than once."""
        ...


class NoReservation:
    """Of a request that came in no HTTP body."""

    def free(self) -> None:
        pass


class ReplyRequest(Struct, frozen=True):
    """A reply that somebody asks for.

    ``fields``: the request for the provider, raw JSON by field. ``shown``: what the
    dialect needs to render it later. ``replicated``: it is to be resumable.
    ``queue_seconds``: the caller's own bound of the wait. ``is_allowed``: whether its
    owner's credential is still valid.
    """

    reply_id: str
    owner: Owner
    payer: Payer
    kind: ReplyKind
    surface: Surface
    model: str
    fields: Mapping[str, bytes]
    streamed: bool = True
    replicated: bool = False
    shown: str = ""
    queue_seconds: float | None = None
    max_output_tokens: int | None = None
    key: str | None = None
    body_hash: bytes = b""
    reservation: BodyReservation = field(default_factory=NoReservation)
    is_allowed: Callable[[], bool] = lambda: True

    @property
    def is_assistant(self) -> bool:
        return self.kind == "assistant"


class Admission:
    """Admits requests on one node."""

    def __init__(
        self,
        settings: StreamingSettings,
        routing: Routing,
        leases: NodeLeases,
        check_rates: Callable[[ReplyRequest], Awaitable[None]],
        active_limit: Callable[[Payer], int],
    ) -> None:
        self._settings = settings
        self._routing = routing
        self._leases = leases
        self._check_rates = check_rates
        self._active_limit = active_limit
        self.draining = asyncio.Event()

    def models(self) -> Sequence[str]:
        """The models that clients may ask for."""
        return self._routing.models()

    def check_model(self, model: str) -> None:
        """NotFound names the model and where to see which there are."""
        if model not in self._routing.models():
            telemetry.reply_refused("model")
            raise NotFound(
                f"there is no model {model[:64]!r} here; see GET /v1/models", model=model
            )

    async def check(self, request: ReplyRequest) -> None:
        """Raise the first reason to refuse the request."""
        self.refuse_if_draining()
        self.check_model(request.model)
        await self._check_rates(request)

    def refuse_if_draining(self) -> None:
        if self.draining.is_set():
            telemetry.reply_refused("draining")
            raise Unavailable("this node is stopping", retry_after_seconds=1.0)

    async def take_place(self, request: ReplyRequest) -> PoolPlace:
        """A place in the pool: leased, or waiting if the settings allow that.

        RateLimited or Unavailable if it can have neither. If the caller is cancelled,
        the place is given up.
        """
        place = self._leases.ask(self._pool_request(request))
        try:
            await place.decided()
            may_wait = self._settings.queue_failover.enabled or request.is_assistant
            if place.waiting and not may_wait:
                telemetry.reply_refused("off")
                raise RateLimited(
                    "no more replies of this user can run now, and the queue is switched off",
                    retry_after_seconds=FULL_USER_RETRY_SECONDS,
                )
        except QueueFull as full:
            self._leases.release(request.reply_id)
            telemetry.reply_refused(full.cause)
            raise _refusal(full.cause) from None
        except BaseException:
            self._leases.release(request.reply_id)
            raise
        telemetry.reply_admitted("queue" if place.waiting else "pool")
        return place

    def _pool_request(self, request: ReplyRequest) -> PoolRequest:
        payer, queue = request.payer, self._settings.queue_failover
        return PoolRequest(
            request.reply_id,
            payer.tenant,
            f"key:{payer.user}" if payer.is_key else f"user:{payer.user}",
            self._active_limit(payer),
            pool=self._routing.first_pool(request.model),
            capped=not request.is_assistant,
            waiting_max=queue.waiting_per_tenant if payer.is_key else queue.waiting_per_user,
        )


def _refusal(cause: FullCause) -> HoldfastError:
    text = FULL_TEXTS[cause]
    if cause == "user":
        return RateLimited(text, retry_after_seconds=FULL_USER_RETRY_SECONDS)
    return Unavailable(text, retry_after_seconds=FULL_RETRY_SECONDS)
