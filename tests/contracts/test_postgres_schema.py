"""The schema of what nodes share: made once, by nodes that start together, and never by
a release that is too old for it.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import pytest
from cluster_database import another_node, any_server, first_node

from engines import Server
from holdfast.access.revocations.postgres import PostgresRevocations
from holdfast.clock import SystemClock
from holdfast.drivers.postgres_database import Database, PostgresSettings
from holdfast.drivers.postgres_schema import SCHEMA, cluster_database
from holdfast.errors import BadSetting, StateCorrupted, Unavailable
from holdfast.fanout.dead_letters.postgres import PostgresDeadLetters
from holdfast.webhooks.postgres import PostgresEndpoints
from proof.proxy import Proxy


async def open_all(database: Database) -> None:
    """Open what a node opens there."""
    await PostgresRevocations.open(database, SystemClock())
    await PostgresDeadLetters.open(database)
    async with PostgresEndpoints.opened(database):
        pass


async def tables(url: str) -> dict[str, int]:
    """The rows of each table."""
    connection = await asyncpg.connect(url)
    try:
        names = await connection.fetch(
            "SELECT tablename FROM pg_tables WHERE schemaname = $1", SCHEMA
        )
        return {
            name: await connection.fetchval(f"SELECT count(*) FROM {SCHEMA}.{name}")
            for [name] in names
        }
    finally:
        await connection.close()


async def test_five_nodes_that_start_together_make_the_tables_once(postgres_server: Server) -> None:
    url = postgres_server.url
    async with first_node(url), AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(another_node(url)) for _ in range(5)]
        await asyncio.gather(*map(open_all, nodes))
        made = await tables(url)
        assert made["version"] == 3 and made["revocation_head"] == made["endpoint_head"] == 1
        await asyncio.gather(*map(open_all, nodes))
        assert await tables(url) == made


async def test_tables_one_release_ahead_are_used_and_newer_ones_refused(
    postgres_server: Server,
) -> None:
    async with first_node(postgres_server.url) as database:
        await open_all(database)

        async def raise_versions() -> None:
            async with database.committing("be changed") as db:
                await db.execute(f"UPDATE {SCHEMA}.version SET number = number + 1")

        await raise_versions()
        await open_all(database)
        await raise_versions()
        with pytest.raises(StateCorrupted, match="revocations in holdfast_cluster have version 3"):
            await open_all(database)


async def test_user_without_rights_is_refused_with_the_right_to_grant(
    postgres_server: Server,
) -> None:
    url = postgres_server.url
    async with first_node(url) as owner:
        async with owner.committing("be changed") as db:
            await db.execute("DROP ROLE IF EXISTS weak")
            await db.execute("CREATE ROLE weak LOGIN")
        weak = cluster_database(PostgresSettings(url.replace("postgres@", "weak@")), any_server)
        try:
            with pytest.raises(BadSetting, match="GRANT CREATE ON DATABASE"):
                await open_all(weak)
            assert await tables(url) == {}
            await open_all(owner)
            async with owner.committing("be changed") as db:
                await db.execute(f"GRANT USAGE ON SCHEMA {SCHEMA} TO weak")
                await db.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA {SCHEMA} TO weak")
            await open_all(weak)
        finally:
            await weak.close()
            async with owner.committing("be changed") as db:
                await db.execute("DROP OWNED BY weak")
                await db.execute("DROP ROLE weak")


async def test_server_that_is_not_there_is_unavailable_without_its_name() -> None:
    nowhere = cluster_database(PostgresSettings("postgresql://u@127.0.0.1:1/db"), any_server)
    with pytest.raises(Unavailable, match="the database of the cluster cannot be prepared now"):
        await open_all(nowhere)


async def test_commits_are_durable_whatever_the_database_is_set_to(postgres_server: Server) -> None:
    async with first_node(postgres_server.url) as owner:
        async with owner.connection("be changed") as db:
            await db.execute("ALTER ROLE postgres SET synchronous_commit = off")
        try:
            async with another_node(postgres_server.url) as node:
                for _ in range(2):  # also after the pool has reset the connection
                    async with node.connection("be read") as db:
                        assert await db.fetchval("SHOW synchronous_commit") == "on"
        finally:
            async with owner.connection("be changed") as db:
                await db.execute("ALTER ROLE postgres RESET synchronous_commit")


async def test_server_that_its_check_refuses_is_not_used(postgres_server: Server) -> None:
    refused = True

    async def refuse_first(connection: Any) -> None:
        nonlocal refused
        if refused:
            refused = False
            raise Unavailable("an old primary")

    async with (
        Proxy("127.0.0.1", postgres_server.port) as old,
        Proxy("127.0.0.1", postgres_server.port) as new,
    ):
        only = f"postgresql://postgres@127.0.0.1:{old.port}/postgres"
        both = f"postgresql://postgres@127.0.0.1:{old.port},127.0.0.1:{new.port}/postgres"
        database = cluster_database(PostgresSettings(only), refuse_first)
        with pytest.raises(Unavailable, match="an old primary"):
            async with database.connection("be read"):
                pytest.fail("it was lent")
        await database.close()

        refused = True
        database = cluster_database(PostgresSettings(both), refuse_first)
        async with database.connection("be read") as one, database.connection("be read") as two:
            assert await one.fetchval("SELECT 1") == await two.fetchval("SELECT 1")
        assert (old.accepted, new.accepted) == (2, 2), "the one used last is tried first"
        await database.close()


async def test_server_that_does_not_answer_is_passed_over(postgres_server: Server) -> None:
    both = f"postgresql://postgres@127.0.0.1:1,127.0.0.1:{postgres_server.port}/postgres"
    database = cluster_database(PostgresSettings(both), any_server)
    async with database.connection("be read") as db:
        assert await db.fetchval("SELECT 1") == 1
    await database.close()
