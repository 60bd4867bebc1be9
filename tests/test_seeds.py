"""``docs/project/design-coverage-messaging.md`` is true: every module and test it names exists, and every
claimed row is in it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "project" / "design-coverage-messaging.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| row |"))
]


def claims_in(path: Path) -> dict[str, list[str]]:
    """The tests of a file, each with the rows it claims."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
            "test_"
        ):
            found[node.name] = list(_claims(node))
    return found


def _claims(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for mark in node.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.covers":
            argument = mark.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_a_row_names_a_module_and_a_test_that_exist_and_how_it_stands(row: list[str]) -> None:
    _, module, test, how = row
    path = module.strip("`")
    assert (ROOT / ("" if path.startswith("tests/") else "src/holdfast") / path).is_file(), (
        f"there is no {module}"
    )
    path, _, name = test.strip("`").partition("::")
    assert name in claims_in(ROOT / path), f"there is no {test}"
    assert re.match(r"as written|stronger: .+|changed: .+", how), (
        f"{how!r} does not say how it stands"
    )


def test_every_test_that_claims_a_row_of_these_documents_is_named() -> None:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, claims in claims_in(path).items():
            if any(claim.startswith(("000 ", "001 ")) for claim in claims):
                assert f"{path.relative_to(ROOT)}::{name}" in PAGE, (
                    f"{name} claims {claims} and is not in the page"
                )
