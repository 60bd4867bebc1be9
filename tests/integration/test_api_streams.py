"""Streamed answers over a real connection."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

from api_rig import serving
from structlog.testing import capture_logs

from holdfast.access.connection_limits import HttpCounts, HttpLimits
from holdfast.api.address_limits import AddressLimits
from holdfast.api.app import RestApp
from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Answer, Call, Endpoint, StreamBounds
from holdfast.gateway.memory_budget import MemoryBudget
from holdfast.gateway.transport import http, server

STREAM = StreamBounds(unread_seconds_max=0.5, drain_seconds=0.5)


class Pieces:
    """A test endpoint: pieces, without end unless a number is given."""

    def __init__(self, piece: bytes, pause_seconds: float, count: float = math.inf) -> None:
        self._piece, self._pause_seconds, self._left = piece, pause_seconds, count
        self.closed = asyncio.Event()

    async def stream_test(self, deps: ApiDeps, call: Call) -> Answer:
        return Answer(self._pieces(), media_type="text/plain")

    async def _pieces(self) -> AsyncIterator[bytes]:
        try:
            while self._left:
                self._left -= 1
                yield self._piece
                await asyncio.sleep(self._pause_seconds)
        finally:
            self.closed.set()


@asynccontextmanager
async def listening(pieces: Pieces) -> AsyncIterator[tuple[RestApp, int, bytes]]:
    """The application, its port and a request of the test endpoint."""
    endpoint = Endpoint(
        "GET", "/v1/test", pieces.stream_test, "A test", "user", "chats:read",
        deadline_seconds=60, stream=STREAM,
    )  # fmt: skip
    async with serving() as rest:
        deps = rest.deps
        address_limits = AddressLimits(deps.settings, deps.clock, deps.proxies)
        app = RestApp(deps, address_limits, [endpoint])
        http_deps = http.HttpDeps(
            port=cast(Any, None),  # no upgrade is asked for
            counts=HttpCounts(HttpLimits(), ()),
            memory_budget=MemoryBudget(1 << 30),
            times=http.HTTP_TIMES,
            count_anonymous=address_limits.count_request,
            legacy_rate_limit_headers=False,
        )
        bearer = f"Authorization: Bearer {rest.token('alice')}\r\n"
        request = f"GET /v1/test HTTP/1.1\r\nHost: x\r\n{bearer}\r\n".encode()
        with server.bound("127.0.0.1", 0) as bound:
            async with server.serving(app, http_deps, bound, asyncio.Event()):
                yield app, bound.getsockname()[1], request


async def read_to_the_end(client: socket.socket) -> None:
    """Read what is buffered until the server's end or reset of the connection."""
    client.setblocking(False)
    with suppress(ConnectionResetError):
        while await asyncio.get_running_loop().sock_recv(client, 65_536):
            pass


async def test_stream_of_a_client_that_disconnects_is_closed() -> None:
    pieces = Pieces(b"piece", 0.05)
    async with listening(pieces) as (_, port, request):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head and b"content-length" not in head
        assert await reader.readuntil(b"piece\r\n") == b"5\r\npiece\r\n"
        assert not pieces.closed.is_set()
        writer.close()
        async with asyncio.timeout(5):
            await pieces.closed.wait()


async def test_stream_with_pipelined_requests_behind_it_ends_with_its_connection() -> None:
    pieces = Pieces(b"piece", 0.05)
    async with listening(pieces) as (_, port, request):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request * 2)
        await reader.readuntil(b"piece\r\n")
        writer.transport.abort()
        async with asyncio.timeout(5):
            await pieces.closed.wait()


async def test_client_that_does_not_read_its_stream_is_disconnected() -> None:
    pieces = Pieces(b"x" * 65_536, 0)
    async with listening(pieces) as (_, port, request):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.sendall(request)
        async with asyncio.timeout(10):
            await pieces.closed.wait()
            await read_to_the_end(client)
        client.close()


async def test_stream_that_drain_cuts_has_no_last_chunk() -> None:
    pieces = Pieces(b"piece", 0.05)
    async with listening(pieces) as (app, port, request):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        await reader.readuntil(b"piece\r\n")
        async with asyncio.timeout(5):
            await app.drain()
            rest = await reader.read()
        assert pieces.closed.is_set() and not rest.endswith(b"0\r\n\r\n")
        writer.close()


async def test_stream_whose_connection_the_server_closes_is_complete() -> None:
    async with listening(Pieces(b"piece", 0.01, 2)) as (app, port, request):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with capture_logs() as lines:
            writer.write(request.replace(b"Host: x", b"Host: x\r\nConnection: close"))
            async with asyncio.timeout(5):
                assert (await reader.read()).endswith(b"0\r\n\r\n")
                await app.drain()
        assert [line["stream_end"] for line in lines] == ["complete"]
        writer.close()
