"""Which rule answers, and how views of the rules merge."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from holdfast.limits.entry_rules import DEFAULT_RULES
from holdfast.limits.rules import (
    RESERVED,
    Rule,
    RuleName,
    RuleSet,
    RuleSnapshot,
    RuleVersion,
    is_reached,
    reserved_beside,
)


def rule(
    tenant: str,
    resource: str,
    limit: int = 100,
    epoch: int = 1,
    version: int = 1,
    deleted: bool = False,
) -> Rule:
    return Rule(
        tenant, resource, "token_bucket", limit, 60.0, epoch=epoch, version=version, deleted=deleted
    )


def test_most_specific_rule_answers() -> None:
    ladder = [
        rule("*", "*", 1),
        rule("*", "/api/*", 2),
        rule("*", "/api/search", 3),
        rule("acme", "*", 4),
        rule("acme", "/*", 5),
        rule("acme", "/api/*", 6),
        rule("acme", "/api/search", 7),
    ]
    rules = RuleSet()
    for step in ladder:
        rules = rules.merge(step)
        found = rules.lookup("acme", "/api/search")
        assert found == step
    assert rules.lookup("other", "/api/search") == ladder[2]
    assert rules.lookup("other", "/api/find") == ladder[1]
    assert rules.lookup("other", "login") == ladder[0]
    assert rules.lookup("acme", "login") == ladder[3]


def test_wildcard_rule_never_answers_for_our_entry_points() -> None:
    """Only an exact name or a wildcard with the word and the colon, of any tenant."""
    assert {default.resource.partition(":")[0] + ":" for default in DEFAULT_RULES} <= set(RESERVED)
    for word in RESERVED:
        resource, short = f"{word}user", word.rstrip(":")
        for tenant in ("acme", "*"):
            for beside in ("*", f"{short[0]}*", f"{short}*"):
                rules = RuleSet.of([rule(tenant, beside, 1)])
                assert rules.lookup("acme", resource) is None and word in reserved_beside(beside)
                assert rules.lookup("acme", f"{short}s") == rule(tenant, beside, 1), (
                    "what is not reserved"
                )
            for by in (f"{word}*", f"{resource}*", resource):
                rules = RuleSet.of([rule(tenant, "*", 1), rule(tenant, by, 2)])
                assert rules.lookup("acme", resource) == rule(tenant, by, 2)
                assert word not in reserved_beside(by)
    assert reserved_beside("/api/*") == reserved_beside("send:user") == []


def test_rule_answers_for_what_it_reaches() -> None:
    chance = random.Random(3)
    parts = ["", "s", "send", "send:", "send:user", "/a", "sen:", "admin:"]
    for _ in range(3_000):
        resource = chance.choice(parts) + chance.choice(["x", "user", ":y"])
        by = chance.choice(
            [
                resource,
                resource[: chance.randrange(len(resource) + 1)] + "*",
                chance.choice(parts) + "*",
            ]
        )
        assert (RuleSet.of([rule("acme", by)]).lookup("acme", resource) is not None) == is_reached(
            resource, by
        )


def test_tombstone_answers_nothing_and_stays() -> None:
    rules = RuleSet.of([rule("acme", "a")]).merge(rule("acme", "a", version=2, deleted=True))
    assert rules.lookup("acme", "a") is None
    assert rules.live() == []
    assert rules.merge(rule("acme", "a", limit=5, version=1)).lookup("acme", "a") is None
    assert rules.merge(rule("acme", "a", limit=5, version=3)).lookup("acme", "a") is not None


def test_merge_leaves_the_old_set_unchanged() -> None:
    old = RuleSet.of([rule("acme", "a", 1)])
    assert old.lookup("acme", "a") is not None
    new = old.merge(rule("acme", "a", 2, version=2))
    before, after = old.lookup("acme", "a"), new.lookup("acme", "a")
    assert before is not None and after is not None
    assert (before.limit, after.limit) == (1, 2)


def test_rule_of_the_newer_epoch_wins_after_a_failover() -> None:
    node = (
        RuleSet(epoch=1)
        .merge(rule("acme", "a", 8, version=8))
        .merge(rule("acme", "a", 9, version=9))
    )
    survivor = RuleSnapshot(2, 8, (rule("acme", "a", 8, version=8),))
    node = node.merge_snapshot(survivor)
    assert node.get(RuleName("acme", "a")) == survivor.rules[0]
    again = node.merge(rule("acme", "a", 9, version=9))
    assert again is node, "an event of the lost life came late and was applied"
    new = rule("acme", "a", 10, epoch=2, version=9)
    assert node.merge(new).lookup("acme", "a") == new


def test_lagging_snapshot_neither_reverts_nor_removes_rules() -> None:
    lagging = RuleSnapshot(1, 1, (rule("acme", "a", version=1),))
    node = (
        RuleSet(epoch=1).merge(rule("acme", "a", 5, version=2)).merge(rule("acme", "b", version=1))
    )
    assert node.merge_snapshot(lagging) is node


def test_lagging_snapshot_of_a_newer_epoch_keeps_still_newer_rules() -> None:
    node = RuleSet(epoch=1).merge(rule("acme", "a", 7, epoch=2, version=3))
    node = node.merge_snapshot(RuleSnapshot(2, 1, (rule("acme", "a", 6, epoch=2, version=2),)))
    found = node.lookup("acme", "a")
    assert found is not None and found.stamp == RuleVersion(2, 3)


def test_digest_shows_any_difference_and_ignores_order() -> None:
    rules = [rule("acme", str(n), n + 1) for n in range(20)]
    shuffled = random.Random(1).sample(rules, len(rules))
    assert RuleSet.of(rules).digest == RuleSet.of(shuffled).digest
    one_by_one = RuleSet()
    for each in shuffled:
        one_by_one = one_by_one.merge(structs.replace(each, version=0)).merge(each)
    assert one_by_one.digest == RuleSet.of(rules).digest
    for field, value in [("limit", 99), ("mode", "off"), ("version", 2), ("deleted", True)]:
        other = [structs.replace(rules[0], **{field: value}), *rules[1:]]
        assert RuleSet.of(other).digest != RuleSet.of(rules).digest


def test_rules_merged_one_by_one_answer_like_a_snapshot() -> None:
    chance = random.Random(11)
    resources = ["*", "a*", "ab*", "ab", "abc", "b"]
    for _ in range(300):
        one_by_one, all_of_them = RuleSet(), {}
        for version in range(1, 25):
            tenant, resource = chance.choice(["acme", "*"]), chance.choice(resources)
            change = rule(tenant, resource, version, version=version, deleted=chance.random() < 0.4)
            one_by_one, all_of_them = one_by_one.merge(change), {**all_of_them, change.name: change}
        at_once = RuleSet(all_of_them)
        for tenant in ("acme", "*", "other"):
            for asked in ("a", "ab", "abc", "abcd", "b", "bb", ""):
                assert one_by_one.lookup(tenant, asked) == at_once.lookup(tenant, asked)
        assert one_by_one.digest == at_once.digest


class Primary:
    """The truth: a log of changes in which a failover may forget the newest ones."""

    def __init__(self) -> None:
        self.epoch = 1
        self.rules: dict[RuleName, Rule] = {}
        self.log: list[Rule] = []
        self.events: list[Rule] = []
        self.snapshots: list[RuleSnapshot] = []
        self.copy()

    def change(self, resource: str, limit: int, deleted: bool) -> None:
        name = RuleName("acme", resource)
        version = self.rules[name].version + 1 if name in self.rules else 1
        self.rules[name] = rule("acme", resource, limit, self.epoch, version, deleted)
        self.log.append(self.rules[name])
        self.events.append(self.rules[name])
        self.copy()

    def fail_over(self, lost: int) -> None:
        self.log = self.log[: len(self.log) - lost]
        self.epoch += 1
        self.rules = {}
        for each in self.log:
            self.rules[each.name] = each
        self.copy()

    def copy(self) -> None:
        self.snapshots.append(RuleSnapshot(self.epoch, len(self.log), tuple(self.rules.values())))


steps = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.sampled_from("abc"), st.integers(1, 9), st.booleans()),
        st.tuples(st.just("fail"), st.integers(0, 2)),
    ),
    max_size=12,
)


@pytest.mark.covers("004 `UpsertIfNewer`")
@settings(max_examples=300, deadline=None)
@given(steps=steps, random=st.randoms(use_true_random=False))
def test_rules_converge_under_any_order_repetition_and_loss(
    steps: Any, random: random.Random
) -> None:
    primary = Primary()
    for step in steps:
        if step[0] == "change":
            primary.change(*step[1:])
        else:
            primary.fail_over(min(step[1], len(primary.log)))
    truth = RuleSet(primary.rules, primary.epoch)
    seen: list[Rule | RuleSnapshot] = [*primary.events, *primary.snapshots] * 2
    for _ in range(3):
        node = RuleSet()
        for item in random.sample(seen, random.randint(0, len(seen))):
            before = node
            node = node.merge_snapshot(item) if isinstance(item, RuleSnapshot) else node.merge(item)
            never_goes_back(before, node)
            yields_to(node, truth)
        node = node.merge_snapshot(primary.snapshots[-1])
        assert node.digest == truth.digest
        for item in random.sample(seen, random.randint(0, len(seen))):
            node = node.merge_snapshot(item) if isinstance(item, RuleSnapshot) else node.merge(item)
        assert node.digest == truth.digest
        assert {r.name: r for r in node.all()} == primary.rules


@settings(max_examples=200, deadline=None)
@given(steps=steps, random=st.randoms(use_true_random=False))
def test_changes_merged_together_equal_one_by_one(steps: Any, random: random.Random) -> None:
    primary = Primary()
    for step in steps:
        if step[0] == "change":
            primary.change(*step[1:])
        else:
            primary.fail_over(min(step[1], len(primary.log)))
    one_by_one = before = RuleSet().merge_snapshot(random.choice(primary.snapshots))
    events = random.sample(primary.events * 2, random.randint(0, 2 * len(primary.events)))
    for event in events:
        one_by_one = one_by_one.merge(event)
    together = before.merge(*events)
    assert (together is before) == (one_by_one is before)
    assert list(together.live()) == list(one_by_one.live()) and together.digest == one_by_one.digest
    assert all(together.lookup("acme", name) == one_by_one.lookup("acme", name) for name in "abc")


@pytest.mark.parametrize("tenants", [1, 10_000])
def test_hundred_changes_cost_one_pass_over_the_other_rules(tenants: int) -> None:
    rules = RuleSet.of([rule(f"t{n % tenants}", f"/r{n}") for n in range(10_000)])
    changes = [rule(f"t{n % tenants}", f"/r{n}", 9, version=2) for n in range(0, 10_000, 100)]

    def one_by_one() -> RuleSet:
        merged = rules
        for change in changes:
            merged = merged.merge(change)
        return merged

    def seconds(merge: Callable[[], RuleSet]) -> float:
        began = time.perf_counter()
        merge()
        return time.perf_counter() - began

    together = min(seconds(lambda: rules.merge(*changes)) for _ in range(5))
    assert together < min(seconds(one_by_one) for _ in range(2)) / 4


def yields_to(node: RuleSet, truth: RuleSet) -> None:
    """Counters that were counted by any node's rule go by the true one; equal stamps
    are of equal rules.
    """
    for mine in node.all():
        theirs = truth.get(mine.name)
        if theirs is not None:
            assert node.in_force(mine) <= truth.in_force(theirs)
            assert node.in_force(mine) != truth.in_force(theirs) or mine == theirs


def never_goes_back(before: RuleSet, after: RuleSet) -> None:
    """A node's rules only become newer: by their own stamps within one epoch, by those
    they are in force by always.
    """
    for old in before.all():
        new = after.get(old.name)
        assert new is None or after.in_force(new) >= before.in_force(old)
    if before.epoch == after.epoch:
        for old in before.all():
            new = after.get(old.name)
            assert new is not None and new.stamp >= old.stamp


@pytest.mark.parametrize("tenants", [1, 1000])
def test_lookup_among_ten_thousand_rules_costs_like_ten(tenants: int) -> None:
    rules = RuleSet.of([rule(f"t{n % tenants}", f"/r{n}") for n in range(10_000)])
    assert rules.lookup("t0", "/r0") is not None
    assert len(rules.live()) == 10_000
