"""The rules of Holdfast's own entry points: defaults, and no lockout. (Pure.)

``DEFAULT_RULES`` are created when a node first starts; then they are the operator's. A
rule that a newer version adds is created when that version first starts, unless a rule
of its name ever existed.

*Live rules* (``replies:active``) are numbers that a part of Holdfast reads whenever it
needs them. That part does its own counting, so no check is ever made by a live rule.

``refuse_lockout`` rejects a change that would lock operators out of the admin API, so
that they can always undo what they did. The rule store calls it where the change is
committed, with the rules of that moment. A rule that could answer for the admin API
must leave enough even while a more specific one answers, because it takes effect when
that one is deleted.

A program that uses limits as a library has no admin API and may set any rule. The check
applies where ``*/admin:key`` is known: a node creates it at first start, and the
tombstone of a rule of ``*`` is never forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.errors import InvalidRule
from holdfast.limits.rules import ANY, Precision, Rule, RuleName, is_reached

ADMIN = RuleName(ANY, "admin:key")
"""The rule of the admin API. Operators belong to no tenant, and no credential has this
one, so the checks of others cannot reach their counters."""


def _rule(resource: str, limit: int, burst: int, precision: Precision = "strict") -> Rule:
    return Rule(ANY, resource, "token_bucket", limit, 60.0, burst_size=burst, precision=precision)


DEFAULT_RULES = (
    _rule("connect:user", 120, 60),
    _rule("connect:address", 600, 600),
    _rule("send:user", 3_000, 500),
    _rule("send:tenant", 600_000, 60_000),
    _rule("rest:user", 1_200, 100),
    _rule("rest:tenant", 60_000, 2_000),
    # so most remote checks wait for one round trip, not two
    _rule("check:tenant", 600_000, 60_000, "leased"),
    _rule("reply:user", 600, 100),
    _rule("reply:tenant", 60_000, 6_000),
    _rule(ADMIN.resource, 600, 200),
)
"""Generous for people, but they stop a client that loops."""

TOKENS_USER, TOKENS_TENANT = "tokens:user", "tokens:tenant"
"""Tokens of models, charged as replies use them. There are no rules by default."""

ENTRY_POINT_RESOURCES = frozenset(
    {*(rule.resource for rule in DEFAULT_RULES), TOKENS_USER, TOKENS_TENANT}
)
"""What our own entry points check. They count arrivals; none reports an end."""

LIVE = "replies:"
"""The prefix of live rules."""
ACTIVE, ACTIVE_OF_KEY = f"{LIVE}active", f"{LIVE}active:key"
"""How many replies a user, or a key that names no user, may have active at a time."""
ACTIVE_OF_KEY_DEFAULT = 1_000

ADMIN_CALLS_PER_MINUTE_MIN = 10
"""Calls an operator must have each minute. Without the counters, each node grants
them."""
ADMIN_WINDOW_SECONDS_MAX = 60.0
"""For all algorithms but the token bucket, which grants again while it drains: a window
that is used up blocks until it ends."""

_WILDCARDS = (ADMIN.resource[:length] + ANY for length in range(len(ADMIN.resource), -1, -1))
ADMIN_RESOURCES = (
    ADMIN.resource,
    *(wildcard for wildcard in _WILDCARDS if is_reached(ADMIN.resource, wildcard)),
)
"""The resources whose rule for ``*`` can answer for the admin API, by specificity."""


def is_admin_rule(name: RuleName) -> bool:
    """Whether a rule of this name can answer for the admin API."""
    return name.tenant == ADMIN.tenant and name.resource in ADMIN_RESOURCES


def refuse_lockout(made: Iterable[Rule], there: Iterable[Rule]) -> None:
    """InvalidRule if the rules ``made`` leave operators too little of the admin API.

    ``there`` are the admin API's rules before the change.
    """
    before = {rule.resource: rule for rule in there}
    ours = {rule.resource: rule for rule in made if is_admin_rule(rule.name)}
    after = {**before, **ours}
    if ADMIN.resource not in after:
        return
    judged = [rule for rule in ours.values() if not rule.deleted]
    answering = _answering(after)
    if answering is not None and answering != _answering(before):
        judged.append(answering)
    for rule in judged:
        if field := locks_out(rule):
            raise InvalidRule(
                f"this would lock operators out of the admin API: {rule.label} must allow at least"
                f" {ADMIN_CALLS_PER_MINUTE_MIN} calls a minute, by a token bucket or a window of at"
                f" most {ADMIN_WINDOW_SECONDS_MAX:g} s, and must not close when the counters are"
                " unavailable",
                fields={field: "locks operators out"},
            )


def locks_out(rule: Rule) -> str:
    """The field by which a rule leaves operators too few admin calls, or ""."""
    if rule.mode != "enforce":
        return ""
    if rule.on_store_failure == "closed":
        return "onStoreFailure"
    if rule.algorithm != "token_bucket" and rule.window_seconds > ADMIN_WINDOW_SECONDS_MAX:
        return "window"
    per_minute = rule.limit * 60 / rule.window_seconds
    return "limit" if min(per_minute, rule.capacity) < ADMIN_CALLS_PER_MINUTE_MIN else ""


def _answering(rules: Mapping[str, Rule]) -> Rule | None:
    return next(
        (
            rule
            for resource in ADMIN_RESOURCES
            if (rule := rules.get(resource)) and not rule.deleted
        ),
        None,
    )
