"""Where the proofs of a test run leave their counts; printed at its end, and by ``make results`` as RESULTS.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.verify.results import Row, read, summary, this_commit, write

DIRECTORY = Path(__file__).resolve().parent.parent.parent / ".results"


def tally(row: Row) -> None:
    """Keep the count of one proof; fail if a promise was broken."""
    write(replace(row, commit=this_commit(DIRECTORY.parent)), DIRECTORY)
    assert row.failures == 0, f"{row.name}: {row.failures} of {row.runs} failed"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if DIRECTORY.is_dir() and (rows := read(DIRECTORY)):
        terminalreporter.section("proof")
        for line in summary(rows):
            terminalreporter.write_line(line)
