"""Which changes would lock operators out of the admin API."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from holdfast.errors import InvalidRule
from holdfast.limits.entrances import questions
from holdfast.limits.lockout import ADMIN, DOOR, keep_open, locks_out
from holdfast.limits.rules import Rule, RuleSet
from holdfast.message import User

ENOUGH = Rule(*ADMIN, "token_bucket", 600, 60.0)
TOO_FEW = Rule("*", "admin:*", "fixed_window", 1, 60.0)


def test_the_door_is_what_the_admin_entrance_asks() -> None:
    (asked,) = questions("admin", User("", "key-1"))
    assert (asked.tenant, asked.resource) == ADMIN


@pytest.mark.parametrize(
    "rule",
    [
        structs.replace(ENOUGH, limit=9),
        structs.replace(ENOUGH, window_seconds=3601.0),
        structs.replace(ENOUGH, burst_size=9),
        structs.replace(ENOUGH, on_store_failure="closed"),
    ],
)
def test_a_rule_that_leaves_operators_too_little_locks_them_out_where_it_is_enforced(rule: Rule) -> None:
    assert locks_out(rule)
    assert not locks_out(structs.replace(rule, mode="shadow"))
    assert not locks_out(ENOUGH)


def test_what_answers_the_door_is_what_the_limiter_would_find() -> None:
    """Any rules and one more: it is refused just when the rule that would answer changes to one that locks out."""
    chance = random.Random(7)
    resources = [*DOOR, "admin:keys", "admin:key/x", "send:user", "b*", "*", "adm*", "admin*"]
    refused = 0
    for _ in range(2_000):
        rules = {
            name: Rule("*", name, "fixed_window", chance.choice((1, 600)), 60.0, deleted=chance.random() < 0.3)
            for name in chance.sample(resources, 6)
        }
        made = Rule("*", chance.choice(resources), "fixed_window", 1, 60.0, version=2, deleted=chance.random() < 0.5)
        before, after = RuleSet.of(rules.values()), RuleSet.of({**rules, made.resource: made}.values())
        rule = after.lookup(*ADMIN)
        has_door = after.get(ADMIN) is not None
        shuts = has_door and rule is not None and rule != before.lookup(*ADMIN) and locks_out(rule)
        try:
            keep_open([made], [rule for name, rule in rules.items() if name in DOOR])
            assert not shuts
        except InvalidRule:
            assert shuts
            refused += 1
    assert refused > 50


def test_what_was_shut_before_stops_no_other_change() -> None:
    other = Rule("*", "admin:k*", "token_bucket", 1, 60.0)
    keep_open([other], [structs.replace(ENOUGH, limit=1), TOO_FEW])


def test_a_program_without_an_admin_entrance_may_make_any_rule() -> None:
    keep_open([TOO_FEW], [])
    with pytest.raises(InvalidRule):
        keep_open([TOO_FEW], [structs.replace(ENOUGH, deleted=True)])
