"""One life of a node on virtual time: the real gateway, sessions, ingest and fanout
over memory adapters.

The disk (the store and its log) and the other parts that all nodes share are passed in
and outlive it. ``kill`` is a kill -9: sockets break, all tasks stop where they are, and
nothing more reaches the disk.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import cast

from holdfast import telemetry
from holdfast.access.principal import USER_SCOPES, Principal
from holdfast.access.proofs import CursorProofs
from holdfast.clock import Ids
from holdfast.errors import Unauthorized
from holdfast.eventlog.contract import EventLog
from holdfast.fanout.bus.contract import DeviceDisplaced, EphemeralNotification, Notification
from holdfast.fanout.dead_letters import RecentDeadLetters
from holdfast.fanout.ephemeral import Ephemeral
from holdfast.fanout.feed import FeedDeps, LogFeed
from holdfast.fanout.members import Members
from holdfast.fanout.presence import PresenceReporter
from holdfast.fanout.registry.contract import Registry
from holdfast.fanout.registry.sweeper import RegistrySweeper
from holdfast.gateway.connection import Connection
from holdfast.gateway.contract import GatewayDeps
from holdfast.gateway.settings import GatewaySettings
from holdfast.history.history import ChatHistory
from holdfast.ingest.contract import Durability
from holdfast.ingest.durability import EpochRaiser, StoreDurability
from holdfast.ingest.watermarks import Watermarks
from holdfast.message import User
from holdfast.session.settings import BackpressureSettings, OutboundSettings, TimeoutSettings
from holdfast.store.contract import ChatStore
from holdfast.store.leases.held import HeldLease
from holdfast.work.contract import WorkStore
from proof.faults import FaultPlan, faulty
from proof.simulation.disk import SimulatedDisk
from proof.simulation.link import NodeBus, NodeLink, ReachedStore, reached
from proof.simulation.log import FaultyLog
from proof.simulation.network import Wire
from proof.simulation.options import Options
from proof.simulation.parts import Parts
from proof.simulation.reader import LEASE, MessageReader
from proof.simulation.shared import SharedParts
from proof.simulation.watch import Watch, WatchedReceiver, watched, watched_intake
from proof.virtual_loop import LoopClock

HEARTBEAT_SECONDS = 10.0
PROOFS = CursorProofs(b"simulation")
RESTART_SECONDS = 1.0
POLL_SECONDS = 2.0
"""How often a node looks whether the store is back, and whether it is to read the log.
Seldom: idle turns of the loop are most of a run's cost.
"""
_PLENTY_BYTES = 2**30


class NodeClock(LoopClock):
    """The clocks of one node; its wall clock may be wrong."""

    def __init__(self, ahead_seconds: float) -> None:
        self._ahead_seconds = ahead_seconds

    def now(self) -> float:
        return super().now() + self._ahead_seconds


class SimulatedServer:
    """One life, until ``kill`` or ``stop``; make it inside ``link.run``."""

    def __init__(
        self,
        link: NodeLink,
        disk: SimulatedDisk,
        parts: Parts,
        plan: FaultPlan,
        options: Options,
        ids: Ids,
        watch: Watch,
        shared: SharedParts,
    ) -> None:
        self.link = link
        self._has_others = options.servers > 1
        rng = random.Random(f"{options.seed} {link.name}")
        self._clock = NodeClock(rng.uniform(-1, 1) * options.skew_seconds)
        self._wires: list[Wire] = []
        store = faulty(parts.around_store(cast(ChatStore, ReachedStore(disk.store, link))), plan)
        self.settings = parts.settings(gateway_settings(options))
        self._registry = faulty(cast(Registry, reached(shared.registry, link, "registry")), plan)
        self.durability: Durability = parts.durability(store, self._clock, self._registry)
        self._intake = watched_intake(watch, parts.intake)(
            self.durability, self._clock, ids, grouping=store.grouping, lane=store.lane
        )
        self.history = ChatHistory(
            store, EpochRaiser(self.durability, self._clock, ids), PROOFS, self._clock
        )
        self._members = Members(store.members)
        self._bus = bus = NodeBus(ids.new("bus_"), shared.hub, link)
        self._ephemeral = Ephemeral(self._members, self.history.memberships_of, self._clock, bus)
        self._watermarks = Watermarks(self.durability, self._ephemeral.on_watermarks_moved)
        self._presence = PresenceReporter(
            link.name,
            self._registry,
            self._ephemeral,
            bus,
            self._clock,
            self.settings.connections_per_user,
        )
        deps = GatewayDeps(
            self.settings,
            self._clock,
            ids,
            self._intake,
            self.history,
            self._watermarks,
            PROOFS,
            _no_tokens,
            rng,
        )
        connection_type = watched(watch, parts.connection, parts.session)
        self.gateway = parts.gateway(deps, self._presence, _PLENTY_BYTES, connection_type)
        self._ephemeral.connect(self.gateway)
        self._presence.close_displaced = self._close_displaced
        bus.subscribe(self._on_notification)
        log = cast(EventLog, reached(disk.log, link, "log"))
        self.receiver = WatchedReceiver(self.gateway, link.name, watch)
        feed_log = faulty(FaultyLog(log, plan, options), plan)
        feed_deps = FeedDeps(feed_log, self.receiver, self._members, RecentDeadLetters())
        self._feed = LogFeed(feed_deps, self._clock, watch=self._ephemeral.on_entries)
        leases = faulty(reached(parts.leases(shared.leases, self._clock), link, "leases"), plan)
        self._sweeper = RegistrySweeper(self._registry, self._ephemeral, leases, self._clock)
        self._lease, self._jobs = HeldLease(leases, LEASE, self._clock), shared.jobs
        jobs = faulty(cast(WorkStore, reached(shared.jobs, link, "jobs")), plan)
        self._reader = MessageReader(log, jobs, store, self._clock)
        self._reader.is_held, self._reader.held_poll_seconds = self._is_held, POLL_SECONDS
        self._stopping = asyncio.Event()
        self._life = asyncio.create_task(self._live())

    async def _live(self) -> None:
        async with self.gateway, asyncio.TaskGroup() as group:
            work = [
                self._intake.run(),
                self._watermarks.run(),
                self._presence.run(),
                self._ephemeral.run(),
                self._bus.run(),
                self._lease.run(),
                _restarted(self._feed.run),
                _restarted(self._reader.run),
                _restarted(self._check_recovery),
            ]
            if self._has_others:
                work.append(self._sweeper.run())
            roles = [group.create_task(each) for each in work]
            await self._stopping.wait()
            for role in roles:
                role.cancel()

    async def _check_recovery(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if isinstance(self.durability, StoreDurability):
                await self.durability.check_recovery()
            await self.history.check_recovery()

    def _is_held(self) -> bool:
        if (fence := self._lease.fence) is not None:
            self._jobs.on_act(self.link, fence)
        return fence is not None

    def _close_displaced(self, connection_ids: Iterable[str]) -> None:
        displaced = list(connection_ids)
        here = [c for c in self.gateway.open_connections if c.connection_id not in displaced]
        for connection in self.gateway.open_connections:
            if connection.connection_id in displaced and all(
                (connection.user, connection.device_id) != (other.user, other.device_id)
                for other in here
            ):
                telemetry.mark("a device was displaced by a connection to another node")
        self.gateway.close_displaced(displaced)

    def _on_notification(self, notification: Notification) -> None:
        if isinstance(notification, DeviceDisplaced):
            self._presence.on_notification(notification)
        elif isinstance(notification, EphemeralNotification):
            self._ephemeral.on_notification(notification)

    def accept(self, wire: Wire, user: User, device_id: str) -> Connection:
        """A device has connected; its token is already checked."""
        self._wires = [each for each in self._wires if not each.over]
        self._wires.append(wire)
        return self.gateway.accept(
            wire, Principal(user.tenant, user.user_id, USER_SCOPES, "user"), device_id
        )

    @property
    def committing(self) -> bool:
        return self._intake.committing > 0

    def kill(self) -> None:
        """kill -9: the remaining tasks end without any effect."""
        self.link.dead = True
        for wire in self._wires:
            wire.cut()
        self._stopping.set()

    async def stop(self) -> None:
        """Drain and end."""
        self._stopping.set()
        await asyncio.wait([self._life])


async def _restarted(role: Callable[[], Awaitable[None]]) -> None:
    """Restart a role that ends with an error, as a node does."""
    while True:
        try:
            await role()
        except Exception:
            await asyncio.sleep(RESTART_SECONDS)


def _no_tokens(_credential: str) -> Principal:
    raise Unauthorized("devices of a simulation are known at the door")


def gateway_settings(options: Options) -> GatewaySettings:
    return GatewaySettings(
        backpressure=BackpressureSettings(
            outbound=OutboundSettings(max_buffer_messages=options.buffer_messages)
        ),
        timeouts=TimeoutSettings(heartbeat_interval_seconds=HEARTBEAT_SECONDS),
        reconnect_spread_seconds=2.0,
    )
