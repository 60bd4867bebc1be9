"""A report in pieces: nothing is lost or doubled, children stay with their parents, and
a round trip is bounded.
"""

from __future__ import annotations

from holdfast.work.contract import Child, Failed, Report
from holdfast.work.job import Failure, FailureAction, FailureVerdict, JobDraft, Reason
from holdfast.work.reports import fitting, joined, size_of, split


def _failed(seq: int, size: int) -> Failed:
    return Failed(
        seq,
        1,
        FailureVerdict(FailureAction.RETRY, Reason.UNKNOWN),
        Failure(Reason.UNKNOWN, error="e" * size),
    )


def _report() -> Report:
    children = [Child(seq, JobDraft("T", b"x" * 10)) for seq in (1, 3, 3)]
    return Report(
        [1, 2, 3], [_failed(4, 5), _failed(5, 7)], held=[6], released=[7], children=children
    )


def test_pieces_of_a_report_are_the_whole_report() -> None:
    report = _report()
    pieces = split(report)
    assert joined(pieces) == report
    assert [(piece.completed, len(piece.children)) for piece in pieces[:3]] == [
        ([1], 1),
        ([2], 0),
        ([3], 2),
    ]


def test_report_too_large_for_one_round_trip_is_split_and_one_job_always_fits() -> None:
    report = _report()
    assert size_of(report) == 42
    assert fitting(report, 42) == (report, Report())
    rest, sent = report, list[Report]()
    while rest != Report():
        now, rest = fitting(rest, 12)
        sent.append(now)
    assert [each.completed for each in sent] == [[1, 2], [3], []]
    assert [size_of(each) for each in sent] == [10, 20, 12], (
        "the children of one job are not parted"
    )
    assert joined(sent) == report
