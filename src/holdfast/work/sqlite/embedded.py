"""The embedded job store and its one session, over any way to run a transaction.

``contract`` says what they promise; ``verbs`` does the work inside a transaction.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, TypeVar, cast

import apsw

from holdfast import telemetry
from holdfast.clock import Clock, wait_at_most
from holdfast.errors import BadSetting
from holdfast.work.contract import (
    ACTS_KEPT_MAX,
    INBOX_SECONDS,
    Claimed,
    ClaimRequest,
    Owners,
    ReaderMark,
    Report,
    Rewound,
    SessionTaken,
    TransactionEnded,
    reader_row,
)
from holdfast.work.inspection import (
    BlockedStream,
    Group,
    JobAct,
    JobEntry,
    OpenBreaker,
    Query,
    Stats,
    WaitingJobs,
    counted_reasons,
)
from holdfast.work.job import (
    PARTITIONS,
    Failure,
    Job,
    JobDraft,
    Reason,
    check_seq,
    check_seqs,
    reason_of,
)
from holdfast.work.sqlite import verbs

T = TypeVar("T")
SQL = verbs.SQL
_FORGOTTEN_AT_ONCE_MAX = 20_000
"""Per call of ``owners``, so 4,000 ids a second: more than an inbox takes in for long.
"""


_Transact = Callable[[Callable[[apsw.Connection], Any]], Awaitable[Any]]
"""Runs work in one transaction; its changes are as durable as the store on return. As
``read`` it runs work that changes nothing, if possible beside the writer."""
_Lend = Callable[[], AbstractAsyncContextManager[apsw.Connection]]
"""Lends the one writing connection, in a transaction that commits with the block, or
rolls back if the block fails."""
_LENT = "holdfast_lent"
"""A savepoint in the transaction of a loan: if it is gone, the borrower ended the
transaction."""


class _Borrowing:
    """Refuses calls by the task that has borrowed the connection: a deadlock."""

    def __init__(self, transact: _Transact, lend: _Lend, read: _Transact) -> None:
        self._transact, self._lend, self._read = transact, lend, read
        self._borrower: asyncio.Task[Any] | None = None

    async def transact(self, work: Callable[[apsw.Connection], T], /) -> T:
        self._refuse_borrower()
        return cast(T, await self._transact(work))

    async def read(self, work: Callable[[apsw.Connection], T], /) -> T:
        self._refuse_borrower()
        return cast(T, await self._read(work))

    @asynccontextmanager
    async def lend(
        self, finish: Callable[[apsw.Connection], None] | None = None
    ) -> AsyncIterator[apsw.Connection]:
        """Lend the connection; ``finish`` runs last, in the block's transaction."""
        self._refuse_borrower()
        async with self._lend() as db:
            db.execute(f"SAVEPOINT {_LENT}")
            task = self._borrower = asyncio.current_task()
            try:
                yield db
            finally:
                if self._borrower is task:
                    self._borrower = None
                _take_back(db)
            try:
                db.execute(f"RELEASE {_LENT}")
            except apsw.Error as error:
                raise TransactionEnded(str(error)) from error
            if finish is not None:
                finish(db)

    def _refuse_borrower(self) -> None:
        if self._borrower is not None and self._borrower is asyncio.current_task():
            raise BadSetting(
                "inside a transaction of the embedded store use its connection; nothing else can be"
                " asked"
            )


def _take_back(db: apsw.Connection) -> None:
    """Remove the borrower's hooks from the connection."""
    with suppress(apsw.Error):  # the borrower may have closed it
        db.row_trace = db.exec_trace = None


class EmbeddedWork:
    """See ``contract.WorkStore``."""

    shared = False

    def __init__(
        self,
        transact: _Transact,
        lend: _Lend,
        read: _Transact,
        clock: Clock,
        acts_kept_max: int = ACTS_KEPT_MAX,
    ) -> None:
        borrowing = _Borrowing(transact, lend, read)
        self._transact, self._read = borrowing.transact, borrowing.read
        self._lend = borrowing.lend
        self._clock, self._acts_kept_max = clock, acts_kept_max
        self._woken = asyncio.Event()
        self._worker_name: str | None = None
        """The name of the worker that has joined."""

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[apsw.Connection]:
        """The store's own connection, to write your data and ``outbox.enqueue``
        atomically.

        Committed to stable storage when the block is left, rolled back on an error. All
        other writes wait meanwhile: be brief.
        """
        async with self._lend() as db:
            yield db
        self._woken.set()

    async def enqueue(
        self, drafts: Sequence[JobDraft], marks: Sequence[ReaderMark] = ()
    ) -> list[int]:
        seqs = await self._transact(
            lambda db: verbs.enqueue_marked(db, drafts, marks, self._clock.now())
        )
        self._woken.set()
        if 0 in seqs:
            telemetry.work_known_already()
        return seqs

    async def reader_offset(self, reader: str, shard: int = 0) -> int | None:
        row = reader_row(reader, shard)
        return await self._read(lambda db: db.execute(SQL["position"], (row,)).get)

    async def join(self, name: str) -> EmbeddedSession:
        if self._worker_name is not None:
            raise SessionTaken(
                f"the worker {self._worker_name!r} runs the jobs of this store; it has one worker"
            )
        self.on_joining()
        self._worker_name = name
        try:
            number = await self._transact(
                lambda db: verbs.start_session(db, name, self._clock.now())
            )
        except BaseException:
            self.on_left()
            raise
        return EmbeddedSession(number, name, self)

    def on_joining(self) -> None:
        """SessionTaken if a worker of another store object has joined the same jobs."""

    def on_left(self) -> None:
        """The worker has left; another one may join."""
        self._worker_name = None

    async def find(self, query: Query, limit: int = 100) -> Sequence[JobEntry]:
        values = {**_conditions(query), "limit": limit}
        return await self._read(lambda db: verbs.find(db, values))

    async def dead(self, query: Query, limit: int = 100) -> Sequence[JobEntry]:
        values = {**_conditions(query), "limit": limit}
        return await self._read(lambda db: verbs.dead(db, values))

    async def retry(self, seqs: Sequence[int], *, reset: bool, by: str, why: str) -> int:
        now, seqs = self._clock.now(), check_seqs(seqs)
        act = ("retry", _words(seqs), by, why)
        return await self._act(
            lambda db: verbs.retry(db, seqs, reset, now), act, "no such job waits for a retry"
        )

    async def park(self, seqs: Sequence[int], *, by: str, why: str) -> int:
        now, seqs = self._clock.now(), check_seqs(seqs)
        act = ("park", _words(seqs), by, why)
        nothing = "no such job, or it is parked already"
        return await self._act(lambda db: verbs.park(db, seqs, now, (by, why)), act, nothing)

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
        types, ids = [type] if type else [], check_seqs(ids)
        through = check_seq(through) if through else 0
        act = ("release", _words([stream, *ids, *types]), by, why)
        nothing = f"the stream {stream!r} is not blocked"
        return await self._act(
            lambda db: verbs.release(db, stream, ids, types, through, (by, why)), act, nothing
        )

    async def bury(
        self, seqs: Sequence[int], *, by: str, why: str, failure: Failure | None = None
    ) -> int:
        now, seqs = self._clock.now(), check_seqs(seqs)
        act = ("dead", _words(seqs), by, why)
        return await self._act(lambda db: verbs.bury(db, seqs, now, failure), act, "no such job")

    async def replay(self, query: Query, *, limit: int, by: str, why: str) -> int:
        now, values = self._clock.now(), {**_conditions(query), "limit": limit}
        act = ("replay", str(query), by, why)
        return await self._act(lambda db: verbs.replay(db, values, now), act, "no such dead letter")

    async def discard(self, query: Query, *, limit: int, by: str, why: str) -> int:
        values = {**_conditions(query), "limit": limit}
        act = ("discard", str(query), by, why)
        return await self._act(lambda db: verbs.discard(db, values), act, "no such dead letter")

    async def waiting(self, destinations: Sequence[str]) -> Mapping[str, WaitingJobs]:
        return await self._read(lambda db: verbs.waiting(db, destinations))

    async def oldest(self, destination: str, *, before: float, limit: int) -> Sequence[int]:
        return await self._read(lambda db: verbs.oldest(db, destination, before, limit))

    async def streams(self, limit: int = 100) -> Sequence[BlockedStream]:
        return await self._read(
            lambda db: [_blocked(row) for row in db.execute(SQL["streams"], (limit,))]
        )

    async def stats(self, parked: Collection[str] = ()) -> Stats:
        return await self._read(lambda db: _stats(db, self._clock.now(), parked))

    async def dead_counts(self) -> Mapping[Reason | None, int]:
        return await self._read(_dead_counts)

    async def open_breakers(self) -> Sequence[OpenBreaker]:
        now = self._clock.now()
        return await self._read(
            lambda db: [OpenBreaker(*row) for row in db.execute(SQL["open_breakers"], (now,))]
        )

    async def acts(self, limit: int = 100, before: int | None = None) -> Sequence[JobAct]:
        return await self._read(
            lambda db: [JobAct(*row) for row in db.execute(SQL["acts"], (limit, before))]
        )

    async def close(self) -> None:
        """Close nothing: the adapters own the resources."""

    def revoke_loan(self) -> None:
        """Roll back the transaction of the current loan, if any."""
        raise NotImplementedError

    def run_blocking(self, work: Callable[[apsw.Connection], None]) -> None:
        """Run ``work`` in its own transaction, in the calling thread. Blocks.

        For a stuck event loop. A lent transaction is rolled back.
        """
        raise NotImplementedError

    async def _act(
        self, change: Callable[[apsw.Connection], int], act: tuple[str, str, str, str], nothing: str
    ) -> int:
        now = self._clock.now()
        kept_max = self._acts_kept_max
        count = await self._transact(
            lambda db: verbs.record(db, act, change(db), nothing, now, kept_max)
        )
        self._woken.set()
        return count


class EmbeddedSession:
    """See ``contract.WorkerSession``. It owns every partition while it lives."""

    may_start = True

    def __init__(self, instance: int, name: str, store: EmbeddedWork) -> None:
        self.instance, self._name, self._store = instance, name, store
        self._transact, self._lend = store._transact, store._lend
        self._clock, self._woken = store._clock, store._woken
        self._borrower: Job | None = None
        self._cursor = 0
        self._rewinds = 0

    def fence(self, job: Job) -> int:
        return self.instance

    async def process(self, report: Report, request: ClaimRequest) -> Claimed:
        rewinds, cursor, now = self._rewinds, self._cursor, self._clock.now()
        claimed = await self._transact(
            lambda db: verbs.process(db, self.instance, report, request, cursor, now)
        )
        if rewinds == self._rewinds:
            self._cursor = claimed.through
        return claimed

    async def rewind(self) -> Rewound:
        self._rewinds += 1
        self._cursor = 0
        return await self._transact(verbs.read_blocks)

    async def step(self, job: Job, stages: int) -> None:
        await self._transact(lambda db: verbs.step(db, self.instance, job.seq, stages))

    @asynccontextmanager
    async def transaction(self, job: Job) -> AsyncIterator[Any]:
        async with self._lend(lambda db: verbs.finish(db, self.instance, job.seq)) as db:
            self._borrower = job
            try:
                yield db
            finally:
                if self._borrower is job:
                    self._borrower = None

    def revoke(self, job: Job) -> None:
        if self._borrower is job:
            self._borrower = None
            self._store.revoke_loan()

    async def breakers(
        self, opened: Mapping[str, float], closed: Sequence[str]
    ) -> Mapping[str, float]:
        now = self._clock.now()

        def work(db: apsw.Connection) -> Mapping[str, float]:
            db.executemany(SQL["close_breaker"], [(kind,) for kind in closed])
            db.executemany(
                SQL["open_breaker"],
                [(kind, now + left, self._name) for kind, left in opened.items()],
            )
            return {
                kind: until - now for kind, until, _ in db.execute(SQL["open_breakers"], (now,))
            }

        return await self._transact(work)

    async def owners(self) -> Owners:
        before = self._clock.now() - INBOX_SECONDS

        def work(db: apsw.Connection) -> None:
            verbs.fenced(db, self.instance)
            db.execute(SQL["forget_seen"], (before, _FORGOTTEN_AT_ONCE_MAX))

        await self._transact(work)
        return Owners([self.instance], dict.fromkeys(range(PARTITIONS)))

    async def take(self, partitions: Sequence[int]) -> Mapping[int, int]:
        return dict.fromkeys(partitions, self.instance)

    async def release_partitions(self, partitions: Sequence[int]) -> None:
        """Do nothing: no other worker could take them."""

    async def wait(self, timeout_seconds: float) -> bool:
        try:
            return await wait_at_most(self._woken, timeout_seconds)
        finally:
            self._woken.clear()

    def wake(self) -> None:
        self._woken.set()

    def report_before_exit(self, report: Report, culprit: int | None) -> None:
        self._store.run_blocking(
            lambda db: verbs.report_before_exit(
                db, self.instance, report, culprit, self._clock.now()
            )
        )

    async def leave(self) -> None:
        try:
            await self._transact(lambda db: db.execute(SQL["leave"], (self.instance,)).fetchall())
        finally:
            self._store.on_left()


def _words(items: Sequence[object]) -> str:
    return " ".join(map(str, items))


def _conditions(query: Query) -> dict[str, Any]:
    return {
        "seqs": f"[{','.join(map(str, query.seqs))}]" if query.seqs else None,
        "type": query.type,
        "stream": query.stream,
        "reason": int(query.reason) if query.reason is not None else None,
        "state": int(query.state) if query.state is not None else None,
        "fingerprint": query.fingerprint,
    }


def _blocked(row: Any) -> BlockedStream:
    waiting, kind, attempt, reason, error, due_at, since = row[8:]
    block = verbs.block_of(row[:8])
    return BlockedStream(
        block, waiting, kind or "", attempt or 0, reason_of(reason), error or "", due_at, since
    )


def _stats(db: apsw.Connection, now: float, parked: Collection[str]) -> Stats:
    groups = db.execute(SQL["groups"], (json.dumps(list(parked)),))
    blocked = db.execute(SQL["blocked"]).get
    return Stats.counted(map(Group._make, groups), _dead_counts(db), blocked, now)


def _dead_counts(db: apsw.Connection) -> Mapping[Reason | None, int]:
    return counted_reasons(db.execute(SQL["dead_counts"]))
