"""What node records promise: one living node for each name, and connections enough of
the database for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace
from store_rigs import PostgresRig
from structlog.testing import capture_logs
from work_rigs import until

from engines import Server
from holdfast.errors import BadSetting
from holdfast.node.cluster_record import RecordRenewal
from holdfast.store.nodes.contract import LIVE_SECONDS, NodeRecord
from holdfast.store.nodes.memory import MemoryNodes
from holdfast.store.postgres import PostgresStore, PostgresStoreSettings
from holdfast.store.postgres.nodes import PostgresNodes
from proof.proxy import Proxy

EAST = NodeRecord("east", "1.0", ("gateway", "ingest"), "http://east", 30, 2, 7, {"a": "b"}, "ø")
WEST = replace(EAST, name="west", address="http://west")


@asynccontextmanager
async def two_nodes(server: Server) -> AsyncIterator[tuple[PostgresNodes, PostgresNodes]]:
    rig = PostgresRig(server.url)
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(rig.open())
        two = await stack.enter_async_context(PostgresStore(rig.settings))
        nodes = one.nodes(), two.nodes()
        for each in nodes:
            stack.callback(each.close)
        yield nodes


async def execute(server: Server, statement: str) -> Any:
    connection = await asyncpg.connect(server.url)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


async def test_node_that_is_alone_sees_itself() -> None:
    nodes = MemoryNodes()
    assert await nodes.living() == []
    await nodes.join(EAST)
    assert [each.record for each in await nodes.living()] == [EAST]
    moved = replace(EAST, lag=9)
    assert await nodes.renew(moved) is None
    assert [each.record for each in await nodes.living()] == [moved]
    assert (await nodes.gone(), await nodes.leases(), await nodes.database()) == ([], [], None)
    await nodes.leave()
    assert await nodes.living() == []


async def test_living_nodes_are_listed_with_their_records(postgres_server: Server) -> None:
    async with two_nodes(postgres_server) as (one, two):
        await one.join(EAST)
        await two.join(WEST)
        moved = replace(WEST, lag=9, clients=3)
        assert await two.renew(moved) == (60, 97)
        assert [each.record for each in await one.living()] == [EAST, moved]
        assert all(0 <= each.age_seconds < LIVE_SECONDS for each in await one.living())
        database = await two.database()
        assert database.connections == (60, 97) and database.failover == "undeclared"
        await execute(
            postgres_server,
            "UPDATE holdfast_chats.node SET renewed_at = renewed_at - interval '16 s'"
            " WHERE name = 'west'",
        )
        assert [each.record for each in await one.living()] == [EAST]
        [gone] = await one.gone()
        assert gone.record == moved and 16 <= gone.age_seconds < 40
        assert (await one.database()).connections == (30, 97), "it takes none"
        await two.renew(moved)
        assert await one.gone() == [], "it is back"
        await one.leave()
        assert await two.gone() == [], "it left as planned"
        assert [each.record.name for each in await two.living()] == ["west"]


async def test_node_is_gone_for_an_hour(postgres_server: Server) -> None:
    async with two_nodes(postgres_server) as (one, two):
        await one.join(EAST)
        await two.join(WEST)
        for minutes, names in ((58, ["west"]), (3, [])):
            await execute(
                postgres_server,
                f"UPDATE holdfast_chats.node SET renewed_at = renewed_at - interval '{minutes} min'"
                " WHERE name = 'west'",
            )
            assert [each.record.name for each in await one.gone()] == names


async def test_clock_that_goes_back_makes_a_dead_node_dead_no_later(
    postgres_server: Server,
) -> None:
    async with two_nodes(postgres_server) as (one, two):
        await one.join(EAST)
        await two.join(WEST)
        await execute(
            postgres_server,
            "UPDATE holdfast_chats.node SET renewed_at = renewed_at + interval '1 h'"
            " WHERE name = 'west'",
        )
        assert [each.record for each in await one.living()] == [EAST]


async def test_second_living_node_of_a_name_is_refused_and_says_what_to_do(
    postgres_server: Server,
) -> None:
    async with two_nodes(postgres_server) as (one, two):
        await one.join(EAST)
        with pytest.raises(BadSetting, match=r"runs at http://east, has the name east: give each"):
            await two.join(replace(EAST, address="http://copy"))
        assert [each.record for each in await one.living()] == [EAST]
        await one.leave()
        await two.join(EAST)


async def test_name_is_free_as_soon_as_its_process_is_gone(postgres_server: Server) -> None:
    """Nothing is waited for: a killed node that is started again serves at once."""
    async with two_nodes(postgres_server) as (one, two):
        await one.join(EAST)
        one.close()  # as the end of its process does
        await two.join(EAST)
        with pytest.raises(BadSetting, match="has the name east"):
            await one.renew(EAST)


async def test_node_whose_connection_broke_takes_its_name_again(postgres_server: Server) -> None:
    rig = PostgresRig(postgres_server.url)
    async with rig.open() as other, Proxy("127.0.0.1", postgres_server.port) as proxy:
        far = f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres"
        async with PostgresStore(PostgresStoreSettings(far)) as store:
            nodes, others = store.nodes(), other.nodes()
            await nodes.join(EAST)
            proxy.reset()
            await until(lambda: is_free(postgres_server))
            await nodes.renew(EAST)
            with pytest.raises(BadSetting, match="has the name east"):
                await others.join(EAST)
            nodes.close()
            others.close()


async def is_free(server: Server) -> bool:
    locks = "SELECT count(*) = 0 FROM pg_locks WHERE locktype = 'advisory'"
    return bool(await execute(server, locks))


async def test_node_for_which_there_are_too_few_connections_is_refused(
    postgres_server: Server,
) -> None:
    async with two_nodes(postgres_server) as (one, two):
        await one.join(replace(EAST, connections=50))
        with pytest.raises(
            BadSetting,
            match="has 97 connections for nodes, and 98 are needed: up to 48 by this node and 50 by"
            " those that run; raise max_connections of PostgreSQL by 1 or more",
        ):
            await two.join(replace(WEST, connections=48))
        assert len(await one.living()) == 1
        await two.join(replace(WEST, connections=47))


async def test_nodes_that_start_together_do_not_both_get_the_last_connections(
    postgres_server: Server,
) -> None:
    async with two_nodes(postgres_server) as (one, two):
        other = await asyncpg.connect(postgres_server.url)
        async with asyncio.timeout(20):
            async with other.transaction():
                await other.execute("SELECT pg_advisory_xact_lock(7525060110206892804)")
                starts = [
                    asyncio.create_task(one.join(replace(EAST, connections=60))),
                    asyncio.create_task(two.join(replace(WEST, connections=60))),
                ]
                waiting = "SELECT count(*) = 2 FROM pg_locks WHERE NOT granted"
                await until(lambda: execute(postgres_server, waiting))
            results = await asyncio.gather(*starts, return_exceptions=True)
        await other.close()
        assert sorted(map(type, results), key=str) == [type(None), BadSetting]


async def test_sum_that_grew_too_large_is_warned_of_once(postgres_server: Server) -> None:
    """By a smaller max_connections after a restart of PostgreSQL, for example."""
    async with two_nodes(postgres_server) as (one, two):
        await one.join(EAST)
        await two.join(WEST)
        renewal = RecordRenewal(two, lambda: replace(WEST, connections=80), renew_seconds=0.01)
        with capture_logs() as logged:
            running = asyncio.create_task(renewal.run())
            await until(lambda: bool(logged))
            await asyncio.sleep(0.1)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert [(line["event"], line["wanted"], line["available"]) for line in logged] == [
            ("node.connections_too_few", 110, 97)
        ]


async def test_leases_are_listed_with_their_holders(postgres_server: Server) -> None:
    rig = PostgresRig(postgres_server.url)
    async with rig.open() as store:
        nodes, leases = store.nodes(), store.leases("east")
        await nodes.join(EAST)
        await leases.acquire("sweep", 5)
        await leases.acquire("ended", 0)
        [lease] = await nodes.leases()
        assert (lease.name, lease.holder) == ("sweep", "east") and 0 < lease.seconds_left <= 5
        nodes.close()
        leases.close()
