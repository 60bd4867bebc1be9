"""The database of a cluster: its schema empty at first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import asyncpg

from engines import Server
from holdfast.drivers.postgres_database import Database, PostgresSettings
from holdfast.drivers.postgres_schema import SCHEMA, cluster_database


async def any_server(connection: Any) -> None:
    """The check of a connection where no chats are."""


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
    database = cluster_database(settings, any_server)
    try:
        yield database
    finally:
        await database.close()


async def new_database(server: Server, name: str) -> str:
    """A new database of this name; its URL."""
    connection = await asyncpg.connect(server.url)
    await connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    await connection.execute(f"CREATE DATABASE {name}")
    await connection.close()
    return urlsplit(server.url)._replace(path=f"/{name}").geturl()
