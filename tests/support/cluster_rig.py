"""Nodes of one cluster: real processes, a real PostgreSQL of their own, the shipped NGINX
and a Redis if a test wants them; and people on it (``cluster_conversation``: who talk).

A node reaches them directly, or by links that a test can cut (``cluster_links``).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from cluster_links import (
    Links,
    Namespaces,
    NodePlace,
    Peer,
    ProxyLink,
    direct_place,
    proxied_place,
)
from node_forks import ForkedNode, fork_node
from program import Program

from engines import Server, free_port, nginx, postgres, redis
from engines.fixtures import had
from holdfast.access.principal import USER_SCOPES
from holdfast.access.secrets import SECRETS_FILE, read_secrets
from holdfast.access.tokens import Tokens, TokenSettings, shared_secret
from holdfast.cli.rest import RestClient
from holdfast.client import ClientSettings, Message
from holdfast.clock import SystemClock
from holdfast.eventlog.postgres import PostgresEventLog
from holdfast.message import User
from holdfast.node.supervisor import GAUGES_SECONDS
from holdfast.store.postgres import PostgresStore, PostgresStoreSettings
from holdfast.verify.history import Recorder
from holdfast.verify.recording import RecordingClient
from proof.end_state import note_log, note_store
from proof.proxy import Proxy

START_SECONDS_MAX = 60.0
TENANT = "acme"
TOKEN_SECONDS = 36_000
TOKEN_KEY = "the same key on every node, 32 bytes or more"
QUICK = ClientSettings(
    reconnect_initial_seconds=0.05, reconnect_cap_seconds=0.5, ack_interval_seconds=0.05
)
SETTINGS: Mapping[str, Any] = {
    "server.log_format": "json",
    "server.trusted_proxies": ["127.0.0.1/32"],
    "gateway.backpressure.inbound.rate_limit_per_second": 2000,
    "gateway.backpressure.inbound.work_rate_limit_per_second": 4000,
}


@dataclass
class ClusterNode:
    """One node."""

    program: Program
    settings: dict[str, Any]
    place: NodePlace
    environment: Mapping[str, str] = field(default_factory=dict)
    gauges_seconds: float = GAUGES_SECONDS
    process: ForkedNode = field(init=False)

    @property
    def url(self) -> str:
        host, port = self.place.addresses["clients"]
        return f"http://{host}:{port}"

    def proxy(self, peer: Peer) -> Proxy:
        """The fault proxy on its way to a peer."""
        link = self.place.links[peer]
        assert isinstance(link, ProxyLink)
        return link.proxy

    @property
    def log(self) -> Path:
        return self.program.state_dir.parent / "serve.log"

    def begin(self) -> None:
        namespace = self.place.namespace
        self.process = fork_node(
            self.settings, self.log, namespace, self.environment, self.gauges_seconds
        )

    async def start(self) -> None:
        """Until it serves."""
        self.begin()
        ended = asyncio.create_task(self.process.ended())
        try:
            async with asyncio.timeout(START_SECONDS_MAX), aiohttp.ClientSession() as session:
                while not await self._is_ready(session):
                    assert not ended.done(), self.log.read_text()[-3000:]
                    await asyncio.sleep(0.02)
        finally:
            ended.cancel()

    async def kill(self) -> None:
        await self.process.kill()

    async def stop(self) -> None:
        """As an operator does: it drains."""
        self.process.send(signal.SIGTERM)
        await self.process.ended()

    async def _is_ready(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.url}/health/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False


class ClusterPerson:
    """A client that sends, keeps what it receives, and goes on by itself."""

    def __init__(
        self,
        rig: ClusterRig,
        user: str,
        url: str,
        device: str = "phone",
        settings: ClientSettings = QUICK,
    ) -> None:
        self.user = User(TENANT, user)
        self.client = RecordingClient(
            url, rig.token(user), rig.record, self.user, f"{user}-{device}", settings=settings
        )
        self.events: list[Any] = []
        self._news = asyncio.Event()

    @asynccontextmanager
    async def online(self) -> AsyncIterator[ClusterPerson]:
        async with self.client:
            listening = asyncio.create_task(self._listen())
            try:
                await self.client.connected()
                yield self
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)

    async def say(self, chat_id: str, text: str) -> int:
        return (await self.client.send(chat_id, text)).sequence

    def texts(self, chat_id: str) -> list[str]:
        return [e.content for e in self.events if isinstance(e, Message) and e.chat_id == chat_id]

    async def has(self, chat_id: str, count: int) -> None:
        """Wait until it has this many messages of the chat."""
        while len(self.client.copies.get(chat_id, ())) < count:
            await self.news()

    async def sees(self, kind: type[Any], **facts: Any) -> Any:
        """Wait for an event of this kind with these facts; return it."""
        while True:
            for event in self.events:
                if isinstance(event, kind) and all(
                    getattr(event, name) == value for name, value in facts.items()
                ):
                    return event
            await self.news()

    async def news(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def _listen(self) -> None:
        async for event in self.client.events():
            self.client.take(event)
            self.events.append(event)
            self._news.set()


@dataclass
class ClusterRig:
    """The parts. ``url`` is that of NGINX if there is one, else the first node's."""

    nodes: Sequence[ClusterNode]
    postgres: Server
    redis: Server | None
    proxy: Server | None
    record: Recorder
    url: str

    def token(self, user: str, tenant: str = TENANT) -> str:
        tokens = Tokens(TokenSettings(), shared_secret(TOKEN_KEY.encode()), SystemClock())
        return tokens.mint(User(tenant, user), TOKEN_SECONDS, USER_SCOPES)

    def person(self, user: str, node: int | None = None, device: str = "phone") -> ClusterPerson:
        """``node`` None: through NGINX."""
        return ClusterPerson(self, user, self.url if node is None else self.nodes[node].url, device)

    async def ask(
        self,
        user: str,
        method: str,
        path: str,
        body: Any = None,
        node: int | None = None,
        tenant: str = TENANT,
        key: str | None = None,
    ) -> Any:
        url = self.url if node is None else self.nodes[node].url
        headers = {"Authorization": f"Bearer {self.token(user, tenant)}"}
        if key is not None:
            headers["Idempotency-Key"] = key
        async with (
            aiohttp.ClientSession(url, headers=headers) as session,
            session.request(method, path, json=body) as answer,
        ):
            assert answer.status < 300, await answer.text()
            return await answer.json()

    async def chat(self, *members: str, node: int | None = 0, tenant: str = TENANT) -> str:
        body = {"name": "lobby", "members": list(members[1:])}
        made = await self.ask(members[0], "POST", "/v1/chats", body, node, tenant)
        return str(made["chat"]["chat_id"])

    def operator(self, node: int) -> RestClient:
        """Of any node; one of them has the admin key."""
        states = [each.program.state_dir for each in self.nodes]
        [state] = [each for each in states if (each / SECRETS_FILE).exists()]
        return RestClient(self.nodes[node].url, read_secrets(state).admin_key)

    async def note_state(self, founders: Mapping[str, Sequence[str]]) -> None:
        """Record what is stored, for the checkers."""
        async with PostgresStore(PostgresStoreSettings(self.postgres.url)) as store:
            await note_store(self.record, store, store, founders)
            await note_log(self.record, PostgresEventLog(store))


@asynccontextmanager
async def cluster_rig(
    folder: Path,
    *,
    nodes: int = 3,
    with_redis: bool = True,
    with_nginx: bool = False,
    links: Links = "none",
    database: Server | None = None,
    shared: Server | None = None,
    settings: Mapping[str, Any] | None = None,
    each: Sequence[Mapping[str, Any]] = (),
    environments: Sequence[Mapping[str, str]] = (),
    gauges_seconds: float = GAUGES_SECONDS,
) -> AsyncIterator[ClusterRig]:
    """Nodes that serve. ``database`` and ``shared``: a PostgreSQL and a Redis that the
    test has started. ``settings`` by dotted path, for every node; ``each``: those of
    the single nodes; ``environments``: variables of theirs; ``gauges_seconds``: how
    often they set their gauges and judge their alerts.
    """
    async with AsyncExitStack() as stack:
        if database is None:
            database = had("postgres", partial(_postgres, links))
            stack.callback(database.stop)
        if shared is None and with_redis:
            shared = had("redis", partial(_redis, links))
            stack.callback(shared.stop)
        keys = folder / "token.keys"
        keys.write_text(TOKEN_KEY + "\n")
        keys.chmod(0o600)
        made = []
        for number in range(nodes):
            home = folder / f"node{number}"
            node = await _make_node(home, keys, database, shared, links, stack)
            node.settings.update(settings or {})
            node.settings.update(each[number] if each else {})
            node.environment = environments[number] if environments else {}
            node.gauges_seconds = gauges_seconds
            made.append(node)
        for node in made:
            stack.push_async_callback(_end, node)
        await asyncio.gather(*(node.start() for node in made))
        rig = ClusterRig(made, database, shared, None, Recorder(), made[0].url)
        if with_nginx:
            ports = [node.program.port for node in made]
            rig.proxy = proxy = had("nginx", lambda: nginx.start(ports, free_port()))
            stack.callback(proxy.stop)
            rig.url = proxy.url
            stack.enter_context(trusting(proxy.folder / "cert.pem"))
        yield rig


def _postgres(links: Links) -> Server:
    connections = {"max_connections": "600"}
    if not isinstance(links, Namespaces):
        return postgres.start(**connections)
    server = postgres.start(listen_addresses="*", **connections)
    with (server.folder / "data" / "pg_hba.conf").open("a") as rules:
        rules.write("host all all samenet trust\n")
    server.process.send_signal(signal.SIGHUP)
    return server


def _redis(links: Links) -> Server:
    if isinstance(links, Namespaces):
        return redis.start(bind="0.0.0.0", **{"protected-mode": "no"})
    return redis.start()


async def _make_node(
    folder: Path,
    keys: Path,
    database: Server,
    shared: Server | None,
    links: Links,
    stack: AsyncExitStack,
) -> ClusterNode:
    folder.mkdir(parents=True)  # noqa: ASYNC240
    program = Program(folder / "state")
    ports: dict[Peer, int] = {"postgres": database.port, "clients": program.port}
    if shared is not None:
        ports["redis"] = shared.port
    match links:
        case Namespaces():
            place = links.place(ports)
        case "proxies":
            place = await proxied_place(ports, stack)
        case "none":
            place = direct_place(ports)
    to = {peer: f"{host}:{port}" for peer, (host, port) in place.addresses.items()}
    chosen: dict[str, Any] = {
        "server.host": place.host,
        "server.port": program.port,
        "server.state_dir": str(program.state_dir),
        "access.tokens.secret_file": str(keys),
        "cluster.postgres": f"postgresql://postgres@{to['postgres']}/postgres?sslmode=disable",
        **SETTINGS,
    }
    if shared is not None:
        chosen["cluster.redis"] = f"redis://{to['redis']}/0?sslmode=disable"
    return ClusterNode(program, chosen, place)


@contextmanager
def trusting(certificate: Path) -> Iterator[None]:
    """The clients of this process trust it."""
    before = os.environ.get("SSL_CERT_FILE")
    os.environ["SSL_CERT_FILE"] = str(certificate)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SSL_CERT_FILE"]
        else:
            os.environ["SSL_CERT_FILE"] = before


async def _end(node: ClusterNode) -> None:
    with suppress(ProcessLookupError, AttributeError):
        node.process.send(signal.SIGCONT)
        await node.process.kill()
