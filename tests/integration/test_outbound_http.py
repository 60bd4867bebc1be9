"""Servers that never end their response: a call costs little and delays no other."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import aiohttp
import httpx
import pytest
import uvloop
from hostile_receiver import ENDLESS, OK, hostile_receivers
from program import Program
from token_issuer import ISSUER, jwk, jwks
from webhook_rig import until

from holdfast.access.issuers import Issuer, IssuerSettings
from holdfast.access.jwks import JWKS_BYTES_MAX, BadJwks
from holdfast.drivers.outbound_http import BoundedConnector, _BoundedProtocol
from holdfast.node.jwks_fetch import fetch_jwks
from holdfast.webhooks.http_client import WebhookCaller
from holdfast.work.chat_transport import ChatTransport
from holdfast.work.failures import JobFailed
from holdfast.work.job import Reason
from proof.virtual_loop import LoopClock

HELD_SECONDS_MAX = 0.25
"""How long a response may hold the event loop; without the bounds it takes seconds."""
CALLS_SECONDS_MAX = 5.0
GROWTH_BYTES_MAX = 48 * 1024 * 1024

_AROUND = "more than 64 KiB beside its body"
_INTERIM = "more than 10 interim answers"
OUTCOMES = {
    "continue": _INTERIM,
    "early_hints": _INTERIM,
    "blank_lines": _AROUND,
    "header_fields": "not valid HTTP: Too many headers",
    "long_header": "not valid HTTP: Got more than 8190 bytes",
    "answers": "200",
    "blank_lines_after_answer": "200",
    "body": "500",
    "tiny_chunks": "500",
    "chunk_extension": "500",
    "trailers": "500|Too many headers",
}
"""What the log of deliveries says of a call: the status that was answered, whatever
came behind it, or the error.
"""


def run(coroutine: Any) -> Any:
    """On the loop that a server runs on."""
    return uvloop.run(asyncio.wait_for(coroutine, 60))


def a_caller(**changes: float) -> WebhookCaller:
    return WebhookCaller(
        **{"timeout_seconds": 30, "connect_timeout_seconds": 30, **changes}, private_allowed=True
    )


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def connections_to(url: str) -> int:
    """How many this machine has open to the server at this address."""
    # ESTABLISHED, CLOSE_WAIT
    port, used = f":{int(url.split(':')[2].split('/')[0]):04X}", ("01", "08")
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(port) and row[3] in used for row in rows)


async def loop_held(work: Awaitable[None]) -> float:
    """For how much processor time at most nothing else ran on the loop while ``work``
    did.

    Without the collector: with the objects of all collected tests one pass of it takes
    most of a second.
    """
    gc.disable()
    try:
        task, held, before = asyncio.ensure_future(work), 0.0, time.thread_time()
        while not task.done():
            await asyncio.sleep(0)
            now = time.thread_time()
            held, before = max(held, now - before), now
        task.result()
        return held
    finally:
        gc.enable()


async def none_open_to(url: str) -> None:
    async with asyncio.timeout(2):
        await until(lambda: not connections_to(url))


@pytest.fixture(scope="module")
def hostile() -> Iterator[dict[str, str]]:
    with hostile_receivers() as urls:
        yield urls


# --- servers without an end
# ---------------------------------------------------------------------------


def test_every_kind_of_a_hostile_receiver_has_its_outcome() -> None:
    assert OUTCOMES.keys() == ENDLESS.keys()


@pytest.mark.parametrize("kind", ENDLESS)
async def test_endless_response_costs_bounded_bytes_and_time_and_does_not_hold_the_loop(
    kind: str, hostile: dict[str, str]
) -> None:
    async def call(caller: WebhookCaller) -> str:
        try:
            return str((await caller.post(hostile[kind], b"{}", {}, 1000))[0])
        except OSError as error:
            return str(error)

    async def calls() -> None:
        callers = [a_caller() for _ in range(3)]
        memory, began = resident_bytes(os.getpid()), time.monotonic()
        outcomes = await asyncio.gather(*(call(caller) for caller in callers))
        await none_open_to(hostile[kind])  # also those that wait for the next call
        assert time.monotonic() - began < CALLS_SECONDS_MAX
        assert resident_bytes(os.getpid()) - memory < GROWTH_BYTES_MAX
        for caller in callers:
            await caller.close()
        assert [outcome for outcome in outcomes if not re.search(OUTCOMES[kind], outcome)] == []

    assert await loop_held(calls()) < HELD_SECONDS_MAX


async def test_jwks_response_without_a_status_is_given_up_at_every_fetch(
    hostile: dict[str, str],
) -> None:
    """Known keys stay valid; the reason is counted as for any unreadable set."""
    answers = [hostile["continue"], "good", hostile["blank_lines"]]
    failures = list[str]()

    async def fetch(_: str) -> bytes:
        where = answers.pop(0)
        try:
            return jwks(jwk("ES256")) if where == "good" else await fetch_jwks(where)
        except BadJwks as bad:
            failures.append(bad.reason)
            raise

    async def refreshes() -> None:
        issuer = Issuer(IssuerSettings(ISSUER, hostile["continue"], ("acme",)), fetch, LoopClock())
        seen = list[tuple[str | None, int]]()

        async def changed(*_: object) -> None:
            pass

        for _ in range(3):
            await issuer._refresh(changed)
            seen.append((issuer.trouble, issuer.status()["keys"]))
        (first, none), good, (last, known) = seen
        assert _INTERIM in str(first) and _AROUND in str(last) and good == (None, 1)
        assert (none, known, failures) == (0, 1, ["too_large", "too_large"])

    began = time.monotonic()
    assert await loop_held(refreshes()) < HELD_SECONDS_MAX
    assert time.monotonic() - began < CALLS_SECONDS_MAX


@pytest.mark.parametrize("kind", ["continue", "blank_lines"])
async def test_chat_transport_names_the_hostile_response_and_the_job_is_retried(
    kind: str, hostile: dict[str, str]
) -> None:
    context: Any = SimpleNamespace(job=SimpleNamespace(payload=b"hi"), key="k")

    async def sends() -> None:
        async with ChatTransport(hostile[kind], "credential", source="test") as chats:
            with pytest.raises(JobFailed, match=OUTCOMES[kind]) as caught:
                await chats.send(context, "chat_1")
        assert caught.value.reason is Reason.TRANSPORT_UNAVAILABLE

    assert await loop_held(sends()) < HELD_SECONDS_MAX


@pytest.mark.alone
async def test_hostile_receivers_and_issuer_do_not_delay_another_tenant(
    tmp_path: Path, hostile: dict[str, str]
) -> None:
    """One server: an endpoint of each kind, four chats each, and an issuer whose keys
    are behind endless 1xx.
    """
    issuers = json.dumps([{"issuer": ISSUER, "jwks": hostile["continue"], "tenants": ["acme"]}])
    program = Program(tmp_path / "state")
    try:
        server = program.serve(
            "--set", "work.webhooks.private_allowed=true", "--set", f"access.issuers={issuers}"
        )
        await _check_other_tenant(program, server.pid, hostile)
    finally:
        program.stop()


async def _check_other_tenant(program: Program, pid: int, hostile: dict[str, str]) -> None:
    admin = {
        "Authorization": (
            f"Bearer {json.loads((program.state_dir / 'secrets.json').read_text())['admin_key']}"
        )
    }

    def user(tenant: str) -> dict[str, str]:
        return {
            "Authorization": (
                f"Bearer {program.ok('token', '--user', 'u', '--tenant', tenant).strip()}"
            )
        }

    async with httpx.AsyncClient(base_url=program.url, timeout=30) as http:

        async def post(path: str, headers: dict[str, str], **body: str) -> dict[str, Any]:
            answer = await http.post(path, headers={**headers, "Idempotency-Key": "k"}, json=body)
            assert answer.status_code == 201, answer.text
            return dict(answer.json())

        async def get(path: str, headers: dict[str, str]) -> dict[str, Any]:
            answer = await http.get(path, headers=headers)
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        good, evil = user("good"), {kind: user(kind.replace("_", "-")) for kind in ENDLESS}
        chats = {kind: [await _chat(http, evil[kind]) for _ in range(4)] for kind in ENDLESS}
        memory, began = resident_bytes(pid), time.monotonic()
        hooks = {}
        for kind in ENDLESS:
            hook = {"url": hostile[kind], "tenant": kind.replace("_", "-"), "reason": "test"}
            made = await http.post("/admin/webhooks", headers=admin, json=hook)
            hooks[kind] = made.json()["endpoint_id"]
        sends = [
            asyncio.create_task(post(f"/v1/chats/{chat}/messages", evil[kind], content="hi"))
            for kind in ENDLESS
            for chat in chats[kind]
        ]
        waited, logs = list[float](), dict[str, list[dict[str, Any]]]()
        while any(len(logs.get(kind, [])) < 4 for kind in ENDLESS):
            assert time.monotonic() - began < 30, {kind: len(log) for kind, log in logs.items()}
            for kind in ENDLESS:
                asked = time.monotonic()
                await get("/v1/chats", good)
                waited.append(time.monotonic() - asked)
                await asyncio.sleep(0.01)  # within the rate of a user
                logs[kind] = (await get(f"/admin/webhooks/{hooks[kind]}/deliveries", admin))[
                    "deliveries"
                ]
        await asyncio.gather(*sends)
        for kind, log in logs.items():
            for each in log:
                outcome = f"{each['status']} {each['error']}"
                # A call that takes over a connection before the blank lines have come
                # gets them in front of its answer.
                reused = kind == "blank_lines_after_answer" and _AROUND in outcome
                assert re.search(OUTCOMES[kind], outcome) or reused, each
        assert _INTERIM in (await get("/admin/status", admin))["issuers"][ISSUER]["trouble"]
        assert max(waited) < 4 * HELD_SECONDS_MAX, sorted(waited)[-10:]
        assert resident_bytes(pid) - memory < GROWTH_BYTES_MAX


async def _chat(http: httpx.AsyncClient, headers: dict[str, str]) -> str:
    made = await http.post("/v1/chats", headers=headers, json={"name": "x"})
    assert made.status_code == 201, made.text
    return str(made.json()["chat"]["chat_id"])


# --- how a connection is used
# -------------------------------------------------------------------------

Answers = Callable[[int, int], bytes]
"""What is sent for the nth request of the mth connection."""


@asynccontextmanager
async def answering(answers: Answers) -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """A server's URL and its connections."""
    connections = list[asyncio.StreamWriter]()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        number, requests = len(connections), 0
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"content-length: (\d+)", head.lower())
                await reader.readexactly(int(length[1]) if length else 0)
                requests += 1
                writer.write(answers(number, requests))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook", connections
    finally:
        server.close()


async def test_connection_is_reused_after_a_few_interim_responses() -> None:
    interim = b"HTTP/1.1 102 Processing\r\n\r\n" * 10

    caller = a_caller()
    async with answering(lambda _, request: interim * (request % 2) + OK) as (url, connections):
        for _ in range(20):
            assert (await caller.post(url, b"{}", {}, 100))[0] == 200
        assert len(connections) == 1
        await caller.close()


@pytest.mark.parametrize(
    "unasked", [OK, b"x", b"\r\n", b"HTTP/1.1 101 Switching Protocols\r\n\r\n"]
)
async def test_connection_with_unrequested_bytes_is_not_reused(
    unasked: bytes,
) -> None:
    caller = a_caller()
    async with answering(lambda connection, _: OK.replace(b"200", b"20%d" % connection)) as (
        url,
        connections,
    ):
        assert (await caller.post(url, b"{}", {}, 100))[0] == 201
        connections[0].write(unasked)
        await none_open_to(url)
        assert (await caller.post(url, b"{}", {}, 100))[0] == 202
        await caller.close()


@pytest.mark.parametrize("chunk", [100, 4096, 70_000])
async def test_long_chunked_body_is_read_up_to_the_callers_bound(chunk: int) -> None:
    data = b" " * (JWKS_BYTES_MAX - 2) + b"{}"
    pieces = [data[start : start + chunk] for start in range(0, len(data), chunk)]
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"

    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with answering(lambda *_: head + body) as (url, _):
        assert await fetch_jwks(url) == data
        caller = a_caller()
        assert (await caller.post(url, b"{}", {}, 1000))[:2] == (200, b" " * 1000)
        await caller.close()


@pytest.mark.parametrize("around", [b"1;" + b"a" * 70_000 + b"\r\n{\r\n", b"1\r\n{\r\n" * 14_000])
async def test_chunk_extensions_and_trailers_of_a_body_are_bounded(
    around: bytes,
) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with answering(lambda *_: head + around + b"0\r\n\r\n") as (url, _):
        with pytest.raises(BadJwks, match=_AROUND):
            await fetch_jwks(url)


async def test_body_that_arrives_faster_than_it_is_read_is_not_excessive() -> None:
    """One read of the transport brings more than the reader's buffer: the parser rests,
    and the bytes behind are body all the same.
    """
    loop, piece = asyncio.get_running_loop(), b"100\r\n" + b"a" * 256 + b"\r\n"
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    protocol = _BoundedProtocol(loop)
    protocol.connection_made(Mock(is_closing=lambda: False))
    protocol.set_response_params(read_until_eof=True, auto_decompress=False)
    protocol.data_received(head)
    for _ in range(3):
        protocol.data_received(piece * 1000)
    _, body = await protocol.read()
    assert body.total_bytes < 3000 * 256  # the parser rests
    reading = asyncio.create_task(body.read())
    await asyncio.sleep(0)
    protocol.data_received(piece * 1000 + b"0\r\n\r\n")
    assert len(await reading) == 4000 * 256


async def test_receiver_that_does_not_read_keeps_no_connection_after_the_call() -> None:
    """A close would wait for it to take the rest of the request."""

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    caller, url = (
        a_caller(timeout_seconds=0.1),
        f"http://127.0.0.1:{listener.getsockname()[1]}/",
    )
    with pytest.raises(OSError, match=r"no answer within 0\.1 s"):
        await caller.post(url, b"x" * (8 << 20), {}, 100)
    await none_open_to(url)
    await caller.close()
    listener.close()


async def test_aiohttp_with_another_connection_class_is_refused() -> None:
    """The bounds rest on a private attribute of it: without them nothing is sent."""

    async with answering(lambda *_: OK) as (url, connections):
        connector = BoundedConnector()
        connector._factory = aiohttp.TCPConnector()._factory
        async with aiohttp.ClientSession(connector=connector) as session:
            with pytest.raises(RuntimeError, match="cannot be bounded"):
                await session.get(url)
        assert len(connections) <= 1
