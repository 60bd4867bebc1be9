"""Real WebSocket clients of a whole node, for tests of the protocol itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import websockets

from holdfast.access.principal import USER_SCOPES
from holdfast.gateway.transport.http import HTTP_TIMES, HttpTimes
from holdfast.message import User
from holdfast.node.lifecycle import running
from holdfast.node.node import Node
from holdfast.settings import load


@asynccontextmanager
async def running_node(
    folder: Path, file: Path | None = None, http_times: HttpTimes = HTTP_TIMES, **settings: Any
) -> AsyncIterator[Node]:
    """A whole node on SQLite and a free port; ``a__b`` sets the setting ``a.b``."""
    paths = {name.replace("__", "."): value for name, value in settings.items()}
    loaded = load(
        file,
        {},
        {"server.port": 0, "server.state_dir": str(folder), "server.log_level": "error", **paths},
    )
    async with asyncio.timeout(120), running(loaded, http_times=http_times) as node:
        yield node


def token(node: Node, user_id: str, seconds: float = 3600) -> str:
    return node.tokens.mint(User("default", user_id), seconds, USER_SCOPES)


def ws_url(node: Node) -> str:
    return node.url.replace("http", "ws") + "/v1/ws"


@asynccontextmanager
async def connected(
    node: Node, user_id: str, seconds: float = 3600
) -> AsyncIterator[websockets.ClientConnection]:
    """A connected client, whose token is valid for ``seconds``."""
    headers = {"Authorization": f"Bearer {token(node, user_id, seconds)}"}
    async with websockets.connect(
        ws_url(node), additional_headers=headers, compression=None
    ) as client:
        hello = json.loads(await client.recv())
        assert hello["type"] == "connection_established"
        yield client


async def ask(client: websockets.ClientConnection, kind: str, **payload: Any) -> dict[str, Any]:
    """Send a request and return its answer; pushes in between are passed over."""
    await client.send(json.dumps({"type": kind, "request_id": "q", "payload": payload}))
    while True:
        frame: dict[str, Any] = json.loads(await client.recv())
        if frame.get("request_id") == "q":
            return frame


async def create_chat(node: Node, owner: str, *members: str) -> str:
    async with httpx.AsyncClient(base_url=node.url) as http:
        body = {"kind": "group", "name": "lobby", "members": list(members)}
        headers = {"Authorization": f"Bearer {token(node, owner)}"}
        answer = await http.post("/v1/chats", json=body, headers=headers)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["chat"]["chat_id"])
