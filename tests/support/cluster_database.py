"""The database of a cluster: its schema empty at first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from holdfast.drivers.postgres_database import Database, DatabaseUse, PostgresSettings
from holdfast.drivers.postgres_schema import SCHEMA

CLUSTER = DatabaseUse("node", "cluster")


@asynccontextmanager
async def cluster_database(url: str) -> AsyncIterator[Database]:
    """A database whose schema is dropped first."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
    finally:
        await connection.close()
    async with another_node(url) as database:
        yield database


@asynccontextmanager
async def another_node(url: str) -> AsyncIterator[Database]:
    """The connections of one more node to the same database."""
    # longer than usual: a disk under test may be slow
    database = Database(PostgresSettings(url, timeout_seconds=20), CLUSTER)
    try:
        yield database
    finally:
        await database.close()
