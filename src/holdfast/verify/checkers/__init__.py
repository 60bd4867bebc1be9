"""One checker per promise: a history in, a verdict out. (Pure.)

- ``verdict``         the result of a checker
- ``stored``          1 to 3: what is in the store
- ``served``          4, 5, 9 and 12: what clients received
- ``answered``        6, 7, 8 and 10: bounds, warnings, replies, planes
- ``jobs``            11: a job's effects
- ``replies``         15: what readers get of AI replies
- ``fault_timeline``  which faults excuse which failures, for 8, 10 and 12

The numbers are those of ``docs/internals/proof.md``. 13 and 14 judge the limiter and
are in ``tests/proof/limits_checkers.py``. A verdict says how many facts it examined,
because a checker that examined nothing proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.verify.checkers.answered import (
    answered_in_time,
    buffers_bounded,
    failure_stays_in_its_plane,
    no_silent_close,
)
from holdfast.verify.checkers.jobs import job_effects_once
from holdfast.verify.checkers.replies import reply_is_whole
from holdfast.verify.checkers.served import (
    acked_is_offered,
    cursors_monotone,
    no_late_fill,
    nothing_leaks,
)
from holdfast.verify.checkers.stored import (
    acked_is_stored,
    one_message_per_key,
    sequence_is_unique,
)
from holdfast.verify.checkers.verdict import Verdict
from holdfast.verify.history import History

CHECKERS: dict[int, Callable[[History], Verdict]] = {
    1: acked_is_stored,
    2: one_message_per_key,
    3: sequence_is_unique,
    4: no_late_fill,
    5: cursors_monotone,
    6: buffers_bounded,
    7: no_silent_close,
    8: answered_in_time,
    9: acked_is_offered,
    10: failure_stays_in_its_plane,
    11: job_effects_once,
    12: nothing_leaks,
    15: reply_is_whole,
}


def check(history: History) -> list[Verdict]:
    """All verdicts, in the order of their numbers."""
    return [checker(history) for checker in CHECKERS.values()]


def red(verdicts: Sequence[Verdict]) -> set[int]:
    """The numbers of the checkers that found a violation."""
    return {number for number, verdict in zip(CHECKERS, verdicts, strict=True) if not verdict.ok}


__all__ = ["CHECKERS", "Verdict", "check", "red"]
