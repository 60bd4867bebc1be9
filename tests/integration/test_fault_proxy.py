"""The proxy's faults, felt by real sockets."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proof.proxy import NetworkConditions, Proxy

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()
    except OSError:
        pass


@asynccontextmanager
async def quiet_loop(seconds: float = 10.0) -> AsyncIterator[None]:
    """The block ends in time and leaves nothing for the loop to complain about."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, complaint: complaints.append(complaint)
    )
    async with asyncio.timeout(seconds):
        yield
    gc.collect()  # reports the exceptions that nobody retrieved
    assert not complaints


@asynccontextmanager
async def proxied(
    conditions: NetworkConditions | None = None,
) -> AsyncIterator[tuple[Proxy, Callable[[], Awaitable[Streams]]]]:
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(_echo(reader, writer))
        serving.add(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    writers: list[asyncio.StreamWriter] = []
    async with Proxy("127.0.0.1", port, conditions) as proxy:

        async def connect() -> Streams:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writers.append(writer)
            return reader, writer

        yield proxy, connect
        for writer in writers:
            writer.close()
    server.close()
    await asyncio.gather(*serving)


async def test_proxy_without_faults_passes_bytes_and_the_end_on() -> None:
    async with quiet_loop(), proxied() as (_, connect):
        reader, writer = await connect()
        sent = bytes(range(256)) * 4096
        writer.write(sent)
        writer.write_eof()
        assert await reader.read(-1) == sent


async def test_latency_delays_each_direction() -> None:
    async with quiet_loop(), proxied(NetworkConditions(latency_seconds=0.05)) as (_, connect):
        reader, writer = await connect()
        began = asyncio.get_running_loop().time()
        writer.write(b"x")
        assert await reader.read(1) == b"x"
        assert asyncio.get_running_loop().time() - began >= 0.1


async def test_bandwidth_bounds_the_rate() -> None:
    async with quiet_loop(), proxied(NetworkConditions(bytes_per_second=1_000_000)) as (_, connect):
        reader, writer = await connect()
        began = asyncio.get_running_loop().time()
        writer.write(bytes(200_000))
        await reader.readexactly(200_000)
        assert asyncio.get_running_loop().time() - began >= 0.2


async def test_slices_cut_frames_apart_without_changing_them() -> None:
    async with (
        quiet_loop(),
        proxied(NetworkConditions(slice_bytes=3, bytes_per_second=1000)) as (_, connect),
    ):
        reader, writer = await connect()
        sent, pieces = b"a frame that arrives in pieces", []
        writer.write(sent)
        while sum(map(len, pieces)) < len(sent):
            pieces.append(await reader.read(65536))
        assert b"".join(pieces) == sent and len(pieces) > 3


async def test_reset_reaches_the_client_and_the_next_connection_works() -> None:
    async with quiet_loop(), proxied() as (proxy, connect):
        reader, writer = await connect()
        writer.write(b"x")
        await reader.read(1)
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        reader, writer = await connect()
        writer.write(b"y")
        assert await reader.read(1) == b"y"


async def test_connection_reset_by_its_client_ends() -> None:
    async with quiet_loop(), proxied() as (proxy, connect):
        reader, writer = await connect()
        writer.write(b"x")
        await reader.read(1)
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        while proxy.open:  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("one_way", [None, "up", "down"])
async def test_blackhole_swallows_bytes_and_its_stream_never_continues(
    one_way: str | None,
) -> None:
    async with quiet_loop(), proxied() as (proxy, connect):
        reader, writer = await connect()
        writer.write(b"x")
        await reader.read(1)
        proxy.set(blackhole=True, one_way=one_way)
        writer.write(b"lost")
        while not any(pair.has_hole for pair in proxy._pairs):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.1)
        assert proxy.open == 1
        proxy.set(blackhole=False)
        with pytest.raises(ConnectionResetError):
            await reader.read(1)


async def test_proxy_that_is_down_breaks_and_refuses_connections_until_it_is_up() -> None:
    async with quiet_loop(), proxied() as (proxy, connect):
        reader, writer = await connect()
        writer.write(b"x")
        await reader.read(1)
        proxy.set(down=True)
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        reader, _ = await connect()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        proxy.set(down=False)
        reader, writer = await connect()
        writer.write(b"y")
        assert await reader.read(1) == b"y"


async def test_unreachable_target_is_a_reset() -> None:
    async with quiet_loop(), Proxy("127.0.0.1", 1) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        writer.close()


async def test_stopped_reader_blocks_the_writer() -> None:
    async with quiet_loop(), proxied() as (_, connect):
        _, writer = await connect()
        writer.write(bytes(50_000_000))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.drain(), 0.2)


def test_impossible_conditions_are_refused() -> None:
    for bad in ({"latency_seconds": -1}, {"bytes_per_second": 0}, {"slice_bytes": 0}):
        with pytest.raises(ValueError):
            NetworkConditions(**bad)  # type: ignore[arg-type]
