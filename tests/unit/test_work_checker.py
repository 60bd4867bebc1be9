"""Checker 11 sees each breach; its controls: tests/simulation/test_job_controls.py."""

from __future__ import annotations

import pytest

from holdfast.verify.checkers.jobs import (
    EffectSeen,
    Enqueued,
    JobHistory,
    Ran,
    effects_once_in_order,
)


def history(*effects: tuple[int, int], runs: list[Ran] | None = None, jobs: int = 3) -> JobHistory:
    return JobHistory(
        [Enqueued("s", seq) for seq in range(1, jobs + 1)],
        runs or [],
        [EffectSeen("s", seq, fence) for seq, fence in effects],
    )


def test_once_in_order_and_fenced_is_green() -> None:
    verdict = effects_once_in_order(history((1, 1), (2, 1), (3, 2)))
    assert verdict.ok
    assert verdict.examined > 3


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (history((1, 1), (2, 1)), "3 of s is lost"),
        (history((1, 1), (2, 1), (2, 2), (3, 2)), "had its effect 2 times"),
        (history((1, 1), (3, 1), (2, 1)), "2 after 3"),
        (history((1, 2), (2, 1), (3, 2)), "fence 1 after 2"),
        (history((1, 1), (2, 1), (3, 1), (4, 1)), "which nobody enqueued"),
        (
            history((1, 1), (2, 1), (3, 1), runs=[Ran("s", 1, "a", 0, 2), Ran("s", 2, "b", 1, 3)]),
            "overlaps",
        ),
        (
            history((1, 1), (2, 1), (3, 1), runs=[Ran("s", 2, "a", 0, 1), Ran("s", 1, "a", 2, 3)]),
            "after 2 was done",
        ),
    ],
)
def test_each_breach_is_red(broken: JobHistory, says: str) -> None:
    verdict = effects_once_in_order(broken)
    assert not verdict.ok
    assert says in str(verdict)


def test_unknown_commit_may_or_may_not_have_an_effect() -> None:
    unsure = JobHistory(
        [Enqueued("s", 1, certain=False), Enqueued("s", 2)], [], [EffectSeen("s", 2, 1)]
    )
    assert effects_once_in_order(unsure).ok
    unsure.effects.insert(0, EffectSeen("s", 1, 1))
    assert effects_once_in_order(unsure).ok
