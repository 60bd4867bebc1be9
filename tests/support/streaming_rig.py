"""Nodes that make replies together: real processes, one real Redis, the shipped NGINX.

Each node has its own state directory and port, and reaches Redis through a fault proxy
of its own. The first node's state directory holds the credentials of all.
"""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from program import Program
from reply_reader import ReplyClient

from engines import Server, free_port, nginx, redis
from engines.fixtures import had
from holdfast.access.keys import KeyRing
from holdfast.access.secrets import FileCredentials, open_secrets
from holdfast.clock import SystemClock, timestamp
from proof.proxy import Proxy

HOST = "chat.example.com"
PACES: Mapping[str, float] = {"words": 100, "slow": 20, "crawl": 2, "burst": 0}
"""Models that repeat what they are sent, and their tokens a second; 0: at once."""
RATES = ("reply:user", "reply:tenant", "rest:user", "rest:tenant", "connect:address")


def model_settings(paces: Mapping[str, float] = PACES) -> dict[str, str]:
    """Settings for one scripted provider and model of each pace."""
    providers = [
        {
            "name": name,
            "kind": "scripted",
            "script": {"text": "{input}", "tokens_per_second": pace},
        }
        for name, pace in paces.items()
    ]
    models = [{"name": name, "providers": [f"{name}:{name}"]} for name in paces]
    return {
        "streaming.providers": json.dumps(providers),
        "streaming.models": json.dumps(models),
    }


@dataclass
class RigNode:
    """One node. ``link`` is its way to Redis, None without Redis."""

    program: Program
    options: Sequence[str]
    link: Proxy | None = None
    process: subprocess.Popen[str] | None = None
    client: ReplyClient = field(init=False)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    async def start(self) -> None:
        self.process = await asyncio.to_thread(self.program.serve, *self.options)

    async def kill(self) -> None:
        """As a crash does: nothing is ended, nobody is told."""
        assert self.process is not None
        self.process.kill()
        await asyncio.to_thread(self.process.wait)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def stopped(self, seconds: float) -> None:
        """Wait for its end."""
        assert self.process is not None
        await asyncio.to_thread(self.process.wait, seconds)


@dataclass
class StreamingRig:
    """The parts. ``client`` asks through NGINX if there is one, else the first node."""

    nodes: Sequence[RigNode]
    redis: Server | None
    proxy: Server | None
    key: str
    client: ReplyClient


@asynccontextmanager
async def streaming_rig(
    folder: Path,
    *,
    nodes: int = 3,
    with_redis: bool = True,
    with_nginx: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[StreamingRig]:
    """Nodes that serve. ``settings`` by dotted path, for every node."""
    async with AsyncExitStack() as stack:
        server = had("redis", redis.start) if with_redis else None
        if server is not None:
            stack.callback(server.stop)
        made = []
        for number in range(nodes):
            node = await _make_node(folder, number, made, server, settings or {}, stack)
            made.append(node)
        admin_key, key = await _make_credentials(made[0].program.state_dir)
        await asyncio.gather(*(node.start() for node in made))
        for node in made:
            session = await _session(stack, node.program.url)
            await _raise_rates(session, admin_key)
            node.client = ReplyClient(session, key)
        proxy = _start_nginx(made, stack) if with_nginx else None
        client = await _proxy_client(proxy, key, stack) if proxy else made[0].client
        yield StreamingRig(made, server, proxy, key, client)


async def _make_node(
    folder: Path,
    number: int,
    before: Sequence[RigNode],
    server: Server | None,
    settings: Mapping[str, Any],
    stack: AsyncExitStack,
) -> RigNode:
    (folder / f"node{number}").mkdir(parents=True)
    program = Program(folder / f"node{number}" / "state")
    chosen: dict[str, Any] = {
        "server.trusted_proxies": "127.0.0.1/32",
        "server.log_format": "json",
        **model_settings(),
        **settings,
    }
    link = None
    if before:
        chosen["access.credentials_dir"] = before[0].program.state_dir
    if server is not None:
        link = await stack.enter_async_context(Proxy("127.0.0.1", server.port))
        chosen["cluster.redis"] = f"redis://127.0.0.1:{link.port}/0"
    options = [part for path, value in chosen.items() for part in ("--set", f"{path}={value}")]
    node = RigNode(program, options, link)
    stack.push_async_callback(_end, node)
    return node


async def _end(node: RigNode) -> None:
    if node.is_running:
        node.send(signal.SIGCONT)
        await node.kill()


async def _make_credentials(state: Path) -> tuple[str, str]:
    """The admin key of the first node's state directory, and a tenant key."""
    state.mkdir(mode=0o700)  # noqa: ASYNC240
    at = timestamp(SystemClock().now())
    secrets = open_secrets(state, at)
    ring = await KeyRing.load(FileCredentials(state))
    _, key = await ring.issue("tenant", "rig", at, tenant="acme")
    return secrets.admin_key, key


async def _raise_rates(session: aiohttp.ClientSession, admin_key: str) -> None:
    """So that the rates of a node refuse nothing."""
    for resource in RATES:
        rule = {"tenantID": "*", "resource": resource, "expectedVersion": 1}
        raised = {"limit": 10**6, "burstSize": 10**6, "reason": "load"}
        async with session.put(
            "/admin/rules",
            json=rule | raised,
            headers={"Authorization": f"Bearer {admin_key}"},
        ) as answer:
            assert answer.status == 200, await answer.text()


async def _session(stack: AsyncExitStack, url: str) -> aiohttp.ClientSession:
    return await stack.enter_async_context(
        aiohttp.ClientSession(
            url,
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=60),
        )
    )


def _start_nginx(nodes: Sequence[RigNode], stack: AsyncExitStack) -> Server:
    ports = [urlsplit(node.program.url).port or 0 for node in nodes]
    proxy = had("nginx", lambda: nginx.start(ports, free_port()))
    stack.callback(proxy.stop)
    return proxy


async def _proxy_client(proxy: Server, key: str, stack: AsyncExitStack) -> ReplyClient:
    known = ssl.create_default_context(cafile=str(proxy.folder / "cert.pem"))
    session = await stack.enter_async_context(
        aiohttp.ClientSession(
            proxy.url,
            headers={"Host": HOST},
            connector=aiohttp.TCPConnector(ssl=known, limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=60),
        )
    )
    return ReplyClient(session, key, server_hostname=HOST)
