"""The shipped NGINX configuration before three scripted nodes: where a request for a
reply goes, how often, what of it is logged, and how a dead node looks to its client.
"""

from __future__ import annotations

import asyncio
import re
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from work_rigs import until

from engines import Server, free_port, nginx
from engines.fixtures import had
from holdfast.streaming.settings import ReplyClocks, ReplyTimes

HOST = "chat.example.com"
PATIENCE_SECONDS = 20
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
CHAT = "/v1/chat/completions"
POSTS = (CHAT, "/v1/responses", "/v1/replies")

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def answer_ok(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")


async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """End the connection instead of an answer, as a node that dies does."""


class ScriptedNode:
    """A node that reads whole requests, counts them and answers as it is set to."""

    def __init__(self) -> None:
        self.answer: Answer = answer_ok
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.port = free_port()
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    def stop_listening(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            length = [h for h in head.lower().split("\r\n") if h.startswith("content-length:")]
            self.bodies.append(await reader.readexactly(int(length[0].split()[1]) if length else 0))
            await self.answer(reader, writer)
        writer.close()


class Rig:
    """Three nodes behind NGINX, and a client of it."""

    def __init__(
        self, nodes: list[ScriptedNode], proxy: Server, client: aiohttp.ClientSession
    ) -> None:
        self.nodes, self.proxy, self.client = nodes, proxy, client

    def post(self, path: str = CHAT, body: bytes = b"{}", **options: Any) -> Any:
        return self.client.post(path, data=body, server_hostname=HOST, **options)

    def get(self, path: str) -> Any:
        return self.client.get(path, server_hostname=HOST)

    @property
    def requests(self) -> list[int]:
        return [len(node.heads) for node in self.nodes]


@asynccontextmanager
async def rig(changes: Mapping[str, str] | None = None) -> AsyncIterator[Rig]:
    nodes = [ScriptedNode() for _ in range(3)]
    for node in nodes:
        await node.listen()
    proxy = had("nginx", lambda: nginx.start([n.port for n in nodes], free_port(), changes))
    known = ssl.create_default_context(cafile=str(proxy.folder / "cert.pem"))
    try:
        async with (
            asyncio.timeout(PATIENCE_SECONDS),
            aiohttp.ClientSession(
                proxy.url,
                headers={"Host": HOST},
                connector=aiohttp.TCPConnector(ssl=known, limit=0),
            ) as client,
        ):
            yield Rig(nodes, proxy, client)
    finally:
        proxy.stop()
        for node in nodes:
            node.stop_listening()


async def status_of(response: Any) -> int:
    async with response as got:
        await got.read()
        return int(got.status)


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.covers("002 layer 1: NGINX distributes requests")
async def test_requests_for_replies_go_to_the_nodes_in_turn(path: str) -> None:
    async with rig() as r:
        for _ in range(9):
            assert await status_of(r.post(path)) == 200
        assert r.requests == [3, 3, 3]


async def test_node_that_fails_fast_gets_no_more_than_its_turn() -> None:
    """The others stream: by their connections it would be the idle one."""

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        await reader.read()  # until its client leaves

    async with rig() as r, AsyncExitStack() as open_streams:
        fast, *others = r.nodes
        fast.answer = break_off
        for node in others:
            node.answer = stream
        for _ in range(9):
            await open_streams.enter_async_context(r.post())
        assert r.requests == [3, 3, 3]


@pytest.mark.parametrize("path", POSTS)
async def test_refused_connection_leads_to_another_node(path: str) -> None:
    async with rig() as r:
        r.nodes[0].stop_listening()
        assert [await status_of(r.post(path)) for _ in range(12)] == [200] * 12
        assert r.requests[0] == 0 and sum(r.requests) == 12


@pytest.mark.parametrize("path", POSTS)
async def test_sent_request_is_never_repeated_at_another_node(path: str) -> None:
    """A request that kills its node kills one: the client gets 502 once."""
    async with rig() as r:
        for node in r.nodes:
            node.answer = break_off
        assert await status_of(r.post(path)) == 502
        assert sum(r.requests) == 1


async def test_refusal_of_the_queue_is_not_asked_of_another_node() -> None:
    async def full(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n"
        )

    async with rig() as r:
        for node in r.nodes:
            node.answer = full
        async with r.post() as got:
            assert (got.status, got.headers["Retry-After"]) == (503, "7")
        assert sum(r.requests) == 1


async def test_each_request_for_a_reply_has_a_connection_of_its_own() -> None:
    """On a kept connection that a node closes, a POST that was not read would fail."""

    async def keep_open(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.read()  # until NGINX closes it

    async with rig() as r:
        for node in r.nodes:
            node.answer = keep_open
        assert [await status_of(r.post()) for _ in range(6)] == [200] * 6
        assert sum(node.connections for node in r.nodes) == 6


async def _stream_then_die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + chunk(b"data: one\n\n"))
    await writer.drain()


async def test_node_that_dies_while_it_streams_is_no_clean_end() -> None:
    async with rig() as r:
        for node in r.nodes:
            node.answer = _stream_then_die
        async with r.post() as got:
            assert await got.content.readuntil(b"\n\n") == b"data: one\n\n"
            with pytest.raises(aiohttp.ClientPayloadError):
                await got.read()
        [request_line] = [head.split("\r\n")[0] for node in r.nodes for head in node.heads]
        assert request_line.endswith(" HTTP/1.1"), "an answer to 1.0 has no chunks"


async def test_with_http_1_0_a_dead_node_would_be_a_clean_end() -> None:
    """The control of the test above: this is why the file says 1.1."""

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: one\n\n")
        await writer.drain()

    async with rig({"proxy_http_version 1.1;": "proxy_http_version 1.0;"}) as r:
        for node in r.nodes:
            node.answer = die
        async with r.post() as got:
            assert await got.read() == b"data: one\n\n", "nothing tells the client"


class _Paced:
    """Sends an event whenever it is let to, and ends after the last."""

    def __init__(self, events: int) -> None:
        self.go = asyncio.Semaphore(0)
        self.closed = asyncio.Event()
        self._events = events

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        gone = asyncio.create_task(self._watch(reader))
        for number in range(self._events):
            await self.go.acquire()
            writer.write(chunk(b"data: %d\n\n" % number))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        await gone

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        await reader.read()
        self.closed.set()


@pytest.mark.parametrize("path", [*POSTS, "/v1/replies/r1/events", "/v1/responses/r1"])
async def test_each_event_passes_at_once_and_is_not_held_back(path: str) -> None:
    """The next event is sent only when the client has the one before."""
    paced = _Paced(3)
    async with rig() as r:
        for node in r.nodes:
            node.answer = paced
        async with r.post(path) if path in POSTS else r.get(path) as got:
            for number in range(3):
                paced.go.release()
                assert await got.content.readuntil(b"\n\n") == b"data: %d\n\n" % number
            assert await got.read() == b""


async def test_node_learns_at_once_that_its_client_has_left() -> None:
    paced = _Paced(2)
    async with rig() as r:
        for node in r.nodes:
            node.answer = paced
        async with r.post() as got:
            paced.go.release()
            await got.content.readuntil(b"\n\n")
            got.connection.transport.abort()
            await asyncio.wait_for(paced.closed.wait(), 5)


async def test_reload_lets_open_streams_go_on_and_new_requests_pass() -> None:
    paced = _Paced(2)
    async with rig() as r:
        for node in r.nodes:
            node.answer = paced
        async with r.post() as got:
            paced.go.release()
            assert await got.content.readuntil(b"\n\n") == b"data: 0\n\n"
            r.proxy.process.send_signal(signal.SIGHUP)
            for node in r.nodes:
                node.answer = answer_ok
            await until(lambda: "gracefully shutting down" in r.proxy.log.read_text())
            assert await status_of(r.post(headers={"Connection": "close"})) == 200
            paced.go.release()
            assert await got.read() == b"data: 1\n\n", "the old worker ends with its last stream"


async def test_killed_proxy_is_no_clean_end_for_its_clients() -> None:
    paced = _Paced(2)
    async with rig() as r:
        for node in r.nodes:
            node.answer = paced
        async with r.post() as got:
            paced.go.release()
            await got.content.readuntil(b"\n\n")
            master = psutil.Process(r.proxy.pid)
            for process in [*master.children(), master]:
                process.kill()
            with pytest.raises(aiohttp.ClientPayloadError):
                await got.read()
            await asyncio.wait_for(paced.closed.wait(), 5)


async def test_body_of_a_reply_may_have_5_mib_and_arrives_whole() -> None:
    async with rig() as r:
        large = bytes(range(256)) * 20_000  # 5,120,000 bytes
        assert await status_of(r.post(body=large)) == 200
        assert [body for node in r.nodes for body in node.bodies] == [large]
        assert await status_of(r.post(body=b"x" * (5 * 2**20 + 1))) == 413
        assert await status_of(r.post("/v1/chats", body=b"x" * 65_537)) == 413, "others stay small"
        assert sum(r.requests) == 1


async def test_large_body_is_in_a_file_without_a_name_and_a_small_one_in_none() -> None:
    """Nobody can open it by a path, and it is gone with the process. NGINX lets a body
    be a quarter larger than its buffer.
    """
    arrived, answer = asyncio.Event(), asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await answer.wait()
        await answer_ok(reader, writer)

    async with rig() as r:
        for node in r.nodes:
            node.answer = wait
        for size, files in ((512 * 1024, 0), (700 * 1024, 1)):
            arrived.clear()
            posting = asyncio.create_task(status_of(r.post(body=b"x" * size)))
            await arrived.wait()
            assert not [f for f in (r.proxy.folder / "temp").rglob("*") if f.is_file()]
            assert _nameless_files(r.proxy.pid) == files
            answer.set()
            assert await posting == 200
            answer.clear()


def _nameless_files(master: int) -> int:
    """How many files its workers have open that are in no folder any more."""
    workers = psutil.Process(master).children()
    links = [link for w in workers for link in Path(f"/proc/{w.pid}/fd").iterdir()]
    return sum("/temp/" in str(link.readlink()) for link in links)


async def test_no_log_has_the_arguments_of_an_address() -> None:
    """A ticket is among them; the error log would have it for each failed read."""
    async with rig() as r:
        assert await status_of(r.get("/v1/replies/r1/events?ticket=secret-1")) == 200
        for node in r.nodes:
            node.answer = break_off
        assert await status_of(r.get("/v1/replies/r2/events?ticket=secret-2")) == 502
        for node in r.nodes:
            node.answer = _stream_then_die
        async with r.get("/v1/replies/r3/events?ticket=secret-3") as got:
            with pytest.raises(aiohttp.ClientPayloadError):
                await got.read()
        access = r.proxy.folder / "access.log"
        await until(lambda: "/v1/replies/r3/events " in access.read_text())
        written = access.read_text() + r.proxy.log.read_text()
        assert "GET /v1/replies/r2/events 502" in written and "secret" not in written


async def test_one_address_may_ask_for_500_replies_at_once() -> None:
    async with rig() as r:
        statuses = await asyncio.gather(*(status_of(r.post()) for _ in range(500)))
        assert statuses == [200] * 500


def test_proxy_waits_longer_than_any_reply_and_not_long_for_a_node() -> None:
    """Timeouts of minutes; the last two are of the locations of replies."""
    shipped = nginx.SHIPPED.read_text()
    *_, asked, read = [float(each) for each in re.findall(r"proxy_read_timeout (\d+)s", shipped)]
    assert asked > ReplyClocks().reply_seconds
    assert read > 4 * ReplyTimes().heartbeat_seconds
    assert re.findall(r"proxy_connect_timeout (\d+)s", shipped) == ["2"]
