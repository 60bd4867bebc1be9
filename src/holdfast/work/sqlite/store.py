"""The two embedded job stores, for one process; see ``contract`` and ``embedded``.

``SqliteWork`` keeps jobs in one file, ``work.db`` in the state directory.
``MemoryWork`` has neither a file nor a thread: it is for tests and simulations.

Both lend out their one writing connection for a handler's transaction; all other writes
wait until it is returned.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import apsw

from holdfast.clock import Clock, SystemClock
from holdfast.drivers.sqlite.database import Handle, SqliteSettings, give_up, open_and_migrate
from holdfast.drivers.sqlite.file_copy import StateFile
from holdfast.drivers.sqlite.threads import WorkerThreads
from holdfast.errors import ServerBusy, Unavailable
from holdfast.work.contract import ACTS_KEPT_MAX
from holdfast.work.sqlite.embedded import EmbeddedWork
from holdfast.work.sqlite.session_lock import SessionLock
from holdfast.work.sqlite.verbs import MIGRATIONS

T = TypeVar("T")
WORK = StateFile(
    name="work.db",
    migrations=MIGRATIONS,
    counts={
        "jobs": "SELECT count(*) FROM job",
        "dead": "SELECT count(*) FROM dead",
        "read_through": "SELECT coalesce(max(position), 0) FROM reader",
    },
)
"""The file in a state directory and in its backups."""

_BLOCKING_BUSY_MILLISECONDS = 2000


class _Withdrawn(Exception):
    """Roll back: the borrower of the connection failed, or must return it."""


class _Loan:
    """A loan of the writer's connection; the writer waits until it is ``returned``."""

    def __init__(self) -> None:
        self.returned = threading.Event()
        self.failed = self.revoked = False


class SqliteWork(EmbeddedWork):
    """Jobs in a file: one thread writes, another one reads.

    Every verb that changes something is one transaction, on stable storage when the
    verb returns. Operators' queries use the reader, so counting a million jobs stops no
    worker.
    """

    def __init__(
        self,
        path: Path,
        writer: WorkerThreads,
        reader: WorkerThreads,
        clock: Clock,
        acts_kept_max: int = ACTS_KEPT_MAX,
    ) -> None:
        super().__init__(
            self._transact_in_writer, self._borrowed, self._read_in_reader, clock, acts_kept_max
        )
        self._path, self._writer, self._reader = path, writer, reader
        self._loan: _Loan | None = None
        self._lock = SessionLock(path)

    @classmethod
    async def open(
        cls,
        path: Path,
        clock: Clock | None = None,
        settings: SqliteSettings | None = None,
        vfs: str | None = None,
        *,
        acts_kept_max: int = ACTS_KEPT_MAX,
    ) -> SqliteWork:
        """Open or create the file.

        Raises an OperatorError if it is damaged, not writable, or of a newer version.
        """
        chosen = settings or SqliteSettings()
        connection = await asyncio.to_thread(open_and_migrate, path, chosen, MIGRATIONS, vfs)
        handle = Handle(path, chosen, vfs, write=True)
        handle.adopt(connection)
        writer = WorkerThreads("work-writer", [handle], chosen.writes_waiting_max, _busy)
        read_handle = Handle(path, chosen, vfs, write=False)
        reader = WorkerThreads("work-reader", [read_handle], chosen.reads_waiting_max, _busy)
        return cls(path, writer, reader, clock or SystemClock(), acts_kept_max)

    def on_joining(self) -> None:
        self._lock.take()

    def on_left(self) -> None:
        super().on_left()
        self._lock.release()

    async def close(self) -> None:
        await self._reader.close()
        await self._writer.close()
        self._lock.release()

    async def _read_in_reader(self, work: Callable[[apsw.Connection], T], /) -> T:
        def read(handle: Handle) -> T:
            with handle.snapshot() as db:
                return work(db)

        return await self._reader.do(read)

    async def _transact_in_writer(self, work: Callable[[apsw.Connection], T], /) -> T:
        def transaction(handle: Handle) -> T:
            with handle.transaction() as db:
                return work(db)

        return await self._writer.do(transaction)

    @asynccontextmanager
    async def _borrowed(self) -> AsyncIterator[apsw.Connection]:
        """The writer's connection, in a transaction; its thread waits meanwhile."""
        loop = asyncio.get_running_loop()
        lent: asyncio.Future[Any] = loop.create_future()
        loan = _Loan()

        def lend(handle: Handle) -> None:
            try:
                with handle.transaction() as db:
                    loop.call_soon_threadsafe(lent.set_result, db)
                    loan.returned.wait()
                    if loan.failed:
                        raise _Withdrawn
            except _Withdrawn:
                if loan.revoked:
                    # the borrower may still use it; the next transaction opens a new
                    # one
                    handle.close()

        done: asyncio.Future[Any] = self._writer.do(lend)
        try:
            await asyncio.wait({done, lent}, return_when=asyncio.FIRST_COMPLETED)
            db = await (done if done.done() else lent)
            self._loan = loan
            yield db
            if loan.revoked:
                raise Unavailable("the transaction was ended: its run is over")
        except BaseException:
            loan.failed = True
            raise
        finally:
            if self._loan is loan:
                self._loan = None
            loan.returned.set()
            await asyncio.shield(done)

    def revoke_loan(self) -> None:
        if (loan := self._loan) is not None:
            loan.failed = loan.revoked = True
            loan.returned.set()

    def run_blocking(self, work: Callable[[apsw.Connection], None]) -> None:
        """Use a separate connection: the writer's replies need the stuck event loop.

        A lent transaction is rolled back, but its connection stays open. Opening it
        again would rewrite the write-ahead log (``settle_log``), which needs exclusive
        access.
        """
        if (loan := self._loan) is not None:
            loan.failed = True
            loan.returned.set()
        connection = apsw.Connection(str(self._path), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            connection.set_busy_timeout(_BLOCKING_BUSY_MILLISECONDS)
            connection.execute("BEGIN IMMEDIATE")
            work(connection)
            connection.execute("COMMIT")
        finally:
            give_up(connection)


class MemoryWork(EmbeddedWork):
    """Jobs in memory, lost with the process. No thread, so virtual time works."""

    def __init__(self, clock: Clock | None = None, *, acts_kept_max: int = ACTS_KEPT_MAX) -> None:
        chosen = clock or SystemClock()
        super().__init__(self._inline, self._borrowed, self._inline, chosen, acts_kept_max)
        self._db = apsw.Connection(":memory:")
        self._turn = asyncio.Lock()
        self._loan: object | None = None
        for script in MIGRATIONS:
            self._db.execute(script)

    async def _inline(self, work: Callable[[apsw.Connection], T], /) -> T:
        async with self._borrowed() as db:
            return work(db)

    @asynccontextmanager
    async def _borrowed(self) -> AsyncIterator[apsw.Connection]:
        await self._turn.acquire()
        loan = self._loan = object()
        self._db.execute("BEGIN")
        try:
            yield self._db
            if self._loan is not loan:
                raise Unavailable("the transaction was ended: its run is over")
        except BaseException:
            self._end(loan, "ROLLBACK")
            raise
        self._end(loan, "COMMIT")

    def revoke_loan(self) -> None:
        self._end(self._loan, "ROLLBACK")

    def run_blocking(self, work: Callable[[apsw.Connection], None]) -> None:
        """Do nothing: everything ends with the process."""

    def _end(self, loan: object | None, how: str) -> None:
        """End the transaction of this loan, once; a second call does nothing."""
        if loan is not None and self._loan is loan:
            self._loan = None
            try:
                if self._db.in_transaction:
                    self._db.execute(how)
            finally:
                self._turn.release()


def _busy() -> ServerBusy:
    return ServerBusy("too many writes wait for the job store", retry_after_seconds=1.0)
