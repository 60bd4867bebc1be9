"""The servers that `messaging.py` measures, each in a process of its own:
`python bench/children.py node|websockets`.

A child prints one line of JSON when it serves, then obeys one order per line: `used`
(processor seconds, resident memory), `send` (messages at once to everybody in a
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
from contextlib import suppress
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
    """Raise the default rules as an operator would, so that they refuse nothing. (One
    node of a cluster does it for all.)

    The long window keeps the counters in use, as they are in a server with the usual
    rules: one that refills between two sends would be made again for each.
    """
    from holdfast.errors import VersionConflict

    raised = {
        "limit": 10**9,
        "burstSize": 10**9,
        "window": "366d",
        "reason": "people who never stop",
    }
    for resource in ("connect:user", "connect:address", "send:user", "send:tenant"):
        rule = {"tenantID": "*", "resource": resource, "expectedVersion": 1, **raised}
        with suppress(VersionConflict):
            await node.limits.control.update(rule, "bench")
    await node.limits.feed.sync()


UNBOUNDED = {
    "server.port": 0,
    "server.log_level": "error",
    "gateway.backpressure.inbound.rate_limit_per_second": 1e9,
    "gateway.backpressure.inbound.rate_limit_burst": 10**9,
    "gateway.backpressure.inbound.work_rate_limit_per_second": 2e9,
    "gateway.backpressure.inbound.work_rate_limit_burst": 2 * 10**9,
    "gateway.backpressure.inbound.max_queue_depth": 10_000,
    "durability.chats.members_at_creation_max": 1_000,
    # Otherwise a server that commits one by one would refuse what waits in a busy
    # machine.
    "gateway.timeouts.durability_rpc_seconds": 60,
    "durability.intake.max_age_seconds": 60,
}


async def node(settings: dict[str, Any]) -> None:
    """A whole node in a temporary state directory: on SQLite with synchronous=FULL,
    unless the settings name other engines.
    """
    from holdfast.node.lifecycle import running, settle_heap
    from holdfast.settings import load

    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as state:
        loaded = load(None, {}, {**UNBOUNDED, "server.state_dir": state, **settings})
        async with running(loaded) as running_node:
            await open_wide(running_node)
            settle_heap()  # as `holdfast serve` does
            url = running_node.url.replace("http", "ws") + "/v1/ws"
            await obey(NodeOrders(running_node).by_name(), {"url": url})


class NodeOrders:
    """The orders of a running node."""

    def __init__(self, node: Any) -> None:
        from holdfast.clock import Ids, SystemClock

        self._node = node
        self._chats = node.engines.chats
        self._ids = Ids(SystemClock())
        self._sent = 0

    def by_name(self) -> dict[str, Callable[[dict[str, Any]], Awaitable[Any]]]:
        return {
            "used": used,
            "groups": self.groups,
            "create": self.create,
            "send": self.send,
            "mint": self.mint,
            "own_chats": self.own_chats,
            "elsewhere": self.elsewhere,
            "store": self.store,
        }

    async def create(self, order: dict[str, Any]) -> dict[str, Any]:
        """A chat of `count` users, from user `first` on."""
        users = [f"u{n}" for n in _numbers(order)]
        return {"chat_id": await self._create(users, "bench")}

    async def own_chats(self, order: dict[str, Any]) -> dict[str, Any]:
        """A chat for each of `count` users from `first` on, who are alone in it."""
        chats = [await self.create({"first": n, "count": 1}) for n in _numbers(order)]
        return {"chat_ids": [chat["chat_id"] for chat in chats]}

    async def elsewhere(self, order: dict[str, Any]) -> None:
        """`chats` chats of `members` members, of whom nobody connects."""
        for number in range(order["chats"]):
            users = [f"offline{number}-{n}" for n in range(order["members"])]
            await self._create(users, "elsewhere")

    async def send(self, order: dict[str, Any]) -> None:
        """`together` messages at once."""
        drafts = [self._draft(order["chat_id"]) for _ in range(order["together"])]
        await self._node._durability.persist(drafts, time.monotonic() + 5)

    async def store(self, order: dict[str, Any]) -> None:
        """`count` messages in a chat, without the rest of the path."""
        left = order["count"]
        while left > 0:
            drafts = [self._draft(order["chat_id"]) for _ in range(min(left, 500))]
            await self._chats.append(drafts)
            left -= 500

    async def groups(self, order: dict[str, Any]) -> dict[str, float | None]:
        from holdfast.telemetry import REGISTRY

        kinds = {"sends": "sum", "groups": "count"}
        return {
            name: REGISTRY.get_sample_value(f"holdfast_ingest_group_sends_{kind}")
            for name, kind in kinds.items()
        }

    async def mint(self, order: dict[str, Any]) -> dict[str, Any]:
        from holdfast.message import User

        users = [User("default", f"u{n}") for n in _numbers(order)]
        return {"tokens": [self._node.tokens.mint(user, 86_400) for user in users]}

    async def _create(self, users: list[str], name: str) -> str:
        from holdfast.clock import timestamp
        from holdfast.message import User
        from holdfast.store.commands import CommandContext, CreateChat

        chat_id, message_id = self._ids.new("chat_"), self._ids.new("msg_")
        creator = User("default", users[0])
        context = CommandContext(creator, timestamp(time.time()), message_id, operator=True)
        await self._chats.change(CreateChat(context, chat_id, "group", name, users[1:]))
        return chat_id

    def _draft(self, chat_id: str) -> Any:
        from holdfast.clock import timestamp
        from holdfast.message import Draft, User

        self._sent += 1
        key, message_id = f"c{self._sent}", self._ids.new("msg_")
        sender, now = User("default", "u0"), timestamp(time.time())
        return Draft(sender, chat_id, key, PADDING, "text/plain", message_id, now)


def _numbers(order: dict[str, Any]) -> range:
    first = order.get("first", 0)
    return range(first, first + order["count"])


async def websockets_broadcast() -> None:
    """The peer: the websockets library's own broadcast to all connections."""
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
