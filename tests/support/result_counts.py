"""Where the proofs of a test run leave their counts; printed at its end, and by
``make results`` as RESULTS.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
from msgspec.structs import replace

from proof.coverage_marks import MUST_HAPPEN, missed
from proof.results import Row, read, summary, this_commit, write

DIRECTORY = Path(__file__).resolve().parent.parent.parent / ".results"
_kept: set[str] = set()
"""The proofs of this run; what earlier ones left in the directory is not its own."""


def tally(row: Row, reached: Mapping[str, int] | None = None, *, whole: bool = True) -> None:
    """Keep the count of one proof; fail if a promise was broken, or a rare moment never
    came.

    ``whole`` False: a shortened run, which need not reach all of its marks.
    """
    counts = reached or {}
    marks = {name: counts.get(name, 0) for name in MUST_HAPPEN.get(row.name, ())}
    write(replace(row, commit=this_commit(DIRECTORY.parent), marks=marks), DIRECTORY)
    _kept.add(row.name)
    assert row.failures == 0, f"{row.name}: {row.failures} of {row.runs} failed"
    assert not whole or not missed(row.name, counts), (
        f"{row.name} never met: {missed(row.name, counts)}"
    )


class Control(Protocol):
    """A broken variant, and the checkers that must turn red."""

    name: str
    red: Set[int]


C = TypeVar("C", bound=Control)


def tally_controls(
    name: str,
    how: str,
    requirement: str,
    controls: Sequence[C],
    seeds: Sequence[int],
    turned_red: Callable[[C], Set[int]],
) -> None:
    """Try each control, and keep the count of those that turned red what they must and
    no more.
    """
    began = time.perf_counter()
    found = {control.name: turned_red(control) for control in controls}
    wrong = {
        c.name: (sorted(found[c.name]), sorted(c.red)) for c in controls if found[c.name] != c.red
    }
    print("control: (turned red, ought to)", wrong)
    seconds = time.perf_counter() - began
    tally(
        Row(
            name,
            how,
            len(controls),
            len(wrong),
            requirement,
            f"{seeds[0]}..{seeds[-1]} each",
            seconds=seconds,
        )
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells the process that prints."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["proofs"] = sorted(_kept)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _kept.update(getattr(node, "workeroutput", {}).get("proofs", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if rows := [row for row in read(DIRECTORY) if row.name in _kept]:
        terminalreporter.section("proof")
        for line in summary(rows):
            terminalreporter.write_line(line)
