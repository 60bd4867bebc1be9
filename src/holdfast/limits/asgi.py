"""Limits for any ASGI application: ``RateLimitMiddleware(app, limiter, who)``.

Responses carry ``RateLimit-Policy`` and ``RateLimit`` of
draft-ietf-httpapi-ratelimit-headers, and the old X-RateLimit headers if asked for. A
refused request gets 429 with ``Retry-After`` and a problem document (RFC 9457) that
names the violated policies; the application never sees it. Rules in shadow mode do not
show. A request that no rule can answer (its subject is too long) gets 400.

WebSockets are checked at the handshake. They are refused the same way if the server
supports ``websocket.http.response``; otherwise they are closed, which is 403. A hold of
a concurrency rule is renewed while the request or socket lasts, and released however it
ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from holdfast.errors import InvalidCheck
from holdfast.limits.http import PROBLEM_TYPE, problem, rate_limit_headers, retry_after
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.rules import Check, Decision

_Scope = MutableMapping[str, Any]
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]
Encoded = list[tuple[bytes, bytes]]

TRY_AGAIN_LATER = 1013
_ANSWERED = {"http": "http.response", "websocket": "websocket.http.response"}
"""Scope type, and the message type of its response."""


class RateLimitMiddleware:
    """ASGI middleware. ``who`` returns the checks of a request; with none it passes."""

    def __init__(
        self,
        app: _App,
        limiter: Limiter,
        who: Callable[[_Scope], Sequence[Check]],
        *,
        legacy: bool = False,
    ) -> None:
        self._app = app
        self._limiter = limiter
        self._who = who
        self._legacy = legacy

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        checks = self._who(scope) if scope["type"] in _ANSWERED else ()
        if not checks:
            await self._app(scope, receive, send)
            return
        try:
            decisions = await self._limiter.check_many(checks)
        except InvalidCheck as error:
            await _refuse(
                scope,
                receive,
                send,
                {"title": "Bad Request", "status": 400, "detail": error.message},
                [],
            )
            return
        visible = self._limiter.visible(checks, decisions)
        added = [
            (n.lower().encode(), v.encode())
            for n, v in rate_limit_headers(visible, legacy=self._legacy)
        ]
        async with self._holding(checks, decisions):
            if all(decision.allowed for decision in decisions):
                await self._pass_on(scope, receive, send, added)
            else:
                wait = (b"retry-after", str(retry_after(visible)).encode())
                await _refuse(scope, receive, send, problem(visible), [*added, wait])

    async def _pass_on(self, scope: _Scope, receive: _Receive, send: _Send, added: Encoded) -> None:
        async def with_headers(message: _Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept"):
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        await self._app(scope, receive, with_headers)

    @asynccontextmanager
    async def _holding(
        self, checks: Sequence[Check], decisions: Sequence[Decision]
    ) -> AsyncIterator[None]:
        held = [
            (check, d.hold, d.window_seconds)
            for check, d in zip(checks, decisions, strict=True)
            if d.hold
        ]
        renewing = asyncio.create_task(self._renew(held)) if held else None
        try:
            yield
        finally:
            if renewing is not None:
                renewing.cancel()
            for check, hold, _ in held:
                await self._limiter.release(check, hold)

    async def _renew(self, held: Sequence[tuple[Check, str, float]]) -> None:
        while True:
            await asyncio.sleep(min(window_seconds for _, _, window_seconds in held) / 2)
            for check, hold, _ in held:
                await self._limiter.renew(check, hold)


async def _refuse(
    scope: _Scope, receive: _Receive, send: _Send, document: Mapping[str, Any], added: Encoded
) -> None:
    """Respond in place of the application."""
    body = msgspec.json.encode(document)
    headers = [
        *added,
        (b"content-type", PROBLEM_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
    ]
    answer = _ANSWERED[scope["type"]]
    if scope["type"] == "websocket":
        await receive()  # websocket.connect
        if answer not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": TRY_AGAIN_LATER})
            return
    await send({"type": f"{answer}.start", "status": document["status"], "headers": headers})
    await send({"type": f"{answer}.body", "body": body})
