"""The servers that `messaging.py` measures, each in a process of its own: `python bench/children.py node|websockets`.

A child prints one line of JSON when it serves, then obeys one order per line: `cpu` (seconds of processor time and
resident memory so far) and `send` (so many messages at once to everybody in a chat).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

PADDING = "x" * 100


async def obey(orders: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]], hello: dict[str, Any]) -> None:
    """Answer orders until the standard input ends."""
    loop = asyncio.get_running_loop()
    print(json.dumps(hello), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        print(json.dumps(await orders[order["do"]](order) or {}), flush=True)


async def cpu(order: dict[str, Any]) -> dict[str, float]:
    return {"cpu": time.process_time(), "rss": psutil.Process(os.getpid()).memory_info().rss}


async def node(settings: dict[str, Any]) -> None:
    """A whole Holdfast node on SQLite with synchronous=FULL, in a temporary state directory."""
    from holdfast.clock import timestamp
    from holdfast.message import Draft, User
    from holdfast.node import running
    from holdfast.settings import load
    from holdfast.store.changes import Act, AddMember, CreateChat

    unbounded = {
        "server.port": 0,
        "server.log_level": "error",
        "access.handshakes_per_ip_per_minute": 10_000_000,
        "gateway.backpressure.inbound.rate_limit_per_second": 1e9,
        "gateway.backpressure.inbound.rate_limit_burst": 10**9,
        "gateway.backpressure.inbound.max_queue_depth": 10_000,
    }
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as state:
        loaded = load(None, {}, {**unbounded, "server.state_dir": state, **settings})
        async with running(loaded) as running_node:
            parts = running_node
            sent = 0

            def act(user_id: str) -> Act:
                return Act(User("default", user_id), timestamp(time.time()), parts._ids.new("msg_"), operator=True)

            async def create(order: dict[str, Any]) -> dict[str, Any]:
                """A chat of so many users, from user `first` on."""
                users = [f"u{n}" for n in range(order["first"], order["first"] + order["count"])]
                chat_id = parts._ids.new("chat_")
                await parts._store.change(CreateChat(act(users[0]), chat_id, "group", "bench", users[1:90]))
                for user in users[90:]:
                    await parts._store.change(AddMember(act(users[0]), chat_id, user))
                return {"chat_id": chat_id, "head": max(len(users) - 90, 0)}

            async def send(order: dict[str, Any]) -> None:
                nonlocal sent
                drafts = []
                for _ in range(order["together"]):
                    sent += 1
                    now, message_id = timestamp(time.time()), parts._ids.new("msg_")
                    sender = User("default", "u0")
                    drafts.append(Draft(sender, order["chat_id"], f"c{sent}", PADDING, "text/plain", message_id, now))
                await parts._durability.persist(drafts, time.monotonic() + 5)

            async def groups(order: dict[str, Any]) -> dict[str, float]:
                from holdfast.telemetry import REGISTRY

                name = "holdfast_ingest_group_sends"
                return {key: REGISTRY.get_sample_value(f"{name}_{key}") or 0.0 for key in ("sum", "count")}

            async def mint(order: dict[str, Any]) -> dict[str, Any]:
                users = [User("default", f"u{n}") for n in range(order["count"])]
                return {"tokens": [parts.tokens.mint(user, 86_400) for user in users]}

            orders = {"cpu": cpu, "create": create, "send": send, "groups": groups, "mint": mint}
            await obey(orders, {"url": parts.url.replace("http", "ws") + "/v1/ws"})


async def websockets_broadcast() -> None:
    """The peer: the websockets library's own broadcast to everybody who is connected."""
    from websockets.asyncio.server import ServerConnection, broadcast, serve

    connected: set[ServerConnection] = set()

    async def hold(connection: ServerConnection) -> None:
        connected.add(connection)
        await connection.wait_closed()

    async def send(order: dict[str, Any]) -> None:
        for _ in range(order["together"]):
            broadcast(connected, order["text"])

    async with serve(hold, "127.0.0.1", 0, compression=None, ping_interval=None) as server:
        port = server.sockets[0].getsockname()[1]
        await obey({"cpu": cpu, "send": send}, {"url": f"ws://127.0.0.1:{port}/"})


if __name__ == "__main__":
    if sys.argv[1] == "node":
        uvloop.run(node(json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}))
    else:
        uvloop.run(websockets_broadcast())
