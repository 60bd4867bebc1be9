"""What ``holdfast jobs replay`` and ``discard`` ask for, and in which second."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from holdfast.cli import jobs, output
from holdfast.cli.context import CliContext
from holdfast.cli.jobs import _in_portions, _one_by_one, _portions, _row, _show_acts
from holdfast.cli.rest import RestClient
from holdfast.errors import NotFound
from holdfast.work.inspection import BURIED


def test_job_that_dies_again_is_replayed_once() -> None:
    assert list(_portions(2, dead=5)) == [2, 2, 1]


def test_replay_without_dead_letters_asks_the_server() -> None:
    assert list(_portions(2, dead=0)) == [2]


@pytest.mark.parametrize(("rate", "pauses"), [(1, 3), (2, 1), (100, 0)])
def test_named_dead_letters_are_replayed_oldest_first_although_some_are_gone(
    monkeypatch: pytest.MonkeyPatch, rate: int, pauses: int
) -> None:
    asked, slept = list[Any](), list[float]()
    monkeypatch.setattr(jobs.time, "sleep", slept.append)

    class Server:
        def post(self, path: str, body: dict[str, Any]) -> dict[str, int]:
            asked.append(body["seqs"])
            if body["seqs"] == [2]:
                raise NotFound("no such dead letter")
            return {"count": 1}

    rest = cast(RestClient, Server())
    steps = list[tuple[int, int | None]]()
    done = _one_by_one(
        rest, "replay", {"reason": "r"}, [4, 1, 2, 3, 3], rate, lambda *step: steps.append(step)
    )
    assert done == (3, [2])
    assert steps == [(1, 4), (1, 4), (2, 4), (3, 4)]
    assert asked == [[1], [2], [3], [4]]
    assert len(slept) == pauses


@pytest.mark.parametrize(("chosen", "in_all"), [({}, 5), ({"type": "mail"}, None)])
def test_long_replay_reports_its_progress_each_second(
    monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str], in_all: int | None
) -> None:
    monkeypatch.setattr(jobs.time, "sleep", lambda seconds: None)

    class Server:
        def get(self, path: str) -> dict[str, int]:
            return {"dead": 5}

        def post(self, path: str, body: dict[str, Any]) -> dict[str, int]:
            return {"count": body["limit"]}

    steps = list[tuple[int, int | None]]()
    rest, body = cast(RestClient, Server()), {"reason": "r", **chosen}
    assert _in_portions(rest, "replay", body, 2, lambda *step: steps.append(step)) == 5
    assert steps == [(2, in_all), (4, in_all), (5, in_all)]


@pytest.mark.parametrize(
    ("terminal", "as_json", "seen"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_progress_is_for_people_at_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
    as_json: bool,
    seen: bool,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    # rich takes this for a terminal
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(terminal)))
    with output.progress(CliContext(as_json=as_json)) as moved:
        moved("3 enqueued again", 3, 5)
    out, err = capsys.readouterr()
    assert ("3 enqueued again" in err) is seen and out == ""
    assert seen or err == ""


LONG = "order-" + "0123456789" * 12


def test_table_in_a_pipe_has_a_line_per_row_and_cuts_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output.table(
        ("job", "stream", "error"), [(4711, LONG, "e" * 300), (4712, "s", "x")], empty="none"
    )
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["job", "stream", "error"]
    assert first.split() == ["4711", LONG, "e" * 300] and second.split() == ["4712", "s", "x"]


def test_terminal_folds_free_text_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    output.table(("job", "stream", "error"), [(4711, LONG, "e" * 300)], empty="none")
    lines = capsys.readouterr().out.splitlines()
    assert any(LONG in line and "4711" in line for line in lines), "an id can be copied"
    assert len(lines) == 1 + 300 // output.FOLDED_MIN
    assert output.fit_columns(("job", "error"), [4, 300], 80) == [4, 74]
    assert output.fit_columns(("job", "error"), [4, 10], 80) == [4, 10]


@pytest.mark.parametrize(
    ("job", "shown"),
    [
        ({"dead_at": "2026-01-01"}, BURIED),
        ({"dead_at": "2026-01-01", "reason": "throttled"}, "throttled"),
        ({"due_at": "2026-01-01"}, "–"),
    ],
)
def test_dead_letter_without_failure_has_the_word_of_the_counts(
    job: dict[str, Any], shown: str
) -> None:
    known = {"seq": 1, "type": "T", "stream": None, "state": "s", "attempt": 0, "error": ""}
    why = {"due_at": None, "dead_at": None, "reason": None, "reasons": []}
    assert _row({**known, **why, **job})[5] == shown


def test_acts_are_shown_with_how_to_read_on(capsys: pytest.CaptureFixture[str]) -> None:
    act = {
        "number": 9,
        "at": "2026-11-17T10:00:00.000Z",
        "verb": "park",
        "target": "4711",
        "count": 1,
    }
    found = {"acts": [{**act, "by": "ann", "why": "look at it"}], "next_before": 9}
    _show_acts(cast(CliContext, SimpleNamespace(as_json=False)), found)
    shown = capsys.readouterr().out
    assert "ann" in shown and "look at it" in shown and "--before 9" in shown
    _show_acts(cast(CliContext, SimpleNamespace(as_json=True)), found)
    assert msgspec.json.decode(capsys.readouterr().out) == found
    _show_acts(cast(CliContext, SimpleNamespace(as_json=False)), {"acts": [], "next_before": None})
    assert capsys.readouterr().out == "No acts.\n"
