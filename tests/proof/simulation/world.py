"""One run from one seed: traffic and faults, then healing, and a history to judge.

Safety phase: sends, membership changes, operator acts, and the faults that the options
name. Then all faults end. Liveness phase: every device catches up within
``LIVENESS_SECONDS``. At the end the store, the log and every device's copy are
recorded.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from holdfast import telemetry
from holdfast.client.settings import ClientSettings
from holdfast.clock import Ids
from holdfast.ingest.send_queue import IntakeSettings
from holdfast.message import LogEntry, Message
from holdfast.store.memory import MemoryStore
from holdfast.verify.history import (
    ClientSeen,
    ClosingSeen,
    CommitSeen,
    FaultPlane,
    FaultWindow,
    Header,
    History,
    Recorder,
)
from holdfast.wire.codec import ServerFrame
from holdfast.wire.frames import ConnectionClosing
from proof.end_state import note_log, note_store
from proof.faults import Fault as Disturbance
from proof.faults import FaultPlan, Odds
from proof.simulation.device import Device
from proof.simulation.disk import SimulatedDisk
from proof.simulation.disturbances import Disturbances
from proof.simulation.link import NodeLink
from proof.simulation.log import LOSE_LOG
from proof.simulation.network import Wire
from proof.simulation.options import QUIET, Options
from proof.simulation.parts import Parts
from proof.simulation.people import READERS, USERS, Act, People
from proof.simulation.reader import MessageReader, SimulatedJobs, SimulatedLeases
from proof.simulation.server import SimulatedServer, gateway_settings
from proof.simulation.shared import BusOdds, FaultyHub, SharedParts, SimulatedRegistry
from proof.simulation.watch import Watch
from proof.virtual_loop import OWNER, LoopClock, run

LIVENESS_SECONDS = 120.0
SETTLED = "settled"
"""In the notes of a history: whether every device and the reader caught up."""
_DEVICE = ClientSettings()
BYTES_MAX = 6 * 2**20
"""Deliveries, one page, a full control lane, and a page that is on its way."""
REQUESTS_MAX = 100
PLANES: dict[str, FaultPlane] = {
    **dict.fromkeys(("append", "change", "mark"), "durability"),
    **dict.fromkeys(("gateways_of", "read", "end", "lag", LOSE_LOG), "fanout"),
    **dict.fromkeys(("register", "unregister", "renew", "connections_of", "leave"), "fanout"),
    **dict.fromkeys(("sweep", "acquire", "release", "enqueue", "reader_offset"), "fanout"),
}  # fmt: skip
"""The plane of each verb's dependency; every other verb reads history."""


@dataclass(eq=False)
class Node:
    """A node and its current life; None while it is down."""

    name: str
    server: SimulatedServer | None = None
    is_paused: bool = False

    @property
    def is_up(self) -> bool:
        return self.server is not None and not self.is_paused


class World:
    """The state of one run."""

    def __init__(self, options: Options, parts: Parts) -> None:
        self.options = options
        self.parts = parts
        self.rng = random.Random(options.seed)
        self.clock = LoopClock()
        self.header = Header(seed=options.seed, notes=asdict(options))
        self.record = Recorder(self.header)
        self.ids = Ids(self.clock, random.Random(options.seed + 1))
        self.disk = parts.disk() if parts.disk else SimulatedDisk(MemoryStore(shards=options.lanes))
        self.disk.store.on_commit(self._committed)
        self.is_engine_up = True
        self.plan = self._new_plan()
        self.shared = SharedParts(
            SimulatedRegistry(self.clock),
            FaultyHub(random.Random(options.seed + 4), options.bus),
            SimulatedLeases(self.clock),
            SimulatedJobs(self.record),
        )
        self.nodes = [Node(f"node-{number}") for number in range(options.servers)]
        self.devices: list[Device] = []
        self.away_until: dict[str, float] = {}
        """Devices that cannot connect yet."""
        self.people = People(self)
        self.disturbances = Disturbances(self)
        self._disturbed_calls: dict[object, tuple[object, str, Disturbance, float]] = {}
        outbound = gateway_settings(options).backpressure.outbound
        bounds = {
            "messages": outbound.max_buffer_messages,
            "bytes": BYTES_MAX,
            "requests": REQUESTS_MAX,
            "sends": IntakeSettings().max_waiting,
        }
        self.watch = Watch(self.record, self.clock.monotonic, bounds)

    async def run(self) -> History:
        await self.people.found_chats()
        jobs: Any = self.shared.jobs
        await MessageReader(self.disk.log, jobs, self.disk.store, self.clock).begin()
        for node in self.nodes:
            self.start_node(node)
        self._switch_on_devices()
        async with asyncio.TaskGroup() as group:
            for device in self.devices:
                group.create_task(self.people.talk(device))
            for act, times in [*self.people.acts(), *self.disturbances.acts()]:
                for _ in range(times):
                    group.create_task(self._sometime(act))
        self._heal()
        await self._settle()
        await self._finish()
        return self.record.history()

    async def _sometime(self, act: Act) -> None:
        await asyncio.sleep(self.rng.random() * self.options.seconds)
        await act()

    # --- the stage --------------------------------------------------------------------

    def _new_plan(self) -> FaultPlan:
        options = self.options
        by_plane: dict[FaultPlane, Odds] = {"durability": options.writes, "fanout": options.fanout}
        odds = {verb: by_plane[plane] for verb, plane in PLANES.items()} | dict.fromkeys(
            ("wait", "end"), QUIET
        )
        odds[LOSE_LOG] = Odds(fail=options.log_losses)
        plan = FaultPlan(random.Random(options.seed + 2), odds={"*": options.reads, **odds})
        plan.during = self._disturbed
        return plan

    @contextmanager
    def _disturbed(self, verb: str, fault: Disturbance) -> Iterator[None]:
        """Record one disturbed call of a dependency, until its end or its server's."""
        call = object()
        self._disturbed_calls[call] = (OWNER.get(), verb, fault, self.clock.monotonic())
        try:
            yield
        finally:
            self._over([call])

    def end_disturbances(self, link: NodeLink | None = None) -> None:
        """The calls of this node have ended with it; None: those of all."""
        calls = self._disturbed_calls.items()
        self._over([call for call, (owner, *_) in calls if link is None or owner is link])

    def _over(self, calls: Iterable[object]) -> None:
        for call in calls:
            if (open_now := self._disturbed_calls.pop(call, None)) is not None:
                link, verb, fault, began = open_now
                clients = link.served_since(began) if isinstance(link, NodeLink) else ()
                name = f"{verb}: {fault.value}"
                self.note_fault(PLANES.get(verb, "history"), name, began, clients)

    def start_node(self, node: Node) -> None:
        link = NodeLink(node.name, self._disturbed, lambda: self.is_engine_up)
        node.server = link.run(
            SimulatedServer,
            link,
            self.disk,
            self.parts,
            self.plan,
            self.options,
            self.ids,
            self.watch,
            self.shared,
        )

    def _switch_on_devices(self) -> None:
        for name, user in READERS.items():
            self.record.note(
                ClientSeen(client=name, tenant=user.tenant, user_id=user.user_id, device_id="")
            )
        for number in range(self.options.devices):
            user = USERS[number % len(USERS)]
            rng = random.Random(self.options.seed * 100 + number)
            device = self.parts.device(f"{user.user_id}-{number}", user, self.record, rng, _DEVICE)
            self.devices.append(device)
            device.switch_on(self._dial)

    def _dial(self, device: Device) -> Wire | None:
        if self.clock.monotonic() < self.away_until.get(device.name, 0.0):
            return None
        for node in self.nodes:
            if node.server is not None:
                node.server.link.on_client_elsewhere(device.name, self.clock.monotonic())
        server = self.some_server(device.name)
        if server is None:
            return None
        connection = device.recorder.connection

        def on_written(frame: ServerFrame) -> None:
            if isinstance(frame.payload, ConnectionClosing):
                reason = frame.payload.reason
                self.record.note(
                    ClosingSeen(at=self.clock.monotonic(), connection=connection, reason=reason)
                )

        link = server.link
        wire = Wire(self.rng, self.options.latency_seconds, on_written, link.context)
        accepted = link.run(server.accept, wire, device.user, device.device_id)
        self.watch.names[accepted.connection_id] = connection
        wire.attach(accepted, device)
        return wire

    def some_server(self, client: str = "") -> SimulatedServer | None:
        """One that answers, as a proxy finds it; the client uses it too from now on."""
        up = [node.server for node in self.nodes if node.server is not None and not node.is_paused]
        up = [server for server in up if not server.gateway.draining]  # the handshake answers 503
        if not up:
            return None
        chosen = self.rng.choice(up)
        if client:
            chosen.link.on_client(client)
        return chosen

    def somebody(self) -> Device:
        return self.rng.choice(self.devices)

    def note_fault(
        self, plane: FaultPlane, name: str, began: float, clients: Sequence[str] = ()
    ) -> None:
        """Record a fault from ``began`` until now."""
        now = self.clock.monotonic()
        self.record.note(FaultWindow(at=began, until=now, plane=plane, name=name, clients=clients))

    # --- the end ----------------------------------------------------------------------

    def _heal(self) -> None:
        self.plan.heal()
        self.shared.hub.odds = BusOdds()
        self.away_until.clear()
        for device in self.devices:
            device.pause(False)

    async def _settle(self) -> None:
        """Wait for all devices; return early when all are complete for a second. The
        header of the history says whether they were.
        """
        complete = 0
        for _ in range(int(LIVENESS_SECONDS)):
            await asyncio.sleep(1.0)
            await self._recover_halted()
            complete = complete + 1 if await self._all_have_all() else 0
            if complete == 2:
                self._mark_nodes_that_caught_up()
                break
        self.header.notes[SETTLED] = complete == 2

    async def _recover_halted(self) -> None:
        """A halt may be carried out late, by a call that hung."""
        for chat_id in self.people.founders:
            if (await self.disk.store.chat(chat_id)).halted is not None:
                await self.people.recover(chat_id)

    def _mark_nodes_that_caught_up(self) -> None:
        for node in self.nodes:
            if node.server and node.server.receiver.lost_log and node.server.gateway.connections:
                telemetry.mark("a node caught up after it lost the log")

    async def _all_have_all(self) -> bool:
        if any(device.unsent or device.wire is None for device in self.devices):
            return False
        if not await self._all_have_jobs():
            return False
        for device in self.devices:
            for chat_id in (await self.disk.store.memberships([device.user]))[device.user]:
                chat = await self.disk.store.chat(chat_id)  # a device may have deleted messages
                had = [
                    sequence
                    for sequence, _ in device.copies.get(chat_id, [])
                    if sequence >= chat.first_sequence
                ]
                held = device.cursors.get(chat_id)
                if had != self.disk.sequences(chat_id) or (
                    had and held is not None and held.epoch != chat.epoch
                ):
                    return False  # incomplete, or of an older epoch
        return True

    async def _all_have_jobs(self) -> bool:
        """Retention may delete a message before its job is made."""
        jobs = self.shared.jobs
        for message_id, (chat_id, sequence) in list(jobs.unmade.items()):
            if sequence < (await self.disk.store.chat(chat_id)).first_sequence:
                jobs.excuse(message_id)
        return not jobs.unmade

    async def _finish(self) -> None:
        for node in self.nodes:
            if node.server is not None:
                await node.server.stop()
        self.end_disturbances()
        for device in self.devices:
            device.switch_off()
            device.note_copies((await self.disk.store.memberships([device.user]))[device.user])
        store = self.disk.store
        await note_store(
            self.record,
            store,
            store,
            self.people.founders,
            self.disk.keys(),
            self.disk.lost_redactions,
        )
        await note_log(self.record, self.disk.log)

    def _committed(self, entries: Sequence[LogEntry]) -> None:
        for entry in entries:
            if isinstance(entry.what, Message):
                sequence = entry.what.sequence
                at = self.clock.monotonic()
                self.record.note(CommitSeen(at=at, chat_id=entry.chat_id, sequence=sequence))
                self.shared.jobs.on_commit(entry.what)


def play(seed: int, parts: Parts | None = None) -> History:
    """Run a seed; return its history."""
    parts = parts or Parts()
    options = parts.options(Options.derive(seed))

    async def run_world() -> History:
        return await World(options, parts).run()

    return run(run_world(), seed)
