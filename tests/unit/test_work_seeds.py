"""docs/project/design-coverage-work.md names only what exists, and every test that claims a row
of the document.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "project" / "design-coverage-work.md").read_text()
ROW = re.compile(
    r"^\| (.+?) \| `([^`]+)` \| `([^`]+)::([^`]+)` \| (as written|stronger|changed)\b", re.MULTILINE
)
CLAIM = re.compile(r'@pytest\.mark\.covers\("003 [^\n]*\n(?:@[^\n]*\n)*(?:async )?def (test_\w+)')


def test_every_row_has_a_module_a_test_and_a_verdict() -> None:
    rows = ROW.findall(PAGE)
    assert (
        len(rows)
        == len([line for line in PAGE.splitlines() if "`tests/" in line and line.startswith("| ")])
        >= 35
    )
    for row, module, file, test, _ in rows:
        assert (ROOT / "src" / "holdfast" / module).is_file(), f"{row}: {module}"
        assert f"def {test}(" in (ROOT / file).read_text(), f"{row}: {file}::{test}"


def test_every_test_that_claims_a_row_is_named() -> None:
    for path in (ROOT / "tests").rglob("test_work*.py"):
        for name in CLAIM.findall(path.read_text()):
            assert f"::{name}`" in PAGE, name
