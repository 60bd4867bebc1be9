"""Nodes that make replies together: real processes, one real Redis, the shipped NGINX.

Each node has its own state directory and port, and reaches Redis through a fault proxy
of its own. The first node's state directory holds the credentials of all.
"""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from node_forks import ForkedNode, fork_node
from program import Program
from reply_reader import ReplyClient

from engines import Server, free_port, nginx, redis
from engines.fixtures import had
from holdfast.access.keys import KeyRing
from holdfast.access.secrets import FileCredentials, open_secrets
from holdfast.clock import SystemClock, timestamp
from proof.proxy import Proxy

HOST = "chat.example.com"
START_SECONDS_MAX = 60.0
PACES: Mapping[str, float] = {"words": 100, "slow": 20, "crawl": 2, "burst": 0}
"""Models that repeat what they are sent, and their tokens a second; 0: at once."""
RATES = ("reply:user", "reply:tenant", "rest:user", "rest:tenant", "connect:address", "admin:key")


def model_settings(paces: Mapping[str, float] = PACES) -> dict[str, Any]:
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
    return {"streaming.providers": providers, "streaming.models": models}


@dataclass
class RigNode:
    """One node. ``link``: the fault proxy on its way to Redis, if there is one."""

    program: Program
    settings: dict[str, Any]
    admin_key: str
    link: Proxy | None = None
    process: ForkedNode = field(init=False)
    session: aiohttp.ClientSession = field(init=False)
    client: ReplyClient = field(init=False)

    @property
    def log(self) -> Path:
        return self.program.state_dir.parent / "serve.log"

    async def start(self) -> None:
        """Until it serves."""
        self.process = fork_node(self.settings, self.log)
        ended = asyncio.create_task(self.process.ended())
        try:
            async with asyncio.timeout(START_SECONDS_MAX):
                while not await self.is_ready():
                    assert not ended.done(), self.log.read_text()[-2000:]
                    await asyncio.sleep(0.02)
        finally:
            ended.cancel()

    async def status(self) -> Any:
        """What the node reports of its replies."""
        return (await self._admin("/admin/status"))["replies"]

    async def running_replies(self) -> list[dict[str, Any]]:
        """The replies that it makes, as operators see them."""
        return list((await self._admin("/admin/replies"))["replies"])

    async def completion_tokens(self) -> dict[str, int]:
        """What it has counted, by user."""
        rows = (await self._admin("/admin/usage?limit=1000"))["rows"]
        return {row["user"]: row["completion_tokens"] for row in rows}

    async def _admin(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self.admin_key}"}
        async with self.session.get(path, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def is_ready(self) -> bool:
        try:
            async with self.session.get("/health/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False


@dataclass
class StreamingRig:
    """The parts. ``client`` asks through NGINX if there is one, else the first node."""

    nodes: Sequence[RigNode]
    redis: Server | None
    proxy: Server | None
    key: str
    client: ReplyClient
    stack: AsyncExitStack

    async def start_proxy(self) -> None:
        """A new NGINX before the nodes, which ``client`` uses from now on."""
        ports = [node.program.port for node in self.nodes]
        self.proxy = proxy = had("nginx", lambda: nginx.start(ports, free_port()))
        self.stack.callback(proxy.stop)
        known = ssl.create_default_context(cafile=str(proxy.folder / "cert.pem"))
        session = await _session(self.stack, proxy.url, known, {"Host": HOST})
        self.client = ReplyClient(session, self.key, server_hostname=HOST)


@asynccontextmanager
async def streaming_rig(
    folder: Path,
    *,
    nodes: int = 3,
    with_redis: bool = True,
    with_links: bool = True,
    with_nginx: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[StreamingRig]:
    """Nodes that serve. ``settings`` by dotted path, for every node.

    ``with_links`` False: nodes reach Redis directly, also while this loop rests.
    """
    async with AsyncExitStack() as stack:
        server = had("redis", redis.start) if with_redis else None
        if server is not None:
            stack.callback(server.stop)
        first = folder / "node0" / "state"
        admin_key, key = await _make_credentials(first)
        made = [
            _make_node(folder / f"node{number}", (first, admin_key), settings or {})
            for number in range(nodes)
        ]
        for node in made if server is not None else ():
            port = server.port
            if with_links:
                node.link = await stack.enter_async_context(Proxy("127.0.0.1", server.port))
                port = node.link.port
            node.settings["cluster.redis"] = f"redis://127.0.0.1:{port}/0"
        for node in made:
            node.session = await _session(stack, node.program.url)
            node.client = ReplyClient(node.session, key)
        await asyncio.gather(*(_start(node, stack) for node in made))
        rig = StreamingRig(made, server, None, key, made[0].client, stack)
        if with_nginx:
            await rig.start_proxy()
        yield rig


def _make_node(folder: Path, credentials: tuple[Path, str], settings: Mapping[str, Any]) -> RigNode:
    folder.mkdir(parents=True, exist_ok=True)
    program = Program(folder / "state")
    chosen: dict[str, Any] = {
        "server.port": program.port,
        "server.state_dir": str(program.state_dir),
        "server.trusted_proxies": ["127.0.0.1/32"],
        "server.log_format": "json",
        **model_settings(),
        **settings,
    }
    if credentials[0] != program.state_dir:
        chosen["access.credentials_dir"] = str(credentials[0])
    return RigNode(program, chosen, credentials[1])


async def _start(node: RigNode, stack: AsyncExitStack) -> None:
    stack.push_async_callback(_end, node)
    await node.start()
    await _raise_rates(node.session, node.admin_key)


async def _end(node: RigNode) -> None:
    with suppress(ProcessLookupError):
        node.process.send(signal.SIGCONT)
        await node.process.kill()


async def _make_credentials(state: Path) -> tuple[str, str]:
    """The admin key of the first node's state directory, and a tenant key."""
    state.mkdir(mode=0o700, parents=True)  # noqa: ASYNC240
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


async def _session(
    stack: AsyncExitStack,
    url: str,
    tls: ssl.SSLContext | None = None,
    headers: Mapping[str, str] | None = None,
) -> aiohttp.ClientSession:
    """A client with a connection for each request."""
    return await stack.enter_async_context(
        aiohttp.ClientSession(
            url,
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, force_close=True, ssl=tls or True),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=60),
        )
    )
