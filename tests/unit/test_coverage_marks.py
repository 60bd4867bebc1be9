"""Rare moments are counted where they happen, also by a process that dies, and a proof
that missed one is not green.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import result_counts as support
from result_counts import tally

from holdfast import telemetry
from proof import coverage_marks
from proof.coverage_marks import collected, missed, read_marks, write_marks
from proof.results import Row, render

ROW = Row("made up", "by hand", 3, 0, "nothing")


def test_marks_are_counted_while_somebody_collects_and_cost_nothing_otherwise() -> None:
    telemetry.sometimes("before")
    with collected() as counts:
        telemetry.sometimes("a door was", "open")
        telemetry.sometimes("a door was", "open")
        telemetry.sometimes("a bell rang")
    telemetry.sometimes("after")
    assert counts == {"a door was: open": 2, "a bell rang": 1}


def test_the_marks_of_a_process_that_is_killed_are_there(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    assert read_marks(path) == {}
    pid = os.fork()
    if pid == 0:
        write_marks(path)
        telemetry.sometimes("the last moment")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert read_marks(path) == {"the last moment": 1}


def test_proof_that_missed_a_mark_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(coverage_marks.MUST_HAPPEN, "made up", frozenset({"a", "b"}))  # type: ignore[arg-type]
    monkeypatch.setattr(support, "DIRECTORY", tmp_path)
    assert missed("made up", {"a": 1, "b": 0}) == ["b"]
    tally(ROW, {"a": 1, "b": 2})
    with pytest.raises(AssertionError, match=r"never met: \['b'\]"):
        tally(ROW, {"a": 1})
    tally(ROW, {"a": 1}, whole=False)


def test_page_shows_how_often_each_mark_was_reached() -> None:
    assert "| made up | a bell rang | 1,234 |" in render(
        [Row("made up", "", 1, 0, "", marks={"a bell rang": 1234})], "m"
    )
