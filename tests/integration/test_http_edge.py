"""Bytes of an unknown client: bounds, order, and a readable log."""

from __future__ import annotations

import asyncio
import io
import json
import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from log_capture import logging_to
from sockets import running_node

from holdfast.gateway.transport.http import (
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    PATH_BYTES_MAX,
    PIPELINED_MAX,
    URL_BYTES_MAX,
    HttpTimes,
)
from holdfast.node.node import Node

pytestmark = pytest.mark.real_time("uvloop")

GET = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
UPGRADE = (
    b"GET /v1/ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection:"
    b" Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def get(path: str = "/health/live", *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def padded(size: int, head: bytes | None = None) -> bytes:
    """A head of ``size`` bytes."""
    head = head or get("/health/live", "X-Long: ")
    return head.replace(b"X-Long: ", b"X-Long: " + b"x" * (size - len(head)))


LONG_UPGRADE = UPGRADE + b"X-Long: \r\n\r\n"


BOUNDS = {
    "head": (
        padded(HEAD_BYTES_MAX - 100),
        padded(HEAD_BYTES_MAX + 100),
        431,
        f"at most {HEAD_BYTES_MAX} bytes",
    ),
    "a head of three times its bound": (
        GET,
        padded(3 * HEAD_BYTES_MAX),
        431,
        f"at most {HEAD_BYTES_MAX} bytes",
    ),
    "the head of a handshake": (
        padded(HEAD_BYTES_MAX - 100, LONG_UPGRADE),
        padded(HEAD_BYTES_MAX + 100, LONG_UPGRADE),
        431,
        f"at most {HEAD_BYTES_MAX} bytes",
    ),
    "head of many headers": (
        get("/health/live", *["X-Filler: " + "x" * 400] * 60),
        get("/health/live", *["X-Filler: " + "x" * 400] * 90),
        431,
        f"at most {HEAD_BYTES_MAX} bytes",
    ),
    "headers": (
        get("/health/live", *["a: b"] * (HEADERS_MAX - 1)),
        get("/health/live", *["a: b"] * HEADERS_MAX),
        431,
        f"at most {HEADERS_MAX} header fields",
    ),
    "URL": (
        get("/v1/ws?" + "x" * (URL_BYTES_MAX - 7)),
        get("/v1/ws?" + "x" * (URL_BYTES_MAX - 6)),
        414,
        f"at most {URL_BYTES_MAX} bytes",
    ),
    "path": (
        get("/" + "x" * (PATH_BYTES_MAX - 1)),
        get("/" + "x" * PATH_BYTES_MAX),
        414,
        f"at most {PATH_BYTES_MAX} bytes",
    ),
    "trailers": (
        b"POST /v1/chats HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\na: b\r\n\r\n",
        b"POST /v1/chats HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\na: "
        + b"x" * 2 * HEAD_BYTES_MAX
        + b"\r\n\r\n",
        431,
        f"at most {HEAD_BYTES_MAX} bytes",
    ),
}


async def exchange(node: Node, pieces: Sequence[bytes], count: int = 1) -> list[tuple[int, bytes]]:
    """Send the pieces, each a segment of its own; the first ``count`` answers, and
    whatever came with them.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", node.settings.server.port)
    received = b""
    try:
        async with asyncio.timeout(8):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.001 if len(pieces) > 1 else 0)
            while len(answers(received)) < count and (more := await reader.read(65_536)):
                received += more
    except ConnectionError:
        pass  # it was refused before it had sent everything
    writer.close()
    return answers(received)


def answers(received: bytes) -> list[tuple[int, bytes]]:
    """The status and the body of each whole answer."""
    found = []
    while b"\r\n\r\n" in received:
        assert received.startswith(b"HTTP/1.1 "), (
            f"bytes that belong to no answer: {received[:200]!r}"
        )
        head, _, rest = received.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        size = int(fields.get(b"content-length", b"0"))
        if len(rest) < size:
            break
        found.append((int(head[9:12]), rest[:size]))
        received = rest[size:]
    return found


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


async def test_bounds_of_a_request_hold_however_its_bytes_arrive(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        for what, (within, beyond, status, words) in BOUNDS.items():
            [(first, _)] = await exchange(node, [within])
            assert first == (101 if "handshake" in what else first) and first not in (
                414,
                431,
            ), what
            for pieces in ([beyond], cut(beyond, 1_460), cut(beyond, 20_000)):
                *_, (refused, body) = await exchange(node, pieces)
                error = json.loads(body)["error"]
                if what == "trailers" and refused == 401:
                    continue  # answered before its trailers came
                assert (refused, error["code"]) == (status, "MESSAGE_TOO_LARGE"), (
                    what,
                    len(pieces),
                    body,
                )
                assert words in error["message"], what


GARBAGE = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 no HTTP at all\r\n\r\n"
STRANGE: dict[str, tuple[list[bytes], list[int]]] = {
    "a request, then garbage in one segment": ([GET + GARBAGE], [200, 400]),
    "three requests, then garbage": ([GET * 3 + GARBAGE], [200, 200, 200, 400]),
    "more requests than may wait": (
        [GET * (PIPELINED_MAX + 9)],
        [200] * (PIPELINED_MAX + 1) + [400],
    ),
    "garbage": ([GARBAGE], [400]),
    "a chunk that is none, where 100 Continue is awaited": (
        [
            b"GET /health/live HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\n"
        ],
        [400],
    ),
    "a credential in a trailer": (
        [
            b"GET /v1/chats HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"0\r\nAuthorization: Bearer not-even-looked-at\r\nX-Act-As: \r\n\r\n"
        ],
        [401],
    ),
    "a request that hangs, then garbage": (
        [
            b"POST /v1/chats HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
            b'"a":1}  ' + GARBAGE,
        ],
        [401, 400],
    ),
    "a body whose chunks are broken": (
        [b"POST /v1/chats HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", b"zz\r\n"],
        [401, 400],
    ),
    "a request, then half of one": ([GET + b"GET /health/li"], [200]),
    "an upgrade to something else": (
        [get("/health/live", "Upgrade: h2c", "Connection: Upgrade")],
        [200],
    ),
    "two lengths": (
        [b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx"],
        [400],
    ),
    "length and chunks": (
        [b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nx"],
        [400],
    ),
    "a proxy's request": ([b"GET http://elsewhere/ HTTP/1.1\r\nHost: x\r\n\r\n"], [404]),
    "CONNECT": ([b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n" + GARBAGE], [400]),
    "a path that is no ASCII": ([b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n"], [400]),
    "a NUL in a header": ([get("/health/live", "X: a\0b")], [400]),
    "a handshake behind a request": ([GET + UPGRADE + b"\r\n"], [200, 400]),
    "a handshake whose credential is none": (
        [UPGRADE + b"Authorization: Bearer a.b.c\r\n\r\n"],
        [401],
    ),
    "two hosts": ([get("/v1/chats", "Host: y")], [400]),
    "two hosts of a page": ([get("/docs/style.css", "Host: y")], [400]),
    "no host": ([b"GET /health/live HTTP/1.1\r\n\r\n"], [400]),
    "no host, as HTTP/1.0 allows": ([b"GET /health/live HTTP/1.0\r\n\r\n"], [200]),
    "a request, then one without a host": (
        [GET + b"GET /health/live HTTP/1.1\r\n\r\n"],
        [200, 400],
    ),
    "a handshake in the form for proxies": (
        [UPGRADE.replace(b"/v1/ws", b"http://elsewhere:80/v1/ws") + b"\r\n"],
        [101],
    ),
    "a handshake at an address that is none": (
        [UPGRADE.replace(b"/v1/ws", b"http://:x/v1/ws") + b"\r\n"],
        [400],
    ),
    "a handshake with garbage behind it": ([UPGRADE + b"\r\n" + GARBAGE], [400]),
    **{
        f"a handshake with two {header}": (
            [UPGRADE + f"{header}\r\n{header}\r\n\r\n".encode()],
            [400],
        )
        for header in (
            "Host: x",
            "Authorization: Bearer a",
            "X-Device-ID: d",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Protocol: holdfast.v1",
        )
    },
}


async def test_strange_requests_are_answered_in_order_and_write_no_traceback(
    tmp_path: Path,
) -> None:
    async with running_node(tmp_path) as node:
        lines = io.StringIO()
        with logging_to(lines):
            for what, (pieces, expected) in STRANGE.items():
                found = await exchange(node, pieces, len(expected))
                assert [status for status, _ in found] == expected, (what, found)
                assert ("two" in what) <= (
                    b"given more than once" in found[-1][1] or what == "two lengths"
                ), what
        assert "raceback" not in lines.getvalue() and "exception" not in lines.getvalue(), (
            lines.getvalue()
        )


COUNTED = {
    "a handshake at another path": ([UPGRADE.replace(b"/v1/ws", b"/else") + b"\r\n"], 404),
    "a handshake of another version": (
        [UPGRADE.replace(b"Version: 13", b"Version: 12") + b"\r\n"],
        426,
    ),
    "a handshake without a key": ([UPGRADE.replace(b"ZQ==", b"") + b"\r\n"], 400),
    "a handshake with POST": ([UPGRADE.replace(b"GET", b"POST") + b"\r\n"], 400),
    "a handshake with two devices": ([UPGRADE + b"X-Device-ID: a\r\nX-Device-ID: b\r\n\r\n"], 400),
    "a handshake that does not wait": ([UPGRADE + b"\r\n" + GARBAGE], 400),
    "a handshake with a body": ([UPGRADE + b"Content-Length: 1\r\n\r\n"], 400),
    "garbage": ([GARBAGE], 400),
    "no host": ([b"GET /health/live HTTP/1.1\r\n\r\n"], 400),
    "a head that is too large": ([padded(HEAD_BYTES_MAX + 100)], 431),
    "a path that is too long": ([get("/" + "x" * PATH_BYTES_MAX)], 414),
    "nothing there": ([get("/nowhere")], 404),
}


async def test_every_response_without_credential_counts_against_its_address(
    tmp_path: Path,
) -> None:
    few = {"api__unauthenticated_per_minute": 1, "api__unauthenticated_burst": len(COUNTED)}
    async with running_node(tmp_path, **few) as node:
        rule = {
            "tenantID": "*",
            "resource": "connect:address",
            "expectedVersion": 1,
            "burstSize": len(COUNTED),
        }
        await node.limits.control.update({**rule, "limit": 1}, "test")
        await node.limits.feed.sync()
        for what, (pieces, status) in COUNTED.items():
            [(found, body)] = await exchange(node, pieces)
            assert found == status, (what, body)
        for _ in range(len(COUNTED)):
            await exchange(node, [get("/nowhere")])
            await exchange(node, [UPGRADE + b"\r\n"])
        for what, (pieces, _) in COUNTED.items():
            [(found, body)] = await exchange(node, pieces)
            assert found == 429, (what, body)
            policy = json.loads(body)["violated-policies"]
            assert policy in (["unauthenticated"], ["*/connect:address"]), what


async def test_requests_of_a_client_that_has_ended_its_side_are_answered(tmp_path: Path) -> None:
    # it is closed when everything is answered, not when time is up

    async with running_node(tmp_path, http_times=HttpTimes(head_seconds=60)) as node:
        for then in (
            b"",
            b"GET /health/li",
            b"POST /v1/tokens HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", node.settings.server.port)
            writer.write(GET + get("/health/ready") * 9 + GET + then)
            writer.write_eof()
            async with asyncio.timeout(8):
                received = await reader.read(-1)
            assert [status for status, _ in answers(received)] == [200] * 11, then
            writer.close()


async def test_no_head_is_awaited_while_answers_are_not_read(tmp_path: Path) -> None:
    """A client that reads slowly is not late with its next request."""
    pages = get("/openapi.json", "Accept-Encoding: identity") * 40

    async def ask(node: Node, ending: bytes) -> list[int]:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", node.settings.server.port))
        await loop.sock_sendall(client, pages + ending)
        received = bytearray()
        async with asyncio.timeout(20):
            for size in (0, 100_000):
                while len(received) < size:
                    received += await loop.sock_recv(client, 65_536)
                await asyncio.sleep(0.3)
            while more := await loop.sock_recv(client, 1 << 20):
                received += more
        client.close()
        return [status for status, _ in answers(bytes(received))]

    async with running_node(
        tmp_path, http_times=HttpTimes(head_seconds=0.1, rest_seconds=0.1)
    ) as node:
        unfinished, refused = await asyncio.gather(ask(node, b"GET /hea"), ask(node, GARBAGE))
        assert unfinished == [200] * 40
        assert refused == [200] * 40 + [400]


@pytest.mark.parametrize(
    ("asked", "then"),
    [
        (GET, b"\r\n"),
        (b"POST /v1/chats HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n", b"abc"),
    ],
    ids=["a blank line behind an answer", "the rest of a body that was refused"],
)
async def test_a_connection_that_asks_nothing_more_is_closed_whatever_it_sends(
    tmp_path: Path, asked: bytes, then: bytes
) -> None:
    async with running_node(tmp_path, http_times=HttpTimes(head_seconds=0.3)) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.settings.server.port)
        writer.write(asked)
        await reader.readuntil(b"}")
        writer.write(then)
        await asyncio.wait_for(reader.read(-1), 4)
        writer.close()


async def test_mutilated_requests_write_no_traceback(tmp_path: Path) -> None:
    rng = random.Random(10)
    whole = [GET, UPGRADE + b"\r\n", *(b"".join(pieces) for pieces, _ in STRANGE.values())]

    def mutilated() -> bytes:
        data = bytearray(rng.choice(whole) + rng.choice([b"", GET, UPGRADE + b"\r\n", GARBAGE]))
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        return bytes(data[: rng.randrange(1, len(data) + 1)])

    async def send(node: Node, data: bytes) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", node.settings.server.port)
        for piece in cut(data, rng.randrange(1, len(data) + 1)):
            writer.write(piece)
            await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()

    async with running_node(tmp_path) as node:
        lines = io.StringIO()
        with logging_to(lines):
            for _ in range(20):
                await asyncio.gather(
                    *(send(node, mutilated()) for _ in range(20)), return_exceptions=True
                )
            [(alive, _)] = await exchange(node, [GET])
            assert alive == 200
            assert len(lines.getvalue().splitlines()) < 100, (
                "of 400 requests the first are logged, then a sum"
            )
        assert "raceback" not in lines.getvalue() and "exception" not in lines.getvalue(), (
            lines.getvalue()
        )


async def test_garbage_on_an_open_websocket_writes_no_traceback(tmp_path: Path) -> None:
    rng = random.Random(11)

    async def send(node: Node, data: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.settings.server.port)
        writer.write(UPGRADE + b"\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        for piece in cut(data, rng.randrange(1, len(data) + 1)):
            writer.write(piece)
            await asyncio.sleep(0)
        writer.write_eof()
        with suppress(ConnectionError):
            while await reader.read(65_536):
                pass
        writer.close()

    async with running_node(tmp_path) as node:
        garbage = [
            GET,
            GARBAGE,
            UPGRADE + b"\r\n",
            b"\x81\xfe\xff\xff" + b"x" * 70_000,
            b"\x89\x80abcd" * 50,
        ]
        garbage += [rng.randbytes(rng.randrange(1, 300)) for _ in range(60)]
        lines = io.StringIO()
        with logging_to(lines):
            async with asyncio.timeout(30):
                await asyncio.gather(*(send(node, data) for data in garbage))
        assert "raceback" not in lines.getvalue() and '"exception"' not in lines.getvalue(), (
            lines.getvalue()
        )
