"""Operators must stay able to undo what they do: which change would lock them out of the admin API. (Pure.)

It is judged where the change is committed, by the rules that are there at that moment: two changes that are harmless
alone can shut the door together.

A program that uses limits as a library has no such door, and may make any rule. The door is where ``*/admin:key`` is
known: a node creates it when it first starts, and a deleted rule of ``*`` is remembered for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.errors import InvalidRule
from holdfast.limits.rules import ANY, Rule, RuleName, is_reached

ADMIN = RuleName(ANY, "admin:key")
"""What the admin API asks. Operators belong to no tenant, and no credential is of this one, so that nobody's checks
reach their counters."""

ADMIN_CALLS_PER_MINUTE_MIN = 10

_WILDCARDS = (ADMIN.resource[:length] + ANY for length in range(len(ADMIN.resource), -1, -1))
DOOR = (ADMIN.resource, *(wildcard for wildcard in _WILDCARDS if is_reached(ADMIN.resource, wildcard)))
"""The resources whose rule, for ``*``, can be the one that answers the admin API; the most specific first."""


def is_of_the_door(name: RuleName) -> bool:
    return name.tenant == ADMIN.tenant and name.resource in DOOR


def keep_open(made: Iterable[Rule], there: Iterable[Rule]) -> None:
    """InvalidRule if the rules that are made leave the admin API with next to nothing. ``there``: the door's before."""
    before = {rule.resource: rule for rule in there}
    after = {**before, **{rule.resource: rule for rule in made if is_of_the_door(rule.name)}}
    rule = _answering(after)
    if ADMIN.resource in after and rule is not None and rule != _answering(before) and locks_out(rule):
        raise InvalidRule(
            f"this would lock operators out of the admin API: {rule.label} must allow at least "
            f"{ADMIN_CALLS_PER_MINUTE_MIN} calls a minute and must not close when the counters are away",
            fields={"limit" if rule.on_store_failure != "closed" else "onStoreFailure": "locks operators out"},
        )


def locks_out(rule: Rule) -> bool:
    """Whether a rule leaves the admin API less than an operator needs to undo it."""
    per_minute = rule.limit * 60 / rule.window_seconds  # a holder at the door leaves with the window
    too_few = min(per_minute, rule.capacity) < ADMIN_CALLS_PER_MINUTE_MIN
    return rule.mode == "enforce" and (rule.on_store_failure == "closed" or too_few)


def _answering(rules: Mapping[str, Rule]) -> Rule | None:
    return next((rule for resource in DOOR if (rule := rules.get(resource)) and not rule.deleted), None)
