"""What ``holdfast jobs replay`` and ``discard`` ask for, and in which second."""

from __future__ import annotations

from typing import Any, cast

import pytest

from holdfast.cli import jobs
from holdfast.cli.jobs import _one_by_one, _portions
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
    assert _one_by_one(rest, "replay", {"reason": "r"}, [4, 1, 2, 3, 3], rate) == (3, [2])
    assert asked == [[1], [2], [3], [4]]
    assert len(slept) == pauses
