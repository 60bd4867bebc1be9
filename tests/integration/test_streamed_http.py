"""HTTP for streamed answers: what belongs to an answer is read, within bounds; what
does not ends the connection.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tls import certificate
from upstream import HEAD, After, Answer, Received, Upstream, chunked, raw, status, stream_of

from holdfast.bounds import MIB
from holdfast.drivers.streamed_http import READ_BYTES, UNREAD_BYTES_MAX, HttpFailure, HttpServer

IDLE_SECONDS = 0.2


@asynccontextmanager
async def served(answer: Answer) -> AsyncIterator[tuple[Upstream, HttpServer]]:
    async with Upstream(answer) as upstream, asyncio.timeout(10):
        server = HttpServer(f"{upstream.base_url}/chat/completions", {}, IDLE_SECONDS)
        yield upstream, server
        server.close()


async def whole(server: HttpServer) -> tuple[int, bytes]:
    answer = await server.post(b"{}")
    try:
        body = b""
        while piece := await answer.read():
            body += piece
        return answer.status, body
    finally:
        answer.close()


async def test_interim_answers_come_before_the_one_that_counts() -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nContent-Length: 9\r\nX: y\r\n\r\n"
    async with served(raw(interim, interim, HEAD, chunked(b"a"), b"0\r\n\r\n")) as (_, server):
        answer = await server.post(b"{}")
        assert (answer.status, b"x" in answer.headers) == (200, False)
        assert await answer.read() == b"a"
        answer.close()


async def test_trailers_are_no_headers() -> None:
    async with served(raw(HEAD, b"0\r\nX-Late: 1\r\n\r\n", then="keep")) as (_, server):
        answer = await server.post(b"{}")
        assert await answer.read() == b""
        assert b"x-late" not in answer.headers
        answer.close()


@pytest.mark.parametrize("unasked", [b"HTTP/1.1 200 OK\r\n\r\n", b"x"], ids=["answer", "bytes"])
async def test_answer_with_bytes_behind_it_is_whole_but_its_connection_ends(
    unasked: bytes,
) -> None:
    async with served(raw(HEAD + chunked(b"a") + b"0\r\n\r\n" + unasked, then="keep")) as (
        upstream,
        server,
    ):
        for _ in range(2):
            assert await whole(server) == (200, b"a")
        assert upstream.connections == 2


async def test_bytes_between_two_requests_end_the_connection() -> None:
    sent = asyncio.Event()

    async def answer(_request: Received, writer: asyncio.StreamWriter) -> After:
        writer.write(HEAD + b"0\r\n\r\n")
        await sent.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged")
        return "keep"

    async with served(answer) as (upstream, server):
        assert await whole(server) == (200, b"")
        sent.set()
        await asyncio.wait(upstream._tasks)  # its connections
        assert await whole(server) == (200, b"")
        assert upstream.connections == 2


async def test_idle_connection_is_closed_after_its_time() -> None:
    async with served(stream_of(b"a")) as (upstream, server):
        await whole(server)
        began = time.monotonic()
        await asyncio.wait(upstream._tasks)  # its connections
        assert IDLE_SECONDS * 0.9 < time.monotonic() - began < 5
        await whole(server)
        assert upstream.connections == 2


@pytest.mark.parametrize("said", [b"Connection: close", b"Connection: keep-alive"])
async def test_connection_is_used_again_if_the_server_keeps_it(said: bytes) -> None:
    async with served(status(200, b"a", said)) as (upstream, server):
        for _ in range(2):
            assert await whole(server) == (200, b"a")
        assert upstream.connections == (2 if b"close" in said else 1)


async def test_body_that_nobody_reads_waits_at_the_server() -> None:
    sent, size = 0, 64 * MIB

    async def answer(_request: Received, writer: asyncio.StreamWriter) -> After:
        nonlocal sent
        writer.write(HEAD)
        while sent < size:
            writer.write(chunked(b"a" * 0x10000))
            await writer.drain()
            sent += 0x10000
        writer.write(b"0\r\n\r\n")
        return "keep"

    async with served(answer) as (upstream, server):
        held = await server.post(b"{}")
        await upstream.until(lambda upstream: sent > 0)
        await asyncio.sleep(0.2)  # as much as it can
        assert sent < size // 2
        arrived = len(await held.read())
        assert arrived <= UNREAD_BYTES_MAX + READ_BYTES
        while piece := await held.read():
            arrived += len(piece)
        assert (arrived, held.is_complete) == (size, True)
        held.close()


async def test_answer_that_ends_with_a_reset_connection_is_lost() -> None:
    head = HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"")
    async with served(raw(head, b"a", then="reset")) as (_, server):
        with pytest.raises(HttpFailure) as caught:
            await whole(server)
    assert caught.value.kind == "lost"


LOOPS: dict[str, Callable[[Coroutine[Any, Any, None]], None]] = {
    "asyncio": asyncio.run,
    "uvloop": uvloop.run,
}


@pytest.mark.parametrize("loop", LOOPS)
def test_connection_that_is_lost_at_once_is_a_failure_at_once(loop: str) -> None:
    async def on_connection(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def ask() -> None:
        listener = await asyncio.start_server(on_connection, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        server = HttpServer(f"http://127.0.0.1:{port}/", {}, IDLE_SECONDS)
        async with asyncio.timeout(5):
            failures = await asyncio.gather(
                *(server.post(b"{}") for _ in range(50)), return_exceptions=True
            )
        kinds = {failure.kind for failure in failures if isinstance(failure, HttpFailure)}
        assert len(failures) == 50 and kinds <= {"lost", "unreachable"}
        assert all(isinstance(failure, HttpFailure) for failure in failures)
        listener.close()

    LOOPS[loop](ask())


@pytest.mark.parametrize("loop", LOOPS)
def test_tls_server_is_trusted_by_its_certificate(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*files)

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(HEAD + chunked(b"a" * 100_000) + b"0\r\n\r\n")

    async def ask() -> None:
        listener = await asyncio.start_server(on_connection, "127.0.0.1", 0, ssl=context)
        port = listener.sockets[0].getsockname()[1]
        stranger = HttpServer(f"https://127.0.0.1:{port}/", {}, IDLE_SECONDS)
        with pytest.raises(HttpFailure) as caught:
            await stranger.post(b"{}")
        assert caught.value.kind == "unreachable"
        monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
        server = HttpServer(f"https://127.0.0.1:{port}/", {}, IDLE_SECONDS)
        assert await whole(server) == (200, b"a" * 100_000)
        server.close()
        listener.close()

    LOOPS[loop](ask())
