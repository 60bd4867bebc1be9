"""What a job store promises. Adapters: sqlite (a file, or memory) and postgres.

A worker joins the store and gets a session. ``WorkerSession.process`` is its one round
trip: it reports outcomes and claims jobs in one transaction. A report is durable when
the call returns. After the lease is lost, every verb raises ``LeaseLost`` and changes
nothing.

Order: the jobs of a stream are handed out by ``seq``, which is commit order within a
stream, and by one session at a time. Claiming writes nothing: the next owner simply
reads again what a dead session held.

Cancel-safety: a cancelled or failed ``process`` may have taken effect. Reports are
idempotent: call ``rewind``, then ``process`` with the same report.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.errors import HoldfastError, Unavailable, VersionConflict
from holdfast.work.inspection import (
    BlockedStream,
    JobAct,
    JobEntry,
    OpenBreaker,
    Query,
    Stats,
    WaitingJobs,
)
from holdfast.work.job import (
    Block,
    Failure,
    FailureVerdict,
    Job,
    JobDraft,
    Reason,
)

PER_BACKLOG = 64
"""How many held jobs of one stream are read at once."""
INBOX_SECONDS = 7 * 86400.0
"""How long the inbox remembers an id."""
ACTS_KEPT_MAX = 100_000
"""How many acts of operators are kept; the node's audit log has its own bound."""


class LeaseLost(HoldfastError):
    """This worker was declared dead, or its partition moved; nothing was applied."""


class SessionTaken(Unavailable):
    """The store admits one worker, and another live one has joined. Try again later."""


class JobGone(HoldfastError):
    """This one job is gone: an operator buried it, or it has already ended."""

    def __init__(self) -> None:
        super().__init__("the job is gone: an operator acted on it, or it has ended")


class RunEnded(HoldfastError):
    """The run is over, because its handler returned or was given up as stuck."""

    def __init__(self) -> None:
        super().__init__("this run of the job is over: its context cannot be used any more")


class TransactionEnded(HoldfastError):
    """The borrower ended the transaction, or closed the connection, inside the block.

    What it committed itself stays; nothing else is stored, and no job is completed.
    """

    def __init__(self, detail: str = "") -> None:
        message = (
            "the transaction was ended inside its block, by COMMIT, ROLLBACK or closing the"
            " connection"
        )
        super().__init__(f"{message}: leave that to the block" + (f" ({detail})" if detail else ""))


@dataclass(frozen=True, slots=True)
class Failed:
    """A failed run: job, attempt, verdict, and the stages that it completed."""

    seq: int
    attempt: int
    verdict: FailureVerdict
    failure: Failure
    stages: int = 0


@dataclass(frozen=True, slots=True)
class ReaderMark:
    """How far a named reader has read a shard, stored with the jobs that it makes."""

    reader: str
    shard: int
    offset: int
    replaces: int | None = None
    """The stored offset that it moves on from; None: there is none yet."""

    @property
    def row(self) -> str:
        """Its row in the store: shard 0 has the reader's own name."""
        return reader_row(self.reader, self.shard)


def overtaken() -> VersionConflict:
    return VersionConflict("another reader of this name has read on: nothing was stored")


def reader_row(reader: str, shard: int) -> str:
    return f"{reader}:{shard}" if shard else reader


@dataclass(frozen=True, slots=True)
class Child:
    """A job enqueued by another's success, stored with the parent's completion."""

    parent: int
    draft: JobDraft


@dataclass(slots=True)
class Report:
    """The outcomes of jobs; ``running`` is all in flight, for counting crashes."""

    completed: list[int] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)
    running: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """How many jobs and bytes the session can take, and how many it starts at once.

    ``backlogs``: streams whose held jobs after a sequence are wanted, ``per_backlog``
    of each at most. ``paused_types``: types whose breaker is not closed; their due
    retries stay in the store, except one of each type in ``probing``.
    ``wake_on_enqueue``: if there is nothing to claim, the next enqueue shall end
    ``WorkerSession.wait``.
    """

    jobs: int = 0
    bytes_max: int = 8 << 20
    starting: int = 0
    backlogs: Mapping[str, int] = field(default_factory=dict)
    per_backlog: int = PER_BACKLOG
    wake_on_enqueue: bool = False
    paused_types: Sequence[str] = ()
    probing: Sequence[str] = ()

    @property
    def per_backlog_bytes(self) -> int:
        """The most bytes of one backlog; its first job is always read."""
        return max(1, self.bytes_max // max(1, len(self.backlogs)))


@dataclass(slots=True)
class Claimed:
    """What ``process`` hands out. ``jobs`` rise by seq; the ``started`` are in flight.

    ``backlog``: held jobs of the wanted streams. ``through``: every ready job up to it
    has been handed out since the last rewind; older ready jobs may still precede a held
    job beyond it. ``busy``: completed parents whose child's stream another transaction
    locks; neither they nor their children were stored, so report them again.
    ``notice``: an operator changed something, or a failure matched no job; call
    ``rewind``. ``next_due_seconds``: when the next retry is due; None: no retry waits.
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
    """The blocks, and the streams whose held jobs may be free to run, with the type and
    destination of the first one."""

    blocks: Sequence[Block] = ()
    backlogs: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Owners:
    """The live workers, and the owner of each partition (None: free)."""

    alive: Sequence[int]
    by_partition: Mapping[int, int | None]


class WorkerSession(Protocol):
    """One worker's session. One event loop calls its verbs, one at a time."""

    instance: int

    @property
    def may_start(self) -> bool:
        """Whether the lease is certain enough to start a job now."""
        ...

    def fence(self, job: Job) -> int:
        """A fencing token: it rises with every new owner of the job's stream."""
        ...

    async def process(self, report: Report, request: ClaimRequest) -> Claimed:
        """Report and claim, in one transaction; the module says more on order.

        Raises Refused, and changes nothing, if the store can never take a value in it.
        """
        ...

    async def rewind(self) -> Rewound:
        """Make the next ``process`` read all streams from the start. Always safe.

        The caller drops what it has not started and ignores jobs that it knows. Held
        jobs come only as a requested backlog, so that a million of them cost nothing.
        """
        ...

    async def step(self, job: Job, stages: int) -> None:
        """Add completed stages to a running job; durable on return. Raises JobGone."""
        ...

    def transaction(self, job: Job) -> AbstractAsyncContextManager[Any]:
        """A transaction for the handler's effects that also completes the job.

        Leaving it deletes the job's row under a valid lease, or rolls back and raises
        LeaseLost, JobGone or TransactionEnded.
        """
        ...

    def revoke(self, job: Job) -> None:
        """Roll back a run's open transaction, if any; its connection is lost to it."""
        ...

    async def breakers(
        self, opened: Mapping[str, float], closed: Sequence[str]
    ) -> Mapping[str, float]:
        """Publish own breakers (seconds left); returns all open types, likewise."""
        ...

    async def owners(self) -> Owners:
        """Reap expired workers, then say who is alive and who owns what.

        A death counts as a crash of the suspects in flight, or of all jobs in flight if
        there was no suspect; not as an attempt or a strike. The third crash is poison.
        """
        ...

    async def take(self, partitions: Sequence[int]) -> Mapping[int, int]:
        """Lease partitions that are free or this session's; call ``rewind`` next.

        Returns those owned now with their fence. If the reply is lost, take those again
        that ``owners`` shows as this session's.
        """
        ...

    async def release_partitions(self, partitions: Sequence[int]) -> None:
        """Release idle, fully reported partitions, even if the call then fails."""
        ...

    async def wait(self, timeout_seconds: float) -> bool:
        """Sleep until woken (True) or the time is over. Cancel-safe."""
        ...

    def wake(self) -> None:
        """End a ``wait`` from within this process."""
        ...

    async def leave(self) -> None:
        """End the session; its partitions are free at once."""
        ...

    def report_before_exit(self, report: Report, culprit: int | None) -> None:
        """Store the report, count a crash of the culprit, and leave. Blocks.

        Called from another thread when the event loop is stuck. Without a culprit, all
        of ``report.running`` are suspects, as if the process had died.
        """
        ...


class WorkStore(Protocol):
    """The jobs, the dead letters, the blocks, and the operators' acts on them."""

    shared: bool
    """Whether many processes may join, so that leases and takeover matter."""

    async def enqueue(
        self, drafts: Sequence[JobDraft], marks: Sequence[ReaderMark] = ()
    ) -> list[int]:
        """Store jobs and a reader's ``marks``, in order and in one transaction.

        Returns their sequences, 0 for a job that the inbox has seen before.
        VersionConflict if another has moved a mark, and nothing is stored: of two
        readers of one name, only one makes jobs of an entry.
        """
        ...

    async def reader_offset(self, reader: str, shard: int = 0) -> int | None:
        """How far a named reader has read a shard; None if it never stored a mark."""
        ...

    async def join(self, name: str) -> WorkerSession:
        """Start a session. SessionTaken if the store admits one, and another has it."""
        ...

    async def find(self, query: Query, limit: int = 100) -> Sequence[JobEntry]:
        """Jobs by sequence."""
        ...

    async def dead(self, query: Query, limit: int = 100) -> Sequence[JobEntry]:
        """Dead letters, newest first."""
        ...

    async def retry(self, seqs: Sequence[int], *, reset: bool, by: str, why: str) -> int:
        """Make waiting or parked jobs due now; ``reset`` clears their counts."""
        ...

    async def park(self, seqs: Sequence[int], *, by: str, why: str) -> int:
        """Stop jobs, and the streams behind them, until an operator acts."""
        ...

    async def release(
        self,
        stream: str,
        *,
        ids: Sequence[int] = (),
        type: str = "",
        through: int = 0,
        by: str,
        why: str,
    ) -> int:
        """Let these jobs pass every block of the stream; NotFound if it has none."""
        ...

    async def bury(
        self, seqs: Sequence[int], *, by: str, why: str, failure: Failure | None = None
    ) -> int:
        """Move jobs to the dead letters, for a ``failure``, and lift their blocks."""
        ...

    async def replay(self, query: Query, *, limit: int, by: str, why: str) -> int:
        """Enqueue dead letters again, in stream order; NotFound if there are none."""
        ...

    async def discard(self, query: Query, *, limit: int, by: str, why: str) -> int:
        """Delete dead letters."""
        ...

    async def waiting(self, destinations: Sequence[str]) -> Mapping[str, WaitingJobs]:
        """The jobs waiting for each of these destinations; omits those without."""
        ...

    async def oldest(self, destination: str, *, before: float, limit: int) -> Sequence[int]:
        """Of a destination's ``limit`` oldest jobs, those enqueued before that time."""
        ...

    async def streams(self, limit: int = 100) -> Sequence[BlockedStream]:
        """Blocked streams, longest waiting first."""
        ...

    async def stats(self, parked: Collection[str] = ()) -> Stats:
        """Reads every job. ``parked``: destinations whose jobs wait on purpose, and do
        not count in ``oldest_age_seconds``.
        """
        ...

    async def dead_counts(self) -> Mapping[Reason | None, int]:
        """How many dead letters there are, by reason; None: buried without a failure.
        Reads an index of the reasons, never a letter.
        """
        ...

    async def open_breakers(self) -> Sequence[OpenBreaker]: ...

    async def acts(self, limit: int = 100, before: int | None = None) -> Sequence[JobAct]:
        """Acts, newest first; ``before`` is the last number of the previous page."""
        ...

    async def close(self) -> None: ...
