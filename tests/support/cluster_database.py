"""The database of a cluster: its schema empty at first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from holdfast.drivers.postgres_database import Database, PostgresSettings
from holdfast.drivers.postgres_schema import SCHEMA, cluster_database


@asynccontextmanager
async def first_node(url: str) -> AsyncIterator[Database]:
    """The connections of a node to a database whose schema is dropped first."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
    finally:
        await connection.close()
    async with another_node(url) as database:
        yield database


@asynccontextmanager
async def another_node(url: str, timeout_seconds: float = 20) -> AsyncIterator[Database]:
    """The connections of one more node. It waits long: a disk may be slow."""
    settings = PostgresSettings(
        url, connect_timeout_seconds=min(2, timeout_seconds), timeout_seconds=timeout_seconds
    )
    database = cluster_database(settings)
    try:
        yield database
    finally:
        await database.close()
