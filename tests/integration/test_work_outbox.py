"""The outbox in the transaction of the caller, the inbox, and refusals."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import asyncpg
import psycopg
import pytest
from psycopg.rows import dict_row, tuple_row
from sqlalchemy.ext.asyncio import create_async_engine
from work_rigs import ManualWorker, draft, postgres_work, until

from engines import Server
from holdfast.errors import BadSetting, InvalidMessage, StateCorrupted, Unavailable
from holdfast.work.inspection import Query
from holdfast.work.job import JobDraft
from holdfast.work.outbox import enqueue, enqueue_sync, received
from holdfast.work.postgres import PostgresWork
from holdfast.work.postgres.store import SCHEMA_VERSION, migrate


async def _none_left(store: Any) -> bool:
    return not await store.find(Query(), 1)


async def stored(store: Any) -> list[bytes]:
    return [entry.payload for entry in await store.find(Query())]


@pytest.mark.covers("003 outbox: stored with the caller's data")
async def test_asyncpg_commits_or_rolls_back_the_job_with_the_data(postgres_server: Server) -> None:
    async with postgres_work(postgres_server.url) as o:
        connection = await asyncpg.connect(postgres_server.url)
        async with connection.transaction():
            (seq,) = await enqueue(connection, draft(payload=b"kept"))
            assert await stored(o.store) == [], "nothing is seen before the commit"
            assert await enqueue(connection, *[]) == [], "a transaction may enqueue nothing"
        with pytest.raises(ZeroDivisionError):
            async with connection.transaction():
                await enqueue(connection, draft(payload=b"lost"))
                raise ZeroDivisionError
        assert await stored(o.store) == [b"kept"]
        assert seq > 0
        await connection.close()


@pytest.mark.parametrize("rows", [tuple_row, dict_row])
async def test_psycopg_commits_or_rolls_back_the_job_with_the_data(
    postgres_server: Server, rows: Any
) -> None:
    async with postgres_work(postgres_server.url) as o:
        connection = await psycopg.AsyncConnection.connect(postgres_server.url, row_factory=rows)
        await enqueue(connection, draft(payload=b"async"), draft(None, payload=b"two"))
        await connection.commit()
        await enqueue(connection, draft(payload=b"lost"))
        await connection.rollback()
        await connection.close()
        with psycopg.connect(postgres_server.url, row_factory=rows) as sync:
            enqueue_sync(sync, draft(payload=b"sync"))
            assert enqueue_sync(sync, *[]) == []
        assert await stored(o.store) == [b"async", b"two", b"sync"]


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_sqlalchemy_commits_or_rolls_back_the_job_with_the_data(
    postgres_server: Server, driver: str
) -> None:
    async with postgres_work(postgres_server.url) as o:
        engine = create_async_engine(
            postgres_server.url.replace("postgresql:", f"postgresql+{driver}:")
        )
        async with engine.begin() as connection:
            await enqueue(connection, draft(payload=b"kept", delay_seconds=5))
        with pytest.raises(ZeroDivisionError):
            async with engine.begin() as connection:
                await enqueue(connection, draft(payload=b"lost"))
                raise ZeroDivisionError
        await engine.dispose()
        assert await stored(o.store) == [b"kept"]


async def test_unknown_kind_of_connection_is_refused() -> None:
    with pytest.raises(BadSetting, match="asyncpg, psycopg, SQLAlchemy or apsw"):
        await enqueue(object(), draft())


async def test_producers_of_one_stream_are_serialised_and_others_are_not(
    postgres_server: Server,
) -> None:
    async with postgres_work(postgres_server.url) as o:
        first, second = [await asyncpg.connect(postgres_server.url) for _ in range(2)]
        transaction = first.transaction()
        await transaction.start()
        await enqueue(first, draft("a", payload=b"1"))
        await enqueue(second, draft("b", payload=b"other stream"))
        waiting = asyncio.create_task(enqueue(second, draft("a", payload=b"2")))
        manual = await ManualWorker.join(o.store)
        claimed = await manual.call()
        assert [job.payload for job in claimed.jobs] == [b"other stream"], (
            "a held transaction delays nobody else"
        )
        assert not waiting.done()
        await transaction.commit()
        await waiting
        claimed = await manual.call()
        assert [job.payload for job in claimed.jobs] == [b"1", b"2"]
        await first.close()
        await second.close()


@pytest.mark.covers("003 inbox: a message is stored once")
async def test_repeated_inbox_message_is_received_once(
    postgres_server: Server,
) -> None:
    async with postgres_work(postgres_server.url) as o:
        connections = [await asyncpg.connect(postgres_server.url) for _ in range(5)]

        async def receive(connection: Any) -> bool:
            async with connection.transaction():
                return await received(
                    connection, "shop", "order-7", JobDraft("Order", b"{}", "order-7")
                )

        assert sum(await asyncio.gather(*map(receive, connections))) == 1
        assert len(await stored(o.store)) == 1
        with pytest.raises(InvalidMessage):
            await received(connections[0], "", "", JobDraft("Order", b"{}"))
        for connection in connections:
            await connection.close()


async def test_schema_of_the_next_release_is_used_and_newer_ones_refused(
    postgres_server: Server,
) -> None:
    async with postgres_work(postgres_server.url) as o:
        connection = await asyncpg.connect(postgres_server.url)
        await connection.execute("UPDATE holdfast_work.version SET number = number + 1")
        await (await PostgresWork.open(postgres_server.url)).close()
        await connection.execute("UPDATE holdfast_work.version SET number = number + 1")
        with pytest.raises(
            StateCorrupted,
            match=f"version {SCHEMA_VERSION + 2}; this program knows up to {SCHEMA_VERSION}: ",
        ):
            await PostgresWork.open(postgres_server.url)
        await connection.close()
        assert o.store is not None


def test_server_of_an_old_version_is_refused() -> None:
    class Old:
        def get_server_version(self) -> Any:
            return asyncpg.types.ServerVersion(12, 9, 0, "final", 0)

    with pytest.raises(BadSetting, match="PostgreSQL 12 is too old"):
        asyncio.run(migrate(Old()))


def test_server_that_refuses_connections_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="cannot connect"):
        asyncio.run(PostgresWork.open("postgresql://postgres@127.0.0.1:1/postgres"))


async def test_server_that_does_not_answer_is_unavailable_with_a_timeout() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    timeout = pytest.raises(Unavailable, match="cannot connect to PostgreSQL: TimeoutError")
    with silent, timeout:
        url = f"postgresql://x@127.0.0.1:{silent.getsockname()[1]}/x"
        await PostgresWork.open(url, connect_seconds_max=0.05)


async def test_many_processes_may_migrate_at_once(postgres_server: Server) -> None:
    connection = await asyncpg.connect(postgres_server.url)
    await connection.execute("DROP SCHEMA IF EXISTS holdfast_work CASCADE")
    stores = await asyncio.gather(*(PostgresWork.open(postgres_server.url) for _ in range(4)))
    assert await connection.fetchval("SELECT number FROM holdfast_work.version") == SCHEMA_VERSION
    for store in stores:
        await store.close()
    await connection.close()


async def test_worker_survives_the_loss_of_its_connections(postgres_server: Server) -> None:
    from holdfast.work.handlers import Context, Handlers
    from holdfast.work.worker import Worker, WorkerSettings

    async with postgres_work(postgres_server.url) as o:
        handlers, seen = Handlers(), list[int]()

        @handlers.handle(dict, type="order", stream=lambda _: "s")
        async def handle(ctx: Context, payload: dict[str, Any]) -> None:
            seen.append(ctx.job.seq)
            await asyncio.sleep(0.005)

        connection = await asyncpg.connect(postgres_server.url)
        cut = (
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND query LIKE '%holdfast_work.process%'"
        )
        settings = WorkerSettings(concurrency=4, balance_seconds=0.2, poll_max_seconds=0.05)
        async with Worker(o.store, handlers, settings=settings).running():
            seqs = await o.store.enqueue([draft() for _ in range(200)])
            for so_many in range(20, 201, 20):
                await until(lambda so_many=so_many: len(seen) >= so_many)
                await until(lambda: connection.fetchval(cut))
            await until(lambda: _none_left(o.store))
        assert seen == seqs, "each once and in order: a lost answer is asked for again"
        await connection.close()
