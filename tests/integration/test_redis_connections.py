"""Connections to a real Redis that are lost at any moment, on the server's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from engines import Server
from holdfast.drivers.redis import connection_pool
from holdfast.drivers.redis_scripts import Pipe

pytestmark = pytest.mark.real_time("uvloop")


@asynccontextmanager
async def lost_connection(url: str) -> AsyncIterator[AbstractConnection]:
    connection = connection_pool(url, protocol=2, socket_timeout=1.0).make_connection()
    await connection.connect()
    connection._writer.transport.abort()
    for _ in range(3):  # turns of the loop until the transport is closed
        await asyncio.sleep(0)
    yield connection
    await connection.disconnect(nowait=True)


async def test_command_on_a_lost_connection_fails_as_every_other_trouble(
    redis_server: Server,
) -> None:
    async with lost_connection(redis_server.url) as connection:
        with pytest.raises(RedisError):
            await connection.send_command("PING")


async def test_pipe_does_not_take_over_a_lost_connection(redis_server: Server) -> None:
    async with lost_connection(redis_server.url) as connection:
        with pytest.raises(ConnectionError):
            Pipe(connection, "the counters", 1.0, lambda error: None)
