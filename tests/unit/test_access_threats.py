"""The threat model is kept honest: each row of SECURITY.md names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

from holdfast.api.deps import ApiSettings
from holdfast.api.schemas import NewToken
from holdfast.cli.app import app
from holdfast.cli.context import TOKEN_HOURS
from holdfast.gateway.transport.http import HTTP_TIMES
from holdfast.session.settings import TimeoutSettings
from holdfast.store.rollbacks import RESETS_PER_MINUTE

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    line
    for line in (ROOT / "SECURITY.md").read_text().splitlines()
    if re.match(r"\| (?!actor|-)", line)
]


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(
        n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_the_times_that_the_page_gives_are_those_of_the_code() -> None:
    page = " ".join((ROOT / "SECURITY.md").read_text().split())
    head, body, login = (
        HTTP_TIMES.head_seconds,
        ApiSettings().body_seconds_max,
        TimeoutSettings().authentication_seconds,
    )
    assert (
        f"{head:g} s for the head of a request, {body:g} s for its body" in page
        and f"{login:g} s to auth" in page
    )
    assert "last an hour by default" in page and NewToken("alice").ttl_seconds == 3600
    assert f"`holdfast token` {TOKEN_HOURS:g} hours" in page
    (asked,) = [p for p in get_command(app).commands["token"].params if p.name == "hours"]
    assert asked.default == TOKEN_HOURS
    assert f"{RESETS_PER_MINUTE} requests a minute" in page


def test_the_table_is_there() -> None:
    assert len(ROWS) >= 20


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[3].strip()[:40] for row in ROWS])
def test_a_threat_has_an_actor_an_asset_a_control_and_tests_that_exist(row: str) -> None:
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert len(cells) == 5 and all(cells)
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", cells[4])
    assert named and len(named) == cells[4].count("::")
    for path, name in named:
        assert (ROOT / path).exists(), path
        assert name in names_in(path), f"{path} has no {name}"
