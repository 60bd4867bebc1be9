"""A report in pieces, one per ended job: each can be sent and refused alone. (Pure.)"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from holdfast.work.contract import Child, Report

REPORT_BYTES_MAX = 32 << 20
"""The payloads and failure texts in one round trip; the rest goes with the next one.

One job always fits: ``CHILDREN_BYTES_MAX`` bounds its share.
"""


def split(report: Report) -> list[Report]:
    """One piece per ended job with its children, then one for everything else."""
    children: defaultdict[int, list[Child]] = defaultdict(list)
    for child in report.children:
        children[child.parent].append(child)
    pieces = [Report(completed=[seq], children=children.pop(seq, [])) for seq in report.completed]
    pieces += [Report(failed=[failed]) for failed in report.failed]
    if report.held or report.released:
        pieces.append(Report(held=report.held, released=report.released))
    return pieces


def joined(pieces: Iterable[Report], running: Iterable[int] = ()) -> Report:
    """One report from pieces; ``running`` is in no piece: it is not about one job."""
    report = Report(running=list(running))
    for piece in pieces:
        report.completed.extend(piece.completed)
        report.failed.extend(piece.failed)
        report.held.extend(piece.held)
        report.released.extend(piece.released)
        report.children.extend(piece.children)
    return report


def fitting(report: Report, bytes_max: int = REPORT_BYTES_MAX) -> tuple[Report, Report]:
    """The part of the report that fits into one round trip, and the rest."""
    if size_of(report) <= bytes_max:
        return report, Report()
    pieces, total, count = split(report), 0, 0
    for piece in pieces:
        total += size_of(piece)
        if count and total > bytes_max:
            break
        count += 1
    return joined(pieces[:count]), joined(pieces[count:])


def size_of(report: Report) -> int:
    texts = sum(len(failed.failure.error) + len(failed.failure.trace) for failed in report.failed)
    return texts + sum(_length(child.draft.payload) for child in report.children)


def _length(payload: object) -> int:
    """The length of a payload; 0 for other types, which the store refuses."""
    return len(payload) if isinstance(payload, bytes) else 0
