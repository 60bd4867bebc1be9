"""Operators' endpoints of jobs: what waits, why, and the acts that repair it.

Every act has a reason and is in the audit log first. The job store also records acts on
jobs, with their results (``GET /admin/jobs/acts``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from holdfast.api.admin import record
from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Answer, Call
from holdfast.api.schemas import RequestBody, _Reason
from holdfast.clock import timestamp
from holdfast.errors import InvalidMessage, NotFound
from holdfast.message import SEQUENCE_MAX
from holdfast.work.contract import WorkStore
from holdfast.work.inspection import BlockedStream, JobEntry, Query, by_name
from holdfast.work.job import NAME_LENGTH_MAX, State
from holdfast.work.job import Reason as JobReason

StateName = Literal["ready", "retry", "held", "parked"]
ReasonName = Literal[
    "transport_unavailable", "handler_exception", "validation_failure", "timeout_exceeded",
    "serialization_error", "dependency_failure", "poison_message", "throttled", "unknown",
]  # fmt: skip
Seq = Annotated[int, Meta(ge=1, le=SEQUENCE_MAX)]
Seqs = Annotated[list[Seq], Meta(min_length=1, max_length=1000)]
Word = Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
Limit = Annotated[int, Meta(ge=1, le=1000)]
_TARGET_LENGTH_MAX = 1000


class JobsQuery(RequestBody, frozen=True):
    state: StateName | None = None
    type: Word | None = None
    stream: Word | None = None
    reason: ReasonName | None = None
    fingerprint: Word | None = None
    limit: Limit = 100


class LimitQuery(RequestBody, frozen=True):
    limit: Limit = 100


class ActsQuery(RequestBody, frozen=True):
    """``before`` is the ``next_before`` of the page before."""

    before: Seq | None = None
    limit: Limit = 100


class TheseJobs(RequestBody, frozen=True):
    seqs: Seqs
    reason: _Reason


class RetryJobs(RequestBody, frozen=True):
    """``reset`` forgets attempts, strikes and crashes."""

    seqs: Seqs
    reason: _Reason
    reset: bool = False


class ReleaseJobs(RequestBody, frozen=True):
    """What may pass the stream's failed head: by id, by type, or through a sequence; at
    least one of them.
    """

    stream: Word
    reason: _Reason
    seqs: Annotated[tuple[Seq, ...], Meta(max_length=1000)] = ()
    type: Annotated[str, Meta(max_length=NAME_LENGTH_MAX)] = ""
    through: Annotated[int, Meta(ge=0, le=SEQUENCE_MAX)] = 0


class TheseDead(RequestBody, frozen=True):
    """Which dead letters; every given condition must hold."""

    reason: _Reason
    seqs: Annotated[tuple[Seq, ...], Meta(max_length=1000)] = ()
    type: Word | None = None
    stream: Word | None = None
    failed_with: ReasonName | None = None
    fingerprint: Word | None = None
    limit: Limit = 100


class JobView(Struct, frozen=True):
    """A job, or a dead letter (``dead_at``). ``payload`` is shown for a single job
    only.

    ``reasons`` are all it failed with, in order, the same in succession once: what made
    a job poison stands before it.
    """

    seq: int
    type: str
    stream: str | None
    state: str
    attempt: int
    strikes: int
    crashes: int
    stages: int
    created_at: str
    due_at: str | None
    reason: str | None
    reasons: Sequence[str]
    error_type: str
    error: str
    fingerprint: str
    destination: str
    source: str
    source_id: str
    origin: int
    dead_at: str | None
    payload: str | None = None
    trace: str | None = None


class JobList(Struct, frozen=True):
    jobs: Sequence[JobView]


class StreamView(Struct, frozen=True):
    """A blocked stream: its head, since when, how many wait, what was released."""

    stream: str
    head: int
    policy: str
    since: str
    waiting: int
    head_type: str
    head_attempt: int
    head_reason: str | None
    head_error: str
    head_due_at: str | None
    released_through: int
    released_seqs: Sequence[int]
    released_types: Sequence[str]
    by: str
    why: str


class StreamList(Struct, frozen=True):
    streams: Sequence[StreamView]


class BreakerView(Struct, frozen=True):
    type: str
    open_until: str
    by: str


class BreakerList(Struct, frozen=True):
    breakers: Sequence[BreakerView]


class StatsView(Struct, frozen=True):
    by_state: Mapping[str, int]
    by_reason: Mapping[str, int]
    by_attempt: Mapping[str, int]
    dead: int
    dead_by_reason: Mapping[str, int]
    poison_candidates: int
    scheduled: int
    next_due_at: str | None
    last_due_at: str | None
    oldest_age_seconds: float
    blocked_streams: int


class ActView(Struct, frozen=True):
    number: int
    at: str
    verb: str
    target: str
    count: int
    by: str
    why: str


class ActList(Struct, frozen=True):
    """``next_before``: the ``before`` of the next page; null: there is none."""

    acts: Sequence[ActView]
    next_before: int | None


class Count(Struct, frozen=True):
    """How many jobs, dead letters or blocks it concerned."""

    count: int


def _when(at: float | None) -> str | None:
    return None if at is None else timestamp(at)


def _view(entry: JobEntry, *, whole: bool = False) -> JobView:
    return JobView(
        entry.seq, entry.type, entry.stream,
        "dead" if entry.dead_at is not None else entry.state.name.lower(),
        entry.attempt, entry.strikes, entry.crashes, entry.stages,
        timestamp(entry.created_at), _when(entry.due_at),
        entry.reason.name.lower() if entry.reason is not None else None,
        [reason.name.lower() for reason in entry.reasons],
        entry.error_type, entry.error, entry.fingerprint,
        entry.destination, entry.source, entry.source_id, entry.origin, _when(entry.dead_at),
        entry.payload.decode("utf-8", "replace") if whole else None, entry.trace if whole else None,
    )  # fmt: skip


def _query(asked: JobsQuery) -> Query:
    return Query(
        type=asked.type, stream=asked.stream, fingerprint=asked.fingerprint,
        reason=_reason(asked.reason),
        state=State[asked.state.upper()] if asked.state else None,
    )  # fmt: skip


def _reason(name: str | None) -> JobReason | None:
    return JobReason[name.upper()] if name else None


async def list_jobs(deps: ApiDeps, call: Call) -> Answer:
    asked: JobsQuery = call.query
    found = await call.in_time(deps.work.jobs.find(_query(asked), asked.limit))
    return Answer(JobList([_view(entry) for entry in found]))


async def list_dead_jobs(deps: ApiDeps, call: Call) -> Answer:
    asked: JobsQuery = call.query
    found = await call.in_time(deps.work.jobs.dead(_query(asked), asked.limit))
    return Answer(JobList([_view(entry) for entry in found]))


async def get_job(deps: ApiDeps, call: Call) -> Answer:
    text = call.path["seq"]
    if not text.isdecimal() or not 0 < int(text) <= SEQUENCE_MAX:
        raise NotFound(f"no job {text[:40]}")
    query = Query(seqs=[int(text)])
    store = deps.work.jobs
    found = [*await call.in_time(store.find(query, 1)), *await call.in_time(store.dead(query, 1))]
    if not found:
        raise NotFound(f"no job {text}: it is done or never existed")
    return Answer(_view(found[0], whole=True))


async def get_job_stats(deps: ApiDeps, call: Call) -> Answer:
    stats = await call.in_time(deps.work.jobs.stats(deps.work.webhooks.parked().parked))
    return Answer(
        StatsView(
            {state.name.lower(): n for state, n in stats.by_state.items()},
            by_name(stats.by_reason),
            {str(attempt): n for attempt, n in stats.by_attempt.items()},
            stats.dead,
            by_name(stats.dead_by_reason),
            stats.poison_candidates,
            stats.scheduled,
            _when(stats.next_due_at),
            _when(stats.last_due_at),
            round(stats.oldest_age_seconds, 3),
            stats.blocked_streams,
        )
    )


async def list_job_streams(deps: ApiDeps, call: Call) -> Answer:
    found = await call.in_time(deps.work.jobs.streams(call.query.limit))
    return Answer(StreamList([_stream_view(stream) for stream in found]))


def _stream_view(found: BlockedStream) -> StreamView:
    block = found.block
    return StreamView(
        block.stream, block.head, block.policy.name.lower(),
        timestamp(found.since), found.waiting, found.head_type, found.head_attempt,
        found.head_reason.name.lower() if found.head_reason is not None else None,
        found.head_error, _when(found.head_due_at),
        block.released_through, sorted(block.released_ids),
        sorted(block.released_types), block.by, block.why,
    )  # fmt: skip


async def list_job_breakers(deps: ApiDeps, call: Call) -> Answer:
    found = await call.in_time(deps.work.jobs.open_breakers())
    return Answer(BreakerList([BreakerView(b.type, timestamp(b.open_until), b.by) for b in found]))


async def list_job_acts(deps: ApiDeps, call: Call) -> Answer:
    asked: ActsQuery = call.query
    found = await call.in_time(deps.work.jobs.acts(asked.limit + 1, asked.before))
    page = found[: asked.limit]
    views = [
        ActView(a.number, timestamp(a.at), a.verb, a.target, a.count, a.by, a.why) for a in page
    ]
    return Answer(ActList(views, page[-1].number if len(found) > len(page) else None))


async def _acted(
    deps: ApiDeps,
    call: Call,
    verb: str,
    target: str,
    act: Callable[[WorkStore, str], Awaitable[int]],
) -> Answer:
    """Record an act, then do it: a record without an effect is better than an effect
    without a record."""
    store = deps.work.jobs
    await record(deps, call, f"jobs.{verb}", target, call.body.reason)
    return Answer(Count(await call.done_in_time(act(store, call.principal.user_id))))


def _words(*words: object) -> str:
    """The target of an act for the audit log: bounded, however many jobs there are."""
    text = " ".join(str(word) for word in words if word not in (None, "", 0))
    return text if len(text) <= _TARGET_LENGTH_MAX else f"{text[:_TARGET_LENGTH_MAX]}…"


async def retry_jobs(deps: ApiDeps, call: Call) -> Answer:
    body: RetryJobs = call.body
    target = _words(*body.seqs, "reset" if body.reset else "")
    return await _acted(
        deps,
        call,
        "retry",
        target,
        lambda jobs, by: jobs.retry(body.seqs, reset=body.reset, by=by, why=body.reason),
    )


async def park_jobs(deps: ApiDeps, call: Call) -> Answer:
    body: TheseJobs = call.body
    target = _words(*body.seqs)
    return await _acted(
        deps, call, "park", target, lambda jobs, by: jobs.park(body.seqs, by=by, why=body.reason)
    )


async def bury_jobs(deps: ApiDeps, call: Call) -> Answer:
    body: TheseJobs = call.body
    target = _words(*body.seqs)
    return await _acted(
        deps, call, "bury", target, lambda jobs, by: jobs.bury(body.seqs, by=by, why=body.reason)
    )


async def release_jobs(deps: ApiDeps, call: Call) -> Answer:
    body: ReleaseJobs = call.body
    if not (body.seqs or body.type or body.through):
        raise InvalidMessage("say what is released: seqs, type or through", field="seqs")
    target = _words(
        body.stream, *body.seqs, body.type, f"through {body.through}" if body.through else ""
    )

    async def release(jobs: WorkStore, by: str) -> int:
        return await jobs.release(
            body.stream, ids=body.seqs, type=body.type, through=body.through, by=by, why=body.reason
        )

    return await _acted(deps, call, "release", target, release)


def _dead(body: TheseDead) -> Query:
    return Query(
        body.seqs, body.type, body.stream, _reason(body.failed_with), None, body.fingerprint
    )


def _dead_words(body: TheseDead) -> str:
    return _words(
        *body.seqs,
        body.type,
        body.stream,
        body.failed_with,
        body.fingerprint,
        f"at most {body.limit}",
    )


async def replay_jobs(deps: ApiDeps, call: Call) -> Answer:
    body: TheseDead = call.body

    async def replay(jobs: WorkStore, by: str) -> int:
        return await jobs.replay(_dead(body), limit=body.limit, by=by, why=body.reason)

    return await _acted(deps, call, "replay", _dead_words(body), replay)


async def discard_jobs(deps: ApiDeps, call: Call) -> Answer:
    body: TheseDead = call.body

    async def discard(jobs: WorkStore, by: str) -> int:
        return await jobs.discard(_dead(body), limit=body.limit, by=by, why=body.reason)

    return await _acted(deps, call, "discard", _dead_words(body), discard)
