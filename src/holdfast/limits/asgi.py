"""Limits for any ASGI application: ``RateLimited(app, limiter, who)``.

Answers carry ``RateLimit-Policy`` and ``RateLimit`` of draft-ietf-httpapi-ratelimit-headers (the old X-RateLimit trio
where asked for). A refused request gets 429 with ``Retry-After`` and a problem document (RFC 9457) that names the
policies it broke; the application never sees it. Rules in shadow mode are not told. A request that no rule can answer
(a subject without end) gets 400. What a concurrency rule granted is given back when the request is over, however it
ended.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import InvalidCheck
from holdfast.limits.limiter import Limiter
from holdfast.limits.rules import Check, Decision

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[str, str]]
Encoded = list[tuple[bytes, bytes]]

_INTEGER_MAX = 999_999_999_999_999
"""The largest integer of a structured field (RFC 9651)."""

PROBLEM = "https://iana.org/assignments/http-problem-types#quota-exceeded"
PROBLEM_TITLE = "Request cannot be satisfied as assigned quota has been exceeded"


def rate_limit_headers(decisions: Sequence[Decision], *, legacy: bool = False) -> Headers:
    """What the decisions say, one policy per rule; nothing where no rule was asked."""
    ruled = [decision for decision in decisions if decision.rule]
    if not ruled:
        return []
    policies = ", ".join(f"{_name(d)};q={d.limit}{_window(d)}" for d in ruled)
    state = ", ".join(f"{_name(d)};r={d.remaining};t={_seconds(_more_after(d))}" for d in ruled)
    headers = [("RateLimit-Policy", policies), ("RateLimit", state)]
    if legacy:
        tightest = min(ruled, key=lambda d: d.remaining)
        headers += [
            ("X-RateLimit-Limit", str(tightest.limit)),
            ("X-RateLimit-Remaining", str(tightest.remaining)),
            ("X-RateLimit-Reset", str(_seconds(tightest.reset_after))),
        ]
    return headers


def retry_after(decisions: Sequence[Decision]) -> int:
    """Whole seconds until the slowest of the refusing rules has room."""
    return max(1, *(_seconds(d.retry_after) for d in decisions if not d.allowed))


def _window(decision: Decision) -> str:
    """Optional in the draft, and in whole seconds."""
    return f";w={math.ceil(decision.window_seconds)}" if decision.window_seconds else ""


def _more_after(decision: Decision) -> float:
    """When there is more to have: where the rule refused, the moment to try again, which ``Retry-After`` names too."""
    return decision.retry_after if decision.exceeded and not decision.allowed else decision.reset_after


def _seconds(duration: float) -> int:
    return min(math.ceil(duration), _INTEGER_MAX)


def _name(decision: Decision) -> str:
    """A structured-field string: quotes and backslashes escaped."""
    return '"' + decision.rule.replace("\\", "\\\\").replace('"', '\\"') + '"'


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
    problem = {
        "type": PROBLEM,
        "title": PROBLEM_TITLE,
        "status": 429,
        "violated-policies": [d.rule for d in decisions if d.exceeded],
    }
    await _tell(send, problem, [*added, (b"retry-after", str(retry_after(decisions)).encode())])


async def _tell(send: Send, problem: dict[str, Any], added: Encoded) -> None:
    body = msgspec.json.encode(problem)
    headers = [
        *added,
        (b"content-type", b"application/problem+json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": problem["status"], "headers": headers})
    await send({"type": "http.response.body", "body": body})
