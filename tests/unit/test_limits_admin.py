"""What an operator can do, on the embedded store; the checks of entry points."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
from limits_rig import Shared

from holdfast.clock import ManualClock, SystemClock
from holdfast.errors import InvalidRule, NotFound, RateLimited, Unavailable, VersionConflict
from holdfast.ingest.admission import AdmissionControl
from holdfast.limits.admin import RuleAdmin
from holdfast.limits.counters.memory import MemoryCounters
from holdfast.limits.entry_points import (
    EntryPoint,
    EntryPoints,
    checks_of,
    refusal,
)
from holdfast.limits.entry_rules import DEFAULT_RULES, ENTRY_POINT_RESOURCES
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.rule_changes import Change, RuleChangeResult, decide
from holdfast.limits.rules import Rule, RuleName, RuleSet
from holdfast.limits.rulestore.contract import RetentionSettings
from holdfast.limits.rulestore.sqlite import SqliteRuleStore
from holdfast.message import Outcome, User
from holdfast.telemetry import REGISTRY
from proof import virtual_loop

RULE: dict[str, Any] = {
    "tenantID": "acme",
    "resource": "/api/search",
    "algorithm": "token_bucket",
    "limit": 100,
    "window": "60s",
}
NAME = RuleName("acme", "/api/search")


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[RuleAdmin]:
    async with SqliteRuleStore(folder / "limits.db", SystemClock()) as store:
        yield RuleAdmin(store, SystemClock(), "embedded")


@pytest.mark.real_time
async def test_rule_is_changed_read_and_rolled_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as control:
        await control.create({**RULE, "reason": "launch", "idempotencyKey": "k1"}, "olga")
        again = await control.create({**RULE, "reason": "launch"}, "olga", key="k1")
        assert again.repeated
        update = {"tenantID": "acme", "resource": "/api/search", "limit": 500, "expectedVersion": 1}
        assert (await control.update(update, "olga")).rule.version == 2
        with pytest.raises(VersionConflict) as raised:
            await control.update({**update, "limit": 200}, "boris")
        assert raised.value.details["currentVersion"] == 2
        back = await control.roll_back(
            {"tenantID": "acme", "resource": "/api/search", "version": 1}, "olga"
        )
        assert (back.rule.version, back.rule.limit) == (3, 100)
        history = await control.history(NAME, None, 10)
        assert [(c.action, c.actor, c.rule.limit) for c in history] == [
            ("rollback", "olga", 100), ("update", "olga", 500), ("create", "olga", 100),
        ]  # fmt: skip
        gone = {"tenantID": "acme", "resource": "/api/search", "expectedVersion": 3}
        await control.delete(gone, "olga")
        with pytest.raises(NotFound):
            await control.get(NAME)
        with pytest.raises(NotFound):
            await control.roll_back(
                {"tenantID": "acme", "resource": "/api/search", "version": 9}, "olga"
            )


@pytest.mark.covers("004 versions are 64-bit integers")
@pytest.mark.parametrize(
    ("verb", "body", "field"),
    [
        ("update", {"limit": 5}, "expectedVersion"),
        ("delete", {}, "expectedVersion"),
        ("delete", {"expectedVersion": 1, "limit": 5}, "limit"),
        ("update", {"expectedVersion": "7", "limit": 5}, "expectedVersion"),
        ("update", {"expectedVersion": True, "limit": 5}, "expectedVersion"),
        ("update", {"expectedVersion": 1, "reason": 7}, "reason"),
        ("update", {"expectedVersion": 1, "idempotencyKey": "x" * 200}, "idempotencyKey"),
        ("update", {"expectedVersion": 1, "idempotencyKey": "a\0b"}, "idempotencyKey"),
        ("update", {"expectedVersion": 2**53}, "expectedVersion"),
        (
            "create",
            {"algorithm": "token_bucket", "limit": 5, "window": "60s", "expectedVersion": 7},
            "expectedVersion",
        ),
        ("roll_back", {}, "version"),
        ("roll_back", {"version": -1}, "version"),
        ("roll_back", {"version": 2**53}, "version"),
        ("roll_back", {"version": 2**63 - 1}, "version"),
        ("roll_back", {"version": 10**30}, "version"),
        ("roll_back", {"version": 1, "limit": 5}, "limit"),
    ],
)
@pytest.mark.real_time
async def test_invalid_call_names_its_field(
    tmp_path: Path, verb: str, body: dict[str, Any], field: str
) -> None:
    async with opened(tmp_path) as control:
        with pytest.raises(InvalidRule) as raised:
            await getattr(control, verb)(
                {"tenantID": "acme", "resource": "/api/search", **body}, "olga"
            )
        assert list(raised.value.details["fields"]) == [field]


@pytest.mark.parametrize(
    "body",
    [
        {"tenantID": "*", "resource": "admin:key", "limit": 1},
        {"tenantID": "*", "resource": "admin:k*", "limit": 1},
        {"tenantID": "*", "resource": "admin:*", "limit": 100, "window": "1h"},
        {"tenantID": "*", "resource": "admin:key", "limit": 100, "onStoreFailure": "closed"},
    ],
)
@pytest.mark.real_time
async def test_operators_cannot_lock_themselves_out(tmp_path: Path, body: dict[str, Any]) -> None:
    async with opened(tmp_path) as control:
        await control.ensure(DEFAULT_RULES)
        await control.delete(
            {"tenantID": "*", "resource": "admin:key", "expectedVersion": 1}, "olga"
        )
        before = await control.page(None, None, 100)
        with pytest.raises(InvalidRule, match="lock operators out"):
            await control.create({**RULE, **body}, "olga")
        assert await control.page(None, None, 100) == before
        await control.create({**RULE, **body, "mode": "shadow"}, "olga")


@pytest.mark.real_time
async def test_idempotency_key_in_header_and_body_must_be_equal(tmp_path: Path) -> None:
    async with opened(tmp_path) as control:
        with pytest.raises(InvalidRule) as raised:
            await control.create({**RULE, "idempotencyKey": "k1"}, "olga", key="k2")
        assert list(raised.value.details["fields"]) == ["idempotencyKey"]
        await control.create({**RULE, "idempotencyKey": "k1"}, "olga", key="k1")
        assert (await control.create(RULE, "olga", key="k1")).repeated


@pytest.mark.real_time
async def test_page_of_an_invalid_tenant_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as control:
        for tenant in ("\0", "a b", "a*", ""):
            with pytest.raises(InvalidRule) as raised:
                await control.page(tenant, None, 10)
            assert list(raised.value.details["fields"]) == ["tenantID"]
        assert await control.page("*", None, 10) == []


@pytest.mark.real_time
async def test_deletion_that_uncovers_a_lockout_rule_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as control:
        await control.create({**RULE, "tenantID": "*", "resource": "admin:*", "limit": 1}, "olga")
        await control.ensure(DEFAULT_RULES)
        with pytest.raises(InvalidRule, match=re.escape("*/admin:* must allow at least")):
            await control.delete(
                {"tenantID": "*", "resource": "admin:key", "expectedVersion": 1}, "olga"
            )


@pytest.mark.real_time
async def test_default_rules_can_be_deleted_and_stay_deleted(tmp_path: Path) -> None:
    async with opened(tmp_path) as control:
        await control.ensure(DEFAULT_RULES)
        await control.ensure(DEFAULT_RULES)
        rules = await control.page("*", None, 100)
        assert {rule.resource for rule in rules} == {rule.resource for rule in DEFAULT_RULES}
        assert {rule.version for rule in rules} == {1}
        await control.delete(
            {"tenantID": "*", "resource": "rest:user", "expectedVersion": 1}, "olga"
        )
        await control.ensure(DEFAULT_RULES)
        assert "rest:user" not in {rule.resource for rule in await control.page("*", None, 100)}


@pytest.mark.real_time
async def test_rule_outlives_its_history(tmp_path: Path) -> None:
    kept = RetentionSettings(changes_kept=100)
    async with SqliteRuleStore(tmp_path / "limits.db", SystemClock(), retention=kept) as store:
        control = RuleAdmin(store, SystemClock(), "embedded")
        await control.create(RULE, "olga")
        busy = {**RULE, "resource": "/busy"}
        await control.create(busy, "robot")
        for version in range(1, 102):
            await control.update({**busy, "limit": version, "expectedVersion": version}, "robot")
        assert (await control.get(NAME)).version == 1
        assert await control.history(NAME, None, 10) == [], (
            "it is there; what was done to it is forgotten"
        )
        with pytest.raises(NotFound):
            await control.history(RuleName("acme", "/never"), None, 10)
        with pytest.raises(NotFound):
            await control.roll_back({"tenantID": "acme", "resource": "/busy", "version": 1}, "olga")


@pytest.mark.real_time
async def test_admin_errors_are_counted_by_operation_and_error(tmp_path: Path) -> None:
    def count() -> float:
        labels = {"operation": "update_rule", "error": "not_found"}
        return REGISTRY.get_sample_value("holdfast_admin_errors_total", labels) or 0.0

    async with opened(tmp_path) as control:
        before = count()
        with pytest.raises(NotFound):
            await control.update({**RULE, "expectedVersion": 1}, "olga")
        assert count() == before + 1
        assert await control.health() == {
            "status": "healthy", "embedded_primary": "reachable",
        }  # fmt: skip


def entry_points(*rules: Rule) -> EntryPoints:
    clock = ManualClock()
    return EntryPoints(Limiter(MemoryCounters(clock), clock, rules=RuleSet.of(rules)))


@pytest.mark.real_time
async def test_entry_point_checks_user_tenant_and_address() -> None:
    ann, bob = User("acme", "ann"), User("acme", "bob")
    by_user = entry_points(Rule("*", "send:user", "fixed_window", 2, 60.0))
    assert [by_user.ask_at_once("send", ann) is None for _ in range(3)] == [True, True, False]
    assert by_user.ask_at_once("send", bob) is None
    by_tenant = entry_points(Rule("*", "rest:tenant", "fixed_window", 2, 60.0))
    answers = [refusal(await by_tenant.decide("rest", user)) for user in (ann, bob, ann)]
    assert answers[:2] == [None, None]
    assert isinstance(answers[2], RateLimited)
    assert answers[2].retry_after_seconds and answers[2].details["rule"] == "*/rest:tenant"
    assert refusal(await by_tenant.decide("rest", User("other", "ann"))) is None, (
        "each tenant has the whole limit"
    )
    by_address = entry_points(Rule("*", "connect:address", "fixed_window", 1, 60.0))
    assert by_address.ask_at_once("connect", User("", ""), "10.0.0.1") is None
    assert by_address.ask_at_once("connect", User("", ""), "10.0.0.1") is not None
    assert by_address.ask_at_once("connect", User("", ""), "10.0.0.2") is None


class LimitedSends:
    """Sends of one turn behind rules: what went on, and who was refused."""

    def __init__(self, *rules: Rule) -> None:
        self.admitted: list[str] = []
        self.refused: list[str] = []
        self.admission = AdmissionControl(self, entry_points(*rules), ManualClock())

    def submit(self, body: Any, sender: User, source: str, deadline: float, answer: Any) -> None:
        self.admitted.append(source)

    def send(self, user_id: str, source: str) -> None:
        def answer(outcome: Outcome) -> None:
            assert isinstance(outcome, RateLimited) and outcome.retry_after_seconds
            self.refused.append(source)

        sender = User("acme", user_id)
        self.admission.submit(None, sender, source, 0.0, answer)  # type: ignore[arg-type]


async def sent(limited: LimitedSends, *each: tuple[str, str]) -> LimitedSends:
    """All of them in one turn of the loop."""
    for user_id, source in each:
        limited.send(user_id, source)
    await asyncio.sleep(0)
    return limited


@pytest.mark.real_time
async def test_refused_send_is_answered_and_not_submitted() -> None:
    limited = await sent(
        LimitedSends(Rule("*", "send:user", "fixed_window", 1, 60.0)), ("ann", "a1"), ("ann", "a2")
    )
    assert (limited.admitted, limited.refused) == (["a1"], ["a2"])


@pytest.mark.real_time
async def test_sends_of_one_turn_pass_in_order_as_far_as_they_fit() -> None:
    by_user = Rule("*", "send:user", "token_bucket", 3, 60.0, burst_size=3)
    by_tenant = Rule("*", "send:tenant", "fixed_window", 6, 60.0)
    together = [(user, f"{user}{n}") for user in ("ann", "bob", "ann") for n in range(2)]
    limited = await sent(
        LimitedSends(by_user, by_tenant), *together, *[("eve", f"eve{n}") for n in range(4)]
    )
    assert limited.admitted == [
        "ann0",
        "ann1",
        "bob0",
        "bob1",
        "ann0",
        "eve0",
    ], "three of ann's, six of the tenant's"
    assert limited.refused == ["ann1", "eve1", "eve2", "eve3"]


@pytest.mark.real_time
async def test_broken_callback_does_not_affect_other_sends() -> None:
    limited = LimitedSends(Rule("*", "send:user", "fixed_window", 1, 60.0))
    limited.send("ann", "a1")
    limited.admission.submit(
        None,  # type: ignore[arg-type]
        User("acme", "ann"),
        "a2",
        0.0,
        lambda outcome: 1 / 0,  # type: ignore[arg-type]
    )
    limited.send("ann", "a3")
    limited.send("bob", "b1")
    await asyncio.sleep(0)
    assert (limited.admitted, limited.refused) == (["a1", "b1"], ["a3"])


@pytest.mark.real_time
async def test_concurrency_rule_is_checked_for_each_send() -> None:
    limited = LimitedSends(Rule("*", "send:user", "concurrency", 2, 60.0))
    await sent(limited, *[("ann", f"a{n}") for n in range(3)])
    assert (limited.admitted, limited.refused) == (["a0", "a1"], ["a2"])


def test_every_check_of_an_entry_point_is_a_reserved_resource() -> None:
    asked = [
        checks_of(entry_point, User("acme", "ann"), "192.0.2.1")
        for entry_point in get_args(EntryPoint)
    ]
    assert {check.resource for checks in asked for check in checks} == ENTRY_POINT_RESOURCES, (
        "no rule that nobody asks"
    )


def test_rule_that_is_no_longer_valid_can_be_deleted() -> None:
    old = Rule("acme", "send:user", "concurrency", 2, 60.0)
    made = decide(Change("delete", old.name, "olga", "", expected_version=1), old, None, 1)
    assert isinstance(made, Rule) and made.deleted


@pytest.mark.real_time
async def test_refusal_by_one_rule_is_not_charged_to_the_others() -> None:
    ann, bob = User("acme", "ann"), User("acme", "bob")
    points = entry_points(
        Rule("*", "send:user", "fixed_window", 5, 3600.0),
        Rule("*", "send:tenant", "fixed_window", 2, 60.0),
    )
    admitted, refused = points.admit_at_once("send", ann, 4)
    assert admitted == 2 and refused is not None and refused.details["rule"] == "*/send:tenant"
    for _ in range(10):
        assert points.ask_at_once("send", ann) is not None
    left = [decision.remaining for decision in await points.decide("send", ann)]
    assert left == [3, 0], "two went through, and only they were counted"
    assert points.admit_at_once("send", bob, 3)[0] == 0
    by_address = entry_points(
        Rule("*", "connect:user", "fixed_window", 5, 3600.0),
        Rule("acme", "connect:address", "fixed_window", 1, 60.0),
    )
    assert [by_address.ask_at_once("connect", ann, "192.0.2.1") is None for _ in range(4)] == [
        True
    ] + [False] * 3
    assert (await by_address.decide("connect", ann, "192.0.2.2"))[0].remaining == 3


async def test_cached_refusal_by_one_rule_is_not_charged_to_the_others() -> None:
    counters, ann = Shared(), User("acme", "ann")
    rules = [
        Rule("*", "send:user", "fixed_window", 50, 3600.0),
        Rule("*", "send:tenant", "fixed_window", 1, 60.0),
    ]
    points = EntryPoints(Limiter(counters, virtual_loop.LoopClock(), rules=RuleSet.of(rules)))
    for _ in range(3):
        points.admit_at_once("send", ann, 1)
        await asyncio.sleep(0.1)
    counted = len(counters.calls)
    assert [points.admit_at_once("send", ann, 2)[0] for _ in range(10)] == [0] * 10
    await asyncio.sleep(0.1)
    assert len(counters.calls) == counted, "nobody's counter was asked"


class Unreachable(SqliteRuleStore):
    async def change(self, change: Change) -> RuleChangeResult:
        raise Unavailable("the database of the rules cannot be reached now")


@pytest.mark.covers(
    '004 `admin_errors_total{operation="update_rule", error="db_connection_failed"}`'
)
@pytest.mark.real_time
async def test_unavailable_database_is_counted_as_an_admin_error(tmp_path: Path) -> None:
    def count() -> float:
        labels = {"operation": "update_rule", "error": "db_connection_failed"}
        return REGISTRY.get_sample_value("holdfast_admin_errors_total", labels) or 0.0

    before, clock = count(), SystemClock()
    async with Unreachable(tmp_path / "limits.db", clock) as store:
        control = RuleAdmin(store, clock, "embedded")
        with pytest.raises(Unavailable):
            await control.update(
                {"tenantID": "acme", "resource": "/a", "limit": 1, "expectedVersion": 1}, "olga"
            )
    assert count() == before + 1
