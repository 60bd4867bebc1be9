"""Answers, errors and pages as HTTP responses: one error body, one status table."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast.api.endpoint import Answer, Endpoint, WebPage
from holdfast.api.request import Request
from holdfast.api.schemas import TooManyRequests
from holdfast.api.streaming import StreamedBody
from holdfast.errors import HoldfastError, OperatorError, RateLimited
from holdfast.limits.http import PROBLEM, PROBLEM_TITLE, PROBLEM_TYPE
from holdfast.wire.frames import Error, ErrorBody

STATUS = {
    "INVALID_MESSAGE": 400,
    "UNAUTHORIZED": 401,
    "FORBIDDEN": 403,
    "NOT_A_MEMBER": 403,
    "NOT_FOUND": 404,
    "IDEMPOTENCY_KEY_REUSED": 409,
    "VERSION_CONFLICT": 409,
    "MESSAGE_TOO_LARGE": 413,
    "INVALID_CONTENT_TYPE": 415,
    "INVALID_CHECK": 422,
    "INVALID_RULE": 422,
    "RATE_LIMITED": 429,
    "INTERNAL_ERROR": 500,
    "SERVER_BUSY": 503,
    "CHAT_HALTED": 503,
    "SERVICE_UNAVAILABLE": 503,
    "INSUFFICIENT_STORAGE": 507,
}
"""Error code to status; documented in docs/reference/rest.md."""

RETRY_AFTER_SECONDS = {
    "RATE_LIMITED": 1,
    "SERVER_BUSY": 1,
    "SERVICE_UNAVAILABLE": 1,
    "CHAT_HALTED": 30,
}
"""The Retry-After of an error that has none."""

_encoder = msgspec.json.Encoder()


class Response(NamedTuple):
    """A response before ``middleware`` adds its headers."""

    status: int
    body: bytes | StreamedBody = b""
    media_type: str = "application/json"
    headers: Mapping[str, str] = {}


View = Callable[[Request], Awaitable[Response]]


def respond(answer: Answer, status: int) -> Response:
    """The response of an answer; ``status`` is the default."""
    body = answer.body
    if not isinstance(body, (bytes, StreamedBody)):
        body = _encoder.encode(body)
    return Response(answer.status or status, body, answer.media_type, answer.headers)


def respond_error(
    error: HoldfastError,
    *,
    write: bool,
    status: int | None = None,
    to_operator: bool = False,
    violated: Sequence[str] = (),
) -> Response:
    """The response of an error; with ``outcome`` only if it might have written
    something.

    Operators also get texts meant for them. ``violated``: the rules behind a 429.
    """
    error = error if to_operator and isinstance(error, OperatorError) else error.public
    detail = Error(
        code=error.code,
        message=error.message,
        retryable=error.retryable,
        outcome=("unknown" if error.outcome == "unknown" else "rejected") if write else None,
        retry_after_seconds=error.retry_after_seconds,
        details=error.details or None,
    )
    headers = {}
    if error.retryable:
        seconds = error.retry_after_seconds or RETRY_AFTER_SECONDS.get(error.code, 1)
        headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    if error.code == "UNAUTHORIZED":
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, RateLimited):
        body = TooManyRequests(
            detail, PROBLEM, PROBLEM_TITLE, STATUS[error.code], error.message, violated
        )
        return Response(STATUS[error.code], _encoder.encode(body), PROBLEM_TYPE, headers)
    return Response(
        status or STATUS[error.code], _encoder.encode(ErrorBody(detail)), headers=headers
    )


LISTED_MAX = 32
"""Entries of a header's list that are examined; real clients send fewer."""
_WEAK = "W/"


class _BuiltPage(NamedTuple):
    body: bytes
    compressed: bytes
    tag: str
    """Weak, because the plain and the compressed page share it."""


class PageResponses:
    """The responses of one web page.

    It is built on first use, on a thread, because that would block the loop.
    """

    def __init__(self, page: WebPage, endpoints: Sequence[Endpoint]) -> None:
        self._page = page
        self._endpoints = endpoints
        self._built: _BuiltPage | None = None

    async def respond(self, request: Request) -> Response:
        """The page, compressed if the reader accepts it; 304 if the reader has it."""
        page, built = self._page, self._built
        if built is None:
            built = self._built = await asyncio.to_thread(self._build)
        headers = {
            "Content-Security-Policy": page.csp,
            "Cache-Control": page.cache,
            "ETag": built.tag,
            "Vary": "Accept-Encoding",
        }
        if _is_known(built.tag, request.header(b"if-none-match") or ""):
            return Response(304, media_type=page.media_type, headers=headers)
        if _accepts_gzip(request.header(b"accept-encoding") or ""):
            headers["Content-Encoding"] = "gzip"
            return Response(200, built.compressed, page.media_type, headers)
        return Response(200, built.body, page.media_type, headers)

    def _build(self) -> _BuiltPage:
        body = self._page.body(self._endpoints)
        tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        return _BuiltPage(body, gzip.compress(body, mtime=0), _WEAK + tag)


def _is_known(tag: str, if_none_match: str) -> bool:
    """Whether the reader has the page (RFC 9110, section 13.1.2: weak comparison)."""
    known = [each.strip().removeprefix(_WEAK) for each in _listed(if_none_match)]
    return tag.removeprefix(_WEAK) in known or known == ["*"]


def _accepts_gzip(accept_encoding: str) -> bool:
    """Whether the reader accepts gzip (RFC 9110, section 12.5.3).

    A name beats ``*``.
    """
    accepted: dict[str, bool] = {}
    for each in _listed(accept_encoding):
        coding, _, parameters = each.partition(";")
        name, _, weight = parameters.replace(" ", "").lower().partition("=")
        accepted[coding.strip().lower()] = not (name == "q" and weight.strip("0.") == "")
    return accepted.get("gzip", accepted.get("*", False))


def _listed(header: str) -> list[str]:
    return header.split(",", LISTED_MAX)[:LISTED_MAX]
