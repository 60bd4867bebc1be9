"""Settings in, a running node out. The only module that chooses adapters.

A node starts from the storage outwards and stops from the sockets inwards:

    the port → state directory → store → event log → ingest → fanout → gateway → HTTP
"""

from __future__ import annotations

import asyncio
import gc
import getpass
import os
import random
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from holdfast import __version__, telemetry
from holdfast.access import ConnectionCounts, HandshakeLimiter, KeyRing, Secrets, Tokens, open_secrets, shared_secret
from holdfast.api.app import make_app
from holdfast.api.deps import Backup, Deps, PresenceView, Readiness
from holdfast.clock import Clock, Ids, SystemClock, timestamp
from holdfast.errors import BadSetting, HoldfastError, InternalError
from holdfast.eventlog.sqlite import SqliteEventLog
from holdfast.fanout.attendance import Attendance
from holdfast.fanout.dead_letters import RecentDeadLetters
from holdfast.fanout.ephemeral import Ephemeral
from holdfast.fanout.fanout import Fanout, FanoutSettings, Surroundings
from holdfast.fanout.link.local import LocalLink
from holdfast.fanout.members import Members
from holdfast.fanout.registry.memory import MemoryRegistry
from holdfast.gateway.connection import Plane
from holdfast.gateway.entrance import Entrance
from holdfast.gateway.gateway import Gateway
from holdfast.gateway.handshake import Handshake
from holdfast.gateway.port import Port
from holdfast.ingest.durability import DurabilitySettings, GuardedStore
from holdfast.ingest.intake import Intake
from holdfast.ingest.repair import EpochRaiser
from holdfast.ingest.watermarks import Watermarks
from holdfast.limits.entrances import LimitedSends
from holdfast.limits.plane import LimitsPlane
from holdfast.message import User
from holdfast.node_limits import limiting
from holdfast.node_work import working
from holdfast.resilience import BreakerState
from holdfast.settings import UNUSED_WITHOUT_ENGINES, Settings, differences
from holdfast.store.history import History
from holdfast.store.sqlite import SqliteStore
from holdfast.store.sqlite.backup import restore_chats
from holdfast.store.state import CHATS_NAME, held
from holdfast.webhooks.plane import WorkPlane
from holdfast.wire.frames import Presence

BACKUPS = "backups"
HTTP_STOP_SECONDS = 5
"""How long requests that are open after the drain may still take."""
RESTART_SECONDS = 1.0
"""How long a role that ended by an error rests before it is started again."""
BACKLOG = 2048
GAUGES_SECONDS = 5.0


def run_node(settings: Settings, announce: Callable[[str], None] = print) -> None:
    """Serve until SIGINT or SIGTERM, then drain. Raises an OperatorError if it cannot start."""
    telemetry.configure_logging(settings.server.log_format == "json", settings.server.log_level)
    uvloop.run(_serve(settings, announce))


def settle_heap() -> None:
    """Once everything is built: what exists now stays until the process ends, so the collector need not look at it.

    It would otherwise pass over all modules, tens of milliseconds each time, while everybody waits for an ack.
    """
    gc.collect()
    gc.freeze()


def restore_backup(state_dir: Path, backup: Path, overwrite: bool) -> int:
    """Put a backup in place of a stopped server's chats, under new epochs; how many chats it holds.

    StateDirectory if a server runs on the directory, or if there are chats and ``overwrite`` is not said.
    """
    with held(state_dir) as directory:
        at = timestamp(SystemClock().now())
        return restore_chats(backup, directory / CHATS_NAME, at=at, actor=getpass.getuser(), overwrite=overwrite)


async def _serve(settings: Settings, announce: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with running(settings) as node:
        settle_heap()
        for line in node.posture():
            announce(line)
        waits = [asyncio.create_task(event.wait()) for event in (stop, node.broken)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        announce("Stopping: answering what is open, sending clients away.")
    if node.broken.is_set():
        raise InternalError("a part of the server ended by a defect, which its log tells; start it again")


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Node]:
    """A node that serves while the block runs; leaving it drains."""
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        listening = stack.enter_context(_bound(settings.server.host, settings.server.port))
        settings = replace(settings, server=replace(settings.server, port=listening.getsockname()[1]))
        state = stack.enter_context(held(settings.server.state_path))
        secrets, keys = open_secrets(state, timestamp(clock.now()))
        durability = settings.durability
        store = await stack.enter_async_context(
            SqliteStore(state / CHATS_NAME, durability.sqlite, durability.chats, clock)
        )
        telemetry.settings_changed(path for path, _, _ in differences(settings))
        limits = await stack.enter_async_context(limiting(settings.limits, settings.server.node_id, state, clock))
        node = Node(settings, store, clock, secrets, keys, limits)
        await stack.enter_async_context(node.roles())
        work = await stack.enter_async_context(working(settings.work, settings.server.node_id, state, clock, node.log))
        await stack.enter_async_context(node.gateway)
        await stack.enter_async_context(_http(make_app(node.deps(state, work)), node.port(), listening, node.broken))
        try:
            yield node
        finally:
            # While HTTP still answers: handshakes are told to go elsewhere, and readiness says so.
            await node.gateway.drain()


class Node:
    """The parts of one node, put together."""

    def __init__(
        self, settings: Settings, store: SqliteStore, clock: Clock, secrets: Secrets, keys: KeyRing, limits: LimitsPlane
    ) -> None:
        gateway_settings, plane_settings = settings.gateway, settings.durability
        self.settings = settings
        self.secrets = secrets
        self.started_at = timestamp(clock.now())
        self.broken = asyncio.Event()
        """A part ended without which serving on would be a pretence."""
        self._clock = clock
        self._ids = Ids(clock)
        self._keys = keys
        self._store = store
        self.tokens = Tokens(settings.access.tokens, shared_secret(secrets.jwt_secret.encode()), clock)
        self._durability = GuardedStore(
            store,
            clock,
            DurabilitySettings(breaker=gateway_settings.circuit_breaker),
            epoch_raised=lambda chat_id, head: self.gateway.heard(chat_id, head),
        )
        self._intake = Intake(self._durability, clock, self._ids, plane_settings.intake)
        self.limits = limits
        self._sends = LimitedSends(self._intake, limits.entrances)
        raiser = EpochRaiser(self._durability, clock, self._ids)
        self._history = History(store, raiser, clock, plane_settings.history)
        self._watermarks = Watermarks(
            self._durability, lambda moved: self._ephemeral.moved(moved), plane_settings.watermarks
        )
        self._registry = MemoryRegistry()
        self._link = LocalLink()
        self._members = Members(store.members)
        dlq = settings.fanout.dlq
        self._dead_letters = RecentDeadLetters(dlq.max_letters, dlq.alert_threshold_per_hour)
        self._ephemeral = Ephemeral(self, self._members, self._history.memberships, clock, settings.fanout.ephemeral)
        self._attendance = Attendance(settings.server.node_id, self._registry, self._ephemeral)
        self.gateway = Gateway(self._plane(), self._attendance, _memory_budget(settings))
        self._link.connect(settings.server.node_id, self.gateway.deliver)
        self.log = SqliteEventLog(store)
        self._fanout = self._make_fanout()

    @property
    def url(self) -> str:
        return self.settings.server.url

    # --- what the parts need of each other --------------------------------------------------------------

    def push_to_chat(self, chat_id: str, key: tuple[str, ...], frame: bytes) -> None:
        self.gateway.push_to_chat(chat_id, key, frame)

    def push_to_user(self, user: User, key: tuple[str, ...], frame: bytes) -> None:
        self.gateway.push_to_user(user, key, frame)

    def _plane(self) -> Plane:
        return Plane(
            limits=self.settings.gateway,
            clock=self._clock,
            ids=self._ids,
            intake=self._sends,
            history=self._history,
            watermarks=self._watermarks,
            verify=self.tokens.verify,
            rng=random.Random(),
            sends_failing_seconds=lambda: self._durability.breaker_open_seconds,
        )

    def _make_fanout(self) -> Fanout:
        settings = self.settings.fanout
        around = Surroundings(
            log=self.log,
            members=self._members,
            registry=self._registry,
            link=self._link,
            dead_letters=self._dead_letters,
            here=self.settings.server.node_id,
        )
        reading = FanoutSettings(max_poll_records=settings.kafka.consumer.max_poll_records, retry=settings.retry)
        return Fanout(around, self._clock, random.Random(), reading, watch=self._ephemeral.saw)

    def port(self) -> Port:
        """What takes over WebSocket upgrades."""
        server, access, backpressure = self.settings.server, self.settings.access, self.settings.gateway.backpressure
        handshake = Handshake(
            verify=self.tokens.verify,
            limiter=HandshakeLimiter(access.handshakes_per_ip_per_minute),
            counts=ConnectionCounts(access.connections),
            origins=origins_of(self.settings),
            proxies=[ip_network(proxy) for proxy in server.trusted_proxies],
            draining=lambda: self.gateway.draining,
            rules=self.limits.entrances,
        )
        entrance = Entrance(handshake, self.gateway, backpressure.inbound)
        return Port(entrance, backpressure.inbound.max_frame_bytes, backpressure.outbound.socket_send_buffer_bytes)

    @asynccontextmanager
    async def roles(self) -> AsyncIterator[None]:
        """Everything that runs beside the sockets. Ingest ends only when what it took is answered."""
        ended = [asyncio.create_task(self._intake.run()), asyncio.create_task(self._watermarks.run())]
        for task in ended:
            task.add_done_callback(self._ended_by_itself)
        cancelled = [
            asyncio.create_task(_supervised("fanout", self._fanout.run)),
            asyncio.create_task(_supervised("ephemeral", self._ephemeral.run)),
            asyncio.create_task(_supervised("attendance", self._attendance.run)),
            asyncio.create_task(_supervised("gauges", self._keep_gauges)),
        ]
        try:
            yield
        finally:
            for task in ended:
                task.remove_done_callback(self._ended_by_itself)
            self._intake.stop()
            self._watermarks.stop()
            await asyncio.gather(*ended, return_exceptions=True)
            for task in cancelled:
                task.cancel()
            await asyncio.gather(*cancelled, return_exceptions=True)

    def _ended_by_itself(self, task: asyncio.Task[None]) -> None:
        """Ingest cannot be started again in the middle; a supervisor of the process can do it from the beginning."""
        telemetry.defect("ingest", task.exception() or RuntimeError("it ended"))
        self.broken.set()

    async def _keep_gauges(self) -> None:
        """Gauges that must move also while the part they are about stands still."""
        while True:
            await asyncio.sleep(GAUGES_SECONDS)
            if (lag := await self._lag()) is not None:
                telemetry.fanout_lag(lag)
            telemetry.hot_chats(len(self._intake.hot_chats()))
            telemetry.sends_waiting(self._intake.waiting)

    async def _lag(self) -> int | None:
        """None: the log cannot be asked now; that is told as a dependency, and must not hide the rest."""
        try:
            return max(await self.log.end() - self._fanout.position, 0)
        except HoldfastError:
            return None

    # --- what the API shows -----------------------------------------------------------------------------

    def deps(self, state: Path, work: WorkPlane | None = None) -> Deps:
        server = self.settings.server
        return Deps(
            durability=self._durability,
            sends=self._sends,
            history=self._history,
            audit_log=self._store,
            tokens=self.tokens,
            keys=self._keys,
            presence=self._presence,
            status=self._status,
            readiness=self._readiness,
            backup=lambda: self._backup(state),
            work=work.jobs if work else None,
            webhooks=work.webhooks if work else None,
            clock=self._clock,
            ids=self._ids,
            settings=self.settings.api,
            content_bytes_max=self.settings.gateway.backpressure.inbound.max_message_size_bytes,
            pages=self.settings.gateway.pages,
            origins=frozenset(server.allowed_origins),
            proxies=tuple(ip_network(proxy) for proxy in server.trusted_proxies),
            limits=self.limits,
        )

    async def _presence(self, users: Sequence[User]) -> PresenceView:
        here = self._attendance.here
        return PresenceView(
            [
                Presence(user.user_id, "online" if user in here else "offline", self._ephemeral.last_seen(user) or "")
                for user in users
            ]
        )

    async def _readiness(self) -> Readiness:
        states = {"store": self._durability.breaker, "store_reads": self._history.breaker}
        dependencies = {name: "open" if s is BreakerState.OPEN else "up" for name, s in states.items()}
        if self.gateway.draining:
            dependencies["gateway"] = "draining"
        return Readiness(all(state == "up" for state in dependencies.values()), dependencies)

    async def _status(self) -> Mapping[str, Any]:
        readiness = await self._readiness()
        return {
            "version": __version__,
            "node_id": self.settings.server.node_id,
            "started_at": self.started_at,
            "ready": readiness.ready,
            "dependencies": readiness.dependencies,
            "connections": self.gateway.connections,
            "users": len(self._attendance.here),
            "sends_waiting": self._intake.waiting,
            "hot_chats": dict(self._intake.hot_chats()),
            "fanout_lag": await self._lag(),
            "dead_letters": [
                {"position": letter.position, "reason": letter.reason} for letter in await self._dead_letters.read(10)
            ],
            "limits": self.limits.status(),
            "settings": {path: str(value) for path, value, _ in differences(self.settings)},
        }

    async def _backup(self, state: Path) -> Backup:
        folder = state / BACKUPS
        folder.mkdir(mode=0o700, exist_ok=True)
        target = folder / f"chats-{self._ids.new('')}.db"
        await self._store.backup(target)
        return Backup(str(target), target.stat().st_size)

    def posture(self) -> Iterator[str]:
        """How this node stands, line by line, for the operator who starts it."""
        server = self.settings.server
        state = server.state_path
        yield f"Holdfast {__version__} listens on {self.url}"
        yield f"  storage   SQLite in {state}; an ack means that the message is on disk"
        yield f"  secrets   {state / 'secrets.json'}, readable only by you"
        if server.trusted_proxies:
            yield f"  network   {server.host}, behind {', '.join(server.trusted_proxies)}, where TLS ends"
        else:
            yield "  network   this machine only"
        yield f"  browsers  pages of {', '.join(sorted(origins_of(self.settings)))}"
        changed = [entry for entry in differences(self.settings) if entry[0] not in ("server.state_dir", "server.port")]
        yield (
            f"  settings  {len(changed)} differ from their defaults:"
            if changed
            else "  settings  all at their defaults"
        )
        for path, value, default in changed:
            idle = "; no effect without that engine" if path.startswith(UNUSED_WITHOUT_ENGINES) else ""
            yield f"            {path} = {value} (default {default}{idle})"
        program = "holdfast" if shutil.which("holdfast") else sys.argv[0]
        defaults = Settings().server
        where = "" if state == defaults.state_path else f" --state-dir {shlex.quote(str(state))}"
        at = "" if self.url == defaults.url else f" --url {self.url}"
        yield f"  try       {program} chat create --user alice --member bob --name lobby{where}{at}"
        yield f"            {program} chat open lobby --user alice{where}{at}"
        yield f"            {program} token --user alice{where}    (for a client of your own)"
        yield f"  the API   {self.url}/docs"


def origins_of(settings: Settings) -> frozenset[str]:
    """The pages that may connect: those this server shows itself, and those that were allowed."""
    own = {f"http://{host}:{settings.server.port}" for host in ("127.0.0.1", "[::1]", "localhost")}
    return frozenset(own | set(settings.server.allowed_origins))


def _memory_budget(settings: Settings) -> int:
    return settings.gateway.memory_budget_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


async def _supervised(role: str, run: Callable[[], Awaitable[None]]) -> None:
    """Start a role again when it fails: its plane heals by itself, and the others never notice."""
    while True:
        try:
            await run()
        except Exception as error:
            telemetry.defect(role, error)
        await asyncio.sleep(RESTART_SECONDS)


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket, taken before anything else so that a busy port changes nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            raise BadSetting(
                f"cannot listen on {host}:{port} ({error.strerror}): stop what uses it, or choose another with --port"
            ) from None
        listening.listen(BACKLOG)
        yield listening
    finally:
        listening.close()


class _Server(uvicorn.Server):
    """uvicorn without its signals: the node decides when to stop. ``ready`` is set when it accepts."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@asynccontextmanager
async def _http(app: ASGIApp, port: Port, listening: socket.socket, broken: asyncio.Event) -> AsyncIterator[None]:
    """Serve HTTP, and hand upgrades to ``port``. ``broken`` is set if it ends by itself."""
    config = uvicorn.Config(
        app,
        http="httptools",
        ws=port,  # type: ignore[arg-type]  # a factory serves where it wants a class
        lifespan="off",
        log_config=None,
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=HTTP_STOP_SECONDS,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    serving.add_done_callback(lambda ended: None if server.should_exit else broken.set())
    ready = asyncio.create_task(server.ready.wait())
    try:
        await asyncio.wait([ready, serving], return_when=asyncio.FIRST_COMPLETED)
        yield
    finally:
        ready.cancel()
        server.should_exit = True
        await serving
