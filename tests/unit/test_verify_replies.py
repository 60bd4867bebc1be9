"""Checker 15 sees each breach; its controls: tests/simulation/test_reply_controls.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.verify.checkers.replies import reply_is_whole
from holdfast.verify.history import AnyEvent, History, ReplyMade, ReplySeen

MADE = ReplyMade("r", 7, ["a", "b", "c"], "done")
WHOLE = [(7, 0, "a"), (7, 1, "b"), (7, 2, "c")]


def seen(
    entries: Sequence[tuple[int, int, str]] = WHOLE,
    ends: Sequence[str] | None = ("done",),
    **fields: object,
) -> ReplySeen:
    return ReplySeen("r", "reader", entries, ends, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "events",
    [
        [MADE, seen(), seen(at=1)],
        [MADE, seen(WHOLE[:2], ["worker_lost"]), seen(at=1)],
        [MADE, seen(WHOLE[:1], ["aborted"])],
        [MADE, seen([], None)],
        [MADE, seen(resumable=False), seen(WHOLE[:2], ["worker_lost"], at=1)],
        [ReplyMade("r", 6, ["a", "x"]), MADE, seen([(6, 0, "a"), (6, 1, "x"), *WHOLE])],
    ],
)
def test_prefix_with_one_true_end_is_green(events: list[AnyEvent]) -> None:
    verdict = reply_is_whole(History(events))
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([MADE, seen([WHOLE[0], WHOLE[2]])], "7-2 is not the next"),
        ([MADE, seen(WHOLE[1:])], "7-1 is not the next"),
        ([MADE, seen([WHOLE[0], *WHOLE])], "7-0 is not the next"),
        ([MADE, seen([WHOLE[1], WHOLE[0], WHOLE[2]])], "7-0 is not the next"),
        ([MADE, seen([(7, 0, "x"), *WHOLE[1:]])], "7-0 was not made so"),
        ([MADE, seen([*WHOLE, (7, 3, "d")])], "7-3 was not made so"),
        ([MADE, seen(WHOLE[:2])], "done after 2 of 3"),
        ([MADE, seen(ends=[])], "got 0 ends"),
        ([MADE, seen(ends=["done", "done"])], "got 2 ends"),
        ([ReplyMade("r", 7, ["a", "b", "c"]), seen()], "which its producer did not make"),
        ([MADE, seen(), seen(WHOLE[:2], ["worker_lost"], at=1)], "another reader got done"),
    ],
)
def test_each_breach_is_red(events: list[AnyEvent], says: str) -> None:
    verdict = reply_is_whole(History(events))
    assert not verdict.ok and says in str(verdict)
