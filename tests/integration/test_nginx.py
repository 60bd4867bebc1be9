"""The NGINX configuration that is shipped, before a real server: what passes, what is
denied, what is bounded.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest
from program import ROOT, Program
from work_rigs import until

from engines import Server, free_port, nginx
from engines.fixtures import had
from holdfast.api.deps import ApiSettings

HOST = "chat.example.com"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    program = Program(tmp_path_factory.mktemp("nginx") / "state")
    trusted = ("--set", "server.trusted_proxies=127.0.0.1/32")
    program.serve(*trusted)
    yield program
    program.stop()


@pytest.fixture(scope="module")
def plain_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def proxy(program: Program, plain_port: int) -> Iterator[Server]:
    proxy = had("nginx", lambda: nginx.start(program.port, plain_port))
    yield proxy
    proxy.stop()


def session(proxy: Server) -> aiohttp.ClientSession:
    """A client that knows the certificate and the host name."""
    known = ssl.create_default_context(cafile=str(proxy.folder / "cert.pem"))
    return aiohttp.ClientSession(
        proxy.url,
        headers={"Host": HOST},
        connector=aiohttp.TCPConnector(ssl=known, limit=0),
        cookie_jar=None,
    )


def get(
    proxy: Server, target: str, *, method: str = "GET", headers: str = "", body: bytes = b""
) -> tuple[int, str]:
    """The status and the head of the response; the target is sent unchanged."""
    known = ssl.create_default_context(cafile=str(proxy.folder / "cert.pem"))
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    request = (
        f"{method} {target} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n{length}{headers}\r\n"
    )
    with closing(
        known.wrap_socket(socket.create_connection(("127.0.0.1", proxy.port)), server_hostname=HOST)
    ) as line:
        line.settimeout(20)
        line.sendall(request.encode() + body)
        answer = b""
        while piece := line.recv(65536):
            answer += piece
    return int(answer.split(b" ", 2)[1]), answer.split(b"\r\n\r\n")[0].decode()


async def test_requests_and_sockets_pass_and_browsers_must_use_tls(
    proxy: Server, program: Program
) -> None:
    status, head = get(proxy, "/health/ready")
    assert status == 200 and "strict-transport-security: max-age=31536000" in head.lower()
    assert "server: nginx\r\n" in head.lower() + "\r\n", "no version"
    token = program.ok("token", "--user", "alice").strip()

    async def talk(line: socket.socket) -> None:
        known = ssl.create_default_context(cafile=str(proxy.folder / "cert.pem"))
        reader, writer = await asyncio.open_connection(sock=line, ssl=known, server_hostname=HOST)
        writer.write(
            f"GET /v1/ws HTTP/1.1\r\nHost: {HOST}\r\nUpgrade: websocket\r\nConnection:"
            " Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key:"
            " dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: holdfast.v1\r\nX-Device-ID:"
            f" d1\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 101 " in head, head
        first = await reader.readexactly(2)
        assert first[0] == 0x81, "a text frame: the session is established"
        writer.close()

    line = socket.create_connection(("127.0.0.1", proxy.port))
    line.setblocking(False)
    async with asyncio.timeout(20):
        await talk(line)


@pytest.mark.parametrize(
    "target",
    [
        "/admin/status",
        "/admin",
        "/admin/",
        "/metrics",
        "//admin/status",
        "/v1/../admin/status",
        "/%61dmin/status",
        "/admin%2fstatus",
        "/./admin/keys",
        "/metrics/",
        "/metrics?x=1",
        "/v1/chats/%2e%2e/%2e%2e/admin/status",
    ],
)
def test_operators_paths_are_denied_from_outside_with_any_key(
    proxy: Server, program: Program, target: str
) -> None:
    key = program.ok(
        "key", "create", "admin", "--label", "outside", "--scope", "status:read"
    ).split()[0]
    status, _ = get(proxy, target, headers=f"Authorization: Bearer {key}\r\n")
    assert status == 403
    assert "node_id" in program.ok("status", "--json"), "on the machine itself it goes on"


def test_bodies_and_heads_are_bounded(proxy: Server) -> None:
    assert get(proxy, "/v1/chats", method="POST", body=b"x" * 65_537)[0] == 413
    assert get(proxy, "/v1/chats?" + "x" * 9000)[0] == 414
    assert get(proxy, "/v1/chats", headers=f"X-Long: {'x' * 9000}\r\n")[0] in (400, 431)
    assert get(proxy, "/v1/chats", method="POST", body=b"x" * 65_000)[0] == 401, (
        "what is allowed comes through"
    )


def test_plain_http_is_sent_to_https_by_name(proxy: Server, plain_port: int) -> None:
    with closing(socket.create_connection(("127.0.0.1", plain_port))) as line:
        line.sendall(
            b"GET /v1/chats?limit=1 HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
        )
        head = line.recv(65536).decode()
    assert " 308 " in head and "Location: https://chat.example.com/v1/chats?limit=1\r\n" in head


def test_old_tls_is_refused(proxy: Server) -> None:
    old = ssl.create_default_context(cafile=str(proxy.folder / "cert.pem"))
    with pytest.warns(DeprecationWarning):  # that it is old is the point
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with (
        closing(socket.create_connection(("127.0.0.1", proxy.port))) as line,
        pytest.raises(ssl.SSLError),
    ):
        old.wrap_socket(line, server_hostname=HOST)


async def test_requests_and_connections_beyond_the_rate_are_refused(
    program: Program,
) -> None:
    """With a proxy of its own: the others' requests come from the same address."""
    few = {"limit_conn holdfast_connections 200;": "limit_conn holdfast_connections 5;"}
    proxy = had("nginx", lambda: nginx.start(program.port, free_port(), few))

    async def body(client: aiohttp.ClientSession) -> None:
        held = list[asyncio.StreamWriter]()
        for _ in range(5):  # a request whose body does not come yet
            known = ssl.create_default_context(cafile=str(proxy.folder / "cert.pem"))
            _, writer = await asyncio.open_connection(
                "127.0.0.1", proxy.port, ssl=known, server_hostname=HOST
            )
            writer.write(
                f"POST /v1/chats HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 10\r\n\r\nx".encode()
            )
            await writer.drain()
            held.append(writer)
        await until(lambda: _answers(client, 429))
        for writer in held:
            writer.close()
        await until(lambda: _answers(client, 200))
        statuses = await asyncio.gather(*(_status(client) for _ in range(5)))
        many = [
            status
            for _ in range(120)
            for status in await asyncio.gather(*(_status(client) for _ in range(3)))
        ]
        assert set(statuses) == {200} and set(many) == {
            200,
            429,
        }, "a burst passes, more than that does not"

    try:
        async with asyncio.timeout(60), session(proxy) as client:
            await body(client)
    finally:
        proxy.stop()


async def _status(client: aiohttp.ClientSession) -> int:
    async with client.get("/health/live", server_hostname=HOST) as answer:
        return answer.status


async def _answers(client: aiohttp.ClientSession, status: int) -> bool:
    return await _status(client) == status


async def test_forwarded_address_of_a_client_does_not_reach_the_server(tmp_path: Path) -> None:
    """What a client says of its own address does not reach the server."""
    with closing(socket.create_server(("127.0.0.1", 0))) as upstream:
        proxy = had("nginx", lambda: nginx.start(upstream.getsockname()[1], free_port()))
        try:
            seen = list[bytes]()

            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                seen.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
                writer.close()

            async with asyncio.timeout(20), await asyncio.start_server(accept, sock=upstream):
                forged = "X-Forwarded-For: 203.0.113.9\r\n"
                status, _ = await asyncio.to_thread(get, proxy, "/v1/chats", headers=forged)
                assert status == 204
            assert b"X-Forwarded-For: 127.0.0.1\r\n" in seen[0] and b"203.0.113.9" not in seen[0]
        finally:
            proxy.stop()


def test_hanging_node_is_given_up_soon_after_its_longest_answer() -> None:
    """The first line is that of the plain requests; the others are of one location."""
    shipped = (ROOT / "deploy" / "nginx.conf").read_text()
    first = re.search(r"proxy_read_timeout (\d+)s", shipped)
    assert first is not None
    assert ApiSettings().request_seconds_max + 0.5 < float(first[1]) <= 10


def test_the_guide_uses_what_is_shipped() -> None:
    assert "deploy/nginx.conf" in (ROOT / "docs" / "guides" / "operating.md").read_text()
