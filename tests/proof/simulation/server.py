"""One life of a server on virtual time: the real gateway, sessions, ingest and fanout
over memory adapters.

Its disk (the store and its log) is passed in and survives it. ``kill`` is a kill -9:
sockets break, all tasks stop where they are, and nothing more reaches the disk.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from holdfast.access.principal import USER_SCOPES, Principal
from holdfast.access.proofs import CursorProofs
from holdfast.clock import Ids
from holdfast.errors import Unauthorized
from holdfast.fanout.bus.contract import DeviceDisplaced, EphemeralNotification, Notification
from holdfast.fanout.bus.memory import MemoryBus
from holdfast.fanout.dead_letters import RecentDeadLetters
from holdfast.fanout.ephemeral import Ephemeral
from holdfast.fanout.feed import FeedDeps, LogFeed
from holdfast.fanout.members import Members
from holdfast.fanout.presence import PresenceReporter
from holdfast.fanout.registry.contract import NodeRecord, Registry
from holdfast.gateway.connection import Connection
from holdfast.gateway.contract import GatewayDeps
from holdfast.gateway.settings import GatewaySettings
from holdfast.history.history import ChatHistory
from holdfast.ingest.contract import Durability
from holdfast.ingest.durability import EpochRaiser
from holdfast.ingest.watermarks import Watermarks
from holdfast.message import Draft, User
from holdfast.session.settings import BackpressureSettings, OutboundSettings, TimeoutSettings
from holdfast.store.contract import ChatStore
from holdfast.store.memory import MemoryStore
from holdfast.store.numbering import GroupState
from proof.faults import FaultPlan, faulty
from proof.simulation.log import FaultyLog
from proof.simulation.network import Wire
from proof.simulation.options import Options
from proof.simulation.parts import Parts, SimulatedDisk
from proof.simulation.shared import SharedParts
from proof.simulation.watch import Watch, WatchedReceiver, watched, watched_intake
from proof.virtual_loop import LoopClock

HERE = "here"
RECORD = NodeRecord("simulated", (), 0, "")
HEARTBEAT_SECONDS = 10.0
PROOFS = CursorProofs(b"simulation")
RESTART_SECONDS = 1.0
_PLENTY_BYTES = 2**30


class SimulatedServer:
    """One life, until ``kill`` or ``stop``; make it inside a running loop."""

    def __init__(
        self,
        disk: SimulatedDisk,
        parts: Parts,
        plan: FaultPlan,
        options: Options,
        ids: Ids,
        watch: Watch,
        shared: SharedParts,
    ) -> None:
        self._clock = LoopClock()
        self._mortal, self._known = MortalStore(disk.store), Mortal(shared.registry)
        self._wires: list[Wire] = []
        store = faulty(parts.around_store(cast(ChatStore, self._mortal)), plan)
        rng = random.Random(options.seed + 3)
        self.settings = parts.settings(gateway_settings(options))
        self._registry = faulty(cast(Registry, self._known), plan)
        self.durability: Durability = parts.durability(store, self._clock, self._registry)
        self._intake = watched_intake(watch, parts.intake)(
            self.durability, self._clock, ids, grouping=store.grouping, lane=store.lane
        )
        self.history = ChatHistory(
            store, EpochRaiser(self.durability, self._clock, ids), PROOFS, self._clock
        )
        self._members = Members(store.members)
        self._bus = bus = MemoryBus(ids.new("bus_"), shared.hub)
        self._ephemeral = Ephemeral(self._members, self.history.memberships_of, self._clock, bus)
        self._watermarks = Watermarks(self.durability, self._ephemeral.on_watermarks_moved)
        self._presence = PresenceReporter(
            HERE,
            self._registry,
            self._ephemeral,
            bus,
            self._clock,
            lambda: RECORD,
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
        self._presence.close_displaced = self.gateway.close_displaced
        bus.subscribe(self._on_notification)
        log = faulty(FaultyLog(disk.log, plan, options), plan)
        receiver = WatchedReceiver(self.gateway, HERE, watch)
        feed_deps = FeedDeps(log, receiver, self._members, RecentDeadLetters())
        self._feed = LogFeed(feed_deps, self._clock, watch=self._ephemeral.on_entries)
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
            ]
            roles = [group.create_task(each) for each in work]
            roles.append(group.create_task(_restarted(self._feed.run)))
            await self._stopping.wait()
            for role in roles:
                role.cancel()

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
        self._mortal.dead = self._known.dead = True
        for wire in self._wires:
            wire.cut()
        self._stopping.set()

    async def stop(self) -> None:
        """Drain and end."""
        self._stopping.set()
        await asyncio.wait([self._life])


class Mortal:
    """A dependency for one life of the server: after its end no call arrives."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self.dead = False

    def __getattr__(self, verb: str) -> Any:
        inner = getattr(self._inner, verb)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.dead:
                await asyncio.get_running_loop().create_future()
            return await inner(*args, **kwargs)

        return call


class MortalStore(Mortal):
    """The disk's store."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self._store = store
        self.grouping = store.grouping
        self.lane = store.lane

    def peek(self, group: Sequence[Draft]) -> GroupState:
        """The store's records of a group, for a control that predicts commits."""
        return self._store._group_state(group)


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
