"""Rules as JSON, and every reason to reject one, by field and all at once. (Pure.)

The names are those of the design document (``tenantID``, ``burstSize``, ``window:
"60s"``) with ours beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from msgspec import structs

from holdfast.errors import InvalidRule
from holdfast.limits.entry_rules import ENTRY_POINT_RESOURCES, LIVE
from holdfast.limits.rules import (
    ANY,
    Algorithm,
    AnyRule,
    Mode,
    OnStoreFailure,
    Precision,
    Rule,
    RuleName,
    UnreadableRule,
    is_reached,
)

LIMIT_MAX = 1_000_000_000
HOLDERS_MAX = 1_000
"""Holders per concurrency counter. One value stores them, so they cost each check."""

DRAIN_SECONDS_MAX = 100 * 366 * 86_400.0
"""The longest time a full bucket may take to drain: a larger burst is a mistake."""

WINDOW_SECONDS_MIN = 0.1
WINDOW_SECONDS_MAX = 366 * 86_400.0
TENANT_LENGTH_MAX = 64
RESOURCE_LENGTH_MAX = 256

NAMES = {
    "tenantID": "tenant",
    "resource": "resource",
    "algorithm": "algorithm",
    "limit": "limit",
    "window": "window_seconds",
    "burstSize": "burst_size",
    "precision": "precision",
    "onStoreFailure": "on_store_failure",
    "mode": "mode",
}
"""What a caller may set: JSON name → field."""

REQUIRED = ("tenantID", "resource", "algorithm", "limit", "window")
BURSTING = "token_bucket"
"""The algorithm that has a burst; ``burstSize`` null unsets it."""
CHOICES: dict[str, tuple[str, ...]] = {
    "algorithm": get_args(Algorithm),
    "precision": get_args(Precision),
    "onStoreFailure": get_args(OnStoreFailure),
    "mode": get_args(Mode),
}

WINDOW_PATTERN = r"([0-9]{1,9})(ms|s|m|h|d)"
_WINDOW = re.compile(WINDOW_PATTERN)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_window(text: object) -> float | None:
    """Seconds of "500ms", "60s", "5m", "1h" or "1d"; None if it is none of these."""
    match = _WINDOW.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    return round(int(match[1]) * _SECONDS[match[2]], 3)


def render_window(seconds: float) -> str:
    milliseconds = round(seconds * 1000)
    return f"{milliseconds // 1000}s" if milliseconds % 1000 == 0 else f"{milliseconds}ms"


def name_of(body: Mapping[str, Any]) -> RuleName:
    """The rule a request is about. InvalidRule if it does not say."""
    refuse(name_problems(body))
    return RuleName(body["tenantID"], body["resource"])


def name_problems(body: Mapping[str, Any]) -> dict[str, str]:
    """Why a request does not name a rule."""
    return _problems({field: body.get(field) for field in ("tenantID", "resource")})


def check_names(names: Mapping[str, object]) -> None:
    """InvalidRule if no rule can have this ``tenantID`` or ``resource``."""
    refuse(_problems(names))


def field_problems(body: Mapping[str, Any], required: Iterable[str]) -> dict[str, str]:
    """What is wrong with each field of a request, or missing."""
    return {field: "is required" for field in required if field not in body} | _problems(body)


def new_rule(body: Mapping[str, Any]) -> Rule:
    """The rule a request creates. InvalidRule names every wrong field."""
    refuse(field_problems(body, REQUIRED))
    return _judged(Rule(**_fields(body)))


def changed_rule(rule: Rule, body: Mapping[str, Any]) -> Rule:
    """``rule`` with a request's fields; loses its burst if the algorithm has none."""
    refuse(_problems(body))
    fields = _fields(body)
    if fields.get("algorithm", BURSTING) != BURSTING:
        fields.setdefault("burst_size", 0)
    return _judged(structs.replace(rule, **fields))


def render(rule: AnyRule) -> dict[str, Any]:
    """The rule as the API shows it; an unreadable one says why, and what to do."""
    unreadable = {}
    if isinstance(rule, UnreadableRule):
        unreadable["unreadable"] = (
            f"no rule that this version knows ({rule.why}): set all its fields, or delete it"
        )
    return {
        **settable(rule),
        **unreadable,
        "version": rule.version,
        "epoch": rule.epoch,
        "deleted": rule.deleted,
        "updatedAt": rule.updated_at,
        "updatedBy": rule.updated_by,
    }


def settable(rule: AnyRule) -> dict[str, Any]:
    """What a caller would send to create this rule; ``burstSize`` only if it is set."""
    body = {field: getattr(rule, attribute) for field, attribute in NAMES.items()}
    if isinstance(rule.window_seconds, int | float):
        body["window"] = render_window(rule.window_seconds)
    if not rule.burst_size:
        del body["burstSize"]
    return body


def _fields(body: Mapping[str, Any]) -> dict[str, Any]:
    fields = {NAMES[field]: value for field, value in body.items()}
    if "window" in body:
        fields["window_seconds"] = parse_window(body["window"])
    if "burstSize" in body:
        fields["burst_size"] = body["burstSize"] or 0
    return fields


def _problems(body: Mapping[str, Any]) -> dict[str, str]:
    problems = {}
    for field, value in body.items():
        reason = _problem(field, value)
        if reason:
            problems[field] = reason
    return problems


def _problem(field: str, value: object) -> str | None:
    if field in ("tenantID", "resource"):
        return _name_problem(field, value)
    if field in CHOICES:
        return None if value in CHOICES[field] else f"must be one of {', '.join(CHOICES[field])}"
    if field == "burstSize" and value is None:
        return None
    if field in ("limit", "burstSize"):
        return _amount_problem(value)
    if field == "window":
        return _window_problem(value)
    return "is not a field of a rule"


def _name_problem(field: str, value: object) -> str | None:
    longest = TENANT_LENGTH_MAX if field == "tenantID" else RESOURCE_LENGTH_MAX
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        return f"must be a text of 1 to {longest} characters"
    if not value.isascii() or not value.isprintable() or " " in value:
        return "must be printable ASCII without spaces"
    if field == "tenantID":
        if value != ANY and (ANY in value or "{" in value or "}" in value):
            return "must be one tenant without * and braces, or * for all"
    elif ANY in value[:-1]:
        return "may have * only at its end, so that no two wildcards can clash"
    return None


def _amount_problem(value: object) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LIMIT_MAX:
        return None
    return f"must be a whole number from 1 to {LIMIT_MAX}"


def _window_problem(value: object) -> str | None:
    seconds = parse_window(value)
    if seconds is None:
        return 'must be a text like "500ms", "60s", "5m", "1h" or "1d"'
    if not WINDOW_SECONDS_MIN <= seconds <= WINDOW_SECONDS_MAX:
        return "must be from 100ms to 366d"
    return None


def _judged(rule: Rule) -> Rule:
    """Reject fields that are valid alone and contradict each other."""
    problems = {}
    if rule.burst_size and rule.algorithm != BURSTING:
        problems["burstSize"] = f"means nothing for {rule.algorithm}; leave it out"
    elif rule.capacity * rule.window_seconds / rule.limit > DRAIN_SECONDS_MAX:
        problems["burstSize"] = "would take more than 100 years to drain at this limit and window"
    if rule.precision == "leased" and rule.algorithm == "concurrency":
        problems["precision"] = "holders cannot be leased; use strict"
    if rule.resource.startswith(LIVE):
        if rule.algorithm != "concurrency":
            problems["algorithm"] = (
                f"must be concurrency for {LIVE}…, which limits a number at a time"
            )
    elif rule.algorithm == "concurrency" and rule.limit > HOLDERS_MAX:
        problems["limit"] = f"must be at most {HOLDERS_MAX} for concurrency"
    if rule.algorithm == "concurrency" and (entry_point := _entry_point_under(rule.resource)):
        problems["algorithm"] = (
            f"cannot be concurrency for {entry_point}: no entry point releases holds; limit a rate"
        )
    refuse(problems)
    return rule


def _entry_point_under(resource: str) -> str | None:
    """An entry point that a rule of this resource would answer for."""
    return next(
        (ours for ours in sorted(ENTRY_POINT_RESOURCES) if is_reached(ours, resource)), None
    )


def refuse(problems: Mapping[str, str]) -> None:
    """InvalidRule if there are problems: which field, and why."""
    if problems:
        text = "; ".join(f"{field} {reason}" for field, reason in problems.items())
        raise InvalidRule(text, fields=dict(problems))
