"""Reports and claims as arguments of ``process``, and jobs from its rows. (Pure.)"""

from __future__ import annotations

import random
from collections.abc import Collection
from operator import attrgetter
from typing import Any

from holdfast.work.contract import Claimed, ClaimRequest, Failed, Report
from holdfast.work.job import PARTITIONS, Block, InvalidArgument, Job, OnFailure, Reason
from holdfast.work.outbox import arguments
from holdfast.work.postgres.sweep import Sweep

_BACKLOG = 1
_POISONED = 5
"""The action of a dead letter whose reason is PoisonMessage, not its last failure."""


def report_arguments(instance: int, report: Report, rng: random.Random) -> tuple[Any, ...]:
    """The arguments of a report; InvalidArgument if a value cannot be encoded."""
    try:
        return _reported(instance, report, rng)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(
            f"the report cannot be encoded: {type(error).__name__}: {error}"
        ) from error


def _reported(instance: int, report: Report, rng: random.Random) -> tuple[Any, ...]:
    failed = report.failed
    verdicts = [f.verdict for f in failed]
    failures = [f.failure for f in failed]
    return (
        instance,
        report.completed,
        [f.seq for f in failed],
        [f.attempt for f in failed],
        [_action(f) for f in failed],
        [v.delay_seconds for v in verdicts],
        [v.strike for v in verdicts],
        [v.stream for v in verdicts],
        [f.reason for f in failures],
        [f.stages for f in failed],
        [f.error_type for f in failures],
        [f.error for f in failures],
        [f.trace for f in failures],
        [f.fingerprint for f in failures],
        report.held,
        report.released,
        [child.parent for child in report.children],
        *arguments([child.draft for child in report.children], rng)[:7],
    )


def _action(failed: Failed) -> int:
    poisoned = (
        failed.verdict.reason is Reason.POISON_MESSAGE
        and failed.failure.reason is not Reason.POISON_MESSAGE
    )
    return _POISONED if poisoned else failed.verdict.action


def claim_arguments(
    report: Report, request: ClaimRequest, sweep: Sweep, partitions: Collection[int]
) -> tuple[Any, ...]:
    """The arguments of a claim for a session with these partitions and this sweep."""
    seen = sweep.snapshot or "1:1:"
    late = [str(xid) for xid in sweep.late]
    cursor = (sweep.settled, sweep.through, seen, str(sweep.xid), late)
    jobs = request.jobs if partitions else 0
    backlogs = (
        list(request.backlogs),
        list(request.backlogs.values()),
        request.per_backlog,
        request.per_backlog_bytes,
    )
    limits = (jobs, request.bytes_max, request.starting)
    types = (list(request.paused_types), list(request.probing))
    owned = owned_bits(partitions)
    return (report.running, request.wake_on_enqueue, *limits, owned, *cursor, *backlogs, *types)


def owned_bits(partitions: Collection[int]) -> bytes | None:
    """The partitions as a bit set; None: all of them."""
    if len(partitions) == PARTITIONS:
        return None
    bits = bytearray(PARTITIONS // 8)
    for partition in partitions:
        bits[partition // 8] |= 1 << partition % 8
    return bytes(bits)


def unpack(row: Any, claimed: Claimed) -> None:
    """Add the jobs of a row of ``process`` to the claim."""
    if row["seqs"] is None:
        return
    jobs = map(
        Job,
        row["seqs"],
        row["types"],
        row["payloads"],
        row["streams"],
        row["destinations"],
        row["partitions"],
        (attempt + 1 for attempt in row["attempts"]),
        row["strikes"],
        row["crashes"],
        row["stages"],
        row["origins"],
    )
    for kind, job in zip(row["kinds"], jobs, strict=True):
        (claimed.backlog if kind == _BACKLOG else claimed.jobs).append(job)
    claimed.jobs.sort(key=attrgetter("seq"))
    claimed.started.update(row["started"] or ())


def block_of(row: Any) -> Block:
    released = frozenset(row["released_ids"]), frozenset(row["released_types"])
    policy = OnFailure(row["policy"])
    return Block(
        row["stream"],
        row["head"],
        policy,
        row["released_through"],
        *released,
        row["by"],
        row["why"],
    )
