"""Which changes would lock operators out of the admin API."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from holdfast.errors import InvalidRule
from holdfast.limits.entry_points import checks_of
from holdfast.limits.entry_rules import ADMIN, ADMIN_RESOURCES, locks_out, refuse_lockout
from holdfast.limits.rules import Rule, RuleSet
from holdfast.message import User

ENOUGH = Rule(*ADMIN, "token_bucket", 600, 60.0)
TOO_FEW = Rule("*", "admin:*", "fixed_window", 1, 60.0)


def test_admin_resources_are_those_of_the_admin_check() -> None:
    (asked,) = checks_of("admin", User("", "key-1"))
    assert (asked.tenant, asked.resource) == ADMIN


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        (structs.replace(ENOUGH, limit=9), "limit"),
        (structs.replace(ENOUGH, window_seconds=3601.0), "limit"),
        (structs.replace(ENOUGH, burst_size=9), "limit"),
        (structs.replace(ENOUGH, on_store_failure="closed"), "onStoreFailure"),
        (Rule(*ADMIN, "fixed_window", 1_000_000, 60.1), "window"),
        (Rule(*ADMIN, "sliding_window", 1_000_000, 86_400.0), "window"),
        (Rule(*ADMIN, "concurrency", 1_000_000, 3_600.0), "window"),
    ],
)
def test_enforced_rule_with_too_few_admin_calls_locks_out(rule: Rule, field: str) -> None:
    assert locks_out(rule) == field
    assert not locks_out(structs.replace(rule, mode="shadow"))


@pytest.mark.parametrize(
    "rule",
    [
        ENOUGH,
        structs.replace(ENOUGH, limit=600, window_seconds=3600.0),
        Rule(*ADMIN, "fixed_window", 10, 60.0),
        structs.replace(ENOUGH, limit=10, burst_size=10),
    ],
)
def test_ten_admin_calls_a_minute_do_not_lock_out(rule: Rule) -> None:
    assert not locks_out(rule)


def test_answering_admin_rule_is_the_one_the_limiter_finds() -> None:
    """Refused just when it locks out, or lets a rule answer that does."""
    chance = random.Random(7)
    resources = [
        *ADMIN_RESOURCES,
        "admin:keys",
        "admin:key/x",
        "send:user",
        "b*",
        "*",
        "adm*",
        "admin*",
    ]
    refused = 0
    for _ in range(2_000):
        rules = {
            name: Rule(
                "*",
                name,
                "fixed_window",
                chance.choice((1, 600)),
                60.0,
                deleted=chance.random() < 0.3,
            )
            for name in chance.sample(resources, 6)
        }
        made = Rule(
            "*",
            chance.choice(resources),
            "fixed_window",
            1,
            60.0,
            version=2,
            deleted=chance.random() < 0.5,
        )
        before, after = (
            RuleSet.of(rules.values()),
            RuleSet.of({**rules, made.resource: made}.values()),
        )
        rule = after.lookup(*ADMIN)
        has_door = after.get(ADMIN) is not None
        judged = [made] if made.resource in ADMIN_RESOURCES and not made.deleted else []
        if rule is not None and rule != before.lookup(*ADMIN):
            judged.append(rule)
        shuts = has_door and any(map(locks_out, judged))
        try:
            refuse_lockout(
                [made], [rule for name, rule in rules.items() if name in ADMIN_RESOURCES]
            )
            assert not shuts
        except InvalidRule:
            assert shuts
            refused += 1
    assert refused > 50


def test_existing_lockout_does_not_block_other_changes() -> None:
    other = Rule("*", "admin:k*", "token_bucket", 600, 60.0)
    refuse_lockout([other], [structs.replace(ENOUGH, limit=1), TOO_FEW])
    refuse_lockout(
        [structs.replace(TOO_FEW, deleted=True)], [structs.replace(ENOUGH, limit=1), TOO_FEW]
    )


@pytest.mark.parametrize("resource", [name for name in ADMIN_RESOURCES if name != ADMIN.resource])
def test_hidden_wildcard_that_would_lock_operators_out_is_refused(
    resource: str,
) -> None:
    with pytest.raises(InvalidRule, match="lock operators out"):
        refuse_lockout([structs.replace(TOO_FEW, resource=resource)], [ENOUGH])


def test_program_without_an_admin_rule_may_set_any_rule() -> None:
    refuse_lockout([TOO_FEW], [])
    with pytest.raises(InvalidRule):
        refuse_lockout([TOO_FEW], [structs.replace(ENOUGH, deleted=True)])
