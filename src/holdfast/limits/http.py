"""Decisions in HTTP, the same everywhere: headers and problem document. (Pure.)

The headers are ``RateLimit-Policy`` and ``RateLimit`` of
draft-ietf-httpapi-ratelimit-headers. The problem is that draft's, in the form of RFC
9457.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from holdfast.errors import RateLimited
from holdfast.limits.rules import Decision

_Headers = list[tuple[str, str]]

_INTEGER_MAX = 999_999_999_999_999
"""The largest integer of a structured field (RFC 9651)."""

PROBLEM_TYPE = "application/problem+json"
PROBLEM = "https://iana.org/assignments/http-problem-types#quota-exceeded"
PROBLEM_TITLE = "Request cannot be satisfied as assigned quota has been exceeded"


def rate_limit_headers(decisions: Sequence[Decision], *, legacy: bool = False) -> _Headers:
    """The headers of the decisions, one policy per rule; empty if no rule applied."""
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
    """Whole seconds until the slowest refusing rule has room."""
    return max(1, *(_seconds(d.retry_after) for d in decisions if not d.allowed))


def problem(decisions: Sequence[Decision]) -> dict[str, Any]:
    """The members of the document. It names the refusing rules as the headers do."""
    document: dict[str, Any] = {"type": PROBLEM, "title": PROBLEM_TITLE, "status": 429}
    violated = [
        decision.rule for decision in decisions if decision.exceeded and not decision.allowed
    ]
    return {**document, "violated-policies": violated} if violated else document


def refusal(decisions: Sequence[Decision]) -> RateLimited | None:
    """The error if any decision refused: the longest wait, and its rule."""
    refused = [decision for decision in decisions if not decision.allowed]
    if not refused:
        return None
    worst = max(refused, key=lambda decision: decision.retry_after)
    text = f"too many requests: the limit of {worst.rule} is reached"
    return rate_limited(text, worst.retry_after, worst.rule, worst.limit, worst.window_seconds)


def rate_limited(
    text: str, wait_seconds: float, policy: str, limit: int, window_seconds: float
) -> RateLimited:
    """The error of any limit, with all its response needs; the wait is never 0."""
    wait = max(math.ceil(wait_seconds * 1000) / 1000, 0.001)
    return RateLimited(
        text, retry_after_seconds=wait, rule=policy, limit=limit, window_seconds=window_seconds
    )


def refusing(error: RateLimited) -> list[Decision]:
    """The decision behind ``rate_limited``; none if the error came from elsewhere."""
    rule, wait = error.details.get("rule"), error.retry_after_seconds or 0.0
    if rule is None:
        return []
    limit, window = error.details["limit"], error.details["window_seconds"]
    return [Decision(False, limit, 0, wait, wait, rule, exceeded=True, window_seconds=window)]


def _window(decision: Decision) -> str:
    """Optional in the draft, and in whole seconds."""
    return f";w={math.ceil(decision.window_seconds)}" if decision.window_seconds else ""


def _more_after(decision: Decision) -> float:
    """When more is available; after a refusal, the same as ``Retry-After``."""
    return (
        decision.retry_after if decision.exceeded and not decision.allowed else decision.reset_after
    )


def _seconds(duration: float) -> int:
    return min(math.ceil(duration), _INTEGER_MAX)


def _name(decision: Decision) -> str:
    """A structured-field string: quotes and backslashes escaped."""
    return '"' + decision.rule.replace("\\", "\\\\").replace('"', '\\"') + '"'
