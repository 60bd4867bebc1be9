"""Nothing cheap costs everybody: the processor time of the most expensive requests,
frames and handshakes found.

The bounds: 25 ms in one turn of the loop, 2 ms without a credential. A new endpoint or
frame needs a row in ``support/cost_table.py``. What nobody thought of is looked for
with random inputs (``support/cost_fuzz.py``): ``HOLDFAST_SEED=n`` tries others.
"""

from __future__ import annotations

import base64
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from cost import TENANT, USER, CostedNode, costed_node
from cost_fuzz import Fuzz
from cost_table import ENDPOINTS as ROWS
from cost_table import FRAMES, Row
from flooder import frame
from msgspec import Raw

from holdfast.access.revocations.contract import ENTRIES_MAX, Revocation
from holdfast.api.endpoint import Endpoint
from holdfast.api.routes import ENDPOINTS
from holdfast.gateway.transport.http import (
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    PATH_BYTES_MAX,
    URL_BYTES_MAX,
)
from holdfast.limits.admin import ImportRequest
from holdfast.limits.entry_rules import DEFAULT_RULES
from holdfast.message import Draft, User
from holdfast.store.commands import AddMember, ChangeBan, CommandContext, CreateChat
from holdfast.work.job import JobDraft as JobDraft

STRANGER_MS = 2.0
SEED = os.environ.get("HOLDFAST_SEED", "1")
FUZZED_BODIES, FUZZED_FRAMES = 2, 4
"""Of each endpoint, of each type of frame."""
BODY_BYTES = 64 * 1024
PLAIN = Row()
PAGES = ("/nothing", "/", "/openapi.json", "/docs", "/docs/style.css")


def filled(text: str, unit: str, size: int) -> str:
    return text + unit * ((size - len(text)) // len(unit))


def json_bombs(size: int) -> Mapping[str, bytes]:
    """Bodies and frames of ``size`` bytes that are expensive to read somewhere."""
    many = (size - 40) // 18
    keys = ",".join(f'"k{number:07}":{number:06}' for number in range(1, many))
    return {
        "lists": b"[" * size,
        "objects": b'{"a":' * (size // 5),
        "closed lists": b"[" * (size // 2) + b"]" * (size // 2),
        "a number": b"9" * size,
        "a fraction": b"0." + b"3" * (size - 2),
        "many keys": b"{" + keys.encode() + b"}",
        "one key again and again": b"{" + b'"reason":"x",' * ((size - 20) // 13) + b'"reason":"x"}',
        "an unknown field": b'{"' + b"x" * (size - 10) + b'":1}',
        "escapes": b'{"reason":"' + b"\\u20ac" * ((size - 20) // 6) + b'"}',
        "a list of names": b'{"members":[' + b'"m12345",' * ((size - 30) // 9) + b'"m"]}',
        "half surrogates": b'{"reason":"' + b"\\ud83d" * ((size - 20) // 6) + b'"}',
        "a list of numbers": b'{"seqs":[' + b"1," * ((size - 20) // 2) + b"1]}",
        "no JSON": b"\xff" * size,
    }


BOMBS = json_bombs(BODY_BYTES - 64)
LARGE_BOMBS = {
    **json_bombs((4 << 20) - 64),
    # within the bound of structure, so that all of it is read
    "as many keys as may be": json_bombs(100_000 * 18)["many keys"],
    "as many numbers as may be": b'{"input":[' + b"1.2345678901234567e-300," * 99_990 + b"1]}",
    "as many items as may be": b'{"input":[' + b'{"role":"user","content":""},' * 49_000 + b"1]}",
}
"""For endpoints that take 4 MiB."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CostedNode]:
    with costed_node(tmp_path_factory.mktemp("cost")) as node:
        node.run(furnish(node))
        yield node


CHAT = "chat_of_everybody"
AT = "2026-01-01T00:00:00.000Z"


async def furnish(world: CostedNode) -> None:
    """One chat with as many members and messages as a page can hold, one user with many
    chats, rules and jobs.
    """
    node, tenant = world.node, TENANT

    def act(user_id: str = USER) -> CommandContext:
        return CommandContext(User(tenant, user_id), AT, node._ids.new("msg_"), operator=True)

    await node.engines.chats.change(
        CreateChat(act(), CHAT, "group", "everybody", [f"m{n}" for n in range(80)])
    )
    for n in range(80, 300):
        await node.engines.chats.change(AddMember(act(), CHAT, f"m{n}", "member"))
    drafts = [
        Draft(User(tenant, USER), CHAT, f"c{n}", "€" * 340, "text/plain", node._ids.new("msg_"), AT)
        for n in range(250)
    ]
    await node.engines.chats.append(drafts)
    for n in range(300):
        await node.engines.chats.change(ChangeBan(act(), CHAT, f"banned-{n}", True))
    for n in range(ENTRIES_MAX - 1_000):
        entry = Revocation("ban", "acme", f"banned-{n}", "", 0, AT, None, n + 1)
        node.revocations._entries[entry.key] = entry
    for n in range(200):
        await node.engines.records.record(act(), "cost", "x" * 500, "")
        await node.engines.chats.change(CreateChat(act(), f"chat_{n}", "group", "x" * 60, []))
    rule = {"resource": "r" * 200, "algorithm": "token_bucket", "limit": 10, "window": "60s"}
    rules = [{"tenantID": f"t{n}", **rule} for n in range(600)]
    wide = {
        "tenantID": "*",
        "algorithm": "token_bucket",
        "limit": 10**9,
        "window": "60s",
        "burstSize": 10**9,
    }
    # no rate is what is measured here
    rules += [{**wide, "resource": rule.resource} for rule in DEFAULT_RULES]
    await node.limits.control.import_rules(
        Raw(msgspec.json.encode(rules)), "cost", ImportRequest(False, None, "")
    )
    await node.limits.feed.sync()
    await node._work.jobs.enqueue(
        [JobDraft("not.yet", b"x" * 200, f"s{n}", delay_seconds=3600) for n in range(1_000)]
    )


def request(method: str, target: str, *headers: str, body: bytes = b"") -> bytes:
    length = [f"Content-Length: {len(body)}", "Content-Type: application/json"] if body else []
    return (
        "\r\n".join([f"{method} {target} HTTP/1.1", "Host: x", *headers, *length, "", ""]).encode()
        + body
    )


def target_of(endpoint: Endpoint, row: Row = PLAIN) -> str:
    """A path of the endpoint: of the chat of everybody, else of what does not exist."""
    path = endpoint.path.replace(":path", "")
    values = {"chat_id": CHAT, "user_id": "m1", "sequence": "1", "seq": "1", **row.path}
    while "{" in path:
        name = path[path.index("{") + 1 : path.index("}")]
        path = path.replace("{" + name + "}", values.get(name, "none"))
    return f"{path}?{row.query}" if row.query else path


Ask = Callable[[], bytes]


def strange(method: str, target: str) -> Mapping[str, bytes]:
    """What is expensive at any address, within and beyond the bounds of a head."""
    names = "".join(f"&{n:x}" for n in range(20_000))
    some = [f"X-{n}: {n}" for n in range(HEADERS_MAX - 5)]
    return {
        "a long query": request(method, (target + "?" + names)[: URL_BYTES_MAX - 10]),
        "a query of one name": request(method, filled(target + "?", "a&", URL_BYTES_MAX - 10)),
        "a query beyond its bound": request(method, target + "?" + names[:60_000]),
        "a path of line breaks": request(method, filled(target + "/", "%0a", PATH_BYTES_MAX - 10)),
        "a path beyond its bound": request(method, filled(target + "/", "%0a", 60_000)),
        "many headers": request(method, target, *some),
        "headers beyond their bound": request(
            method, target, *(f"X-{n}: {n}" for n in range(5_000))
        ),
        "many requests in one segment": request(method, target) * 4_000,
        "a long header": request(method, target, "X-Long: " + "x" * (HEAD_BYTES_MAX - 500)),
        "an endless list of proxies": request(
            method, target, "X-Forwarded-For: " + "," * (HEAD_BYTES_MAX - 500)
        ),
        "a long credential": request(
            method, target, "Authorization: Bearer " + "e" * (HEAD_BYTES_MAX - 500)
        ),
        "a long token": request(method, target, "Authorization: Bearer " + "a." * 2_047),
        "an API key": request(
            method, target, "Authorization: Bearer hf_admin_" + "e" * (HEAD_BYTES_MAX - 500)
        ),
        "a long origin": request(method, target, "Origin: " + "e" * (HEAD_BYTES_MAX - 500)),
    }


def judge(costs: Mapping[str, float], bounds_ms: Mapping[str, float]) -> None:
    beyond = {
        what: round(cost * 1000, 2) for what, cost in costs.items() if cost * 1000 > bounds_ms[what]
    }
    assert not beyond, f"milliseconds in one turn of the loop: {beyond} (HOLDFAST_SEED={SEED})"


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda e: e.name)
def test_a_request_is_cheap_whatever_its_bytes(world: CostedNode, endpoint: Endpoint) -> None:
    row, target = ROWS[endpoint.name], target_of(endpoint)
    costs: dict[str, float] = {}

    def ask(where: str, body: bytes = b"") -> None:
        headers = [*world.credential(endpoint.caller), world.address()]
        if endpoint.key != "none":
            headers.append(f"Idempotency-Key: {os.urandom(8).hex()}")
        answer = world.request(request(endpoint.method, where, *headers, body=body))
        assert answer[9:12] not in (
            b"401",
            b"403",
            b"429",
            b"500",
            b"503",
        ), f"this measures a refusal: {answer!r}"

    body = b"" if row.body is None else msgspec.json.encode(row.body)
    costs["its row"] = world.cost(lambda: ask(target_of(endpoint, row), body))
    if endpoint.body is not None:
        bombs = BOMBS if endpoint.body_bytes_max is None else LARGE_BOMBS
        for what, bomb in bombs.items():
            costs[what] = world.cost(lambda bomb=bomb: ask(target, bomb))
    judge(costs, dict.fromkeys(costs, row.milliseconds_max))


def test_a_stranger_costs_little_at_every_address(world: CostedNode) -> None:
    costs: dict[str, float] = {}
    addresses = {(e.method, target_of(e)) for e in ENDPOINTS} | {("GET", page) for page in PAGES}
    for page in PAGES:
        world.request(request("GET", page, world.address()))  # made once, on a thread
    for method, target in sorted(addresses):
        data = request(method, target, world.address(), body=BOMBS["objects"])
        costs[f"{method} {target}"] = world.cost(lambda data=data: world.request(data))
    for header in ("Accept-Encoding", "If-None-Match"):
        data = request("GET", PAGES[-1], f"{header}: " + "a," * (HEAD_BYTES_MAX // 2 - 100))
        costs[f"a page, {header}"] = world.cost(lambda data=data: world.request(data))
    for method, target in [
        ("GET", "/health/live"),
        ("GET", "/v1/chats"),
        ("POST", "/v1/limits/check"),
        ("GET", "/x"),
    ]:
        for what, data in strange(method, target).items():
            costs[f"{method} {target}, {what}"] = world.cost(lambda data=data: world.request(data))
    judge(costs, dict.fromkeys(costs, STRANGER_MS))


def test_a_user_costs_little_by_the_shape_of_a_request(world: CostedNode) -> None:
    costs: dict[str, float] = {}
    for method, target in [
        ("GET", "/v1/chats"),
        ("GET", f"/v1/chats/{CHAT}/messages"),
        ("GET", "/admin/rules"),
    ]:
        for what, data in strange(method, target).items():
            who = world.credential("operator" if target.startswith("/admin") else "user")
            if b"Authorization" not in data:
                data = data.replace(
                    b"Host: x\r\n", ("\r\n".join(["Host: x", *who]) + "\r\n").encode(), 1
                )
            costs[f"{target}, {what}"] = world.cost(lambda data=data: world.request(data))
    judge(costs, dict.fromkeys(costs, 25.0))


def fuzzed(endpoint: Endpoint, fuzz: Fuzz) -> Iterator[tuple[str, str, list[str], bytes]]:
    """What is asked, where, with which headers and which body."""
    row, target = ROWS[endpoint.name], target_of(endpoint)
    valid = b"" if row.body is None else msgspec.json.encode(row.body)
    yield "query", f"{target}?{fuzz.text(URL_BYTES_MAX - len(target) - 1)}", [], valid
    yield "header", target, [fuzz.header(HEAD_BYTES_MAX - 1_000)], valid
    for name in {"chat_id", "user_id", "sequence", "seq", "name"} & set(
        re.findall(r"{(\w+)", endpoint.path)
    ):
        odd = row._replace(path={name: fuzz.text(PATH_BYTES_MAX - len(target))}, query="")
        yield name, target_of(endpoint, odd), [], valid
    for number in range(FUZZED_BODIES if endpoint.body is not None else 0):
        yield (
            f"body {number}",
            target,
            [],
            fuzz.body(row.body or {}, endpoint.body_bytes_max or BODY_BYTES),
        )


def test_no_random_request_is_expensive(world: CostedNode) -> None:
    costs: dict[str, float] = {}
    bounds: dict[str, float] = {}

    def ask(data: bytes) -> None:
        answer = world.request(data)
        assert answer[9:12] not in (
            b"429",
            b"500",
            b"503",
        ), f"HOLDFAST_SEED={SEED}: {data[:300]!r} {answer!r}"

    for endpoint in ENDPOINTS:
        method, bound = endpoint.method, ROWS[endpoint.name].milliseconds_max
        asked = list(fuzzed(endpoint, Fuzz(f"{SEED} {endpoint.name}")))
        for what, target, headers, body in asked:
            who = world.credential(endpoint.caller)
            data = request(method, target, *who, *headers, body=body)
            name = f"{endpoint.name}, {what}"
            costs[name], bounds[name] = world.cost(lambda data=data: ask(data)), bound
        what, target, headers, body = asked[-1]
        data = request(method, target, world.address(), *headers, body=body)
        name = f"{endpoint.name}, {what} of a stranger"
        costs[name], bounds[name] = world.cost(lambda data=data: world.request(data)), STRANGER_MS
    judge(costs, bounds)


# --- WebSockets
# --------------------------------------------------------------------------------------


def upgrade(*headers: str, path: str = "/v1/ws") -> bytes:
    key = base64.b64encode(os.urandom(16)).decode()
    lines = [
        f"GET {path} HTTP/1.1",
        "Host: x",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {key}",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode()


LAST = frame(1, b'{"type":"none","request_id":"last"}')
"""Refused when everything before it has been handled."""
ANSWERED = {"authenticate", "send_message", "resume", "sync_request"}


def token_of(world: CostedNode, user_id: str) -> str:
    return world.node.tokens.mint(User(TENANT, user_id), 3600)


def read_head(sock: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received and (more := sock.recv(1 << 16)):
        received += more
    return received


def await_answer(sock: socket.socket, *awaited: bytes) -> None:
    """Until all of this has come, or the end."""
    received = b""
    while not all(part in received for part in awaited) and (more := sock.recv(1 << 16)):
        received += more


def test_a_handshake_is_cheap_with_and_without_a_credential(world: CostedNode) -> None:
    signed = token_of(world, "m1").rpartition(".")[0]
    address_limits = {
        "plain": [],
        "a token whose signature is wrong": [f"Authorization: Bearer {signed}.{'A' * 43}"],
        "a long token": ["Authorization: Bearer " + "a." * 2_047],
        "many subprotocols": ["Sec-WebSocket-Protocol: " + "a," * (HEAD_BYTES_MAX // 2 - 500)],
        "an endless list of proxies": ["X-Forwarded-For: " + "," * (HEAD_BYTES_MAX - 1_000)],
        "many headers": [f"X-{n}: {n}" for n in range(HEADERS_MAX - 10)],
        "a long origin": ["Origin: " + "x" * (HEAD_BYTES_MAX - 1_000)],
        "a long key": ["X-Device-ID: " + "x" * (HEAD_BYTES_MAX - 1_000)],
    }
    costs: dict[str, float] = {}

    def shake(*headers: str, path: str = "/v1/ws") -> bytes:
        with world.connected() as sock:
            sock.sendall(upgrade(*headers, path=path))
            return read_head(sock)

    for what, headers in address_limits.items():
        costs[what] = world.cost(lambda headers=headers: shake(*headers, world.address()))
    costs["a long query"] = world.cost(
        lambda: shake(world.address(), path=filled("/v1/ws?", "token=&", URL_BYTES_MAX))
    )
    bounds = dict.fromkeys(costs, STRANGER_MS)
    users = iter(range(1_000))
    costs["with a credential"] = world.cost(
        lambda: shake(
            world.address(), f"Authorization: Bearer {token_of(world, f'm{next(users)}')}"
        )
    )
    judge(costs, {**bounds, "with a credential": 25.0})


def send_frames(world: CostedNode, data: bytes, *, authenticated: bool, answered: bool) -> None:
    """On a new connection that the client ends; the server ends after reading all."""
    credential = [f"Authorization: Bearer {token_of(world, USER)}"] if authenticated else []
    with world.connected() as sock:
        sock.sendall(upgrade(world.address(), *credential))
        received = read_head(sock)
        while authenticated and b"connection_established" not in received:
            received += sock.recv(1 << 16)
        world.settled()
        world.begin()  # what the handshake costs is judged elsewhere
        with suppress(ConnectionError):
            sock.sendall(data + LAST)
            await_answer(sock, b'"request_id":"last"', *([b'"request_id":"q"'] if answered else []))
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        world.settled()


def said(kind: str) -> dict[str, Any]:
    """A frame of this type, as expensive as is known."""
    text = msgspec.json.encode({"type": kind, "request_id": "q", "payload": FRAMES[kind]})
    return msgspec.json.decode(text.replace(b"{chat}", CHAT.encode()), type=dict)


@pytest.mark.parametrize("authenticated", [True, False], ids=["session", "stranger"])
def test_a_frame_is_cheap_whatever_its_bytes(world: CostedNode, authenticated: bool) -> None:
    costs: dict[str, float] = {}

    def cost(data: bytes, *, answered: bool = False) -> float:
        return world.cost(
            lambda: send_frames(world, data, authenticated=authenticated, answered=answered)
        )

    for kind in FRAMES:
        costs[kind] = cost(frame(1, msgspec.json.encode(said(kind))), answered=kind in ANSWERED)
    for what, bomb in BOMBS.items():
        costs[what] = cost(frame(1, bomb))
    small = frame(1, b'{"type":"heartbeat_ack"}')
    for what, data in {"binary": frame(2, b"x" * 1_000), "pings": frame(9, b"") * 300,
                       "many frames in one segment": small * 300}.items():  # fmt: skip
        costs[what] = cost(data)
    judge(costs, dict.fromkeys(costs, 25.0 if authenticated else STRANGER_MS))


@pytest.mark.parametrize("authenticated", [True, False], ids=["session", "stranger"])
def test_no_random_frame_is_expensive(world: CostedNode, authenticated: bool) -> None:
    costs: dict[str, float] = {}
    for kind in FRAMES:
        fuzz = Fuzz(f"{SEED} {kind}")
        for number in range(FUZZED_FRAMES):
            pieces = fuzz.pieces(fuzz.body(said(kind), BODY_BYTES - 64), 16)
            last = len(pieces) - 1
            data = b"".join(
                frame(0 if n else 1, piece, fin=n == last) for n, piece in enumerate(pieces)
            )
            costs[f"{kind} {number}"] = world.cost(
                lambda data=data: send_frames(
                    world, data, authenticated=authenticated, answered=False
                )
            )
    judge(costs, dict.fromkeys(costs, 25.0 if authenticated else STRANGER_MS))
