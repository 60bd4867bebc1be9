"""The guide's roles on a real PostgreSQL: each can do its work, and nothing else."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from program import ROOT
from work_rigs import until

from engines import Server
from holdfast.errors import BadSetting
from holdfast.work.handlers import Context, Handlers
from holdfast.work.inspection import Query
from holdfast.work.job import JobDraft
from holdfast.work.outbox import enqueue, received
from holdfast.work.postgres import PostgresWork
from holdfast.work.worker import Worker, WorkerSettings

MAKE_ROLES, GRANT = re.findall(
    r"```sql\n(.*?)```", (ROOT / "docs/guides/work.md").read_text().split("### Roles")[1], re.DOTALL
)
ROLES = ("jobs_owner", "jobs_worker", "jobs_producer")


@asynccontextmanager
async def database(server: Server) -> AsyncIterator[dict[str, str]]:
    """A database of its own with the guide's roles; the URL for each of them."""
    root = await asyncpg.connect(server.url)
    await root.execute("CREATE DATABASE app")
    await root.execute(MAKE_ROLES)
    base = server.url.removesuffix("postgres").removeprefix("postgresql://postgres")
    try:
        yield {role: f"postgresql://{role}{base}app" for role in ROLES}
    finally:
        await root.execute("DROP DATABASE app WITH (FORCE)")
        for role in ROLES:
            await root.execute(f"DROP ROLE {role}")
        await root.close()


async def _prepared(urls: dict[str, str]) -> None:
    await (await PostgresWork.open(urls["jobs_owner"])).close()
    owner = await asyncpg.connect(urls["jobs_owner"])
    await owner.execute(GRANT)
    await owner.close()


async def test_three_database_roles_of_the_guide_are_sufficient(
    postgres_server: Server,
) -> None:
    async with database(postgres_server) as urls:
        with pytest.raises(BadSetting, match="permission denied for database app: see the roles"):
            await PostgresWork.open(urls["jobs_worker"])
        await _prepared(urls)
        handlers, seen = Handlers(), list[str]()

        @handlers.handle(dict, type="order", stream=lambda order: order["stream"])
        async def handle(ctx: Context, order: dict[str, str]) -> None:
            if order["do"] == "fail" and ctx.job.attempt == 1:
                raise TimeoutError
            if order["do"] == "child":
                ctx.enqueue(JobDraft("order", b'{"stream":"c","do":"nothing"}', "c"))
            await ctx.step(16, lambda: asyncio.sleep(0))
            seen.append(order["do"])
            if order["do"] == "transaction":
                async with ctx.transaction() as connection:
                    await connection.fetchval("SELECT 1")

        producer = await asyncpg.connect(urls["jobs_producer"])
        todo = ["nothing", "fail", "child", "transaction"]
        drafts = [
            JobDraft("order", b'{"stream": "%s", "do": "%s"}' % (d.encode(), d.encode()), d)
            for d in todo
        ]
        store = await PostgresWork.open(urls["jobs_worker"], server="this one")
        async with producer.transaction():
            await enqueue(producer, *drafts)
            assert await received(
                producer, "shop", "1", JobDraft("order", b'{"stream":"i","do":"inbox"}', "i")
            )
        async with Worker(store, handlers, settings=WorkerSettings(balance_seconds=0.2)).running():
            await until(lambda: len(seen) >= 5)
            await until(lambda: _one_left(store))
            (failed,) = await store.find(Query())
            assert await store.retry([failed.seq], reset=False, by="ann", why="now") == 1
            await until(lambda: len(seen) >= 6)
            await until(lambda: _none_left(store))
        assert sorted(seen) == ["child", "fail", "inbox", "nothing", "nothing", "transaction"]
        (dead,) = await store.enqueue([JobDraft("order", b"{}", "d")])
        assert await store.park([dead], by="ann", why="later") == 1
        assert await store.bury([dead], by="ann", why="never") == 1
        assert await store.replay(Query(), limit=10, by="ann", why="again") == 1
        assert len(await store.acts()) == 4 and (await store.stats()).dead == 0
        await store.close()
        await producer.close()


FORBIDDEN = {
    "jobs_producer": [
        "SELECT * FROM holdfast_work.job",
        "SELECT * FROM holdfast_work.wh_outbox",
        "INSERT INTO holdfast_work.job (partition, type, payload) VALUES (1, 'order', '{}')",
        "DELETE FROM holdfast_work.seen",
        "SELECT nextval('holdfast_work.job_seq')",
        "SELECT holdfast_work.bury_dead(0, 3)",
        "SELECT holdfast_work.bury(ARRAY[1])",
        "CREATE TABLE holdfast_work.mine ()",
    ],
    "jobs_worker": [
        "UPDATE holdfast_work.version SET number = 1",
        "DELETE FROM holdfast_work.partition",
        "DROP FUNCTION holdfast_work.enqueue",
        "CREATE TABLE holdfast_work.mine ()",
        "ALTER TABLE holdfast_work.job ADD COLUMN mine text",
        "UPDATE holdfast_work.server SET name = 'mine'",
    ],
}


async def test_no_database_role_can_do_more_than_its_work(postgres_server: Server) -> None:
    async with database(postgres_server) as urls:
        await _prepared(urls)
        for role, statements in FORBIDDEN.items():
            connection = await asyncpg.connect(urls[role])
            for statement in statements:
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(statement)
            await connection.close()
        with pytest.raises(BadSetting, match="permission denied for table version: see the roles"):
            await PostgresWork.open(urls["jobs_producer"])
        await _only_the_granted_may_enqueue(urls)


async def _only_the_granted_may_enqueue(urls: dict[str, str]) -> None:
    """Who may read the schema, for the views, say, cannot enqueue; who may enqueue
    cannot stop the workers by it.
    """
    owner = await asyncpg.connect(urls["jobs_owner"])
    await owner.execute("REVOKE EXECUTE ON FUNCTION holdfast_work.enqueue FROM jobs_producer")
    producer = await asyncpg.connect(urls["jobs_producer"])
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await enqueue(producer, JobDraft("order", b"{}"))
    await owner.execute("GRANT EXECUTE ON FUNCTION holdfast_work.enqueue TO jobs_producer")
    nowhere = (
        "SELECT holdfast_work.enqueue('{256}', '{NULL}', '{NULL}', '{order}', '{\"\"}',"
        " ARRAY[''::bytea], '{0}')"
    )
    with pytest.raises(asyncpg.CheckViolationError, match="job_partition"):
        await producer.execute(nowhere)
    await producer.close()
    await owner.close()


async def test_worker_role_with_an_old_schema_names_the_owner_role(postgres_server: Server) -> None:
    async with database(postgres_server) as urls:
        await _prepared(urls)
        owner = await asyncpg.connect(urls["jobs_owner"])
        await owner.execute("UPDATE holdfast_work.version SET number = 1")
        with pytest.raises(BadSetting, match="must be owner of table job: see the roles"):
            await PostgresWork.open(urls["jobs_worker"])
        await owner.close()


async def test_worker_opens_no_more_connections_than_the_guide_says(
    postgres_server: Server,
) -> None:
    async with database(postgres_server) as urls:
        await _prepared(urls)
        store = await PostgresWork.open(urls["jobs_worker"], connections_max=3)
        handlers, watcher, most = Handlers(), await asyncpg.connect(urls["jobs_owner"]), 0
        here = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'jobs_worker'"

        @handlers.handle(dict, type="order", stream=lambda _: None)
        async def handle(ctx: Context, payload: dict[str, Any]) -> None:
            async with ctx.transaction() as connection:
                await ctx.step(16, lambda: asyncio.sleep(0))
                await connection.fetchval("SELECT pg_sleep(0.01)")

        async with Worker(store, handlers, settings=WorkerSettings(concurrency=20)).running():
            await store.enqueue([JobDraft("order", b"{}") for _ in range(100)])
            while not await _none_left(store):
                await asyncio.gather(
                    *(
                        store.enqueue([JobDraft("other", b"{}", None, delay_seconds=9)])
                        for _ in "12345"
                    )
                )
                most = max(most, await watcher.fetchval(here))
        await store.close()
        assert most == 2 * 3 + 3
        await watcher.close()


async def _one_left(store: PostgresWork) -> bool:
    """The completed jobs are reported; the failed one is left."""
    return len(await store.find(Query())) == 1


async def _none_left(store: PostgresWork) -> bool:
    return not await store.find(Query(type="order"), 1)
