"""What a store of jobs promises. Adapters: memory (the reference), sqlite, postgres.

A worker takes a *seat*. ``Seat.process`` is the one round trip of its life: it reports what became of jobs and gets
new ones, in one transaction. What a report says is durable when the call returns. A seat whose lease was lost gets
``LeaseLost`` from every verb and has changed nothing.

Order: jobs of one stream are handed out in ``seq`` order, and ``seq`` order is commit order within a stream. A job is
handed out by one seat at a time. Claiming writes nothing, so what a dead seat held is simply read again.

Cancel-safety: a cancelled or failed ``process`` may have happened. Reports are idempotent; call ``rewind`` and then
``process`` with the same report.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol

from holdfast.errors import HoldfastError, Unavailable
from holdfast.work.job import Block, Failure, FailureVerdict, Job, JobDraft, Reason, State, reason_of

PER_BACKLOG = 64
"""How many held jobs of one stream are read at once."""


POISON_CANDIDATE_ATTEMPTS = 10
INBOX_SECONDS = 7 * 86400.0
"""How long the inbox remembers an id."""
ACTS_KEPT_MAX = 100_000
"""The record of operators' acts forgets the oldest beyond this many; the node's audit log has its own."""


class LeaseLost(HoldfastError):
    """This worker was declared dead or its partition has moved; nothing of what it reported was applied."""


class SessionTaken(Unavailable):
    """The store has one seat, and another worker that is alive sits there; the message names it. Try again later."""


class JobGone(HoldfastError):
    """This job is not there any more: an operator buried it, or it ended already. Says nothing about other jobs."""

    def __init__(self) -> None:
        super().__init__("the job is gone: an operator acted on it, or it has ended")


class RunEnded(HoldfastError):
    """This run of the job is over: its handler returned, or hung and was given up. Its context is closed."""

    def __init__(self) -> None:
        super().__init__("this run of the job is over: its context cannot be used any more")


class TransactionEnded(HoldfastError):
    """When its block was left, the transaction was not open any more: whoever it was lent to has ended it, or closed
    the connection. What was committed inside the block stays; nothing else of it is stored, and no job is completed.
    """

    def __init__(self, detail: str = "") -> None:
        told = "the transaction was ended inside its block, by COMMIT, ROLLBACK or closing the connection"
        super().__init__(f"{told}: leave that to the block" + (f" ({detail})" if detail else ""))


@dataclass(frozen=True, slots=True)
class Failed:
    """A failed run: which attempt of which job, what was decided, what was completed before (the bits of stages)."""

    seq: int
    attempt: int
    verdict: FailureVerdict
    failure: Failure
    stages: int = 0


@dataclass(frozen=True, slots=True)
class ReaderMark:
    """How far a named reader of something else has come; stored with the jobs it made of what it read."""

    reader: str
    position: int


@dataclass(frozen=True, slots=True)
class Child:
    """A job enqueued by the success of another: stored exactly when its parent's completion is."""

    parent: int
    draft: JobDraft


@dataclass(slots=True)
class Report:
    """What became of the jobs a seat holds. ``running`` is the record of what is in flight, for crash counting."""

    completed: list[int] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)
    running: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """How much the seat can take: jobs and bytes, how many of them start at once, and which backlogs to read on.

    ``backlogs`` maps a stream to the sequence after which its held jobs are wanted, at most ``per_backlog`` of each.
    ``shut`` are job types whose breaker is not closed: their due retries stay where they are, but for one of each type
    in ``probing``. ``sleeping``: if nothing is found, ``Seat.wait`` shall be ended by the next enqueue.
    """

    jobs: int = 0
    bytes_max: int = 8 << 20
    starting: int = 0
    backlogs: Mapping[str, int] = field(default_factory=dict)
    per_backlog: int = PER_BACKLOG
    sleeping: bool = False
    shut: Sequence[str] = ()
    probing: Sequence[str] = ()

    @property
    def per_backlog_bytes(self) -> int:
        """The most of one backlog, but for its first job: all of them together fit like everything else."""
        return max(1, self.bytes_max // max(1, len(self.backlogs)))


@dataclass(slots=True)
class Claimed:
    """What ``process`` hands out. ``jobs`` rise by seq; the first ``Want.starting`` unsuspected ones are in flight.

    ``backlog`` are held jobs of the wanted streams. ``through``: every ready job up to it has been handed out since the
    last rewind; before a held job beyond it, older ready ones of its stream may be yet to come. ``busy`` are completed
    parents whose child's stream is locked by an open transaction: they and their children were not stored and must be
    reported again. ``notice``: an operator changed something, or a failure fitted no job as it is now; call
    ``rewind``. ``next_due_seconds``: when the next retry is due, None for never.
    """

    jobs: list[Job] = field(default_factory=list)
    started: set[int] = field(default_factory=set)
    backlog: list[Job] = field(default_factory=list)
    through: int = 0
    busy: list[int] = field(default_factory=list)
    notice: bool = False
    next_due_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Rewound:
    """Where streams stand when everything is read again: their blocks, and whose held jobs may be free to run, each
    with the type and the destination of its first held job."""

    blocks: Sequence[Block] = ()
    backlogs: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Owners:
    """Who is alive, and who owns which partition (None: it is free)."""

    alive: Sequence[int]
    by_partition: Mapping[int, int | None]


@dataclass(frozen=True, slots=True)
class JobEntry:
    """A job as people see it."""

    seq: int
    type: str
    stream: str | None
    state: State
    attempt: int
    strikes: int
    crashes: int
    stages: int
    created_at: float
    due_at: float | None = None
    destination: str = ""
    payload: bytes = b""
    reason: Reason | None = None
    error_type: str = ""
    error: str = ""
    trace: str = ""
    fingerprint: str = ""
    source: str = ""
    source_id: str = ""
    origin: int = 0
    dead_at: float | None = None
    reasons: Sequence[Reason] = ()
    """Every reason it failed with, in order; the same in succession once. At most 64: the first 63 and the last."""

    @classmethod
    def stored(cls, values: Iterable[tuple[str, Any]]) -> JobEntry:
        """From the columns of a table: numbers for states and reasons, NULL for what is not known."""
        found = dict(values)
        found["state"], found["reason"] = State(found["state"]), reason_of(found["reason"])
        kept = found["reasons"]
        found["reasons"] = [Reason(n) for n in (json.loads(kept) if isinstance(kept, str) else kept or ())]
        for name in ("error_type", "error", "trace", "fingerprint", "source", "source_id"):
            found[name] = found[name] or ""
        return cls(**found)


@dataclass(frozen=True, slots=True)
class Query:
    """Which jobs or dead letters are meant; every given condition must hold. All empty: all of them."""

    seqs: Sequence[int] = ()
    type: str | None = None
    stream: str | None = None
    reason: Reason | None = None
    state: State | None = None
    fingerprint: str | None = None

    def __str__(self) -> str:
        """For people: ``type=SendMail reason=throttled``, the sequences alone, or ``all``."""
        if self.seqs:
            return " ".join(map(str, self.seqs))
        given = ((field.name, getattr(self, field.name)) for field in fields(self) if field.name != "seqs")
        named = (f"{name}={getattr(value, 'name', value)}" for name, value in given if value is not None)
        return " ".join(named) or "all"


@dataclass(frozen=True, slots=True)
class BlockedStream:
    """A stream that waits: its head, why it waits, and how many jobs stand behind it."""

    block: Block
    waiting: int
    head_type: str
    head_attempt: int
    head_reason: Reason | None
    head_error: str
    head_due_at: float | None
    since: float


@dataclass(frozen=True, slots=True)
class OpenBreaker:
    """A job type whose dependency fails; its jobs are not run before ``open_until``."""

    type: str
    open_until: float
    by: str


class Group(NamedTuple):
    """Jobs that are alike: how many, when the oldest came, when the first and the last of them are due."""

    state: int
    reason: int | None
    attempt: int
    jobs: int
    oldest: float
    next_due: float | None
    last_due: float | None

    @property
    def failed(self) -> bool:
        return self.reason is not None and self.state in (State.RETRY, State.PARKED)


@dataclass(frozen=True, slots=True)
class Stats:
    """The numbers people look at first."""

    by_state: Mapping[State, int]
    by_reason: Mapping[Reason, int]
    by_attempt: Mapping[int, int]
    dead: int
    poison_candidates: int
    scheduled: int
    next_due_at: float | None
    last_due_at: float | None
    oldest_age_seconds: float
    blocked_streams: int

    @classmethod
    def counted(cls, groups: Iterable[Group], dead: int, blocked: int, now: float) -> Stats:
        """Out of one pass over all jobs."""
        by_state, by_reason, by_attempt = Counter[State](), Counter[Reason](), Counter[int]()
        oldest, due = now, list[float]()
        for group in groups:
            oldest = min(oldest, group.oldest)
            by_state[State(group.state)] += group.jobs
            if group.reason is not None and group.failed:
                by_reason[Reason(group.reason)] += group.jobs
                by_attempt[group.attempt] += group.jobs
            if group.state == State.RETRY:
                due += [at for at in (group.next_due, group.last_due) if at is not None]
        poison = sum(count for attempt, count in by_attempt.items() if attempt >= POISON_CANDIDATE_ATTEMPTS)
        return cls(
            by_state,
            by_reason,
            by_attempt,
            dead,
            poison,
            scheduled=by_state[State.RETRY],
            next_due_at=min(due, default=None),
            last_due_at=max(due, default=None),
            oldest_age_seconds=now - oldest,
            blocked_streams=blocked,
        )


class WaitingJobs(NamedTuple):
    """The jobs of one destination that are not done: how many, and when the oldest came."""

    jobs: int
    oldest_at: float


@dataclass(frozen=True, slots=True)
class JobAct:
    """One recorded act of an operator; ``number`` rises with time."""

    number: int
    at: float
    verb: str
    target: str
    count: int
    by: str
    why: str


class WorkerSession(Protocol):
    """One worker's place at the store. All verbs but ``beat`` are called from one event loop, one at a time."""

    instance: int

    @property
    def may_start(self) -> bool:
        """Whether the lease is certain enough to start a job now."""
        ...

    def fence(self, job: Job) -> int:
        """Rises with every new owner of the job's stream; a resource that remembers it can refuse a zombie."""
        ...

    async def process(self, report: Report, want: ClaimRequest) -> Claimed:
        """Report and claim, in one transaction; see the module's text for order and durability.

        Raises Refused, and has changed nothing, if the report holds a value that the store can never take.
        """
        ...

    async def rewind(self) -> Rewound:
        """Read everything again from the start with the next ``process``; says how this seat's streams stand.

        The caller drops what it has not started and ignores jobs it knows. ``process`` hands out ready jobs; held
        ones come only as a backlog that is asked for, so that a million of them cost nothing. Always safe.
        """
        ...

    async def step(self, job: Job, stages: int) -> None:
        """Add completed stages to a running job; durable on return. Raises JobGone if there is no such job any more."""
        ...

    def transaction(self, job: Job) -> AbstractAsyncContextManager[Any]:
        """A transaction for the handler's effects that also completes the job: both or neither.

        Leaving it deletes exactly this job's row under a valid lease, in the transaction that was begun on entering,
        or raises LeaseLost, JobGone or TransactionEnded and rolls back.
        """
        ...

    def revoke(self, job: Job) -> None:
        """End the transaction that a run of this job still has open, if any: it is rolled back, and its connection is
        of no use to the run any more.
        """
        ...

    async def breakers(self, opened: Mapping[str, float], closed: Sequence[str]) -> Mapping[str, float]:
        """Publish own breakers (seconds they stay open); returns every open type with its seconds left."""
        ...

    async def owners(self) -> Owners:
        """Bury the dead, then tell who is alive and who owns what.

        A death is laid to the suspects that were in flight, else to all that was: they get a crash, but neither an
        attempt nor a strike, and are poison with the third.
        """
        ...

    async def take(self, partitions: Sequence[int]) -> Mapping[int, int]:
        """Lease partitions that are free, or this seat's by ``owners``; returns those owned now with their fence.

        Call ``rewind`` after. When the answer is lost, ``owners`` tells which are this seat's: take them again.
        """
        ...

    async def give(self, partitions: Sequence[int]) -> None:
        """Give up partitions of which nothing runs and everything is reported.

        They are given up even if the call fails; what ``owners`` still shows as this seat's is taken or given again.
        """
        ...

    async def wait(self, timeout_seconds: float) -> bool:
        """Sleep until jobs may have come or the time is over; True if woken. Cancel-safe."""
        ...

    def wake(self) -> None:
        """End a ``wait`` from within this process."""
        ...

    async def leave(self) -> None:
        """Give up the seat; what it held is free at once."""
        ...

    def give_up(self, report: Report, culprit: int | None) -> None:
        """The last word of a process whose event loop is stuck, from another thread: store the report, count a crash
        for the job that is to blame, and give up the seat. Blocks.

        Without a culprit the death is laid to what ``report.running`` names, as if the process had died.
        """
        ...


class WorkStore(Protocol):
    """The jobs, the dead letters, the blocks and the acts upon them."""

    shared: bool
    """How adapters differ: many processes may take a seat, and then partitions, beats and takeover matter."""

    async def enqueue(self, drafts: Sequence[JobDraft], mark: ReaderMark | None = None) -> list[int]:
        """Store jobs in order, in one transaction; their sequences, 0 for one that the inbox has seen before.

        With a ``mark`` the reader's position is stored in the same transaction.
        """
        ...

    async def position(self, reader: str) -> int | None:
        """Where a named reader stands; None if it never stored a mark."""
        ...

    async def join(self, name: str) -> WorkerSession:
        """Take a seat. SeatTaken where there is one for all, and another worker has it."""
        ...

    async def find(self, query: Query, limit: int = 100) -> Sequence[JobEntry]:
        """Jobs by sequence."""
        ...

    async def dead(self, query: Query, limit: int = 100) -> Sequence[JobEntry]:
        """Dead letters, newest first."""
        ...

    async def retry(self, seqs: Sequence[int], *, reset: bool, by: str, why: str) -> int:
        """Make waiting or parked jobs due now; ``reset`` forgets attempts and strikes. How many there were."""
        ...

    async def park(self, seqs: Sequence[int], *, by: str, why: str) -> int:
        """Stop jobs, and the streams behind them, until an operator acts."""
        ...

    async def release(
        self, stream: str, *, ids: Sequence[int] = (), type: str = "", through: int = 0, by: str, why: str
    ) -> int:
        """Let the named jobs pass every block of the stream; NotFound if the stream is not blocked."""
        ...

    async def bury(self, seqs: Sequence[int], *, by: str, why: str, failure: Failure | None = None) -> int:
        """Move jobs to the dead letters and lift their blocks, in one act; with a ``failure`` that is their reason."""
        ...

    async def replay(self, query: Query, *, limit: int, by: str, why: str) -> int:
        """Enqueue dead letters again, oldest first, order per stream kept; NotFound if there are none."""
        ...

    async def discard(self, query: Query, *, limit: int, by: str, why: str) -> int:
        """Forget dead letters for good."""
        ...

    async def waiting(self, destinations: Sequence[str]) -> Mapping[str, WaitingJobs]:
        """How many jobs wait for each of these destinations; one without any is left out."""
        ...

    async def oldest(self, destination: str, *, before: float, limit: int) -> Sequence[int]:
        """Those of the ``limit`` oldest jobs of a destination that came before that time."""
        ...

    async def streams(self, limit: int = 100) -> Sequence[BlockedStream]:
        """Blocked streams, longest waiting first."""
        ...

    async def stats(self) -> Stats: ...

    async def open_breakers(self) -> Sequence[OpenBreaker]: ...

    async def acts(self, limit: int = 100, before: int | None = None) -> Sequence[JobAct]:
        """Recorded acts, newest first; those ``before`` a number, which is the last of the page before."""
        ...

    async def close(self) -> None: ...
