"""Where the proofs of a test run leave their counts, and how they are printed.

``make results`` makes RESULTS.md of them. ``HOLDFAST_RESULTS`` names another directory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
from msgspec.structs import replace

from proof.coverage_marks import MUST_HAPPEN, missed
from proof.results import Row, read, summary, this_commit, write

ROOT = Path(__file__).resolve().parent.parent.parent
DIRECTORY = Path(os.environ.get("HOLDFAST_RESULTS", ROOT / ".results"))
_kept: set[str] = set()
"""The proofs of this run; what earlier ones left in the directory is not its own."""


def tally(
    row: Row,
    reached: Mapping[str, int] | None = None,
    *,
    whole: bool = True,
    directory: Path = DIRECTORY,
    must_happen: Mapping[str, frozenset[str]] = MUST_HAPPEN,
) -> None:
    """Keep the count of one proof; fail if it broke a promise or missed a mark.

    ``whole`` False: a shortened run, which need not reach all of its marks.
    """
    counts = reached or {}
    marks = {name: counts.get(name, 0) for name in must_happen.get(row.name, ())}
    write(replace(row, commit=this_commit(ROOT), marks=marks), directory)
    _kept.add(row.name)
    assert row.failures == 0, f"{row.name}: {row.failures} of {row.runs} failed"
    left_out = missed(row.name, counts, must_happen)
    assert not whole or not left_out, f"{row.name} never reached: {left_out}"


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
    """Run each control; count those that turn red what they must and no more."""
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
    """A worker reports to the process that prints."""
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
