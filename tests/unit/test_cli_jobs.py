"""What ``holdfast jobs replay`` and ``discard`` ask for, and in which second."""

from __future__ import annotations

from typing import Any, cast

import pytest

from holdfast.cli import jobs, show
from holdfast.cli.jobs import _in_portions, _one_by_one, _portions
from holdfast.cli.reach import Reach
from holdfast.cli.rest import Rest
from holdfast.errors import NotFound


def test_what_dies_again_is_not_replayed_for_ever() -> None:
    assert list(_portions(2, dead=5)) == [2, 2, 1]


def test_where_nothing_is_dead_the_server_is_asked_and_says_so() -> None:
    assert list(_portions(2, dead=0)) == [2]


@pytest.mark.parametrize(("rate", "pauses"), [(1, 3), (2, 1), (100, 0)])
def test_every_named_dead_letter_is_asked_for_oldest_first_within_the_rate_though_some_are_gone(
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

    rest = cast(Rest, Server())
    told = list[tuple[int, int | None]]()
    done = _one_by_one(rest, "replay", {"reason": "r"}, [4, 1, 2, 3, 3], rate, lambda *step: told.append(step))
    assert done == (3, [2])
    assert told == [(1, 4), (1, 4), (2, 4), (3, 4)]
    assert asked == [[1], [2], [3], [4]]
    assert len(slept) == pauses


@pytest.mark.parametrize(("chosen", "in_all"), [({}, 5), ({"type": "mail"}, None)])
def test_a_replay_of_many_tells_after_each_second_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str], in_all: int | None
) -> None:
    monkeypatch.setattr(jobs.time, "sleep", lambda seconds: None)

    class Server:
        def get(self, path: str) -> dict[str, int]:
            return {"dead": 5}

        def post(self, path: str, body: dict[str, Any]) -> dict[str, int]:
            return {"count": body["limit"]}

    told = list[tuple[int, int | None]]()
    rest, body = cast(Rest, Server()), {"reason": "r", **chosen}
    assert _in_portions(rest, "replay", body, 2, lambda *step: told.append(step)) == 5
    assert told == [(2, in_all), (4, in_all), (5, in_all)]


@pytest.mark.parametrize(
    ("terminal", "as_json", "seen"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_progress_is_for_people_at_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool, as_json: bool, seen: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(terminal)))  # which is how one tells rich whether it has a terminal
    with show.progress(Reach(as_json=as_json)) as moved:
        moved("3 enqueued again", 3, 5)
    out, err = capsys.readouterr()
    assert ("3 enqueued again" in err) is seen and out == ""
    assert seen or err == ""
