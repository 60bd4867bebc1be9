"""Opens what nodes know of each other by: registry, bus and leases.

Registry and bus are in Redis if the nodes share one, else in the database of the
cluster; leases are in the engine of the chats. A node that is alone has all three in
memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from holdfast.clock import Clock, Ids
from holdfast.drivers.cluster import ClusterSettings
from holdfast.errors import extra
from holdfast.fanout.bus.contract import Bus
from holdfast.fanout.bus.memory import MemoryBus
from holdfast.fanout.registry.contract import Registry
from holdfast.fanout.registry.memory import MemoryRegistry
from holdfast.node import database_connections
from holdfast.store.leases.contract import Leases
from holdfast.store.leases.memory import MemoryLeases
from holdfast.store.sqlite import SqliteStore

if TYPE_CHECKING:
    from holdfast.store.postgres import PostgresStore


class BetweenNodes(NamedTuple):
    """What several nodes have in common beside their data."""

    registry: Registry
    bus: Bus
    leases: Leases


@asynccontextmanager
async def open_between_nodes(
    settings: ClusterSettings, node_id: str, clock: Clock, store: SqliteStore | PostgresStore
) -> AsyncIterator[BetweenNodes]:
    """BadSetting if Redis is unfit; a Redis that does not answer is used when it does.

    Unavailable if the PostgreSQL of a cluster does not answer.
    """
    async with AsyncExitStack() as stack:
        leases: Leases = MemoryLeases(clock)
        if not isinstance(store, SqliteStore):
            leases = shared = store.leases(node_id)
            stack.callback(shared.close)
        sender = Ids(clock).new("bus_")
        if settings.redis:
            registry, bus = await _in_redis(settings.redis, sender, stack)
        elif not isinstance(store, SqliteStore):
            registry, bus = await _in_database(settings.postgres, sender, store, stack)
        else:
            registry, bus = MemoryRegistry(clock), MemoryBus(sender)
        yield BetweenNodes(registry, bus, leases)


async def _in_redis(url: str, sender: str, stack: AsyncExitStack) -> tuple[Registry, Bus]:
    with extra("redis"):
        from holdfast.fanout.bus.redis import RedisBus
        from holdfast.fanout.registry.redis import RedisRegistry
    registry = RedisRegistry(url)
    stack.push_async_callback(registry.close)
    await registry.check()
    return registry, RedisBus(url, sender)


async def _in_database(
    url: str, sender: str, store: PostgresStore, stack: AsyncExitStack
) -> tuple[Registry, Bus]:
    with extra("postgres"):
        from holdfast.drivers.postgres_database import PostgresSettings
        from holdfast.drivers.postgres_schema import cluster_database
        from holdfast.fanout.bus.postgres import PostgresBus
        from holdfast.fanout.registry.postgres import PostgresRegistry
    databases = [
        cluster_database(PostgresSettings(url, connections_max=size), store.check_connection)
        for size in (database_connections.REGISTRY, database_connections.BUS)
    ]
    for database in databases:
        stack.push_async_callback(database.close)
    return await PostgresRegistry.open(databases[0]), PostgresBus(databases[1], sender)
