"""Answers, errors and pages as HTTP responses: one error body, one status table."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from holdfast.api.endpoint import Answer, Endpoint, ErrorShape, WebPage
from holdfast.api.request import Request
from holdfast.api.schemas import Problem, TooManyRequests
from holdfast.api.streaming import StreamedBody
from holdfast.errors import HoldfastError, OperatorError, RateLimited
from holdfast.limits.http import PROBLEM, PROBLEM_TITLE, PROBLEM_TYPE
from holdfast.streaming.dialects.openai_errors import error_body, error_object, reply_error
from holdfast.streaming.reply import ReplyFailed
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
    shape: ErrorShape = "holdfast",
) -> Response:
    """The response of an error; with ``outcome`` only if it might have written
    something.

    Operators also get texts meant for them. ``violated``: the rules behind a 429.
    """
    error = error if to_operator and isinstance(error, OperatorError) else error.public
    if shape == "openai":
        return respond_openai_error(error)
    detail = Error(
        code=error.code,
        message=error.message,
        retryable=error.retryable,
        outcome=("unknown" if error.outcome == "unknown" else "rejected") if write else None,
        retry_after_seconds=error.retry_after_seconds,
        details=error.details or None,
    )
    headers = _error_headers(error)
    if shape == "problem":
        headers = _reply_headers(_status(error), headers)
    if isinstance(error, RateLimited):
        body = TooManyRequests(
            detail, PROBLEM, PROBLEM_TITLE, STATUS[error.code], error.message, violated
        )
        return Response(STATUS[error.code], _encoder.encode(body), PROBLEM_TYPE, headers)
    status = status or _status(error)
    if shape == "problem":
        title = HTTPStatus(status).phrase
        problem = Problem(detail, "about:blank", title, status, error.message)
        return Response(status, _encoder.encode(problem), PROBLEM_TYPE, headers)
    return Response(status, _encoder.encode(ErrorBody(detail)), headers=headers)


def _status(error: HoldfastError) -> int:
    return error.error.status if isinstance(error, ReplyFailed) else STATUS[error.code]


def _error_headers(error: HoldfastError) -> dict[str, str]:
    headers = {}
    if error.retryable:
        seconds = error.retry_after_seconds or RETRY_AFTER_SECONDS.get(error.code, 1)
        headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    if error.code == "UNAUTHORIZED":
        headers["WWW-Authenticate"] = "Bearer"
    return headers


REPLY_RETRY_SECONDS_MAX = 60
"""The longest Retry-After of a request for a reply: SDKs do not wait longer."""
NOT_REPEATED = frozenset({409, 502, 504})
"""Statuses of ours that an SDK would repeat at once, though nothing is won by it: the
providers were asked already, in rounds."""
_OPENAI_CODES = {"UNAUTHORIZED": "invalid_api_key", "RATE_LIMITED": "rate_limit_exceeded"}


def respond_openai_error(error: HoldfastError) -> Response:
    """The response of an error as clients of OpenAI's API read it."""
    headers, status = _error_headers(error), _status(error)
    if isinstance(error, ReplyFailed):
        shown = reply_error(error.error)
        headers["X-Reply-Id"] = error.details["reply_id"]
        if status in (429, 503):
            headers["Retry-After"] = str(math.ceil(error.retry_after_seconds or 1))
    else:
        code = _OPENAI_CODES.get(error.code, error.code.lower())
        if error.code == "NOT_FOUND" and "model" in error.details:
            code = "model_not_found"
        shown = error_object(status, error.message, code, error.details.get("field"))
    return Response(status, error_body(shown), headers=_reply_headers(status, headers))


def _reply_headers(status: int, headers: Mapping[str, str]) -> dict[str, str]:
    made = dict(headers)
    if "Retry-After" in made:
        made["Retry-After"] = str(min(int(made["Retry-After"]), REPLY_RETRY_SECONDS_MAX))
    if status in NOT_REPEATED:
        made["x-should-retry"] = "false"
    return made


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
