"""Where the proofs of a test run leave their counts; printed at its end, and by ``make results`` as RESULTS.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.verify.moments import MUST_HAPPEN, missed
from holdfast.verify.results import Row, read, summary, this_commit, write

DIRECTORY = Path(__file__).resolve().parent.parent.parent / ".results"


def tally(row: Row, reached: Mapping[str, int] | None = None, *, whole: bool = True) -> None:
    """Keep the count of one proof; fail if a promise was broken, or a rare moment never came.

    ``whole`` False: a shortened run, which need not meet all of its moments.
    """
    counts = reached or {}
    moments = {name: counts.get(name, 0) for name in MUST_HAPPEN.get(row.name, ())}
    write(replace(row, commit=this_commit(DIRECTORY.parent), moments=moments), DIRECTORY)
    assert row.failures == 0, f"{row.name}: {row.failures} of {row.runs} failed"
    assert not whole or not missed(row.name, counts), f"{row.name} never met: {missed(row.name, counts)}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if DIRECTORY.is_dir() and (rows := read(DIRECTORY)):
        terminalreporter.section("proof")
        for line in summary(rows):
            terminalreporter.write_line(line)
