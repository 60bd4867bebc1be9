"""Real sockets: one port, the protocol's edges, a reader that stops."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import socket
from asyncio import AbstractEventLoop
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import apsw
import httpx
import pytest
from gateway_rig import decode_frames
from sockets import ask, connected, create_chat, running_node, token

from holdfast.gateway.contract import GatewayDeps
from holdfast.gateway.transport.http import HEAD_BYTES_MAX, HttpRequests, HttpTimes
from holdfast.node.node import Node
from holdfast.session.session import Session
from holdfast.telemetry.metrics import REGISTRY
from holdfast.wire.close_codes import CloseReason

pytestmark = pytest.mark.real_time("uvloop")


class Raw:
    """A WebSocket client that may break every rule."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(
        cls, node: Node, *extra: str, connection: str = "Upgrade", size: int = 0
    ) -> tuple[Raw, str]:
        """Handshake by hand; returns the status line too."""
        sock = socket.socket()
        if size:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(
            sock, ("127.0.0.1", node.settings.server.port)
        )
        # With a small limit the reader stops taking from the socket when nobody reads
        # from it.
        reader, writer = await asyncio.open_connection(sock=sock, limit=4096 if size else 1 << 20)
        lines = [
            "GET /v1/ws HTTP/1.1",
            "Host: localhost",
            "Upgrade: websocket",
            f"Connection: {connection}",
            f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}",
            "Sec-WebSocket-Version: 13",
            *extra,
        ]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        return cls(reader, writer), head

    def send(
        self, opcode: int, payload: bytes, *, fin: bool = True, masked: bool = True, rsv: int = 0
    ) -> None:
        first = (0x80 if fin else 0) | rsv << 4 | opcode
        size = len(payload)
        if size < 126:
            length = bytes([size])
        else:
            length = (
                b"\x7e" + size.to_bytes(2, "big")
                if size < 65536
                else b"\x7f" + size.to_bytes(8, "big")
            )
        if masked:
            mask = b"\x01\x02\x03\x04"
            length = bytes([length[0] | 0x80]) + length[1:]
            payload = mask + bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))
        # a write to a peer that is gone is lost, here as on any network
        if not self._writer.is_closing():
            self._writer.write(bytes([first]) + length + payload)

    async def rest(self) -> bytes:
        """Everything until the server closes; also if it had closed before our last
        bytes came, and reset.
        """
        data = b""
        async with asyncio.timeout(10):
            try:
                while more := await self._reader.read(65_536):
                    data += more
            except ConnectionError:
                data += bytes(self._reader._buffer)  # type: ignore[attr-defined]
        return data

    async def frame(self) -> dict[str, Any]:
        """The next text frame."""
        head = await self._reader.readexactly(2)
        size = head[1]
        extra = b""
        if size >= 126:
            extra = await self._reader.readexactly(2 if size == 126 else 8)
            size = int.from_bytes(extra, "big")
        data = head + extra + await self._reader.readexactly(size)
        return decode_frames(data)[0]

    def close(self) -> None:
        self._writer.close()


async def raw(node: Node, user_id: str, size: int = 0) -> Raw:
    client, head = await Raw.connect(
        node, f"Authorization: Bearer {token(node, user_id)}", size=size
    )
    assert head.startswith("HTTP/1.1 101"), head
    assert (await client.frame())["type"] == "connection_established"
    return client


async def test_http_and_websocket_share_one_port(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        async with httpx.AsyncClient(base_url=node.url) as http:
            assert (await http.get("/health/live")).json() == {"status": "live"}
            assert (await http.get("/v1/ws")).status_code == 426
        async with connected(node, "alice"):
            pass


@pytest.mark.parametrize(
    ("whole", "begun"),
    [
        (b"", b""),
        (b"", b"GET /v1/ws HTTP/1.1\r\nHost: lo"),
        (b"GET /no HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / H"),
    ],
)
async def test_client_that_never_finishes_a_request_is_closed(
    tmp_path: Path, whole: bytes, begun: bytes
) -> None:
    async with running_node(tmp_path, http_times=HttpTimes(head_seconds=1)) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.settings.server.port)
        if whole:
            writer.write(whole)
            assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 404"), (
                "what was whole is answered"
            )
        writer.write(begun)
        assert await asyncio.wait_for(reader.read(-1), 4) == b""
        writer.close()


async def test_client_that_never_ends_an_answered_body_is_closed(tmp_path: Path) -> None:
    async with running_node(tmp_path, http_times=HttpTimes(rest_seconds=1)) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.settings.server.port)
        head = b"POST /v1/chats HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % 2)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401")
        await reader.readuntil(b"}}")
        # the end of that body, late but in time: the next request is taken
        writer.write(b"{}" + head % 100)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401")
        await reader.readuntil(b"}}")
        trickle = asyncio.create_task(_trickle(writer))
        assert await asyncio.wait_for(reader.read(-1), 4) == b""
        trickle.cancel()
        writer.close()


async def _trickle(writer: asyncio.StreamWriter) -> None:
    """One byte at a time, each well before the keep-alive ends."""
    for _ in range(99):
        writer.write(b"x")
        await asyncio.sleep(0.1)


async def test_client_that_does_not_read_responses_is_closed(tmp_path: Path) -> None:
    async with running_node(tmp_path, http_times=HttpTimes(unread_seconds=0.3)) as node:
        asking = socket.create_connection(("127.0.0.1", node.settings.server.port))
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asking.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 200)
        asking.setblocking(False)
        async with asyncio.timeout(10):
            while True:
                try:  # of what is sent to a connection that was cut off, the second is refused
                    asking.send(b"\r\n")
                except ConnectionError:
                    break
                await asyncio.sleep(0.05)
        asking.close()


async def test_client_that_does_not_read_a_whole_response_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing more is awaited of it, yet it is not closed as an idle connection is:
    that would wait for the answer to leave.
    """
    connect = HttpRequests.connection_made

    def connect_narrow(requests: HttpRequests, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connect(requests, transport)

    monkeypatch.setattr(HttpRequests, "connection_made", connect_narrow)

    async with running_node(
        tmp_path, http_times=HttpTimes(unread_seconds=0.3, head_seconds=0.1)
    ) as node:
        asking = socket.socket()
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asking.connect(("127.0.0.1", node.settings.server.port))
        asking.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
        await http_connections_are(1)
        await http_connections_are(0)
        asking.close()


async def test_a_head_without_end_is_refused(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.settings.server.port)
        writer.write(b"GET / HTTP/1.1\r\nX-Long: ")
        for _ in range(70):
            writer.write(b"x" * 1024)
        answer = await asyncio.wait_for(reader.read(-1), 4)
        assert answer.startswith(b"HTTP/1.1 431")
        assert (
            f"at most {HEAD_BYTES_MAX} bytes"
            in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        )
        writer.close()


async def test_client_that_goes_on_sending_can_read_a_refusal(tmp_path: Path) -> None:
    """A socket closed with input on its way is reset and loses the response."""

    async with running_node(tmp_path) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.settings.server.port)
        writer.write(b"GET / HTTP/1.1\r\nX-Long: " + b"x" * 100_000)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 431")
        for _ in range(50):
            writer.write(b"x" * 10_000)
            await writer.drain()
        assert (
            json.loads(await asyncio.wait_for(reader.read(-1), 4))["error"]["code"]
            == "MESSAGE_TOO_LARGE"
        )
        writer.close()


UPGRADE = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
)
NO_HANDSHAKES = {
    "POST": (
        f"POST /v1/ws HTTP/1.1\r\nHost: x\r\n{UPGRADE}\r\nContent-Length: 0\r\n\r\n",
        "with GET",
    ),
    "OPTIONS": (f"OPTIONS /v1/ws HTTP/1.1\r\nHost: x\r\n{UPGRADE}\r\n\r\n", "with GET"),
    "HEAD": (f"HEAD /v1/ws HTTP/1.1\r\nHost: x\r\n{UPGRADE}\r\n\r\n", "with GET"),
    "an old version": (f"GET /v1/ws HTTP/1.0\r\nHost: x\r\n{UPGRADE}\r\n\r\n", "with HTTP/1.1"),
    "no host": (f"GET /v1/ws HTTP/1.1\r\n{UPGRADE}\r\n\r\n", "Host header"),
    "chunks": (
        (
            f"GET /v1/ws HTTP/1.1\r\nHost: x\r\n{UPGRADE}\r\nTransfer-Encoding:"
            " chunked\r\n\r\n0\r\n\r\n"
        ),
        "body",
    ),
    "a body": (
        f"GET /v1/ws HTTP/1.1\r\nHost: x\r\n{UPGRADE}\r\nContent-Length: 9\r\n\r\n",
        "no body",
    ),
    "a frame": (
        f"GET /v1/ws HTTP/1.1\r\nHost: x\r\n{UPGRADE}\r\n\r\n\x01\x00",
        "wait for the answer",
    ),
}


@pytest.mark.parametrize("what", NO_HANDSHAKES)
async def test_invalid_opening_handshake_is_refused_with_our_error_body(
    tmp_path: Path, what: str
) -> None:
    request, why = NO_HANDSHAKES[what]

    async with running_node(tmp_path) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.settings.server.port)
        writer.write(request.encode())
        head, _, body = (await asyncio.wait_for(reader.read(-1), 4)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert why in json.loads(body)["error"]["message"]
        assert node.gateway.connections == 0
        writer.close()


async def test_the_memory_of_a_connection_goes_with_it(tmp_path: Path) -> None:
    """The collector comes by seldom; what waited for it would look like a leak."""

    def sessions() -> int:
        return sum(
            isinstance(thing, Session) and thing.user.user_id == "forgotten"
            for thing in gc.get_objects()
        )

    async with running_node(tmp_path) as node:
        gc.collect()
        gc.disable()
        try:
            async with connected(node, "forgotten") as client:
                await ask(client, "resume", cursors={})
                assert sessions() == 1
            async with asyncio.timeout(10):
                while sessions():  # noqa: ASYNC110 - there is no event for the end of an object
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()


async def test_the_credential_of_a_handshake_is_not_kept_with_the_connection(
    tmp_path: Path,
) -> None:
    """A process that lives for weeks would hold the tokens of everybody, and two
    kilobytes more for each.
    """

    async with running_node(tmp_path) as node:
        credential = token(node, "alice")
        client, _ = await Raw.connect(
            node, f"Authorization: Bearer {credential}", f"X-Odd: {credential}"
        )
        await client.frame()
        [connection] = node.gateway.open_connections
        near: list[Any] = [connection]
        found: dict[int, Any] = {}
        for _ in range(6):  # steps from the connection; the process holds the rest
            near = [
                thing
                for holder in near
                for thing in gc.get_referents(holder)
                if id(thing) not in found
            ]
            near = [
                thing
                for thing in near
                if not isinstance(thing, type | ModuleType | AbstractEventLoop | GatewayDeps)
            ]
            found |= {id(thing): thing for thing in near}
        assert connection.connection_id in found.values() and connection._socket in found.values()
        assert not [
            thing for thing in found.values() if isinstance(thing, str) and credential in thing
        ]
        client.close()


async def test_a_socket_is_set_as_we_want_it_whatever_its_library_would_ask(tmp_path: Path) -> None:
    """Its library is not let near the socket: what it would set, the loop has set."""

    async with running_node(tmp_path) as node:
        client = await raw(node, "alice")
        [connection] = node.gateway.open_connections
        transport = connection._socket._raw  # type: ignore[attr-defined]
        sock = transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        wanted = node.settings.gateway.backpressure.outbound.socket_send_buffer_bytes
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) in (
            wanted,
            2 * wanted,
        ), "Linux reports twice as much"
        client.close()


async def test_two_sockets_chat(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        chat_id = await create_chat(node, "alice", "bob")
        async with connected(node, "alice") as alice, connected(node, "bob") as bob:
            for client in (alice, bob):
                assert (await ask(client, "resume", cursors={}))["type"] == "resumed"
            ack = await ask(
                alice, "send_message", client_message_id="c1", chat_id=chat_id, content="hello"
            )
            assert ack["payload"]["sequence"] == 1
            while (frame := json.loads(await bob.recv()))["type"] != "message":
                pass
            assert frame["payload"]["content"] == "hello"


async def test_firefoxs_connection_header_is_understood(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        client, head = await Raw.connect(
            node, f"Authorization: Bearer {token(node, 'alice')}", connection="keep-alive, Upgrade"
        )
        assert head.startswith("HTTP/1.1 101"), head
        client.close()


async def test_compression_is_not_agreed_to(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        client, head = await Raw.connect(
            node,
            f"Authorization: Bearer {token(node, 'alice')}",
            "Sec-WebSocket-Extensions: permessage-deflate",
        )
        assert "extensions" not in head.lower()
        client.close()


async def test_the_token_of_a_subprotocol_is_never_echoed(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        secret = token(node, "alice")
        client, head = await Raw.connect(
            node, f"Sec-WebSocket-Protocol: holdfast.v1, bearer.{secret}"
        )
        assert "Sec-WebSocket-Protocol: holdfast.v1\r\n" in head
        assert secret not in head
        client.close()


@pytest.mark.parametrize(
    ("extra", "status", "code"),
    [
        (["Authorization: Bearer nonsense"], "401", "UNAUTHORIZED"),
        (["Origin: https://evil.example"], "403", "FORBIDDEN"),
    ],
)
async def test_a_refused_handshake_is_an_http_answer_with_our_error_body(
    tmp_path: Path, extra: list[str], status: str, code: str
) -> None:
    async with running_node(tmp_path) as node:
        client, head = await Raw.connect(node, *extra)
        assert head.split()[1] == status
        assert "Content-Type: application/json" in head
        assert json.loads(await client.rest())["error"]["code"] == code


async def test_handshakes_over_the_rate_get_retry_after(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        rule = {
            "tenantID": "*",
            "resource": "connect:address",
            "expectedVersion": 1,
            "burstSize": 1,
        }
        await node.limits.control.update(rule, "test")
        await node.limits.feed.sync()
        client, head = await Raw.connect(node)
        client.close()
        _, head = await Raw.connect(node)
        assert head.split()[1] == "429"
        assert "Retry-After:" in head and 'RateLimit-Policy: "*/connect:address";q=600;w=60' in head


class Idle:
    """A socket that says nothing, unless asked to ask."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, node: Node) -> Idle:
        return cls(*await asyncio.open_connection("127.0.0.1", node.settings.server.port))

    async def ask(self) -> str:
        """The answer to a request, or what was said before it could be made."""
        with suppress(ConnectionError):
            self._writer.write(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return (await self._reader.readuntil(b"\r\n\r\n")).decode()

    async def rest(self) -> bytes:
        return await self._reader.read()

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


def http_connections() -> float | None:
    return REGISTRY.get_sample_value("holdfast_gateway_http_connections_active")


async def http_connections_are(many: int) -> None:
    async with asyncio.timeout(10):
        while http_connections() != many:  # noqa: ASYNC110  # same loop
            await asyncio.sleep(0.01)


async def test_http_connection_over_the_bound_of_its_address_is_refused_and_closed(
    tmp_path: Path,
) -> None:
    async with running_node(tmp_path, access__http__per_address_max=2) as node:
        refused = "holdfast_gateway_http_connections_refused_total"
        before = REGISTRY.get_sample_value(refused) or 0
        held = [await Idle.connect(node) for _ in range(2)]
        await http_connections_are(2)
        late = await Idle.connect(node)
        head = await late._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"\r\nretry-after: 5\r\n" in head.lower()
        error = json.loads(await late.rest())["error"]
        assert (error["code"], error["retryable"]) == ("SERVICE_UNAVAILABLE", True)
        assert error["message"] == "this address holds its 2 HTTP connections"
        assert REGISTRY.get_sample_value(refused) == before + 1
        await held.pop().close()
        await http_connections_are(1)
        client = await Idle.connect(node)
        assert (await client.ask()).split()[1] == "200", "a place is free again"
        for each in (*held, client, late):
            await each.close()
        await http_connections_are(0)


async def test_a_connection_that_became_a_websocket_is_no_http_connection_any_more(
    tmp_path: Path,
) -> None:
    async with (
        running_node(tmp_path, access__http__per_address_max=1) as node,
        connected(node, "alice"),
        connected(node, "bob"),
    ):
        await http_connections_are(0)
        assert node.gateway.connections == 2
        client = await Idle.connect(node)
        assert (await client.ask()).split()[1] == "200"
        await client.close()


async def test_the_connections_of_a_declared_proxy_are_bounded_with_all_others_only(
    tmp_path: Path,
) -> None:
    limits = {"access__http__per_address_max": 1, "access__http__connections_max": 3}
    async with running_node(tmp_path, server__trusted_proxies=["127.0.0.1/32"], **limits) as node:
        clients = [await Idle.connect(node) for _ in range(3)]
        assert [(await client.ask()).split()[1] for client in clients] == ["200"] * 3
        fourth = await Idle.connect(node)
        assert b"this node holds its 3 HTTP connections" in await fourth.rest()
        for client in (*clients, fourth):
            await client.close()


async def test_fragments_become_one_message_with_a_ping_in_between(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        client = await raw(node, "alice")
        frame = json.dumps(
            {"type": "resume", "request_id": "q", "payload": {"cursors": {}}}
        ).encode()
        client.send(0x1, frame[:10], fin=False)
        client.send(0x9, b"")
        client.send(0x0, frame[10:20], fin=False)
        client.send(0x0, frame[20:])
        pong = await client._reader.readexactly(2)
        assert pong == b"\x8a\x00"
        assert (await client.frame())["request_id"] == "q"
        client.close()


@pytest.mark.parametrize("payload", [b"", b"\x03\xe8", b"\x03\xe8bye"])
async def test_a_client_that_closes_gets_its_own_words_back(tmp_path: Path, payload: bytes) -> None:
    async with running_node(tmp_path) as node:
        client = await raw(node, "alice")
        client.send(0x8, payload)
        assert await client.rest() == bytes([0x88, len(payload)]) + payload


def oversize(client: Raw) -> None:
    client.send(0x1, b"x" * 70_000)


def far_oversize(client: Raw) -> None:
    client.send(0x1, b"x" * 1_000_000)


def oversize_without_an_end(client: Raw) -> None:
    client._writer.write(b"\x81\xff" + (1 << 40).to_bytes(8, "big") + bytes(4) + b"x" * 200_000)


def binary(client: Raw) -> None:
    client.send(0x2, b"{}")


def reserved_bit(client: Raw) -> None:
    client.send(0x1, b"{}", rsv=4)


def bad_utf8(client: Raw) -> None:
    client.send(0x1, b'{"type":"\xff"}')


def seventeen_fragments(client: Raw) -> None:
    client.send(0x1, b"{", fin=False)
    for _ in range(17):
        client.send(0x0, b" ", fin=False)


def lone_continuation(client: Raw) -> None:
    client.send(0x0, b"{}")


def unmasked(client: Raw) -> None:
    client.send(0x1, b"{}", masked=False)


def reserved_ping(client: Raw) -> None:
    client.send(0x9, b"", rsv=4)


def bad_close_code(client: Raw) -> None:
    client.send(0x8, (1005).to_bytes(2, "big"))


def unknown_opcode(client: Raw) -> None:
    client.send(0x3, b"{}")


def longer_length_than_needed(client: Raw) -> None:
    client._writer.write(b"\x81\xfe" + (2).to_bytes(2, "big") + bytes(4) + b"{}")


BREAKS = [
    oversize,
    far_oversize,
    binary,
    reserved_bit,
    bad_utf8,
    seventeen_fragments,
    lone_continuation,
    unmasked,
    reserved_ping,
    bad_close_code,
    unknown_opcode,
    longer_length_than_needed,
]


@pytest.mark.parametrize("breaks", [oversize, far_oversize, oversize_without_an_end])
async def test_a_frame_above_the_limit_ends_with_our_closing_however_large_it_is(
    tmp_path: Path, breaks: Callable[[Raw], None]
) -> None:
    async with running_node(tmp_path) as node:
        client = await raw(node, "alice")
        breaks(client)
        rest = await client.rest()
        assert b'"reason":"protocol_error"' in rest and b"larger than 65536 bytes" in rest
        code = rest[rest.rindex(b"\x88") + 2 :][:2]
        assert int.from_bytes(code, "big") == 4501


@pytest.mark.parametrize("breaks", BREAKS)
async def test_a_broken_protocol_ends_that_connection_and_no_other(
    tmp_path: Path, breaks: Callable[[Raw], None]
) -> None:
    async with running_node(tmp_path) as node, connected(node, "bob") as bob:
        client = await raw(node, "alice")
        breaks(client)
        rest = await client.rest()
        assert b'"reason":"protocol_error"' in rest and b"\x88" in rest, (
            "it is said why before the close frame"
        )
        assert (
            int.from_bytes(rest[rest.rindex(b"\x88") + 2 :][:2], "big")
            == CloseReason.PROTOCOL_ERROR.code
        )
        assert (await ask(bob, "resume", cursors={}))["type"] == "resumed"


@pytest.mark.covers("000 contract 4: slow consumers")
async def test_a_stopped_reader_is_warned_then_closed_after_its_grace_and_resumes_complete(
    tmp_path: Path,
) -> None:
    # much more than a transport hides, which takes 64 KiB even if the client reads
    # nothing
    messages = 300

    async with running_node(
        tmp_path,
        gateway__backpressure__inbound__rate_limit_per_second=10000,
        gateway__backpressure__inbound__rate_limit_burst=10000,
        gateway__backpressure__inbound__work_rate_limit_per_second=20000,
        gateway__backpressure__inbound__work_rate_limit_burst=20000,
        gateway__backpressure__outbound__max_buffer_messages=200,
        gateway__backpressure__outbound__socket_send_buffer_bytes=8192,
    ) as node:
        chat_id = await create_chat(node, "alice", "bob")
        stopped = await raw(node, "bob", size=4096)
        stopped.send(0x1, json.dumps({"type": "resume", "payload": {"cursors": {}}}).encode())
        while (await stopped.frame())["type"] != "resumed":
            # a presence may come first; said before the resume is answered, the
            # messages would be a page of it
            pass

        async def talk() -> None:
            async with connected(node, "alice") as alice:
                for n in range(messages):
                    said = {
                        "client_message_id": f"c{n}",
                        "chat_id": chat_id,
                        "content": f"{n:03d}" + "x" * 4000,
                    }
                    ack = await ask(alice, "send_message", **said)
                    assert ack["type"] == "message_ack", ack

        began = asyncio.get_running_loop().time()
        talking = asyncio.create_task(talk())
        await closed(node, "bob")  # on a slow machine that is before everything is said
        assert asyncio.get_running_loop().time() - began >= 5, "never sooner than the grace"
        closing = None
        got = []
        frames = decode_all(await stopped.rest())
        for frame in frames:
            if frame["type"] == "message":
                got.append(frame["payload"]["sequence"])
            elif frame["type"] == "connection_closing":
                closing = frame["payload"]
        assert any(f["type"] == "error" and f["payload"]["code"] == "SLOW_CONSUMER" for f in frames)
        assert (
            closing is not None
            and closing["reason"] == "slow_consumer"
            and closing["reconnect_allowed"]
        )
        assert got == list(range(1, len(got) + 1)), "what was delivered has no hole"
        assert len(got) < messages
        await talking
        async with connected(node, "bob") as again:
            page = {"has_more": True, "through": len(got)}
            while page["has_more"]:
                answer = await ask(
                    again, "sync_request", chat_id=chat_id, epoch=1, after_sequence=page["through"]
                )
                page = answer["payload"]
                got += [message["sequence"] for message in page["messages"]]
        assert got == list(range(1, messages + 1))


async def closed(node: Node, user_id: str) -> None:
    """Wait until the server has closed the user's connection."""
    async with asyncio.timeout(30):
        while any(  # noqa: ASYNC110
            c.user.user_id == user_id and c.closing is None for c in node.gateway.open_connections
        ):
            # a real socket against a real clock: there is no signal to wait for
            await asyncio.sleep(0.1)


def decode_all(data: bytes) -> list[dict[str, Any]]:
    """The text frames; the close frame at the end is left off."""
    end = data.rfind(b"\x88")
    return decode_frames(data[:end] if end >= 0 else data)


@pytest.mark.parametrize(
    ("opcode", "payload", "fin"),
    [(3, b"", True), (9, b"x" * 126, True), (9, b"", False), (8, b"x", True)],
)
async def test_frame_that_picows_cannot_parse_is_answered_by_us_and_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, opcode: int, payload: bytes, fin: bool
) -> None:
    async with running_node(tmp_path) as node:
        client = await raw(node, "alice")
        client.send(1, b'{"type":"resume","request_id":"open","payload":{"cursors":{}}}')
        await asyncio.sleep(0)
        client.send(opcode, payload, fin=fin)
        for _ in range(20):
            client.send(opcode, payload, fin=fin)
            await asyncio.sleep(0)
        frames, close = (await client.rest()).rsplit(b"\x88", 1)
        said = decode_frames(frames)
        assert said[-1]["payload"]["reason"] == "protocol_error"
        assert [frame.get("request_id") for frame in said[:-1]] in (
            [],
            ["open"],
        ), "answered, if it was read before"
        assert close[1:3] == (4501).to_bytes(2, "big")

    assert [record for record in caplog.records if record.name == "holdfast.picows"] == []


async def test_one_frame_of_made_up_cursors_raises_no_epoch_and_a_proven_one_does(
    tmp_path: Path,
) -> None:
    async with running_node(tmp_path) as node:
        chats = [await create_chat(node, "alice", "bob") for _ in range(20)]
        before = await node.history.heads(chats)
        async with connected(node, "bob") as bob:
            answer = await ask(
                bob,
                "resume",
                cursors={chat_id: [before[chat_id].epoch, 1_000_000] for chat_id in chats},
            )
            assert (
                all(chat["reset"] for chat in answer["payload"]["chats"])
                and len(answer["payload"]["chats"]) == 20
            )
            assert await node.history.heads(chats) == before
            sent = await ask(
                bob, "send_message", client_message_id="c1", chat_id=chats[0], content="hello"
            )
            pushed = json.loads(await bob.recv())
            assert (pushed["type"], pushed["payload"]["sequence"]) == (
                "message",
                sent["payload"]["sequence"],
            )
        epoch, sequence = before[chats[0]].epoch, pushed["payload"]["sequence"]
        await lose_the_last_message(node, chats[0])
        async with connected(node, "bob") as bob:
            answer = await ask(
                bob, "resume", cursors={chats[0]: [epoch, sequence, pushed["payload"]["proof"]]}
            )
            (chat,) = (chat for chat in answer["payload"]["chats"] if chat["chat_id"] == chats[0])
            assert (chat["reset"], chat["epoch"]) == (True, epoch + 1)


async def lose_the_last_message(node: Node, chat_id: str) -> None:
    """What a disk does that was put back to an older state."""
    path = Path(node.settings.server.state_dir) / "chats.db"
    database = apsw.Connection(str(path))
    database.set_busy_timeout(5_000)
    chat = database.execute("SELECT chat FROM chats WHERE chat_id = ?", (chat_id,)).get
    with database:
        for trigger in database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'trigger'"
        ).fetchall():
            database.execute(f"DROP TRIGGER {trigger[0]}")  # a counter never goes back otherwise
        database.execute("DELETE FROM messages WHERE chat = ? AND sequence = 1", (chat,))
        database.execute("UPDATE counters SET sequence_counter = 0 WHERE chat = ?", (chat,))
    database.close()
