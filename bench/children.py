"""The servers that `messaging.py` measures, each in a process of its own:
`python bench/children.py node|websockets`.

A child prints one line of JSON when it serves, then obeys one order per line: `used`
(processor seconds, resident memory), `send` (so many messages at once to everybody in a
chat), and for a node `groups` (sends and groups so far), `mint`, `create`, `own_chats`,
`elsewhere` and `store` (tokens, a chat, one each, other chats, messages in a chat).
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


async def obey(
    orders: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]], hello: dict[str, Any]
) -> None:
    """Answer orders until the standard input ends."""
    loop = asyncio.get_running_loop()
    print(json.dumps(hello), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        print(json.dumps(await orders[order["do"]](order) or {}), flush=True)


async def used(order: dict[str, Any]) -> dict[str, float]:
    """Asked on the loop's own thread, so ``loop_cpu`` is what the loop has used,
    without writer and readers.
    """
    rss = psutil.Process(os.getpid()).memory_info().rss
    return {"cpu": time.process_time(), "loop_cpu": time.thread_time(), "rss": rss}


async def open_wide(node: Any) -> None:
    """Raise the rules at the doors as an operator would: they are asked for every send
    and refuse nobody.

    The long window keeps the counters in use, as they are in a server with the usual
    rules: one that refills between two sends would be made anew for each.
    """
    raised = {
        "limit": 10**9,
        "burstSize": 10**9,
        "window": "366d",
        "reason": "people who never stop",
    }
    for resource in ("connect:user", "connect:address", "send:user", "send:tenant"):
        rule = {"tenantID": "*", "resource": resource, "expectedVersion": 1, **raised}
        await node.limits.control.update(rule, "bench")
    await node.limits.feed.sync()


async def node(settings: dict[str, Any]) -> None:
    """A whole Holdfast node on SQLite with synchronous=FULL, in a temporary state
    directory.
    """
    from holdfast.clock import timestamp
    from holdfast.message import Draft, User
    from holdfast.node.lifecycle import running, settle_heap
    from holdfast.settings import load
    from holdfast.store.commands import CommandContext, CreateChat
    from holdfast.telemetry import REGISTRY

    unbounded = {
        "server.port": 0,
        "server.log_level": "error",
        "gateway.backpressure.inbound.rate_limit_per_second": 1e9,
        "gateway.backpressure.inbound.rate_limit_burst": 10**9,
        "gateway.backpressure.inbound.work_rate_limit_per_second": 2e9,
        "gateway.backpressure.inbound.work_rate_limit_burst": 2 * 10**9,
        "gateway.backpressure.inbound.max_queue_depth": 10_000,
        "durability.chats.members_at_creation_max": 1_000,
        # A server that commits one by one would otherwise refuse what waits in a
        # machine that is busy.
        "gateway.timeouts.durability_rpc_seconds": 60,
        "durability.intake.max_age_seconds": 60,
    }
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as state:
        loaded = load(None, {}, {**unbounded, "server.state_dir": state, **settings})
        async with running(loaded) as running_node:
            parts = running_node
            sent = 0
            await open_wide(parts)
            settle_heap()  # as `holdfast serve` does

            def act(user_id: str) -> CommandContext:
                return CommandContext(
                    User("default", user_id),
                    timestamp(time.time()),
                    parts._ids.new("msg_"),
                    operator=True,
                )

            def draft(chat_id: str) -> Draft:
                nonlocal sent
                sent += 1
                now, message_id = timestamp(time.time()), parts._ids.new("msg_")
                return Draft(
                    User("default", "u0"),
                    chat_id,
                    f"c{sent}",
                    PADDING,
                    "text/plain",
                    message_id,
                    now,
                )

            async def create(order: dict[str, Any]) -> dict[str, Any]:
                """A chat of so many users, from user `first` on."""
                users = [f"u{n}" for n in range(order["first"], order["first"] + order["count"])]
                chat_id = parts._ids.new("chat_")
                await parts._store.change(
                    CreateChat(act(users[0]), chat_id, "group", "bench", users[1:])
                )
                return {"chat_id": chat_id}

            async def send(order: dict[str, Any]) -> None:
                drafts = [draft(order["chat_id"]) for _ in range(order["together"])]
                await parts._durability.persist(drafts, time.monotonic() + 5)

            async def own_chats(order: dict[str, Any]) -> dict[str, Any]:
                """A chat for each of so many users, who are alone in it."""
                chats = [await create({"first": n, "count": 1}) for n in range(order["count"])]
                return {"chat_ids": [chat["chat_id"] for chat in chats]}

            async def elsewhere(order: dict[str, Any]) -> None:
                """So many chats of so many members, of whom nobody connects."""
                for number in range(order["chats"]):
                    users = [f"away{number}-{n}" for n in range(order["members"])]
                    command = CreateChat(
                        act(users[0]), parts._ids.new("chat_"), "group", "elsewhere", users[1:]
                    )
                    await parts._store.change(command)

            async def store(order: dict[str, Any]) -> None:
                """So many messages in a chat, without the rest of the path."""
                left = order["count"]
                while left > 0:
                    await parts._store.append(
                        [draft(order["chat_id"]) for _ in range(min(left, 500))]
                    )
                    left -= 500

            async def groups(order: dict[str, Any]) -> dict[str, float | None]:
                kinds = {"sends": "sum", "groups": "count"}
                return {
                    name: REGISTRY.get_sample_value(f"holdfast_ingest_group_sends_{kind}")
                    for name, kind in kinds.items()
                }

            async def mint(order: dict[str, Any]) -> dict[str, Any]:
                users = [User("default", f"u{n}") for n in range(order["count"])]
                return {"tokens": [parts.tokens.mint(user, 86_400) for user in users]}

            orders = {"used": used, "groups": groups, "create": create, "send": send, "mint": mint}
            orders |= {"own_chats": own_chats, "elsewhere": elsewhere, "store": store}
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
        await obey({"used": used, "send": send}, {"url": f"ws://127.0.0.1:{port}/"})


if __name__ == "__main__":
    if sys.argv[1] == "node":
        uvloop.run(node(json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}))
    else:
        (uvloop.run if sys.argv[2:] != ["asyncio"] else asyncio.run)(websockets_broadcast())
