"""How limits start: without their database, with nothing on disk, or damage."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import apsw
import pytest
from limits_rig import Log

from holdfast import telemetry
from holdfast.cli.operations import alarms
from holdfast.limits.composition import RULES_NAME, LimitsSettings, open_limits
from holdfast.limits.entry_rules import DEFAULT_RULES
from holdfast.limits.feed import RuleFeed
from holdfast.limits.rules import Rule, RuleSet
from proof import virtual_loop

NOWHERE = LimitsSettings(rules_url="postgresql://127.0.0.1:1/none")


@pytest.mark.covers("004 a first start while PostgreSQL is down")
@pytest.mark.real_time
@pytest.mark.parametrize("on_disk", [None, b"", b"{"])
async def test_first_start_without_the_database_uses_the_default_rules(
    tmp_path: Path, on_disk: bytes | None
) -> None:
    if on_disk is not None:
        (tmp_path / RULES_NAME).write_bytes(on_disk)
    async with open_limits(NOWHERE, tmp_path, starts_with=DEFAULT_RULES) as parts:
        decisions = [await parts.limiter.check("acme", "send:user", "ann") for _ in range(5_000)]
        assert 0 < sum(decision.allowed for decision in decisions) < 5_000
        assert decisions[0].rule_version == 0, "older than any that an operator made"
        assert len(parts.limiter.rules) == len(DEFAULT_RULES)


@pytest.mark.real_time
async def test_node_that_never_knew_the_rules_reports_them_stale(tmp_path: Path) -> None:
    async with open_limits(NOWHERE, tmp_path, starts_with=DEFAULT_RULES) as parts:
        assert parts.dependencies()["rules"] == "stale"
        assert (await parts.health())["rules"] == "stale"
        status = parts.status()
        assert (status["stale"], status["staleness_seconds"]) == (True, None)
        assert "never" in alarms({"limits": status})[0]
        assert telemetry.REGISTRY.get_sample_value(
            "holdfast_limits_rule_staleness_seconds"
        ) == float("inf")


async def test_default_rules_yield_to_those_of_the_database() -> None:
    log, applied = Log(), list[RuleSet]()
    log.put("a", 5, deleted=True)
    log.put("b", 7)
    log.unavailable = True
    start = [Rule("acme", "a", "token_bucket", 1, 60.0), Rule("acme", "c", "token_bucket", 1, 60.0)]
    async with RuleFeed(
        log, [log], applied.append, virtual_loop.LoopClock(), starts_with=start
    ) as feed:
        assert {(rule.resource, rule.epoch, rule.version) for rule in applied[0].live()} == {
            ("a", 0, 0),
            ("c", 0, 0),
        }
        assert feed.stale
        log.unavailable = False
        await asyncio.sleep(1.2)
        assert [rule.resource for rule in feed.rules.live()] == ["b"], (
            "what was deleted, and what never was"
        )
        assert not feed.stale
        assert feed.rules.digest == (await log.head()).digest


async def test_restart_with_a_lagging_reader_keeps_what_the_node_knew(
    tmp_path: Path,
) -> None:
    log, file = Log(), tmp_path / RULES_NAME
    log.put("a", 5)
    log.put("a", 50)
    async with RuleFeed(log, [log], lambda rules: None, virtual_loop.LoopClock(), file):
        pass
    before = file.read_bytes()
    log.lag, log.lag_seconds = 1, 600.0
    applied: list[RuleSet] = []
    async with RuleFeed(log, [log], applied.append, virtual_loop.LoopClock(), file) as feed:
        await asyncio.sleep(20)
        assert {rule.limit for rules in applied for rule in rules.all()} == {50}
        assert (feed.from_disk, feed.stale, file.read_bytes()) == (True, True, before)
        log.lag, log.lag_seconds = 0, 0.0
        log.put("a", 70, notify=False)
        await asyncio.sleep(2)
        assert (feed.from_disk, feed.stale, limit_of(feed)) == (False, False, 70)


def limit_of(feed: RuleFeed) -> int | None:
    rule = feed.rules.lookup("acme", "a")
    return rule.limit if rule is not None else None


@pytest.mark.real_time
async def test_embedded_rules_have_no_snapshot_file(tmp_path: Path) -> None:
    async with open_limits(LimitsSettings(), tmp_path, starts_with=DEFAULT_RULES):
        pass
    assert not (tmp_path / RULES_NAME).exists()


@pytest.mark.real_time
async def test_node_without_counters_reports_degraded_limiting(
    tmp_path: Path,
) -> None:
    async with open_limits(LimitsSettings(), tmp_path / "whole") as parts:
        assert (await parts.health())["rate_limiting"] == "healthy"
    unreachable = LimitsSettings("redis://127.0.0.1:1/0")
    async with open_limits(
        unreachable, tmp_path / "unavailable", starts_with=DEFAULT_RULES
    ) as parts:
        for subject in range(50):
            assert (await parts.limiter.check("acme", "send:user", str(subject))).degraded
        health = await parts.health()
        assert (health["status"], health["rate_limiting"]) == ("healthy", "degraded")


@pytest.mark.real_time
async def test_decision_without_a_rule_has_its_region(tmp_path: Path) -> None:
    async with open_limits(LimitsSettings(region="eu"), tmp_path) as parts:
        decision = await parts.limiter.check("acme", "unruled", "ann")
        assert (decision.decided_by, decision.region) == ("no_rule", "eu")


@pytest.mark.real_time
async def test_node_without_a_name_gets_a_permanent_one(tmp_path: Path) -> None:
    async def name(folder: str, node_id: str = "") -> str:
        async with open_limits(LimitsSettings(), tmp_path / folder, node_id) as parts:
            return parts.limiter.node.name

    first = await name("a")
    assert await name("a", "a-name") == "a-name"
    assert await name("a") == first, "a restart is nobody new to those who count nodes"
    assert await name("b") != first
    (tmp_path / "a" / "name.json").write_text('{"name":"no name"}')
    assert await name("a") != first, "an invalid name is replaced"


@pytest.mark.real_time
async def test_unreadable_default_rule_does_not_stop_startup(
    tmp_path: Path,
) -> None:
    async with open_limits(LimitsSettings(), tmp_path, starts_with=DEFAULT_RULES):
        pass
    with closing(apsw.Connection(str(tmp_path / "limits.db"))) as db:
        db.execute(
            "UPDATE rules SET body = replace(body, 'token_bucket', 'gcra') WHERE resource ="
            " 'send:user'"
        )
    async with open_limits(LimitsSettings(), tmp_path, starts_with=DEFAULT_RULES) as parts:
        assert {rule.resource for rule in parts.limiter.rules.live()} == {
            rule.resource for rule in DEFAULT_RULES
        } - {"send:user"}
