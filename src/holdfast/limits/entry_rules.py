"""Operators must stay able to undo what they do: which change would lock them out of the admin API. (Pure.)

It is judged where the change is committed, by the rules that are there at that moment. A rule that could answer the
admin API must leave operators enough even while a more specific one answers: it takes effect when that one is deleted.

A program that uses limits as a library has no such door, and may make any rule. The door is where ``*/admin:key`` is
known: a node creates it when it first starts, and a deleted rule of ``*`` is remembered for ever.

The rules that Holdfast's own doors start with. (Pure.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.errors import InvalidRule
from holdfast.limits.rules import ANY, Precision, Rule, RuleName, is_reached

ADMIN = RuleName(ANY, "admin:key")
"""What the admin API asks. Operators belong to no tenant, and no credential is of this one, so that nobody's checks
reach their counters."""


def _rule(resource: str, limit: int, burst: int, precision: Precision = "strict") -> Rule:
    return Rule(ANY, resource, "token_bucket", limit, 60.0, burst_size=burst, precision=precision)


DEFAULT_RULES = (
    _rule("connect:user", 120, 60),
    _rule("connect:address", 600, 600),
    _rule("send:user", 3_000, 500),
    _rule("send:tenant", 600_000, 60_000),
    _rule("rest:user", 1_200, 100),
    _rule("rest:tenant", 60_000, 2_000),
    _rule("check:tenant", 600_000, 60_000, "leased"),  # most questions about limits wait for one round trip, not two
    _rule(ADMIN.resource, 600, 200),
)
"""What each entrance starts with: generous for people, an end for loops. Created once, then the operator's."""

ADMIN_CALLS_PER_MINUTE_MIN = 10
"""Calls of an operator in every minute. While the counters are unavailable every node grants so many by itself."""
ADMIN_WINDOW_SECONDS_MAX = 60.0
"""Of any algorithm but a token bucket, which goes on granting while it is empty: a window that is used up is over only
when it ends."""

_WILDCARDS = (ADMIN.resource[:length] + ANY for length in range(len(ADMIN.resource), -1, -1))
ADMIN_RESOURCES = (ADMIN.resource, *(wildcard for wildcard in _WILDCARDS if is_reached(ADMIN.resource, wildcard)))
"""The resources whose rule, for ``*``, can be the one that answers the admin API; the most specific first."""


def is_of_the_door(name: RuleName) -> bool:
    return name.tenant == ADMIN.tenant and name.resource in ADMIN_RESOURCES


def keep_open(made: Iterable[Rule], there: Iterable[Rule]) -> None:
    """InvalidRule if the rules that are made leave the admin API with next to nothing. ``there``: the door's before."""
    before = {rule.resource: rule for rule in there}
    ours = {rule.resource: rule for rule in made if is_of_the_door(rule.name)}
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
                f"this would lock operators out of the admin API: {rule.label} must allow at least "
                f"{ADMIN_CALLS_PER_MINUTE_MIN} calls a minute, by a token bucket or a window of at most "
                f"{ADMIN_WINDOW_SECONDS_MAX:g} s, and must not close when the counters are unavailable",
                fields={field: "locks operators out"},
            )


def locks_out(rule: Rule) -> str:
    """The field by which a rule leaves the admin API less than an operator needs to undo it; "" if it does not."""
    if rule.mode != "enforce":
        return ""
    if rule.on_store_failure == "closed":
        return "onStoreFailure"
    if rule.algorithm != "token_bucket" and rule.window_seconds > ADMIN_WINDOW_SECONDS_MAX:
        return "window"
    per_minute = rule.limit * 60 / rule.window_seconds
    return "limit" if min(per_minute, rule.capacity) < ADMIN_CALLS_PER_MINUTE_MIN else ""


def _answering(rules: Mapping[str, Rule]) -> Rule | None:
    return next((rule for resource in ADMIN_RESOURCES if (rule := rules.get(resource)) and not rule.deleted), None)
