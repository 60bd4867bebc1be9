"""RESULTS.md says what was run, with its bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.verify.results import Row, main, read, render, summary, write

KILLS = Row(
    "kills", "kill -9", 100, 0, "0 lost", seed="1..100", commit="abc", seconds=88.04, figures={"restart p99": "1.2 s"}
)


def test_a_row_is_kept_by_name_and_the_later_one_wins(tmp_path: Path) -> None:
    write(KILLS, tmp_path)
    write(Row("power cuts", "vfs", 200, 1, "0 lost"), tmp_path)
    write(Row("kills", "kill -9", 7, 0, "0 lost"), tmp_path)
    assert [(row.name, row.runs) for row in read(tmp_path)] == [("kills", 7), ("power cuts", 200)]


def test_the_page_has_the_machine_and_for_each_row_its_commit_and_bound() -> None:
    page = render([KILLS], "2 × x86_64")
    assert "| kills | kill -9 | 100 | 0 | < 0.03 | 0 lost | 1..100 | `abc` | 88.0 | restart p99 1.2 s |" in page
    assert "`abc`" in page and "2 × x86_64" in page


def test_a_failure_has_no_bound() -> None:
    assert "| 1 | – |" in render([Row("power cuts", "vfs", 200, 1, "0 lost")], "m")


def test_the_summary_is_one_line_a_row() -> None:
    assert summary([KILLS]) == ["kills: 100 runs, 0 failures (88.0 s)"]


def test_without_results_the_command_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "make test" in capsys.readouterr().err
    assert main([]) == 2


def test_the_command_prints_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(KILLS, tmp_path)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("# Results")
