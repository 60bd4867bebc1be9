"""Limits for any ASGI application: ``RateLimited(app, limiter, who)``.

Answers carry ``RateLimit-Policy`` and ``RateLimit`` of draft-ietf-httpapi-ratelimit-headers (the old X-RateLimit trio
where asked for). A refused request gets 429 with ``Retry-After`` and a problem document (RFC 9457) that names the
policies it broke; the application never sees it. Rules in shadow mode are not told. A request that no rule can answer
(a subject without end) gets 400. What a concurrency rule granted is given back when the request is over, however it
ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import InvalidCheck
from holdfast.limits.answers import PROBLEM_TYPE, problem, rate_limit_headers, retry_after
from holdfast.limits.limiter import Limiter
from holdfast.limits.rules import Check, Decision

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Encoded = list[tuple[bytes, bytes]]


class RateLimited:
    """ASGI middleware. ``who`` says what a request is to be asked for; an empty answer lets it pass."""

    def __init__(
        self, app: App, limiter: Limiter, who: Callable[[Scope], Sequence[Check]], *, legacy: bool = False
    ) -> None:
        self._app = app
        self._limiter = limiter
        self._who = who
        self._legacy = legacy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        checks = self._who(scope) if scope["type"] == "http" else ()
        if not checks:
            await self._app(scope, receive, send)
            return
        try:
            decisions = await self._limiter.check_many(checks)
        except InvalidCheck as error:
            await _tell(send, {"title": "Bad Request", "status": 400, "detail": error.message}, [])
            return
        told = [d for check, d in zip(checks, decisions, strict=True) if not self._limiter.in_shadow(check)]
        added = [(n.lower().encode(), v.encode()) for n, v in rate_limit_headers(told, legacy=self._legacy)]
        try:
            if all(decision.allowed for decision in decisions):
                await self._pass_on(scope, receive, send, added)
            else:
                await _refuse(send, told, added)
        finally:
            for check, decision in zip(checks, decisions, strict=True):
                if decision.hold:
                    await self._limiter.release(check, decision.hold)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, added: Encoded) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        await self._app(scope, receive, with_headers)


async def _refuse(send: Send, decisions: Sequence[Decision], added: Encoded) -> None:
    await _tell(send, problem(decisions), [*added, (b"retry-after", str(retry_after(decisions)).encode())])


async def _tell(send: Send, told: Mapping[str, Any], added: Encoded) -> None:
    body = msgspec.json.encode(told)
    headers = [
        *added,
        (b"content-type", PROBLEM_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": told["status"], "headers": headers})
    await send({"type": "http.response.body", "body": body})
