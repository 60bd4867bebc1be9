"""A whole node that takes the tokens of somebody else's sign-in, whose keys come from a
real server on loopback.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

import httpx
import pytest
import websockets
from credentials import admin_key_of
from program import ROOT
from sockets import ask, running_node, ws_url
from token_issuer import ISSUER, jwk, jwks, signed

from engines import free_port
from holdfast.access.jwks import JWKS_BYTES_MAX, BadJwks
from holdfast.message import User
from holdfast.node.jwks_fetch import fetch_jwks
from holdfast.node.node import Node

pytestmark = pytest.mark.real_time("uvloop")


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


class SignIn(ThreadingTCPServer):
    """Answers every request with ``says``; None: never."""

    daemon_threads = True

    def __init__(self) -> None:
        self.says: bytes | None = answer(jwks(jwk("ES256")))
        self.asked: list[bytes] = []
        self.ended = threading.Event()
        super().__init__(("127.0.0.1", 0), _Answers)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/jwks.json"


class _Answers(StreamRequestHandler):
    server: SignIn

    def handle(self) -> None:
        self.server.asked.append(b"".join(iter(self.rfile.readline, b"\r\n")))
        if self.server.says is None:
            self.server.ended.wait(30)
            return
        with suppress(OSError):
            self.wfile.write(self.server.says)


@pytest.fixture
def sign_in() -> Iterator[SignIn]:
    with SignIn() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()


BAD: dict[str, tuple[bytes, str, str]] = {
    "a redirect": (
        answer(b"", "302 Found", "Location: http://127.0.0.1:1/"),
        "redirect",
        "not followed",
    ),
    "another status": (answer(b"", "404 Not Found"), "status", "404"),
    "a set that is compressed": (
        answer(gzip.compress(jwks(jwk("ES256"))), "200 OK", "Content-Encoding: gzip"),
        "invalid",
        "compressed",
    ),
    "no HTTP at all": (b"SSH-2.0-OpenSSH_9.6\r\n", "invalid", "not valid HTTP"),
    "nothing": (b"", "unreachable", "cannot be reached"),
}


@pytest.mark.parametrize("case", BAD)
async def test_an_address_that_answers_otherwise_is_named_by_its_reason(
    case: str, sign_in: SignIn
) -> None:
    sign_in.says, reason, words = BAD[case]
    with pytest.raises(BadJwks, match=words) as caught:
        await fetch_jwks(sign_in.url)
    assert caught.value.reason == reason
    assert len(sign_in.asked) == (2 if case == "nothing" else 1), (
        "aiohttp asks a server once more that hangs up"
    )


async def test_no_more_is_read_than_a_set_may_have_and_nothing_of_ours_is_sent(
    sign_in: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    sign_in.says = answer(b" " * (10 * 1024 * 1024))
    assert len(await fetch_jwks(sign_in.url)) == JWKS_BYTES_MAX + 1
    (asked,) = sign_in.asked
    assert b"cookie" not in asked.lower() and b"authorization" not in asked.lower()


async def test_key_server_that_never_answers_is_given_up(sign_in: SignIn) -> None:
    sign_in.says = None
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await fetch_jwks(sign_in.url)


async def test_a_file_is_read_within_the_same_bound_and_what_is_not_there_is_unreachable(
    tmp_path: Path,
) -> None:
    file = tmp_path / "jwks.json"
    for gone in (f"http://127.0.0.1:{free_port()}/jwks.json", str(file), str(tmp_path)):
        with pytest.raises(BadJwks) as caught:
            await fetch_jwks(gone)
        assert caught.value.reason == "unreachable"
    file.write_bytes(b" " * (JWKS_BYTES_MAX + 10))
    assert len(await fetch_jwks(str(file))) == JWKS_BYTES_MAX + 1


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def trouble_with(
    http: httpx.AsyncClient, node: Node, words: str | None, issuer: str = ISSUER
) -> dict[str, Any]:
    """The status of the issuer, as soon as its trouble is this one."""
    async with asyncio.timeout(30):
        while True:
            answer = await http.get(
                "/admin/status",
                headers=bearer(admin_key_of(node)),
            )
            found: dict[str, Any] = answer.json()["issuers"][issuer]
            if found["trouble"] is words or (words and words in str(found["trouble"])):
                return found
            await asyncio.sleep(0.02)


async def test_the_example_of_the_guide_works(tmp_path: Path) -> None:
    guide = (ROOT / "docs/guides/access.md").read_text()
    (settings,) = (
        block
        for block in re.findall(r"^```toml\n(.*?)^```$", guide, re.M | re.S)
        if "issuer" in block
    )
    (program,) = re.findall(r"^```python\n(.*?)^```$", guide, re.M | re.S)
    made: dict[str, Any] = {}
    exec(program, made)
    (tmp_path / "jwks.json").write_text(made["published"])
    address = "https://sign-in.example.com/.well-known/jwks.json"
    file = tmp_path / "holdfast.toml"
    file.write_text(settings.replace(address, str(tmp_path / "jwks.json")))
    assert address in settings

    async with running_node(tmp_path / "state", file) as node:
        async with httpx.AsyncClient(base_url=node.url) as http:
            await trouble_with(http, node, None, "https://sign-in.example.com")
        assert node.tokens.verify(made["token"]).user == User("acme", "alice")


async def test_a_node_takes_the_tokens_of_another_sign_in_on_every_way_in(
    sign_in: SignIn, tmp_path: Path
) -> None:
    unknown = signed("EdDSA", "b", now=time.time())

    async def known(node: Node) -> None:
        alice = signed(
            "ES256", now=time.time(), holdfast_scopes=["chats:read", "chats:send", "chats:create"]
        )
        async with httpx.AsyncClient(base_url=node.url) as http:
            assert (await trouble_with(http, node, None))["keys"] == 1
            made = await http.post("/v1/chats", json={"name": "x"}, headers=bearer(alice))
            assert made.json()["chat"]["tenant"] == "acme"
            refused = await http.get("/v1/chats", headers=bearer(unknown))
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "UNAUTHORIZED")
        async with websockets.connect(
            ws_url(node), additional_headers=bearer(alice), compression=None
        ) as client:
            assert json.loads(await client.recv())["payload"]["user_id"] == "alice"
            assert (await ask(client, "authenticate", token=alice))["type"] == "authenticated"
            assert (await ask(client, "authenticate", token=unknown))["payload"][
                "code"
            ] == "UNAUTHORIZED"
        assert len(sign_in.asked) == 1

    async def in_trouble(node: Node) -> None:
        async with httpx.AsyncClient(base_url=node.url) as http:
            alice = bearer(signed("ES256", now=time.time()))
            assert len((await http.get("/v1/chats", headers=alice)).json()["chats"]) == 1, (
                "its keys were kept"
            )
            assert (await trouble_with(http, node, "redirect"))["keys"] == 1
            refused = await http.get("/v1/chats", headers=bearer(unknown))
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                503,
                "SERVICE_UNAVAILABLE",
            )
            assert 1 <= int(refused.headers["retry-after"]) <= 30
            assert (await http.get("/health/live", headers=bearer(unknown))).status_code == 200
        with pytest.raises(websockets.InvalidStatus) as caught:
            await websockets.connect(ws_url(node), additional_headers=bearer(unknown))
        assert (
            caught.value.response.status_code == 503
            and "Retry-After" in caught.value.response.headers
        )
        async with websockets.connect(ws_url(node), compression=None) as client:
            said = (await ask(client, "authenticate", token=unknown))["payload"]
            assert (said["code"], said["retryable"]) == ("SERVICE_UNAVAILABLE", True)

    issuers = json.dumps([{"issuer": ISSUER, "jwks": sign_in.url, "tenants": ["acme"]}])
    async with running_node(tmp_path, access__issuers=issuers) as node:
        await known(node)
    sign_in.says = BAD["a redirect"][0]
    async with running_node(tmp_path, access__issuers=issuers) as node:
        await in_trouble(node)
