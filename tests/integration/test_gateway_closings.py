"""Why a real node closes real sockets: each reason with its code, announced before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import websockets
from sockets import ask, connected, create_chat, running_node, token, ws_url

from holdfast.node.node import Node

pytestmark = pytest.mark.real_time("uvloop")

IDLE = {
    "gateway__timeouts__heartbeat_interval_seconds": 0.4,
    "gateway__timeouts__heartbeat_timeout_seconds": 0.6,
}
ROTATING = {"gateway__timeouts__rotation_seconds": 1}
STRICT = {
    "gateway__timeouts__authentication_seconds": 0.5,
    "gateway__timeouts__heartbeat_interval_seconds": 0.4,
    "gateway__timeouts__stale_acks_seconds": 0.5,
    "gateway__timeouts__overload_window_seconds": 0.5,
    "gateway__backpressure__inbound__max_queue_depth": 1,
    "gateway__backpressure__inbound__rate_limit_burst": 100,
}


async def closing_of(
    client: websockets.ClientConnection, *, answering: bool = True
) -> tuple[str, int, bool]:
    """Read to the end, answering heartbeats or not: the announced reason, the code, and
    whether to come back.
    """
    announced = ("", False)
    try:
        while True:
            frame = json.loads(await client.recv())
            if frame["type"] == "connection_closing":
                announced = (frame["payload"]["reason"], frame["payload"]["reconnect_allowed"])
            elif frame["type"] == "heartbeat" and answering:
                await client.send(json.dumps({"type": "heartbeat_ack", "payload": {}}))
    except websockets.ConnectionClosed as closed:
        assert closed.rcvd is not None
        return announced[0], closed.rcvd.code, announced[1]


async def silent(node: Node) -> tuple[str, int, bool]:
    async with connected(node, "silent") as client:
        return await closing_of(client, answering=False)


async def nameless(node: Node) -> tuple[str, int, bool]:
    async with websockets.connect(ws_url(node)) as client:
        return await closing_of(client)


async def expiring(node: Node) -> tuple[str, int, bool]:
    """Greeted or not: its second may be over before it is."""
    headers = {"Authorization": f"Bearer {token(node, 'expiring', 1)}"}
    async with websockets.connect(ws_url(node), additional_headers=headers) as client:
        return await closing_of(client)


async def rotated(node: Node) -> tuple[str, int, bool]:
    async with connected(node, "rotated") as client:
        return await closing_of(client)


async def never_acking(node: Node) -> tuple[str, int, bool]:
    """Reads everything, answers heartbeats, and never acks."""
    chat_id = await create_chat(node, "never_acking")
    async with connected(node, "never_acking") as client:
        await ask(client, "resume", cursors={})
        await ask(client, "send_message", client_message_id="c", chat_id=chat_id, content="hello")
        return await closing_of(client)


async def flooding(node: Node) -> tuple[str, int, bool]:
    """Asks for ten things at a time where one is allowed."""
    chat_id = await create_chat(node, "flooding")
    async with connected(node, "flooding") as client:
        send = {"client_message_id": "c", "chat_id": chat_id, "content": "hello"}
        for _ in range(30):
            await client.send(json.dumps({"type": "send_message", "payload": send}))
        return await closing_of(client)


Client = Callable[[Node], Awaitable[tuple[str, int, bool]]]


@pytest.mark.covers("000 contract 3, every close")
@pytest.mark.parametrize(
    ("settings", "clients"),
    [
        (IDLE, {silent: ("idle_timeout", 4001, True)}),
        (ROTATING, {rotated: ("rotation", 4004, True)}),
        (
            STRICT,
            {
                nameless: ("unauthorized", 4502, False),
                expiring: ("token_expired", 4008, True),
                never_acking: ("state_diverged", 4006, True),
                flooding: ("overloaded", 4005, True),
            },
        ),
    ],
    ids=["idle", "rotating", "strict"],
)
async def test_each_reason_has_its_code_and_is_announced(
    tmp_path: Path, settings: dict[str, float], clients: dict[Client, tuple[str, int, bool]]
) -> None:
    """Grouped so that no client meets another's reason first."""

    async with running_node(tmp_path, **settings) as node:
        found = await asyncio.gather(*(client(node) for client in clients))
        assert found == [*clients.values()]
