"""The coverage pages are true: each row says how far it is built, and what it names exists.

A page has a table per section of a design document, and each row has one state. A test
that carries ``@pytest.mark.covers("000 …")`` stands in the page of that document.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    page.stem.removeprefix("design-coverage-"): page
    for page in sorted((ROOT / "docs" / "project").glob("design-coverage-*.md"))
}
HEADING = re.compile(r"## (\d{3}): .+")
STATE = re.compile(r"as written(: .+)?|(stronger|changed|partly): .+|not built(: .+)?")
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
NOTHING = "-"


class Row(NamedTuple):
    document: str
    name: str
    module: str
    tests: str
    state: str


def rows_of(page: Path) -> Iterator[Row]:
    document = ""
    for line in page.read_text().splitlines():
        if found := HEADING.match(line):
            document = found.group(1)
        if line.startswith("|") and not line.startswith(("|---", "| row |")):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 4, f"{page.name} needs four cells: {line}"
            yield Row(document, *cells)


@cache
def covered_by(path: Path) -> dict[str, list[str]]:
    """The tests of a file, each with the rows it covers."""
    return {
        node.name: list(_covers(node))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


def _covers(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for mark in node.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.covers":
            yield ast.literal_eval(mark.args[0])


ROWS = [(name, row) for name, page in PAGES.items() for row in rows_of(page)]


@pytest.mark.parametrize(
    ("page", "row"), ROWS, ids=[f"{page}-{row.document}-{row.name[:60]}" for page, row in ROWS]
)
def test_row_has_a_state_and_names_what_exists(page: str, row: Row) -> None:
    assert row.document, f"{row.name} is under no heading like '## 000: contracts'"
    assert STATE.fullmatch(row.state), f"{row.state!r} is no state"
    if row.state.startswith("not built"):
        assert (row.module, row.tests) == (NOTHING, NOTHING), "a row not built names no code"
        return
    module = row.module.strip("`")
    folder = ROOT if module.startswith(("tests/", "docs/")) else ROOT / "src" / "holdfast"
    assert (folder / module).is_file(), f"there is no {module}"
    named = NAMED_TEST.findall(row.tests)
    assert named, f"{row.name} is proven by no test"
    for path, test in named:
        assert test in covered_by(ROOT / path), f"there is no {path}::{test}"


def test_every_test_that_covers_a_row_is_in_the_page_of_its_document() -> None:
    named: dict[str, set[tuple[str, str]]] = {}
    for _, row in ROWS:
        named.setdefault(row.document, set()).update(NAMED_TEST.findall(row.tests))
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for test, covered in covered_by(path).items():
            for row_name in covered:
                place = (path.relative_to(ROOT).as_posix(), test)
                assert place in named[row_name.split()[0]], f"{place} covers {row_name}"
