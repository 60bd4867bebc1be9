"""The handler of a delivery job: read the message, sign, send, judge the response, log.

A message is delivered at least once. Its ``webhook-id`` is the same for every attempt
and every replay, so that a receiver can recognise a repetition. The failures of one
endpoint never open a breaker for the others.

A job names its message but does not contain it. So a message that was redacted or
removed is not sent, and neither jobs nor dead letters keep a copy that outlives it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from holdfast import telemetry
from holdfast.bounds import positive
from holdfast.clock import Clock, timestamp
from holdfast.errors import NotFound
from holdfast.message import Message
from holdfast.resilience import retry_after_seconds
from holdfast.webhooks.address_guard import check_url
from holdfast.webhooks.contract import JOB_TYPE, Delivery, WebhookEndpoint, WebhookEndpoints
from holdfast.webhooks.signature import sign
from holdfast.work.destinations import Paces
from holdfast.work.failures import JobFailed, JobPostponed
from holdfast.work.handlers import Context, Handlers
from holdfast.work.job import JobDraft, Policies, Reason

if TYPE_CHECKING:
    from holdfast.webhooks.http_client import WebhookCaller

_encode = msgspec.json.Encoder().encode
_PARKED_AGAIN_SECONDS = 1.0
_STORE_RETRY_SECONDS_MAX = 30.0
"""How long a delivery waits at most after a failure of our own stores."""
ERROR_LENGTH_MAX = 300


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """How endpoints are called."""

    timeout_seconds: float = 10.0
    """How long an endpoint may take to respond; then the call fails and is retried."""
    connect_timeout_seconds: float = 10.0
    """How long the name lookup, the connection and the TLS handshake may take together.
    """
    concurrency_per_endpoint: int = 4
    """Calls to one endpoint at once; its other jobs wait without delaying others."""
    answer_bytes_max: int = 64 * 1024
    """The most bytes of a response that are read."""
    parked_max: int = 100_000
    """Jobs kept for a disabled endpoint; beyond it the oldest become dead letters."""
    parked_seconds_max: float = 7 * 86400.0
    """How long jobs of a disabled endpoint are kept; then they become dead letters."""
    private_allowed: bool = False
    """Allow endpoints on private addresses and plain HTTP; for development only."""

    def __post_init__(self) -> None:
        seconds = ("timeout_seconds", "connect_timeout_seconds")
        counts = (
            "concurrency_per_endpoint",
            "answer_bytes_max",
            "parked_max",
            "parked_seconds_max",
        )
        positive(self, *seconds, *counts)


Find = Callable[[str, int], Awaitable[Message | None]]
"""Reads the current message of a chat by its sequence; None if it was removed."""


class DeliveryNotice(msgspec.Struct, frozen=True):
    """The payload of a delivery job: endpoint, message. Empty ``chat_id``: a test."""

    endpoint_id: str
    tenant: str
    at: str
    chat_id: str = ""
    sequence: int = 0
    message_id: str = ""


class WebhookEvent(msgspec.Struct, frozen=True):
    """The body that a receiver gets."""

    type: Literal["message.created", "webhook.test"]
    timestamp: str
    data: dict[str, Any]


def draft_of(notice: DeliveryNotice) -> JobDraft:
    """The delivery job. Each (endpoint, chat) is a stream, so a chat's messages arrive
    in order, and one chat does not wait for another.
    """
    return JobDraft(
        JOB_TYPE,
        _encode(notice),
        f"{notice.endpoint_id}/{notice.chat_id or 'test'}",
        notice.endpoint_id,
    )


def with_webhooks(policies: Policies) -> Policies:
    """The policies plus webhooks' own: an endpoint's failures are strikes and open no
    breaker.

    Failures of our own stores are no strikes. They are retried like those of the job
    store, which is often the same database: after about a second, then with growing
    pauses, because the others may be down while the job store works.
    """
    policies = policies.with_type(JOB_TYPE, strike=True, feeds_breaker=False)
    return policies.with_type(
        JOB_TYPE,
        Reason.DEPENDENCY_FAILURE,
        strike=False,
        base_seconds=policies.store_retry_seconds / 2,
        cap_seconds=_STORE_RETRY_SECONDS_MAX,
    )


async def recall_paces(endpoints: WebhookEndpoints, paces: Paces) -> None:
    """Preload the paces from the log of deliveries after a restart, so that endpoints
    known as slow do not delay the others again.
    """
    for endpoint_id, seconds in (await endpoints.last_seconds()).items():
        paces.ended((JOB_TYPE, endpoint_id), seconds)


class FailingEndpoints:
    """The endpoints whose last delivery from this node failed, for the gauge."""

    def __init__(self) -> None:
        self._failing = set[str]()

    def on_delivery(self, endpoint_id: str, *, accepted: bool) -> None:
        (self._failing.discard if accepted else self._failing.add)(endpoint_id)
        telemetry.webhooks_failing(len(self._failing))

    def on_endpoints(self, enabled: Collection[str]) -> None:
        """Forget those that were removed or disabled: nothing is delivered there."""
        self._failing.intersection_update(enabled)
        telemetry.webhooks_failing(len(self._failing))


class WebhookSender:
    """Delivers messages to endpoints. ``opened`` creates it inside the event loop."""

    def __init__(
        self,
        endpoints: WebhookEndpoints,
        find: Find,
        clock: Clock,
        settings: WebhookSettings,
        failing: FailingEndpoints | None = None,
    ) -> None:
        self._endpoints, self._find, self._clock = endpoints, find, clock
        self._settings = settings
        self._opening_caller: asyncio.Task[WebhookCaller] | None = None
        self._failing = failing or FailingEndpoints()

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        endpoints: WebhookEndpoints,
        find: Find,
        clock: Clock,
        settings: WebhookSettings | None = None,
        failing: FailingEndpoints | None = None,
    ) -> AsyncIterator[WebhookSender]:
        chosen = settings or WebhookSettings()
        sender = cls(endpoints, find, clock, chosen, failing)
        try:
            yield sender
        finally:
            if sender._opening_caller is not None:
                await (await sender._opening_caller).close()

    async def _caller(self) -> WebhookCaller:
        """The HTTP client, made at the first delivery; its import takes a thread."""
        if self._opening_caller is None:
            self._opening_caller = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening_caller)

    async def _open(self) -> WebhookCaller:
        module = await asyncio.to_thread(import_module, "holdfast.webhooks.http_client")
        chosen = self._settings
        caller: WebhookCaller = module.WebhookCaller(
            timeout_seconds=chosen.timeout_seconds,
            connect_timeout_seconds=chosen.connect_timeout_seconds,
            private_allowed=chosen.private_allowed,
        )
        return caller

    def register(self, handlers: Handlers) -> None:
        chosen = self._settings
        deadline = chosen.connect_timeout_seconds + chosen.timeout_seconds + 20

        @handlers.handle(
            DeliveryNotice,
            type=JOB_TYPE,
            deadline_seconds=deadline,
            per_destination_max=chosen.concurrency_per_endpoint,
        )
        async def deliver(ctx: Context, notice: DeliveryNotice) -> None:
            await self.deliver(ctx, notice)

    async def deliver(self, ctx: Context, notice: DeliveryNotice) -> None:
        """Return when the endpoint accepted the message or was removed."""
        try:
            endpoint = await self._endpoints.get(notice.endpoint_id)
        except NotFound:
            if await self._endpoints.removed(notice.endpoint_id):
                return  # the endpoint was removed: nothing to deliver
            message = (
                f"the endpoint {notice.endpoint_id} never existed here: the job belongs to another"
                " server or another state"
            )
            raise JobFailed(Reason.VALIDATION_FAILURE, message) from None
        if endpoint.disabled:
            raise _disabled(endpoint.endpoint_id, endpoint.disabled)
        webhook_id = f"{notice.message_id or f'msg_{ctx.key}'}_{notice.endpoint_id}"
        started = self._clock.monotonic()

        async def log(status: int, error: str) -> None:
            at, seconds = timestamp(self._clock.now()), round(self._clock.monotonic() - started, 3)
            about = (
                notice.endpoint_id,
                webhook_id,
                notice.chat_id,
                notice.sequence,
                ctx.job.attempt,
            )
            await self._endpoints.log(Delivery(*about, at, status, seconds, error))

        try:
            event = await self._event(notice)
            if event is None:
                return
            status, error, retry_after = await self._post(endpoint, webhook_id, _encode(event))
        except Exception as failure:
            await log(0, f"not sent: {type(failure).__name__}: {failure}"[:ERROR_LENGTH_MAX])
            raise
        await log(status, error)
        self._failing.on_delivery(endpoint.endpoint_id, accepted=200 <= status < 300)
        await self._judge(endpoint, status, error, retry_after)

    async def _event(self, notice: DeliveryNotice) -> WebhookEvent | None:
        """The event to send; None if the message is gone."""
        if not notice.chat_id:
            return WebhookEvent("webhook.test", notice.at, {"tenant": notice.tenant})
        message = await self._find(notice.chat_id, notice.sequence)
        if message is None or message.message_id != notice.message_id:
            return None
        return WebhookEvent(
            "message.created", notice.at, {"tenant": notice.tenant, **msgspec.to_builtins(message)}
        )

    async def _post(
        self, endpoint: WebhookEndpoint, webhook_id: str, body: bytes
    ) -> tuple[int, str, float]:
        """(status, error, Retry-After in seconds); status 0: no response."""
        signed = sign(endpoint.secret, webhook_id, self._clock.now(), body)
        signed["user-agent"] = "Holdfast-Webhooks/1"
        try:
            check_url(endpoint.url, private_allowed=self._settings.private_allowed)
            caller = await self._caller()
            status, text, retry_after = await caller.post(
                endpoint.url, body, signed, self._settings.answer_bytes_max
            )
        except OSError as error:
            return 0, str(error)[:ERROR_LENGTH_MAX], 0.0
        reply = "" if status < 300 else text[:200].decode("utf-8", "replace")
        return status, reply, retry_after_seconds(retry_after, self._clock.now()) or 0.0

    async def _judge(
        self, endpoint: WebhookEndpoint, status: int, error: str, retry_after: float
    ) -> None:
        if 200 <= status < 300:
            return
        if status == 410:
            why = "the endpoint answered 410 Gone"
            telemetry.log.warning(
                "webhooks.endpoint_disabled", endpoint=endpoint.endpoint_id, reason=why
            )
            await self._endpoints.disable(endpoint.endpoint_id, why, timestamp(self._clock.now()))
            raise _disabled(endpoint.endpoint_id, why)
        message = f"{endpoint.endpoint_id} answered {status or 'nothing'}: {error}"
        if status == 429:
            reason = Reason.THROTTLED
        elif status == 0 or status >= 500:
            reason = Reason.TRANSPORT_UNAVAILABLE
        else:
            reason = Reason.HANDLER_EXCEPTION
        raise JobFailed(reason, message, retry_after_seconds=retry_after)


def _disabled(endpoint_id: str, why: str) -> JobPostponed:
    """Postpones the job: when it is due again, the worker has paused the endpoint, and
    the job stays parked in the store.
    """
    error = f"{endpoint_id} is disabled: {why}"
    return JobPostponed(
        Reason.TRANSPORT_UNAVAILABLE, error, retry_after_seconds=_PARKED_AGAIN_SECONDS
    )
