"""Clients that do not read, that end their side, and that come in great numbers."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from long_tier import times
from reply_reader import ReplyClient, numbered_words
from scripted_node import STREAMING, ScriptedNode, scripted_node, until
from streaming_rig import streaming_rig

from holdfast.bounds import MIB
from holdfast.streaming.providers.script import ScriptSettings
from holdfast.streaming.settings import (
    ModelSettings,
    ProviderSettings,
    QueueFailoverSettings,
    ReplyClocks,
    ReplyTimes,
)

CHAT = "/v1/chat/completions"
LONG = ProviderSettings(
    "long",
    kind="scripted",
    script=ScriptSettings(text="y" * 1000, tokens=100_000, tokens_per_second=4000),
)
"""It fills the buffers of a connection within 2 s, and has far more to say."""
IMPATIENT = replace(
    STREAMING,
    times=ReplyTimes(
        slow_reader_seconds=0.5, cancel_seconds=0.2, heartbeat_seconds=0.2, drain_seconds=1
    ),
    providers=(*STREAMING.providers, LONG),
    models=(*STREAMING.models, ModelSettings("long", ("long:long",))),
)
MUTE = replace(
    STREAMING,
    clocks=ReplyClocks(),
    times=ReplyTimes(cancel_seconds=0.2, heartbeat_seconds=60, drain_seconds=1),
    providers=(
        ProviderSettings("mute", kind="scripted", script=ScriptSettings(first_token_seconds=60)),
    ),
    models=(ModelSettings("mute", ("mute:mute",)),),
)
"""Nothing is written for a minute, so only the close itself shows that a client left."""


def request(node: ScriptedNode, model: str, stream: bool = True) -> bytes:
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    ).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {node.token}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def test_client_that_never_reads_is_closed_and_its_upstream_too(tmp_path: Path) -> None:
    async with scripted_node(tmp_path, IMPATIENT) as node:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", node.port))
            deaf.sendall(request(node, "long"))
            await until(lambda: len(node.replies()) == 1)
            reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
            writer.write(request(node, "quick"))
            async with asyncio.timeout(20):
                answer = await reader.readuntil(b"0\r\n\r\n")
            assert b"data: [DONE]" in answer, "others are not affected"
            await until(lambda: not node.replies())
            deaf.setblocking(False)
            tail = b""
            with suppress(ConnectionResetError):
                async with asyncio.timeout(20):
                    while piece := await asyncio.get_running_loop().sock_recv(deaf, 1 << 16):
                        tail = (tail + piece)[-1000:]
            assert not tail.endswith(b"0\r\n\r\n"), "it was cut, and got no end"
            writer.close()


async def test_client_that_ends_its_side_still_gets_its_reply(tmp_path: Path) -> None:
    async with scripted_node(tmp_path) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        writer.write(request(node, "quick"))
        writer.write_eof()
        async with asyncio.timeout(20):
            answer = await reader.read()
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()


@pytest.mark.parametrize("headers_came", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_reply_ends_when_its_client_closes_before_the_first_token(
    tmp_path: Path, stream: bool, headers_came: bool
) -> None:
    async with scripted_node(tmp_path, MUTE) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        writer.write(request(node, "mute", stream))
        if stream and headers_came:
            await reader.readuntil(b"\r\n\r\n")
        await until(lambda: [reply.state for reply in node.replies()] == ["running"])
        writer.close()
        async with asyncio.timeout(5):
            await until(lambda: not node.replies())


async def test_quiet_stream_has_comments_of_one_line(tmp_path: Path) -> None:
    async with scripted_node(tmp_path, IMPATIENT) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        writer.write(request(node, "stall"))
        async with asyncio.timeout(20):
            answer = await reader.readuntil(b"0\r\n\r\n")
        assert b"5\r\n: hb\n\r\n" in answer and b": hb\n\n" not in answer
        assert b'"code":"upstream_timeout"' in answer
        writer.close()


async def test_slow_bodies_hold_what_they_sent_and_one_without_room_is_503(
    tmp_path: Path,
) -> None:
    small = replace(STREAMING, queue_failover=QueueFailoverSettings(bytes_max=3 * MIB))
    async with asyncio.timeout(30), scripted_node(tmp_path, small) as node:
        held = node.node.streaming.body_bytes
        head = request(node, "quick").partition(b"Content-Length")[0]
        announced = head + b"Content-Length: %d\r\n\r\n{" % (2 * MIB)

        async def announce() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
            writer.write(announced)
            return reader, writer

        slow = [await announce() for _ in range(64)]
        await until(lambda: held.total == 64)
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        writer.write(request(node, "quick"))
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
        writer.close()
        (_, first), (late, second), *_ = slow
        first.write(b" " * (2 * MIB - 2))
        await until(lambda: held.total > 2 * MIB - 2)
        second.write(b" " * (2 * MIB - 2))
        assert (await late.readuntil(b"\r\n")).startswith(b"HTTP/1.1 503 ")
        for _, writer in slow:
            writer.close()
        await until(lambda: held.total == 0)


async def test_address_with_all_its_connections_open_is_refused_and_others_are_served(
    tmp_path: Path,
) -> None:
    """A third says nothing, a third half a head, a third half a request for a reply."""
    many = times(10_000)
    settings = {"access.http.per_address_max": many, "server.trusted_proxies": []}
    async with (
        asyncio.timeout(120),
        streaming_rig(tmp_path, nodes=1, with_redis=False, settings=settings) as rig,
        aiohttp.TCPConnector(local_addr=("127.0.0.2", 0)) as connector,
        aiohttp.ClientSession(rig.nodes[0].program.url, connector=connector) as elsewhere,
    ):
        port, words = rig.nodes[0].program.port, numbered_words(20)
        post = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nX-Api-Key: {rig.key}\r\n".encode()
        # The server waits 30 s for a body and 5 s for a head, so heads begin last.
        says = [post + b"Content-Length: 1000\r\n\r\n{", post, b""]
        held = []
        for number in range(many):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(says[3 * number // many])
            held.append(writer)
        late, closing = await asyncio.open_connection("127.0.0.1", port)
        assert (await late.read()).startswith(b"HTTP/1.1 503 ")
        closing.close()
        reply = await ReplyClient(elsewhere, rig.key).chat(words)
        assert (reply.text, reply.ends) == (words, ["done"])
        assert reply.ended - reply.asked < 5
        for writer in held:
            writer.close()
        await until_served(rig.client, words)


async def until_served(client: ReplyClient, words: str) -> None:
    async with asyncio.timeout(20):
        while (await client.chat(words)).text != words:  # noqa: ASYNC110 - it sees closes late
            await asyncio.sleep(0.01)
