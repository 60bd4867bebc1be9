"""How a connection ends: the client reads the last frame, whatever it sends meanwhile."""

from __future__ import annotations

import asyncio
import time

import pytest

from holdfast.gateway.transport.linger import END_AFTER_SECONDS, linger

pytestmark = pytest.mark.real_time


class Closing(asyncio.Protocol):
    """Says goodbye to whoever connects."""

    def __init__(self, end_after_seconds: float, ended: asyncio.Event) -> None:
        self._end_after_seconds = end_after_seconds
        self._ended = ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"bye")
        linger(transport, self._end_after_seconds)

    def connection_lost(self, error: Exception | None) -> None:
        self._ended.set()


async def goodbye(end_after_seconds: float, *, close_first: bool = False) -> float:
    """Seconds until the server's side ends for a client that goes on sending, or until
    the connection does for one that closes it.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Closing(end_after_seconds, ended), "127.0.0.1", 0)
    began = time.monotonic()  # the server may begin before the client knows
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    assert await reader.readexactly(3) == b"bye"
    if not close_first:
        writer.write(b"and another thing")
        assert await reader.read() == b"", "no reset, though it was sending"
    writer.close()
    async with asyncio.timeout(10):
        await ended.wait()
    took = time.monotonic() - began
    server.close()
    return took


async def test_side_of_the_server_ends_after_the_client_could_read_why() -> None:
    """A proxy that sees it end cuts off a client that is still sending."""
    assert await goodbye(END_AFTER_SECONDS) >= END_AFTER_SECONDS


async def test_client_that_closes_first_is_not_kept_waiting() -> None:
    assert await goodbye(60.0, close_first=True) < 10
