"""Nodes of one cluster: real processes, a real PostgreSQL of their own, the shipped NGINX
and a Redis if a test wants them; and people who talk on it.

Each node reaches PostgreSQL and Redis through fault proxies of its own.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from node_forks import ForkedNode, fork_node
from program import Program

from engines import Server, free_port, nginx, postgres, redis
from engines.fixtures import had
from holdfast.access.principal import USER_SCOPES
from holdfast.access.tokens import Tokens, TokenSettings, shared_secret
from holdfast.client import ClientSettings, Message
from holdfast.clock import SystemClock
from holdfast.eventlog.postgres import PostgresEventLog
from holdfast.message import User
from holdfast.store.postgres import PostgresStore, PostgresStoreSettings
from holdfast.verify.checkers import check, red
from holdfast.verify.history import FaultPlane, FaultWindow, Recorder
from holdfast.verify.recording import RecordingClient
from proof.end_state import note_log, note_store
from proof.proxy import Proxy

START_SECONDS_MAX = 60.0
TENANT = "acme"
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
    """One node. ``database`` and ``redis``: the fault proxies on its ways."""

    program: Program
    settings: dict[str, Any]
    database: Proxy
    redis: Proxy | None = None
    process: ForkedNode = field(init=False)

    @property
    def url(self) -> str:
        return self.program.url

    @property
    def log(self) -> Path:
        return self.program.state_dir.parent / "serve.log"

    async def start(self) -> None:
        """Until it serves."""
        self.process = fork_node(self.settings, self.log)
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

    def __init__(self, rig: ClusterRig, user: str, url: str, device: str = "phone") -> None:
        self.user = User(TENANT, user)
        self.client = RecordingClient(
            url, rig.token(user), rig.record, self.user, f"{user}-{device}", settings=QUICK
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

    def token(self, user: str) -> str:
        tokens = Tokens(TokenSettings(), shared_secret(TOKEN_KEY.encode()), SystemClock())
        return tokens.mint(User(TENANT, user), 3600, USER_SCOPES)

    def person(self, user: str, node: int | None = None, device: str = "phone") -> ClusterPerson:
        """``node`` None: through NGINX."""
        return ClusterPerson(self, user, self.url if node is None else self.nodes[node].url, device)

    async def ask(
        self, user: str, method: str, path: str, body: Any = None, node: int | None = None
    ) -> Any:
        url = self.url if node is None else self.nodes[node].url
        headers = {"Authorization": f"Bearer {self.token(user)}"}
        async with (
            aiohttp.ClientSession(url, headers=headers) as session,
            session.request(method, path, json=body) as answer,
        ):
            assert answer.status < 300, await answer.text()
            return await answer.json()

    async def chat(self, *members: str, node: int | None = 0) -> str:
        body = {"name": "lobby", "members": list(members[1:])}
        made = await self.ask(members[0], "POST", "/v1/chats", body, node)
        return str(made["chat"]["chat_id"])

    async def note_state(self, founders: Mapping[str, Sequence[str]]) -> None:
        """Record what is stored, for the checkers."""
        async with PostgresStore(PostgresStoreSettings(self.postgres.url)) as store:
            await note_store(self.record, store, store, founders)
            await note_log(self.record, PostgresEventLog(store))


class Conversation:
    """People who talk in one chat all the time, whatever happens to the nodes."""

    def __init__(self, rig: ClusterRig, chat_id: str, people: Sequence[ClusterPerson]) -> None:
        self.rig, self.chat_id, self.people = rig, chat_id, people
        self.acked_at: dict[str, list[float]] = {person.user.user_id: [] for person in people}
        self._acked = asyncio.Event()
        self._goes_on = asyncio.Event()
        self._goes_on.set()

    async def acked_since(self, moment: float) -> None:
        """Until everybody had a send acked after this moment."""
        while any(not at or at[-1] < moment for at in self.acked_at.values()):
            self._acked.clear()
            await self._acked.wait()

    def first_ack(self, users: Iterable[str], moment: float) -> float:
        """When the first of them had a send acked after this moment."""
        return min(at[bisect_left(at, moment)] for at in map(self.acked_at.__getitem__, users))

    async def talk(self, person: ClusterPerson, rng: random.Random) -> None:
        acked_at, number = self.acked_at[person.user.user_id], 0
        while self._goes_on.is_set():
            number += 1
            await person.say(self.chat_id, f"{person.user.user_id} says {number}")
            acked_at.append(time.monotonic())
            self._acked.set()
            await asyncio.sleep(rng.uniform(0.0, 0.02))

    def longest_pause(self, user: str, since: float) -> float:
        """Between two acks of a person, the last before ``since`` included."""
        at = self.acked_at[user]
        first = max(bisect_left(at, since) - 1, 0)
        return max((b - a for a, b in pairwise(at[first:])), default=0.0)

    @contextmanager
    def fault(self, name: str, *planes: FaultPlane, user: str = "") -> Iterator[None]:
        """What fails meanwhile in these planes, for this user or all, has this reason."""
        began = time.monotonic()
        try:
            yield
        finally:
            until = time.monotonic()
            who = [p.client.device_id for p in self.people if p.user.user_id == user]
            for plane in planes:
                self.rig.record.note(
                    FaultWindow(at=began, until=until, plane=plane, name=name, clients=who)
                )

    async def end(self, talking: Sequence[asyncio.Task[None]]) -> None:
        """Everybody has everything that was acked; note it for the checkers."""
        self._goes_on.clear()
        await asyncio.gather(*talking)
        head = max(acked.sequence for _, _, acked in self.rig.record.history().acks())
        await asyncio.gather(*(person.has(self.chat_id, head) for person in self.people))
        for person in self.people:
            person.client.note_copy(self.chat_id)


@asynccontextmanager
async def conversation(
    rig: ClusterRig, where: Mapping[str, int | None], seed: int = 1
) -> AsyncIterator[Conversation]:
    """These people talk while the block runs, each at a node, or through NGINX. Then the
    history is judged: AssertionError if a promise was broken.
    """
    chat_id = await rig.chat(*where)
    people = [rig.person(user, node) for user, node in where.items()]
    async with AsyncExitStack() as stack:
        for person in people:
            await stack.enter_async_context(person.online())
        talks = Conversation(rig, chat_id, people)
        talking = [
            asyncio.create_task(talks.talk(person, random.Random(f"{seed} {person.user}")))
            for person in people
        ]
        try:
            yield talks
            await talks.end(talking)
        finally:
            for task in talking:
                task.cancel()
            await asyncio.gather(*talking, return_exceptions=True)
    await rig.note_state({chat_id: list(where)})
    verdicts = check(rig.record.history())
    assert not red(verdicts), "\n".join(str(v) for v in verdicts if not v.ok)


@asynccontextmanager
async def cluster_rig(
    folder: Path,
    *,
    nodes: int = 3,
    with_redis: bool = True,
    with_nginx: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[ClusterRig]:
    """Nodes that serve. ``settings`` by dotted path, for every node."""
    async with AsyncExitStack() as stack:
        database = had("postgres", lambda: postgres.start(max_connections="300"))
        stack.callback(database.stop)
        shared = had("redis", redis.start) if with_redis else None
        if shared is not None:
            stack.callback(shared.stop)
        keys = folder / "token.keys"
        keys.write_text(TOKEN_KEY + "\n")
        keys.chmod(0o600)
        made = []
        for number in range(nodes):
            node = await _make_node(folder / f"node{number}", keys, database, shared, stack)
            node.settings.update(settings or {})
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
            stack.enter_context(_trusting(proxy.folder / "cert.pem"))
        yield rig


async def _make_node(
    folder: Path, keys: Path, database: Server, shared: Server | None, stack: AsyncExitStack
) -> ClusterNode:
    folder.mkdir(parents=True)  # noqa: ASYNC240
    program = Program(folder / "state")
    link = await stack.enter_async_context(Proxy("127.0.0.1", database.port))
    address = urlsplit(database.url)
    chosen: dict[str, Any] = {
        "server.port": program.port,
        "server.state_dir": str(program.state_dir),
        "access.tokens.secret_file": str(keys),
        "cluster.postgres": f"postgresql://postgres@127.0.0.1:{link.port}{address.path}",
        **SETTINGS,
    }
    node = ClusterNode(program, chosen, link)
    if shared is not None:
        node.redis = await stack.enter_async_context(Proxy("127.0.0.1", shared.port))
        chosen["cluster.redis"] = f"redis://127.0.0.1:{node.redis.port}/0"
    return node


@contextmanager
def _trusting(certificate: Path) -> Iterator[None]:
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
