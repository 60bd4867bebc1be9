"""The handler of a delivery job: sign, send, judge the answer, log the try.

A message is delivered at least once; its ``webhook-id`` is the same for every try and every replay, so that a receiver
can recognise a repetition. What an endpoint answers is its own matter: its failures never open a breaker for others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import msgspec

from holdfast.clock import Clock, timestamp
from holdfast.errors import NotFound
from holdfast.message import Message
from holdfast.webhooks.contract import JOB_TYPE, Delivery, Endpoint, Endpoints
from holdfast.webhooks.guard import GuardedResolver, check_url
from holdfast.webhooks.signing import headers
from holdfast.work.failures import JobFailed
from holdfast.work.handling import Context, Handlers
from holdfast.work.job import Draft, Policies, Reason

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """``private_allowed`` lets endpoints be on private addresses and speak plain HTTP: for development only."""

    timeout_seconds: float = 10.0
    connections_per_host: int = 4
    answer_bytes_max: int = 64 * 1024
    private_allowed: bool = False

    def __post_init__(self) -> None:
        if self.timeout_seconds <= 0 or self.connections_per_host < 1 or self.answer_bytes_max < 1:
            raise ValueError("timeout_seconds, connections_per_host and answer_bytes_max must be greater than 0")


class Notice(msgspec.Struct, frozen=True):
    """A delivery as a job: to whom, and what. ``message`` None: a test."""

    endpoint_id: str
    tenant: str
    at: str
    message: Message | None = None


class Event(msgspec.Struct, frozen=True):
    """What a receiver gets."""

    type: Literal["message.created", "webhook.test"]
    timestamp: str
    data: dict[str, Any]


def draft_of(notice: Notice) -> Draft:
    """One stream per endpoint and chat: a chat's messages arrive in order, and one chat does not wait for another."""
    chat = notice.message.chat_id if notice.message is not None else "test"
    return Draft(JOB_TYPE, _encode(notice), f"{notice.endpoint_id}/{chat}", notice.endpoint_id)


def with_webhooks(policies: Policies) -> Policies:
    """An endpoint's failures count as strikes and concern its own streams only."""
    return policies.with_type(JOB_TYPE, strike=True, feeds_breaker=False)


class Deliveries:
    """Delivers; made inside the event loop, closed by leaving ``opened``."""

    def __init__(
        self, endpoints: Endpoints, clock: Clock, settings: WebhookSettings, session: aiohttp.ClientSession
    ) -> None:
        self._endpoints, self._clock, self._settings, self._session = endpoints, clock, settings, session

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, endpoints: Endpoints, clock: Clock, settings: WebhookSettings | None = None
    ) -> AsyncIterator[Deliveries]:
        chosen = settings or WebhookSettings()
        connector = aiohttp.TCPConnector(
            resolver=GuardedResolver(private_allowed=chosen.private_allowed),
            limit_per_host=chosen.connections_per_host,
            use_dns_cache=False,
        )
        timeout = aiohttp.ClientTimeout(total=chosen.timeout_seconds)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
        ) as session:
            yield cls(endpoints, clock, chosen, session)

    def register(self, handlers: Handlers) -> None:
        deadline = self._settings.timeout_seconds + 20

        @handlers.handle(Notice, type=JOB_TYPE, deadline_seconds=deadline)
        async def deliver(ctx: Context, notice: Notice) -> None:
            await self.deliver(ctx, notice)

    async def deliver(self, ctx: Context, notice: Notice) -> None:
        """Returns when the endpoint has taken it, or is gone; raises JobFailed otherwise."""
        try:
            endpoint = await self._endpoints.get(notice.endpoint_id)
        except NotFound:
            return  # removed since; nobody waits for it
        if endpoint.disabled:
            return
        webhook_id = f"msg_{notice.endpoint_id}_{ctx.key}"
        if notice.message is not None:
            webhook_id = f"{notice.message.message_id}_{notice.endpoint_id}"
        body = _encode(_event(notice))
        started = self._clock.monotonic()
        status, error, retry_after = await self._post(endpoint, webhook_id, body)
        message = notice.message
        await self._endpoints.log(
            Delivery(
                endpoint.endpoint_id,
                webhook_id,
                message.chat_id if message else "",
                message.sequence if message else 0,
                ctx.job.attempt,
                timestamp(self._clock.now()),
                status,
                round(self._clock.monotonic() - started, 3),
                error,
            )
        )
        await self._judge(endpoint, status, error, retry_after)

    async def _post(self, endpoint: Endpoint, webhook_id: str, body: bytes) -> tuple[int, str, float]:
        """(status, error, seconds the endpoint wants us to wait); status 0: no answer."""
        signed = headers(endpoint.secret, webhook_id, self._clock.now(), body)
        signed["user-agent"] = "Holdfast-Webhooks/1"
        try:
            check_url(endpoint.url, private_allowed=self._settings.private_allowed)
            async with self._session.post(endpoint.url, data=body, headers=signed, allow_redirects=False) as answer:
                text = await answer.content.read(self._settings.answer_bytes_max)
                error = "" if answer.status < 300 else text[:200].decode("utf-8", "replace")
                return answer.status, error, _seconds(answer.headers.get("retry-after", ""))
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return 0, f"{type(error).__name__}: {error}"[:300], 0.0

    async def _judge(self, endpoint: Endpoint, status: int, error: str, retry_after: float) -> None:
        if 200 <= status < 300:
            return
        if status == 410:
            await self._endpoints.disable(endpoint.endpoint_id, "the endpoint answered 410 Gone")
            return
        told = f"{endpoint.endpoint_id} answered {status or 'nothing'}: {error}"
        if status == 429:
            raise JobFailed(Reason.THROTTLED, told, retry_after_seconds=min(retry_after, 3600.0))
        reason = Reason.TRANSPORT_UNAVAILABLE if status == 0 or status >= 500 else Reason.HANDLER_EXCEPTION
        raise JobFailed(reason, told, retry_after_seconds=min(retry_after, 3600.0))


def _event(notice: Notice) -> Event:
    if notice.message is None:
        return Event("webhook.test", notice.at, {"tenant": notice.tenant})
    return Event("message.created", notice.at, {"tenant": notice.tenant, **msgspec.structs.asdict(notice.message)})


def _seconds(text: str) -> float:
    return float(text) if text.isdecimal() else 0.0
