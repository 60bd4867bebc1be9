"""Builds the parts of the message path of one node and connects them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import cached_property

from msgspec import structs

from holdfast import __version__, telemetry
from holdfast.access.connection_limits import ConnectionCounts, HttpCounts
from holdfast.access.contract import Credentials
from holdfast.access.issuers import ISSUERS_FILE, Issuers
from holdfast.access.keys import KeyRing
from holdfast.access.proofs import CursorProofs
from holdfast.access.revocations.in_force import RevocationsInForce
from holdfast.access.tokens import Tokens, shared_secret
from holdfast.api.address_limits import AddressLimits
from holdfast.api.deps import ApiDeps, ClusterStatus, NodeStatus, PresenceView, Readiness
from holdfast.clock import Clock, Ids, timestamp
from holdfast.errors import HoldfastError
from holdfast.fanout.bus.contract import (
    IN_DOUBT_MAX,
    ChatsInDoubt,
    DeviceDisplaced,
    KeysChanged,
    Notification,
    RevocationsChanged,
    Status,
)
from holdfast.fanout.dead_letters import overview
from holdfast.fanout.ephemeral import Ephemeral
from holdfast.fanout.feed import FeedDeps, LogFeed
from holdfast.fanout.members import Members
from holdfast.fanout.presence import CALL_SECONDS, PresenceReporter
from holdfast.fanout.registry.sweeper import RegistrySweeper
from holdfast.gateway.contract import GatewayDeps
from holdfast.gateway.gateway import Gateway
from holdfast.gateway.handshake import Handshake
from holdfast.gateway.transport.http import HttpDeps, HttpTimes
from holdfast.gateway.transport.port import Port
from holdfast.gateway.transport.upgrade import WebSocketUpgrade
from holdfast.history.history import ChatHistory
from holdfast.ingest.admission import AdmissionControl
from holdfast.ingest.counter_check import CounterCheck
from holdfast.ingest.durability import EpochRaiser, StoreDurability
from holdfast.ingest.erasure import Eraser
from holdfast.ingest.expiry import KeyExpiry
from holdfast.ingest.intake import Intake
from holdfast.ingest.watermarks import Watermarks
from holdfast.limits.composition import LimitsParts
from holdfast.message import User
from holdfast.node.alerts import NodeAlerts
from holdfast.node.backup import Backups
from holdfast.node.banner import origins_of
from holdfast.node.cluster_record import RecordRenewal, record_of
from holdfast.node.cluster_view import cluster_status
from holdfast.node.engines import Engines
from holdfast.node.jwks_fetch import fetch_jwks
from holdfast.node.readiness import is_ready
from holdfast.node.state_dir import show_disk
from holdfast.node.status import HALTED_SHOWN, dead_jobs_of, living_nodes, soon, wrong_first
from holdfast.node.store_watch import StoreWatch
from holdfast.node.streaming import NodeStreaming
from holdfast.node.supervisor import GAUGES_SECONDS, background_task
from holdfast.resilience import BreakerState
from holdfast.settings import Settings, differences
from holdfast.store.contract import HaltedChats
from holdfast.store.nodes.contract import NodeRecord
from holdfast.streaming.assistants.replying import AssistantDeps
from holdfast.webhooks.parts import WorkParts
from holdfast.wire.frames import Presence


class Node:
    """The parts of one node."""

    def __init__(
        self,
        settings: Settings,
        engines: Engines,
        limits: LimitsParts,
        work: WorkParts,
        credentials: Credentials,
        clock: Clock,
        gauges_seconds: float = GAUGES_SECONDS,
    ) -> None:
        self.settings = settings
        self.engines = engines
        self.limits = limits
        self.node_id = limits.limiter.node.name
        self.started_at = timestamp(clock.now())
        self.broken = asyncio.Event()
        """Set when a part has ended that the node cannot serve without."""
        self._work = work
        self._gauges_seconds = gauges_seconds
        self._last_lag = 0
        self._clock = clock
        self._ids = ids = Ids(clock)

        self.keys = KeyRing(engines.credentials, credentials)
        self.revocations = RevocationsInForce(engines.revocations, clock)
        access, issuers_file = settings.access, settings.server.state_path / ISSUERS_FILE
        self.issuers = Issuers(access.issuers, fetch_jwks, clock, issuers_file)
        secret, check = shared_secret(*credentials.token_keys), self.revocations.check
        self.tokens = Tokens(access.tokens, secret, clock, check, ids, self.issuers)
        proofs = CursorProofs(*credentials.token_keys)

        chats, durability = engines.chats, settings.durability
        breaker, is_muted = settings.gateway.circuit_breaker, self.revocations.is_muted
        self._durability = StoreDurability(chats, clock, breaker, durability.changes)
        self._intake = Intake(
            self._durability, clock, ids, durability.intake, is_muted, chats.grouping, chats.lane
        )
        self._sends = AdmissionControl(self._intake, limits.entry_points, clock)
        self._key_expiry = KeyExpiry(chats, engines.records, clock, durability.keys)
        self._counter_check = CounterCheck(chats, engines.leases, clock, gauges_seconds)
        raiser = EpochRaiser(self._durability, clock, ids, self.node_id)
        page_bytes = settings.gateway.pages.max_bytes
        self.history = ChatHistory(chats, raiser, proofs, clock, durability.history, page_bytes)

        members = Members(chats.members)
        self._ephemeral = Ephemeral(
            members, self.history.memberships_of, clock, engines.bus, settings.fanout.ephemeral
        )
        self._watermarks = Watermarks(
            self._durability, self._ephemeral.on_watermarks_moved, durability.watermarks
        )
        self._presence_reporter = self._make_presence_reporter()
        self._record_renewal = RecordRenewal(engines.nodes, self._node_record)
        self._sweeper = RegistrySweeper(engines.registry, self._ephemeral, engines.leases, clock)
        self.gateway = Gateway(
            self._gateway_deps(proofs), self._presence_reporter, _memory_budget(settings)
        )
        self._feed = self._make_feed(members)
        self.streaming = NodeStreaming(settings, self.node_id, engines, limits, clock)
        self._connect()

    def _connect(self) -> None:
        """Connect the callbacks that lead back to the gateway."""
        self.revocations.on_added = self.gateway.cutoff.on_revoked
        self._ephemeral.connect(self.gateway)
        self._presence_reporter.close_displaced = self.gateway.close_displaced
        bus = self.engines.bus
        bus.subscribe(self._on_notification)
        self.revocations.on_stored = lambda: bus.publish(RevocationsChanged())
        self.keys.on_stored = lambda: bus.publish(KeysChanged())

    def _on_notification(self, notification: Notification) -> None:
        """Another node published this."""
        match notification:
            case DeviceDisplaced():
                self._presence_reporter.on_notification(notification)
            case RevocationsChanged():
                self.revocations.wake()
            case KeysChanged():
                self.keys.wake()
            case ChatsInDoubt():
                self.gateway.roster_sync.compare_chats(notification.chat_ids)
            case _:
                self._ephemeral.on_notification(notification)

    @property
    def url(self) -> str:
        return self.settings.server.url

    def _has(self, role: str) -> bool:
        return role in self.settings.server.roles

    def _if_role(
        self, role: str, name: str, run: Callable[[], Awaitable[None]]
    ) -> AbstractAsyncContextManager[None]:
        """A background task of nodes with this role."""
        return background_task(name, run) if self._has(role) else nullcontext()

    # --- what the parts need of each other

    def _gateway_deps(self, proofs: CursorProofs) -> GatewayDeps:
        return GatewayDeps(
            settings=self.settings.gateway,
            clock=self._clock,
            ids=self._ids,
            sends=self._sends,
            history=self.history,
            watermarks=self._watermarks,
            proofs=proofs,
            verify=self.tokens.verify,
            refusal=self.revocations.refusal,
            rng=random.Random(),
            sends_failing_seconds=lambda: self._durability.breaker_open_seconds,
            retry=self.settings.fanout.retry,
        )

    def _make_presence_reporter(self) -> PresenceReporter:
        return PresenceReporter(
            self.node_id,
            self.engines.registry,
            self._ephemeral,
            self.engines.bus,
            self._clock,
            self.settings.gateway.connections_per_user,
        )

    def _make_feed(self, members: Members) -> LogFeed:
        settings, engines = self.settings.fanout, self.engines
        return LogFeed(
            FeedDeps(engines.log, self.gateway, members, engines.dead_letters),
            self._clock,
            settings.retry,
            settings.read_entries_max,
            self._ephemeral.on_entries,
            self.settings.durability.intake.hot_messages_per_minute,
        )

    def _websocket_port(self) -> Port:
        access, backpressure = self.settings.access, self.settings.gateway.backpressure
        handshake = Handshake(
            verify=self.tokens.verify,
            counts=ConnectionCounts(access.connections),
            origins=origins_of(self.settings),
            proxies=self.settings.server.proxies,
            refusal=self.revocations.refusal,
            draining=lambda: self.gateway.draining,
            is_gateway=self._has("gateway"),
            rules=self.limits.entry_points,
            legacy_rate_limit_headers=self.settings.api.legacy_rate_limit_headers,
        )
        upgrade = WebSocketUpgrade(handshake, self.gateway, backpressure.inbound)
        return Port(
            upgrade,
            backpressure.inbound.max_frame_bytes,
            backpressure.outbound.socket_send_buffer_bytes,
        )

    def http_deps(self, address_limits: AddressLimits, times: HttpTimes) -> HttpDeps:
        """What the HTTP server needs."""
        return HttpDeps(
            port=self._websocket_port(),
            counts=HttpCounts(self.settings.access.http, self.settings.server.proxies),
            memory_budget=self.gateway.memory_budget,
            count_anonymous=address_limits.count_request,
            times=times,
            legacy_rate_limit_headers=self.settings.api.legacy_rate_limit_headers,
        )

    @asynccontextmanager
    async def background_tasks(self) -> AsyncIterator[None]:
        """Run everything beside the sockets.

        Ingest ends when its sends are answered. The names of these tasks are label
        values of the metric ``holdfast_defects``, so they stay.
        """
        chats, pause_seconds = self.engines.chats, self._gauges_seconds
        watch = StoreWatch(self._durability, self.history, chats, pause_seconds)
        ingest_tasks = [
            asyncio.create_task(self._intake.run()),
            asyncio.create_task(self._watermarks.run()),
        ]
        for task in ingest_tasks:
            task.add_done_callback(self._ended_by_itself)
        try:
            async with (
                self._if_role("gateway", "fanout", self._feed.run),
                background_task("ephemeral", self._ephemeral.run),
                background_task("bus", self.engines.bus.run),
                self._if_role("gateway", "attendance", self._presence_reporter.run),
                self._if_role("gateway", "registry_sweep", self._sweeper.run),
                background_task("gauges", self._keep_gauges),
                background_task("probe", watch.probe),
                background_task("recovery", watch.check_recovery),
                self._if_role("ingest", "housekeeping", self._key_expiry.run),
                self._if_role("ingest", "counter_check", self._counter_check.run),
                background_task("record", self._record_renewal.run),
                background_task("revocations", self.revocations.follow),
                background_task("keys", self.keys.follow) if self.keys.is_shared else nullcontext(),
                background_task("issuers", self.issuers.run),
            ):
                yield
        finally:
            for task in ingest_tasks:
                task.remove_done_callback(self._ended_by_itself)
            self._intake.stop()
            self._watermarks.stop()
            await asyncio.gather(*ingest_tasks, return_exceptions=True)

    def _ended_by_itself(self, task: asyncio.Task[None]) -> None:
        """Stop the node: ingest cannot restart alone, the process's supervisor can."""
        telemetry.defect("ingest", task.exception() or RuntimeError("it ended"))
        self.broken.set()

    async def _keep_gauges(self) -> None:
        """Refresh the gauges that must move even while their part hangs."""
        while True:
            await asyncio.sleep(self._gauges_seconds)
            if (lag := await self._lag()) is not None:
                self._last_lag = lag
                telemetry.fanout_lag(lag)
            telemetry.hot_chats(len(self._feed.hot_chats()))
            telemetry.sends_waiting(self._intake.waiting)
            await show_disk(self.settings.server.state_path)
            if (halted := await self._halted(0)) is not None:
                telemetry.chats_halted(halted.count)

    async def _halted(self, limit: int) -> HaltedChats | None:
        """None if the store does not answer; that is shown as a dependency."""
        try:
            return await self.history.ask(lambda store: store.halted(limit))
        except HoldfastError:
            return None

    async def _lag(self) -> int | None:
        """None if the log does not answer; the status reports that as a dependency."""
        if not self._has("gateway"):
            return 0
        try:
            return await self.engines.log.lag(self._feed.position)
        except HoldfastError:
            return None

    def assistant_deps(self) -> AssistantDeps:
        return AssistantDeps(
            replies=self.streaming.parts,
            audience=self.gateway.replies,
            sends=self._sends,
            history=self.history,
            clock=self._clock,
        )

    # --- what the API shows

    def api_deps(self, backups: Backups, alerts: NodeAlerts) -> ApiDeps:
        return ApiDeps(
            durability=self._durability,
            sends=self._sends,
            history=self.history,
            chats=self.engines.chats,
            shared_log=self.engines.shared_log,
            records=self.engines.records,
            eraser=Eraser(
                self.engines.chats,
                self.engines.records,
                self._durability,
                self.engines.leases,
                self._clock,
                self._forget_elsewhere,
            ),
            limits=self.limits,
            work=self._work,
            streaming=self.streaming.parts,
            body_bytes=self.streaming.body_bytes,
            usage=self.engines.usage,
            alerts=alerts,
            tokens=self.tokens,
            keys=self.keys,
            revocations=self.revocations,
            disconnect=self.gateway.cutoff.disconnect,
            dead_letters=self.engines.dead_letters,
            compare_chats=self._compare_chats,
            presence=self._presence,
            status=lambda: self._status(alerts),
            cluster=self._cluster,
            readiness=self._readiness,
            backup=None if self.settings.cluster.postgres else backups.take,
            backup_step=lambda: backups.step,
            clock=self._clock,
            ids=self._ids,
            node_id=self.node_id,
            settings=self.settings.api,
            roles=self.settings.server.roles,
            content_bytes_max=self.settings.gateway.backpressure.inbound.max_message_size_bytes,
            pages=self.settings.gateway.pages,
            origins=frozenset(self.settings.server.allowed_origins),
            proxies=self.settings.server.proxies,
        )

    async def _forget_elsewhere(self, user: User) -> None:
        """What is kept of an erased user beside the store. It may be repeated."""
        await self.revocations.condense(user)
        await self.engines.dead_letters.forget_user(user.user_id)
        await self.streaming.forget_user(user)

    def _compare_chats(self, chat_ids: Sequence[str]) -> None:
        """Every node's sessions of these chats, or of all, compare with the store."""
        self.gateway.roster_sync.compare_chats(chat_ids)
        for start in range(0, len(chat_ids) or 1, IN_DOUBT_MAX):
            named = tuple(chat_ids[start : start + IN_DOUBT_MAX])
            self.engines.bus.publish(ChatsInDoubt(named))

    @cached_property
    def _record(self) -> NodeRecord:
        return record_of(self.settings, self.node_id, self.engines.database_connections)

    def _node_record(self) -> NodeRecord:
        return structs.replace(self._record, clients=self.gateway.connections, lag=self._last_lag)

    async def _cluster(self) -> ClusterStatus:
        nodes, registry = self.engines.nodes, self.engines.registry
        reporter = self._presence_reporter
        return await cluster_status(self.node_id, self.settings, nodes, registry, reporter)

    async def _presence(self, users: Sequence[User]) -> PresenceView:
        """Without the registry only users connected here are known to be online."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                found = await self.engines.registry.gateways_of(users)
        except (HoldfastError, TimeoutError) as error:
            telemetry.registry_failed(error)
            here = [user for user in users if self.gateway.roster.of_user(user)]
            return PresenceView([self._presence_of(user, "online") for user in here], stale=True)
        online = set[User]().union(*found.values())
        return PresenceView(
            [self._presence_of(user, "online" if user in online else "offline") for user in users]
        )

    def _presence_of(self, user: User, status: Status) -> Presence:
        return Presence(user.user_id, status, self._ephemeral.last_seen(user) or "")

    def _readiness(self) -> Readiness:
        states = {"store": self._durability.breaker, "store_reads": self.history.breaker}
        dependencies = {
            name: "open" if s is BreakerState.OPEN else "up" for name, s in states.items()
        }
        if dependencies["store"] == "up" and self._durability.trouble is not None:
            dependencies["store"] = "down"
        if self.gateway.draining:
            dependencies["gateway"] = "draining"
        dependencies |= {**self.limits.dependencies(), **self._work.dependencies()}
        if self._has("streaming"):
            dependencies.update(self.streaming.dependencies())
        if self._has("gateway"):
            dependencies["registry"] = "up" if self._presence_reporter.registry_up else "down"
        return Readiness(is_ready(self.settings.server.roles, dependencies), dependencies)

    def _trouble(self) -> Mapping[str, str]:
        """The dependencies whose last call failed, and why."""
        found = {
            "store": self._durability.trouble,
            "store_reads": self.history.trouble,
            **self.streaming.trouble(),
        }
        return {name: why for name, why in found.items() if why is not None}

    async def _status(self, alerts: NodeAlerts) -> NodeStatus:
        readiness = self._readiness()
        halted, dead, dead_jobs, nodes, lag = await asyncio.gather(
            soon(self._halted(HALTED_SHOWN)),
            soon(overview(self.engines.dead_letters)),
            soon(dead_jobs_of(self._work.jobs)),
            soon(living_nodes(self.engines.nodes)),
            soon(self._lag()),
        )
        found = {
            "halted_chats": halted,
            "dead_letters_of_fanout": dead,
            "dead_letters_of_jobs": dead_jobs,
            "nodes": nodes,
            "fanout_lag": lag,
        }
        by_reason, letters = dead or (None, ())
        return NodeStatus(
            **wrong_first(alerts.alerts, halted, by_reason, dead_jobs),
            unknown=[name for name, value in found.items() if value is None],
            version=__version__,
            node_id=self.node_id,
            started_at=self.started_at,
            ready=readiness.ready,
            dependencies=readiness.dependencies,
            trouble=self._trouble(),
            connections=self.gateway.connections,
            users=len(self.gateway.roster.users),
            nodes=nodes,
            sends_waiting=self._intake.waiting,
            hot_chats=dict(self._feed.hot_chats()),
            hot_messages_per_minute=self.settings.durability.intake.hot_messages_per_minute,
            fanout_lag=lag,
            dead_letters=[{"position": x.offset, "reason": x.reason} for x in letters],
            issuers=self.issuers.status(),
            limits=self.limits.status(),
            webhooks=self._work.webhooks.parked(),
            replies=self.streaming.status(),
            settings={path: str(value) for path, value, _ in differences(self.settings)},
        )


def _memory_budget(settings: Settings) -> int:
    return (
        settings.gateway.memory_budget_bytes
        or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    )
