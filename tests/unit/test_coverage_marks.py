"""Coverage marks are counted where they are reached, also in a killed process."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest
from result_counts import tally

from holdfast import telemetry
from proof.coverage_marks import collected, missed, read_marks, write_marks
from proof.results import Row, render

ROW = Row("made up", "by hand", 3, 0, "nothing")


def test_marks_are_counted_while_somebody_collects_and_cost_nothing_otherwise() -> None:
    telemetry.mark("before")
    with collected() as counts:
        telemetry.mark("a door was", "open")
        telemetry.mark("a door was", "open")
        telemetry.mark("a job ran")
    telemetry.mark("after")
    assert counts == {"a door was: open": 2, "a job ran": 1}


def test_the_marks_of_a_process_that_is_killed_are_there(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    assert read_marks(path) == {}
    pid = os.fork()
    if pid == 0:
        write_marks(path)
        telemetry.mark("the last mark")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert read_marks(path) == {"the last mark": 1}


def test_proof_that_missed_a_mark_fails(tmp_path: Path) -> None:
    count = partial(tally, ROW, directory=tmp_path, must_happen={"made up": frozenset({"a", "b"})})
    assert missed("made up", {"a": 1, "b": 0}, {"made up": frozenset({"a", "b"})}) == ["b"]
    count({"a": 1, "b": 2})
    with pytest.raises(AssertionError, match=r"never reached: \['b'\]"):
        count({"a": 1})
    count({"a": 1}, whole=False)


def test_page_shows_how_often_each_mark_was_reached() -> None:
    assert "| made up | a job ran | 1,234 |" in render(
        [Row("made up", "", 1, 0, "", marks={"a job ran": 1234})], "m"
    )
