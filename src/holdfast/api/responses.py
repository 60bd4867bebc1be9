"""Answers and errors as HTTP responses: one error body, one table of statuses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from holdfast.api.endpoint import Answer
from holdfast.api.request import Response
from holdfast.api.schemas import TooManyRequests
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


def respond(answer: Answer, status: int) -> Response:
    """The response of an answer; ``status`` is the default."""
    body = answer.body if isinstance(answer.body, bytes) else _encoder.encode(answer.body)
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
    error = error if to_operator and isinstance(error, OperatorError) else error.told
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
