"""Limits in another program: the same call a node opens its limits by, and the guide's
own words for it.
"""

from __future__ import annotations

import ast
import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import apsw
import asyncpg
import pytest
from program import ROOT

from holdfast.drivers.sqlite.file_copy import Restored
from holdfast.errors import StateCorrupted
from holdfast.limits.composition import LimitsSettings, open_limits
from holdfast.limits.rules import Rule
from holdfast.limits.rulestore.sqlite import LIMITS

SEARCH = Rule("acme", "/api/search", "fixed_window", 2, 366 * 86_400.0)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


async def test_program_has_only_the_rules_it_starts_with(tmp_path: Path) -> None:
    async with open_limits(LimitsSettings(), tmp_path / "new", starts_with=[SEARCH]) as limits:
        decisions = [await limits.limiter.check("acme", "/api/search", "ann") for _ in range(3)]
        assert [d.allowed for d in decisions] == [True, True, False]
        assert [rule.label for rule in limits.limiter.rules.live()] == ["acme//api/search"]
        change = {"tenantID": "acme", "resource": "/api/search", "limit": 5, "expectedVersion": 1}
        await limits.control.update(change, "olga")
    async with open_limits(LimitsSettings(), tmp_path / "new", starts_with=[SEARCH]) as limits:
        assert limits.limiter.rules.live()[0].limit == 5, "it stays what an operator made of it"


async def test_program_without_operators_may_set_any_limit(
    tmp_path: Path,
) -> None:
    once = Rule("*", "*", "fixed_window", 1, 366 * 86_400.0)
    async with open_limits(LimitsSettings(), tmp_path, starts_with=[once]) as limits:
        assert [(await limits.limiter.check("acme", "x", "ann")).allowed for _ in range(2)] == [
            True,
            False,
        ]


async def test_programs_without_a_name_get_different_ones(
    tmp_path: Path, redis_server: Any
) -> None:
    settings = LimitsSettings(redis_server.url)
    async with (
        open_limits(settings, tmp_path / "a") as one,
        open_limits(settings, tmp_path / "b") as two,
    ):
        assert one.limiter.node.name != two.limiter.node.name
        assert two.limiter.nodes >= 2


async def test_redis_counters_follow_the_rules_after_a_restore_or_a_new_store(
    tmp_path: Path, redis_server: Any
) -> None:
    """Both give out versions that the counters have seen, of rules that are no more."""
    name, subject = {"tenantID": "acme", "resource": "/api/search"}, tmp_path.name
    state, settings = tmp_path / "state", LimitsSettings(redis_server.url)

    async def decided(change: dict[str, Any] | None = None) -> tuple[int, int, bool]:
        async with open_limits(settings, state, starts_with=[SEARCH]) as limits:
            if change is not None:
                await limits.control.update({**name, **change}, "olga")
                await limits.feed.sync()
            decision = await limits.limiter.check("acme", "/api/search", subject)
            return decision.limit, decision.rule_version, limits.feed._nudged.is_set()

    assert await decided() == (2, 1, False)
    shutil.copytree(state, tmp_path / "backup")
    assert await decided({"limit": 1, "expectedVersion": 1}) == (1, 2, False)
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "backup", state)
    database = apsw.Connection(str(state / "limits.db"))
    LIMITS.renew(database, Restored("", 1000, "olga", "", "backup"))
    database.close()
    assert await decided() == (
        2,
        1,
        False,
    ), "the restored rule, and nothing makes the node look for a newer one"
    assert await decided({"limit": 7, "expectedVersion": 1}) == (7, 2, False)
    shutil.rmtree(state)
    assert await decided() == (2, 1, False), "an emptied state directory has its own rules"


async def test_rules_of_a_newer_schema_are_not_changed(
    tmp_path: Path, postgres_server: Any
) -> None:
    settings = LimitsSettings(rules_url=postgres_server.url)
    async with open_limits(settings, tmp_path):
        pass
    connection = await asyncpg.connect(postgres_server.url)
    await connection.execute("INSERT INTO holdfast_limits_schema VALUES (99)")
    try:
        with pytest.raises(StateCorrupted, match="upgrade it"):
            async with open_limits(settings, tmp_path):
                pass
    finally:
        await connection.execute("DELETE FROM holdfast_limits_schema WHERE version = 99")
        await connection.close()


def test_code_in_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    block = BLOCK.findall((ROOT / "docs" / "guides" / "limits.md").read_text())[0]
    code = compile(block, "docs/guides/limits.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    asyncio.run(eval(code, {}))
    assert capsys.readouterr().out == "True 99\n"
