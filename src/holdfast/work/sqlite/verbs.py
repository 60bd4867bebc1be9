"""The verbs of work on one SQLite connection, each inside the caller's transaction. (No
threads, no files.)

A file has one worker and one writer, so there are no partitions, no sweep and no
takeover. When a new worker joins, the previous one is gone for certain, and the jobs
that it had in flight get a crash.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice, starmap
from operator import itemgetter
from typing import Any, cast

import apsw

from holdfast.drivers.statements import migrations, statements
from holdfast.errors import NotFound
from holdfast.work.contract import (
    Claimed,
    ClaimRequest,
    Failed,
    JobGone,
    LeaseLost,
    ReaderMark,
    Report,
    Rewound,
    overtaken,
)
from holdfast.work.inspection import JobEntry, WaitingJobs
from holdfast.work.job import (
    CRASHES_MAX,
    Block,
    Failure,
    FailureAction,
    InvalidArgument,
    Job,
    JobDraft,
    OnFailure,
    Reason,
    State,
    check_draft,
)

SQL = statements("holdfast.work.sqlite")
MIGRATIONS = migrations("holdfast.work.sqlite")
UNFIT = (
    apsw.ConstraintError, apsw.MismatchError, apsw.RangeError, apsw.TooBigError,
    AttributeError, TypeError, ValueError, OverflowError,
)  # fmt: skip
"""Errors that a value causes: the statement or its binding would fail again."""
_ENTRY_COLUMNS = [field.name for field in dataclasses.fields(JobEntry)]


def enqueue(db: apsw.Connection, drafts: Iterable[JobDraft], now: float) -> list[int]:
    seqs: list[int] = []
    for draft in map(check_draft, drafts):
        if draft.source:
            db.execute(SQL["see"], (draft.source, draft.source_id, now))
            if not db.changes():
                seqs.append(0)
                continue
        due_at = now + draft.delay_seconds if draft.delay_seconds else None
        state = State.RETRY if draft.delay_seconds else State.READY
        where = (draft.type, draft.payload, draft.stream, draft.destination)
        db.execute(
            SQL["insert"],
            (*where, int(state), now, due_at, draft.source or None, draft.source_id or None),
        )
        seqs.append(db.last_insert_rowid())
    return seqs


def enqueue_marked(
    db: apsw.Connection, drafts: Iterable[JobDraft], marks: Iterable[ReaderMark], now: float
) -> list[int]:
    for mark in marks:
        if mark.replaces is None:
            db.execute(SQL["make_mark"], (mark.row, mark.offset))
        else:
            db.execute(SQL["move_mark"], (mark.row, mark.offset, mark.replaces))
        if not db.changes():
            raise overtaken()
    return enqueue(db, drafts, now)


def start_session(db: apsw.Connection, name: str, now: float) -> int:
    """Start a session; the jobs that the last one had in flight get a crash."""
    for instance, _, _, running in list(db.execute(SQL["seat"])):
        for (seq,) in list(db.execute(SQL["blamed"], (running,))):
            crashes = db.execute(SQL["crash"], (seq, CRASHES_MAX)).get
            db.execute(SQL["add_reason"], (seq, int(Reason.UNKNOWN)))
            if crashes >= CRASHES_MAX:
                db.execute(SQL["poison"], (seq,))
                db.execute(SQL["add_reason"], (seq, int(Reason.POISON_MESSAGE)))
                _bury(db, seq, now)
        db.execute(SQL["leave"], (instance,))
    return int(db.execute(SQL["take_seat"], (name,)).get)


def report_before_exit(
    db: apsw.Connection, instance: int, report: Report, culprit: int | None, now: float
) -> None:
    """See ``contract.WorkerSession.report_before_exit``.

    Without a culprit the session stays, and the next one blames all jobs in flight.
    """
    fenced(db, instance)
    apply(db, report, now, Claimed())
    db.execute(SQL["record_running"], (json.dumps(report.running),))
    if culprit is not None:
        for table in ("job", "dead"):  # its failure may have buried it
            db.execute(SQL[f"count_crash_{table}"], (culprit,))
        db.execute(SQL["leave"], (instance,))


def fenced(db: apsw.Connection, instance: int) -> tuple[bool, str]:
    """The operators' notice and the jobs in flight; LeaseLost if the session ended."""
    for number, _, notice, running in db.execute(SQL["seat"]):
        if number == instance:
            return bool(notice), running
    raise LeaseLost("another worker has started a session at this store and owns its jobs now")


def finish(db: apsw.Connection, instance: int, seq: int) -> None:
    """Complete a job in its handler's transaction: delete its row under the lease."""
    fenced(db, instance)
    db.execute(SQL["complete"], (seq,))
    if db.changes() != 1:
        raise JobGone
    db.execute(SQL["lift"], (seq,))


def step(db: apsw.Connection, instance: int, seq: int, stages: int) -> None:
    """Add completed stages to a running job under the lease."""
    fenced(db, instance)
    db.execute(SQL["step"], (seq, stages))
    if db.changes() != 1:
        raise JobGone


def process(
    db: apsw.Connection,
    instance: int,
    report: Report,
    request: ClaimRequest,
    cursor: int,
    now: float,
) -> Claimed:
    """See ``contract.WorkerSession.process``; ``cursor`` is the last sequence read."""
    notice, running = fenced(db, instance)
    claimed = Claimed(through=cursor, notice=notice)
    apply(db, report, now, claimed)
    if request.jobs > 0:
        _read(db, request, now, claimed)
    due = _next_due(db, request)
    claimed.next_due_seconds = max(0.0, due - now) if due is not None else None
    in_flight = json.dumps([*report.running, *sorted(claimed.started)])
    if in_flight != running or notice:
        db.execute(SQL["record_running"], (in_flight,))
    return claimed


def apply(db: apsw.Connection, report: Report, now: float, claimed: Claimed) -> None:
    """Store the report; InvalidArgument if a value in it is at fault."""
    try:
        _apply(db, report, now, claimed)
    except UNFIT as error:
        raise InvalidArgument(
            f"SQLite cannot store a value: {type(error).__name__}: {error}"
        ) from error


def _apply(db: apsw.Connection, report: Report, now: float, claimed: Claimed) -> None:
    _store_children(db, report, now)
    if report.completed:
        done = json.dumps(report.completed)
        db.execute(SQL["complete_all"], (done,))
        db.execute(SQL["lift_all"], (done,))
    for failed in report.failed:
        # An operator may have changed the job: it may wait behind the cursor.
        if not _fail(db, failed, now):
            claimed.notice = True
    if report.held:
        db.execute(SQL["hold"], (json.dumps(report.held),))
    for seq in report.released:
        stream = db.execute(SQL["stream_of"], (seq,)).get
        if stream is not None:
            release(db, stream, [seq], [], 0, ("worker", "released by its worker"))
            claimed.notice = True


def _store_children(db: apsw.Connection, report: Report, now: float) -> None:
    """Store children whose parent this report completes;
    a repeated report stores none.
    """
    parents = {child.parent for child in report.children}
    alive = {seq for seq in parents if db.execute(SQL["one"], (seq,)).fetchone() is not None}
    enqueue(db, (child.draft for child in report.children if child.parent in alive), now)


def _read(db: apsw.Connection, request: ClaimRequest, now: float, claimed: Claimed) -> None:
    due = [seq for seq, *_ in _fitting(_due(db, request, now), 1, request.bytes_max)]
    due += [seq for kind in request.probing for (seq,) in db.execute(SQL["probe"], (now, kind))]
    if due:
        db.execute(SQL["make_ready"], (json.dumps(due),))
    late = [
        Job(*db.execute(SQL["one"], (seq,)).get) for seq in sorted(due) if seq <= claimed.through
    ]
    for stream, after in request.backlogs.items():
        held = db.execute(SQL["backlog"], (stream, after, request.per_backlog))
        claimed.backlog.extend(starmap(Job, _fitting(held, 2, request.per_backlog_bytes, len)))
    forward, cut = _forward(db, request, claimed.through)
    claimed.jobs = late + forward
    starting = [job.seq for job in claimed.jobs if not job.suspect][: request.starting]
    claimed.started = set(starting)
    claimed.through = forward[-1].seq if cut else int(db.execute(SQL["last"]).get or 0)


def _due(db: apsw.Connection, request: ClaimRequest, now: float) -> Iterable[Any]:
    """Due retries, the longest due first; those of paused types are not even read."""
    if not request.paused_types:
        return db.execute(SQL["due"], (now, request.jobs))
    each = [
        db.execute(SQL["due_of"], (now, request.jobs, kind)).fetchall()
        for kind in _open_types(db, request)
    ]
    return islice(merge(*each, key=itemgetter(2)), request.jobs)


def _next_due(db: apsw.Connection, request: ClaimRequest) -> float | None:
    if not request.paused_types:
        return cast("float | None", db.execute(SQL["next_due"]).get)
    return min(
        (db.execute(SQL["next_due_of"], (kind,)).get for kind in _open_types(db, request)),
        default=None,
    )


def _open_types(db: apsw.Connection, request: ClaimRequest) -> list[str]:
    return [
        kind for (kind,) in db.execute(SQL["scheduled_types"]) if kind not in request.paused_types
    ]


def _forward(db: apsw.Connection, request: ClaimRequest, cursor: int) -> tuple[list[Job], bool]:
    """Jobs after the cursor, and whether there may be more."""
    rows = list(
        _fitting(db.execute(SQL["claim"], (cursor, request.jobs)), 2, request.bytes_max, len)
    )
    cut = len(rows) == request.jobs or sum(len(row[2]) for row in rows) >= max(request.bytes_max, 1)
    return list(starmap(Job, rows)), cut and bool(rows)


def _fitting(
    rows: Iterable[Any], column: int, bytes_max: int, size: Callable[[Any], int] = int
) -> Iterator[Any]:
    """Rows up to ``bytes_max`` bytes, and at least one."""
    total = 0
    for row in rows:
        yield row
        total += size(row[column])
        if total >= bytes_max:
            return


def _fail(db: apsw.Connection, failed: Failed, now: float) -> bool:
    """Store one failure; False if it matches no job.

    Then it was applied before, or an operator changed the job while it ran.
    """
    verdict, failure = failed.verdict, failed.failure
    values = {
        "seq": failed.seq,
        "attempt": failed.attempt,
        "counted": int(verdict.action is not FailureAction.POSTPONE),
        "strike": int(verdict.strike),
        "stages": int(failed.stages),
        "state": int(State.PARKED if verdict.action is FailureAction.PARK else State.RETRY),
        "due_at": None if verdict.action is FailureAction.PARK else now + verdict.delay_seconds,
        "reason": int(verdict.reason),
        "error_type": failure.error_type,
        "error": failure.error,
        "trace": failure.trace,
        "fingerprint": failure.fingerprint,
    }
    dead = verdict.action is FailureAction.DEAD
    db.execute(SQL["doom" if dead else "keep_failed"], values)
    if not db.changes():
        return False
    if verdict.action is not FailureAction.POSTPONE:
        for reason in (failure.reason, verdict.reason):
            db.execute(SQL["add_reason"], (failed.seq, int(reason)))
    if dead:
        _bury(db, failed.seq, now)
    elif verdict.stream is OnFailure.SKIP:
        db.execute(SQL["lift"], (failed.seq,))
    else:
        db.execute(SQL["block"], (failed.seq, int(verdict.stream), now, "", ""))
    return True


def _bury(db: apsw.Connection, seq: int, now: float) -> int:
    db.execute(SQL["bury"], (seq, now))
    buried = db.changes()
    db.execute(SQL["complete"], (seq,))
    db.execute(SQL["lift"], (seq,))
    return buried


def read_blocks(db: apsw.Connection) -> Rewound:
    blocks = [block_of(row) for row in db.execute(SQL["blocks"])]
    return Rewound(
        blocks, {stream: (job_type, to) for stream, job_type, to in db.execute(SQL["backlogs"])}
    )


def block_of(row: Any) -> Block:
    stream, head, policy, through, ids, types, by, why = row
    released = frozenset(json.loads(ids)), frozenset(json.loads(types))
    return Block(stream, head, OnFailure(policy), through, *released, by, why)


def release(
    db: apsw.Connection,
    stream: str,
    ids: Sequence[int],
    types: Sequence[str],
    through: int,
    who: tuple[str, str],
) -> int:
    """Release these jobs from the stream's blocks; how many blocks there are."""
    rows = list(db.execute(SQL["blocks_of"], (stream,)))
    for head, old_ids, old_types, old_through in rows:
        new_ids = json.dumps(sorted({*json.loads(old_ids), *ids}))
        new_types = json.dumps(sorted({*json.loads(old_types), *types}))
        db.execute(SQL["release"], (head, new_ids, new_types, max(old_through, through), *who))
    return len(rows)


def retry(db: apsw.Connection, seqs: Sequence[int], reset: bool, now: float) -> int:
    return _each(db, "retry", ((seq, now, reset) for seq in seqs))


def park(db: apsw.Connection, seqs: Sequence[int], now: float, who: tuple[str, str]) -> int:
    count = 0
    for seq in seqs:
        if _each(db, "park", [(seq,)]):
            db.execute(SQL["block"], (seq, int(OnFailure.PARK), now, *who))
            count += 1
    return count


def bury(
    db: apsw.Connection, seqs: Sequence[int], now: float, failure: Failure | None = None
) -> int:
    count = sum(_bury(db, seq, now) for seq in seqs)
    if failure is not None:
        words = (int(failure.reason), failure.error_type, failure.error)
        db.executemany(SQL["name_reason"], [(seq, *words) for seq in seqs])
    return count


def waiting(db: apsw.Connection, destinations: Sequence[str]) -> dict[str, WaitingJobs]:
    counted = {name: db.execute(SQL["waiting"], (name,)).get for name in destinations}
    return {name: WaitingJobs(*row) for name, row in counted.items() if row[0]}


def oldest(db: apsw.Connection, destination: str, before: float, limit: int) -> list[int]:
    return [seq for (seq,) in db.execute(SQL["oldest"], (destination, before, limit))]


def _each(db: apsw.Connection, name: str, rows: Iterable[tuple[Any, ...]]) -> int:
    count = 0
    for row in rows:
        db.execute(SQL[name], row)
        count += db.changes()
    return count


def find(db: apsw.Connection, conditions: dict[str, Any]) -> list[JobEntry]:
    return [_entry(row) for row in db.execute(SQL["find"], conditions)]


def dead(
    db: apsw.Connection, conditions: dict[str, Any], *, oldest: bool = False
) -> list[JobEntry]:
    """Dead letters, newest first unless ``oldest``."""
    return [_entry(row) for row in db.execute(SQL["dead"], {**conditions, "oldest": oldest})]


def _entry(row: Any) -> JobEntry:
    return JobEntry.stored(zip(_ENTRY_COLUMNS, row, strict=True))


def replay(db: apsw.Connection, conditions: dict[str, Any], now: float) -> int:
    """Move dead letters back into the job table, oldest first."""
    letters = dead(db, conditions, oldest=True)
    for letter in letters:
        (new,) = enqueue(
            db, [JobDraft(letter.type, letter.payload, letter.stream, letter.destination)], now
        )
        origin, source = (
            letter.origin or letter.seq,
            (letter.source or None, letter.source_id or None),
        )
        db.execute(SQL["remember"], (new, origin, letter.stages, *source))
        db.execute(SQL["discard"], (letter.seq,))
    return len(letters)


def discard(db: apsw.Connection, conditions: dict[str, Any]) -> int:
    return _each(db, "discard", ((letter.seq,) for letter in dead(db, conditions, oldest=True)))


def record(
    db: apsw.Connection,
    act: tuple[str, str, str, str],
    count: int,
    nothing: str,
    now: float,
    kept_max: int,
) -> int:
    """Record an operator's act and notify the worker; NotFound if it did nothing."""
    if not count:
        raise NotFound(nothing)
    verb, target, by, why = act
    db.execute(SQL["record"], (now, verb, target[:1000], count, by, why))
    db.execute(SQL["forget_acts"], (kept_max,))
    db.execute(SQL["notice"])
    return count
