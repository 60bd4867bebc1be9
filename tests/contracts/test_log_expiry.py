"""Old events of a shared log are forgotten once every reader has read them."""

from __future__ import annotations

import asyncpg
import pytest
from store_rigs import PostgresRig, create, send, without_triggers

from engines import Server
from holdfast.clock import SystemClock
from holdfast.eventlog.contract import START, LogLost
from holdfast.eventlog.postgres import PostgresEventLog
from holdfast.fanout.log_expiry import LogExpiry
from holdfast.store.leases.memory import MemoryLeases
from holdfast.store.postgres import PostgresStore
from holdfast.work.contract import ReaderMark
from holdfast.work.sqlite.store import MemoryWork

READERS = ("webhooks", "assistants")


async def events(server: Server) -> int:
    connection = await asyncpg.connect(server.url)
    try:
        return int(await connection.fetchval("SELECT count(*) FROM holdfast_chats.log_event"))
    finally:
        await connection.close()


async def mark(jobs: MemoryWork, reader: str, store: PostgresStore, offset: int) -> None:
    """The reader's position in the shard of the test's chats; it has read all others."""
    shard = store.lane("chat_a")
    marks = [(reader, n, offset if n == shard else 2**40) for n in range(16)]
    stored = {row[:2]: await jobs.reader_offset(*row[:2]) for row in marks}
    await jobs.enqueue([], [ReaderMark(*row, stored[row[:2]]) for row in marks])


async def test_events_wait_for_a_day_and_for_every_reader(postgres_server: Server) -> None:
    rig = PostgresRig(postgres_server.url)
    async with rig.open() as store:
        jobs = MemoryWork()
        await create(store)
        log = PostgresEventLog(store)
        await send(store, "k")
        end = (await log.end()).offset(store.lane("chat_a"))
        clock = SystemClock()
        expiry = LogExpiry(log, jobs, READERS, MemoryLeases(clock), clock)

        await mark(jobs, "webhooks", store, end)
        await expiry.sweep()
        assert await events(postgres_server) == 1, "it is young"
        await without_triggers(
            rig.url, "UPDATE holdfast_chats.log_event SET at = at - interval '25 h'"
        )
        await mark(jobs, "assistants", store, 0)
        await expiry.sweep()
        assert await events(postgres_server) == 1, "a reader has not read it"
        await mark(jobs, "assistants.1", store, end)  # it lost the log and went on
        await expiry.sweep()
        assert await events(postgres_server) == 0
        with pytest.raises(LogLost):
            await log.read(START, 10)


async def test_reader_that_never_began_holds_nothing_back(postgres_server: Server) -> None:
    rig = PostgresRig(postgres_server.url)
    async with rig.open() as store:
        jobs = MemoryWork()
        await create(store)
        await send(store, "k")
        await without_triggers(
            rig.url, "UPDATE holdfast_chats.log_event SET at = at - interval '25 h'"
        )
        clock = SystemClock()
        await LogExpiry(PostgresEventLog(store), jobs, READERS, MemoryLeases(clock), clock).sweep()
        assert await events(postgres_server) == 0
