"""Lends the store's connections: some to writes, more to reads.

No pool of asyncpg: it resets a connection after each use, a round trip more for every
call, and gives up a call whose caller is cancelled. A write here runs in a task of its
own: whoever asked for it may go, the write ends, and until then its connection stays
taken.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, TypeVar

from holdfast import telemetry
from holdfast.errors import OutcomeUnknown, ServerBusy
from holdfast.store.postgres.errors import CONFLICTS, FOREIGN, is_cut_off, translate, unavailable
from holdfast.store.postgres.server import ChatsServer, ServerConnection

T = TypeVar("T")
Work = Callable[[ServerConnection], Coroutine[Any, Any, T]]
_Turn = AbstractAsyncContextManager[None]

READ_SECONDS_MARGIN = 1.0
"""A read ends by itself at ``statement_timeout``; this much later nobody answers."""


class Lender:
    """Lends up to ``size`` connections, the last used first, and opens them on use."""

    def __init__(self, server: ChatsServer, size: int, waiting_max: int) -> None:
        self._server = server
        self._free = asyncio.Semaphore(size)
        self._waiting, self._waiting_max = 0, waiting_max
        self._idle: list[ServerConnection] = []
        self._lent: set[ServerConnection] = set()
        self._is_closed = False

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[ServerConnection]:
        """A connection for one call; closed if the call failed with it."""
        await self._take()
        try:
            connection = await self._connection()
            self._lent.add(connection)
            try:
                yield connection
            except BaseException as error:
                if is_cut_off(error) or isinstance(error, asyncio.CancelledError | OutcomeUnknown):
                    connection.terminate()
                raise
            finally:
                self._lent.discard(connection)
                if self._is_closed:
                    connection.terminate()
                elif not connection.raw.is_closed():
                    self._idle.append(connection)
        finally:
            self._free.release()

    def adopt(self, connection: ServerConnection) -> None:
        self._idle.append(connection)

    def close(self) -> None:
        self._is_closed = True
        for connection in (*self._idle, *self._lent):
            connection.terminate()
        self._idle.clear()

    async def _take(self) -> None:
        if self._free.locked():
            if self._waiting >= self._waiting_max:
                raise ServerBusy("too many calls are waiting; try again", retry_after_seconds=1.0)
            self._waiting += 1
            try:
                await self._free.acquire()
            finally:
                self._waiting -= 1
        else:
            await self._free.acquire()

    async def _connection(self) -> ServerConnection:
        if self._is_closed:
            raise unavailable("the store is closed")
        while self._idle:
            connection = self._idle.pop()
            if not connection.raw.is_closed():
                return connection
        return await self._server.connect()


class Connections:
    """The connections of a node, and what their errors mean."""

    def __init__(self, server: ChatsServer) -> None:
        settings = server.settings
        self._server = server
        self._groups_at_once = settings.groups_at_once
        self._groups = Lender(server, settings.groups_at_once, settings.waiting_max)
        self._changes = Lender(server, settings.changes_at_once, settings.waiting_max)
        self._readers = Lender(server, settings.reads_at_once, settings.waiting_max)
        self._read_seconds = settings.statement_timeout_seconds + READ_SECONDS_MARGIN
        self._writes: set[asyncio.Task[Any]] = set()
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    def adopt(self, connection: ServerConnection) -> None:
        """Lend an open connection first."""
        self._readers.adopt(connection)

    async def open_groups(self, work: Work[None]) -> None:
        """Open every connection for groups of sends, and do ``work`` with each."""
        await asyncio.gather(*(self._ask(self._groups, work) for _ in range(self._groups_at_once)))

    def append(self, work: Work[T]) -> Awaitable[T]:
        """Carry out a group of sends. It goes on if the caller is cancelled."""
        return self._begin(self._groups, work, nullcontext())

    def change(self, work: Work[T], shard: int | None = None) -> Awaitable[T]:
        """Carry out another write, in the same way. Those of one shard take turns: they
        would wait for each other with a connection each, and a shard that hangs would
        take them all.
        """
        turn = nullcontext() if shard is None else self._turns[shard]
        return self._begin(self._changes, work, turn)

    def _begin(self, lender: Lender, work: Work[T], turn: _Turn) -> Awaitable[T]:
        task = asyncio.get_running_loop().create_task(self._write(lender, work, turn))
        self._writes.add(task)
        task.add_done_callback(self._on_written)
        return asyncio.shield(task)

    async def read(self, work: Work[T]) -> T:
        return await self._ask(self._readers, work)

    async def _ask(self, lender: Lender, work: Work[T]) -> T:
        """Carry out what writes nothing. It ends if the caller is cancelled."""
        try:
            async with lender.lend() as connection, asyncio.timeout(self._read_seconds):
                return await work(connection)
        except FOREIGN as error:
            raise translate(error, write=False) from error

    async def close(self) -> None:
        """Wait for writes that were accepted, then close everything: a server that is
        frozen answers none of them.
        """
        if self._writes:
            await asyncio.wait(self._writes, timeout=self._read_seconds)
        for lender in (self._groups, self._changes, self._readers):
            lender.close()

    async def _write(self, lender: Lender, work: Work[T], turn: _Turn) -> T:
        try:
            async with turn, lender.lend() as connection:
                return await work(connection)
        except FOREIGN as error:
            if isinstance(error, CONFLICTS):
                telemetry.transaction_conflict()
            raise translate(error, write=True) from error

    def _on_written(self, task: asyncio.Task[Any]) -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may be gone
