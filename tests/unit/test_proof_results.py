"""RESULTS.md says what was run, with its bound."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from proof.planned import PLAN, uncovered
from proof.results import Row, main, read, render, summary, write

ROOT = Path(__file__).resolve().parents[2]
KILLS = Row(
    "kills",
    "kill -9",
    100,
    0,
    "0 lost",
    seed="1..100",
    commit="abc",
    seconds=88.04,
    figures={"restart p99": "1.2 s"},
)


def test_a_row_is_kept_by_name_and_the_later_one_wins(tmp_path: Path) -> None:
    write(KILLS, tmp_path)
    write(Row("power cuts", "vfs", 200, 1, "0 lost"), tmp_path)
    write(Row("kills", "kill -9", 7, 0, "0 lost"), tmp_path)
    assert [(row.name, row.runs) for row in read(tmp_path)] == [("kills", 7), ("power cuts", 200)]


def test_the_page_has_the_machine_and_for_each_row_its_commit_and_bound() -> None:
    page = render([KILLS], "2 × x86_64")
    assert (
        "| kills | kill -9 | 100 | 0 | < 0.03 | 0 lost | 1..100 | `abc` | 88.0 | restart p99"
        " 1.2 s |" in page
    )
    assert "`abc`" in page and "2 × x86_64" in page


def test_a_failure_has_no_bound() -> None:
    assert "| 1 | – |" in render([Row("power cuts", "vfs", 200, 1, "0 lost")], "m")


def test_planned_fault_that_did_not_run_is_listed() -> None:
    nothing = list(uncovered({}))
    assert [each.planned for each in nothing] == list(PLAN) and not any(
        each.ran for each in nothing
    )
    ran = {
        each.planned.fault: each.ran
        for each in uncovered({"power cut": 1_950, "power cut of work.db": 40})
    }
    assert ran["power cut"] == 1_990
    assert "power cut" not in {each.planned.fault for each in uncovered({"power cut": 2_000})}
    assert "clock jumps of an hour" in {
        each.planned.fault for each in uncovered({"clock jumps": 100})
    }, "never all of it"


def test_a_proof_that_failed_covers_nothing() -> None:
    assert "| disk slow, EIO, ENOSPC | 100 | 10 | – |" in render(
        [Row("disk faults", "", 10, 0, "")], "m"
    )
    assert "| disk slow, EIO, ENOSPC | 100 | 0 | – |" in render(
        [Row("disk faults", "", 10, 1, "")], "m"
    )


def test_every_proof_and_test_that_the_plan_names_exists() -> None:
    """A row that is renamed would count for nothing, without a word."""
    tests = "\n".join(
        path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)
    )
    for planned in PLAN:
        assert all(f'"{row}"' in tests for row in planned.rows), planned.rows
        assert all(
            next((ROOT / "tests").rglob(name), None)
            for name in re.findall(r"test_\w+\.py", planned.missing)
        )


def test_the_summary_is_one_line_a_row() -> None:
    assert summary([KILLS]) == ["kills: 100 runs, 0 failures (88.0 s)"]


def test_without_results_the_command_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 1
    assert "make test" in capsys.readouterr().err
    assert main([]) == 2


def test_the_command_prints_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(KILLS, tmp_path)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("# Results")


def test_make_results_can_write_the_page(tmp_path: Path) -> None:
    """The line of the Makefile, run as make would."""
    root = Path(__file__).parents[2]
    write(Row("kills", "by hand", 3, 0, "nothing"), tmp_path)
    (line,) = [
        line.strip()
        for line in (root / "Makefile").read_text().splitlines()
        if "proof.results" in line
    ]
    command = line.replace("$(BIN)", str(Path(sys.executable).parent)).replace(
        "RESULTS.md.new", str(tmp_path / "page")
    )
    subprocess.run(
        ["sh", "-c", command.replace(".results >", f"{tmp_path} >")], cwd=root, check=True
    )
    assert (tmp_path / "page").read_text().startswith("# Results")
