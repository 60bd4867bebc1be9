"""One run from one seed: traffic and faults, then healing, and a history to judge.

Safety phase: sends, membership changes, operator acts, and the faults that the options
name. Then all faults end. Liveness phase: every device catches up within
``LIVENESS_SECONDS``. At the end the store, the log and every device's copy are
recorded.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from msgspec.structs import replace

from holdfast import telemetry
from holdfast.client.settings import ClientSettings
from holdfast.clock import Ids, timestamp, wait_at_most
from holdfast.errors import HoldfastError
from holdfast.ingest.send_queue import IntakeSettings
from holdfast.message import Cursor, LogEntry, Message, User
from holdfast.store.commands import (
    AddMember,
    ChangeBan,
    ChangeMute,
    Command,
    CommandContext,
    CreateChat,
    HaltChat,
    RecoverChat,
    Redact,
    RemoveMember,
    Retain,
)
from holdfast.store.memory import MemoryStore
from holdfast.verify.history import (
    ClientSeen,
    ClosingSeen,
    CommitSeen,
    Fail,
    FaultPlane,
    FaultWindow,
    Header,
    History,
    Ok,
    PageSeen,
    Recorder,
)
from holdfast.wire.codec import ServerFrame
from holdfast.wire.frames import ConnectionClosing
from proof.end_state import note_log, note_store
from proof.faults import Fault as Disturbance
from proof.faults import FaultPlan, Odds
from proof.simulation.device import Device
from proof.simulation.log import LOSE_LOG
from proof.simulation.network import Wire
from proof.simulation.options import QUIET, Options
from proof.simulation.parts import Parts, SimulatedDisk
from proof.simulation.server import SimulatedServer, gateway_settings
from proof.simulation.shared import (
    BusOdds,
    FaultyHub,
    SharedParts,
    SimulatedRegistry,
    noise,
)
from proof.simulation.watch import Watch
from proof.virtual_loop import LoopClock, run

LIVENESS_SECONDS = 120.0
_DEVICE = ClientSettings()
BYTES_MAX = 6 * 2**20
"""Deliveries, one page, a full control lane, and a page that is on its way."""
REQUESTS_MAX = 100
TENANT = "acme"
OWNER = User(TENANT, "ann")
USERS = (OWNER, User(TENANT, "bob"), User(TENANT, "cal"))
STRANGER = User("other", "eve")
READERS = {"ann over REST": OWNER, "eve over REST": STRANGER}
ELSEWHERE = "chat_other"
LOOKS = 4
BURST_PAGES = 4
HALTED_SECONDS_MAX = 3.0
PLANES: dict[str, FaultPlane] = {
    **dict.fromkeys(("append", "change", "mark"), "durability"),
    **dict.fromkeys(("gateways_of", "read", LOSE_LOG), "fanout"),
    **dict.fromkeys(("register", "unregister", "renew", "connections_of", "leave"), "fanout"),
}  # fmt: skip
"""The plane of each verb's dependency; every other verb reads history."""


class World:
    """The state of one run."""

    def __init__(self, options: Options, parts: Parts) -> None:
        self.options = options
        self.parts = parts
        self.rng = random.Random(options.seed)
        self.clock = LoopClock()
        self.record = Recorder(Header(seed=options.seed, notes=asdict(options)))
        self.ids = Ids(self.clock, random.Random(options.seed + 1))
        self.disk = parts.disk() if parts.disk else SimulatedDisk(MemoryStore(shards=options.lanes))
        self.disk.store.on_commit(self._committed)
        self.plan = self._new_plan()
        hub = FaultyHub(random.Random(options.seed + 4), options.bus)
        self.shared = SharedParts(SimulatedRegistry(self.clock), hub)
        self.server: SimulatedServer | None = None
        self.dead: list[SimulatedServer] = []
        self.devices: list[Device] = []
        self.founders: dict[str, list[str]] = {}
        self._disturbances: dict[object, tuple[str, Disturbance, float]] = {}
        outbound = gateway_settings(options).backpressure.outbound
        bounds = {
            "messages": outbound.max_buffer_messages,
            "bytes": BYTES_MAX,
            "requests": REQUESTS_MAX,
            "sends": IntakeSettings().max_waiting,
        }
        self.watch = Watch(self.record, self.clock.monotonic, bounds)

    async def run(self) -> History:
        await self._found_chats()
        self._start_server()
        self._switch_on_devices()
        async with asyncio.TaskGroup() as people:
            for device in self.devices:
                people.create_task(self._talk(device))
            for act, times in self._acts():
                for _ in range(times):
                    people.create_task(self._sometime(act))
        await self._heal()
        await self._settle()
        await self._finish()
        return self.record.history()

    # The stage

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
        mark = object()
        self._disturbances[mark] = (verb, fault, self.clock.monotonic())
        try:
            yield
        finally:
            self._over([mark])

    def _over(self, marks: Iterable[object]) -> None:
        for mark in marks:
            if (open_now := self._disturbances.pop(mark, None)) is not None:
                verb, fault, began = open_now
                self._note_fault(PLANES.get(verb, "history"), f"{verb}: {fault.value}", began)

    async def _found_chats(self) -> None:
        for number in range(self.options.chats):
            chat_id = f"chat_{number}"
            await self.disk.store.change(
                CreateChat(
                    self._act(OWNER), chat_id, "group", f"chat {number}", [u.user_id for u in USERS]
                )
            )
            self.founders[chat_id] = [user.user_id for user in USERS]
        await self.disk.store.change(
            CreateChat(self._act(STRANGER), ELSEWHERE, "group", "elsewhere", [])
        )
        self.founders[ELSEWHERE] = [STRANGER.user_id]

    def _start_server(self) -> None:
        self.server = SimulatedServer(
            self.disk, self.parts, self.plan, self.options, self.ids, self.watch, self.shared
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
        if self.server is None or self.server.gateway.draining:  # the handshake answers 503
            return None
        connection = device.recorder.connection

        def on_written(frame: ServerFrame) -> None:
            if isinstance(frame.payload, ConnectionClosing):
                reason = frame.payload.reason
                self.record.note(
                    ClosingSeen(at=self.clock.monotonic(), connection=connection, reason=reason)
                )

        wire = Wire(self.rng, self.options.latency_seconds, on_written)
        accepted = self.server.accept(wire, device.user, device.device_id)
        self.watch.names[accepted.connection_id] = connection
        wire.attach(accepted, device)
        return wire

    def _act(self, user: User) -> CommandContext:
        return CommandContext(user, timestamp(self.clock.now()), self.ids.new("msg_"))

    # Users and operators

    async def _talk(self, device: Device) -> None:
        """Send; keys may repeat between users, not between one user's devices."""
        turn = self.devices.index(device) // len(USERS)
        for number in range(self.options.sends_per_device):
            await asyncio.sleep(
                self.rng.expovariate(self.options.sends_per_device / self.options.seconds)
            )
            chat_id = self._some_chat()
            device.send(chat_id, f"{turn}-{number}", f"{device.name} says {number}")

    async def _sometime(self, act: Callable[[], Awaitable[None]]) -> None:
        await asyncio.sleep(self.rng.random() * self.options.seconds)
        await act()

    def _acts(self) -> list[tuple[Callable[[], Awaitable[None]], int]]:
        options = self.options
        return [
            (self._cut, options.cuts),
            (self._open_hole, options.holes),
            (self._stall, options.stalls),
            (self._crash_device, options.device_crashes),
            (self._crash_server, options.server_crashes),
            (self._change_members, options.membership_changes),
            (self._found_chat, options.new_chats),
            (self._redact, options.redactions),
            (self._burst, options.bursts),
            (self._recover, options.recoveries),
            (self._halt, options.halts),
            (self._retain, options.retentions),
            (self._flush_registry, options.registry_flushes),
            (self._make_noise, options.bus_noise),
            (self._look, LOOKS),
        ]

    async def _flush_registry(self) -> None:
        self.shared.registry.flush()

    async def _make_noise(self) -> None:
        chats = list(self.founders)
        await self.shared.hub.send(noise(self.rng, [*USERS, STRANGER], chats))

    async def _cut(self) -> None:
        device = self._somebody()
        self._fault("cut", self.clock.monotonic(), device)
        if device.wire is not None:
            device.wire.cut()

    async def _open_hole(self) -> None:
        """Drop one device's bytes for a while; then break its connection."""
        device, seconds = self._somebody(), self.rng.uniform(1, 20)
        wire = device.wire
        if wire is None or wire.hole:
            return
        wire.hole = True
        began = self.clock.monotonic()
        if not await wait_at_most(wire.ended, seconds):
            wire.cut()
        self._fault("hole", began, device)

    async def _stall(self) -> None:
        device, seconds = self._somebody(), self.rng.uniform(1, 20)
        if device.paused:
            return
        began = self.clock.monotonic()
        device.pause(True)
        await asyncio.sleep(seconds)
        device.pause(False)
        self._fault("stall", began, device)

    async def _crash_device(self) -> None:
        device = self._somebody()
        self._fault("device crash", self.clock.monotonic(), device)
        device.crash()

    async def _crash_server(self) -> None:
        server, self.server = self.server, None
        if server is None:
            return
        if server.committing:
            telemetry.mark("the server was killed while a commit was open")
        server.kill()
        self._over(list(self._disturbances))
        self.dead.append(server)
        began = self.clock.monotonic()
        await asyncio.sleep(self.rng.uniform(0.1, 2))
        self._note_fault("process", "kill -9", began)
        self._start_server()

    async def _change_members(self) -> None:
        chat_id, user = self._some_chat(), self.rng.choice(USERS[1:]).user_id
        members = {member.user_id: member for member in await self.disk.store.members(chat_id)}
        banned = any(ban.user_id == user for ban in await self.disk.store.bans(chat_id))
        command: Command
        if banned:
            command = ChangeBan(self._act(OWNER), chat_id, user, False)
        elif user not in members:
            command = AddMember(self._act(OWNER), chat_id, user)
        elif (dice := self.rng.random()) < 0.4:
            command = ChangeMute(self._act(OWNER), chat_id, user, not members[user].muted)
        elif dice < 0.7:
            command = ChangeBan(self._act(OWNER), chat_id, user, True)
        else:
            command = RemoveMember(self._act(OWNER), chat_id, user)
        await self._try_change(command)

    async def _found_chat(self) -> None:
        """Create a chat while its members are connected, as another node would."""
        chat_id = f"chat_new_{len(self.founders)}"
        users = [user.user_id for user in USERS]
        self.founders[chat_id] = users
        await self.disk.store.change(
            CreateChat(self._act(OWNER), chat_id, "group", "a new chat", users)
        )
        for device in self.devices:
            turn = self.devices.index(device) // len(USERS)
            device.send(chat_id, f"{turn}-new", f"{device.name} says hello")

    async def _look(self) -> None:
        """Read over REST, as a member and as a user of another tenant."""
        chat_id, cursor = self._some_chat(), Cursor(1, 0)
        for name, user in READERS.items():
            server = self.server
            if server is None:
                return
            op = self.record.invoke(
                self.clock.monotonic(), name, "sync", chat_id, cursors={chat_id: cursor}
            )
            try:
                page = await server.history.sync(user, chat_id, cursor, 500)
                pages = [PageSeen.of(page, cursor)]
                self.record.note(Ok(at=self.clock.monotonic(), op=op, pages=pages))
            except HoldfastError as error:
                self.record.note(Fail(at=self.clock.monotonic(), op=op, code=error.code))

    async def _burst(self) -> None:
        """Request several pages at once, as other clients may."""
        self._somebody().ask_at_once(self._some_chat(), BURST_PAGES)

    async def _redact(self) -> None:
        chat_id = self._some_chat()
        head = (await self.disk.store.heads([chat_id]))[chat_id].sequence
        if head:
            await self._try_change(Redact(self._act(OWNER), chat_id, self.rng.randint(1, head)))

    async def _recover(self) -> None:
        """An operator raises a chat's epoch: every device reads it again."""
        await self._try_change(RecoverChat(self._operator(), self._some_chat()))

    async def _halt(self) -> None:
        """An operator halts and recovers a chat, after healing if that fails."""
        chat_id = self._some_chat()
        await self._try_change(HaltChat(self._operator(), chat_id))
        await asyncio.sleep(self.rng.uniform(0, HALTED_SECONDS_MAX))
        await self._try_change(RecoverChat(self._operator(), chat_id))

    async def _retain(self) -> None:
        """Delete the beginning of a chat, perhaps before all devices have it."""
        chat_id = self._some_chat()
        head = (await self.disk.store.heads([chat_id]))[chat_id].sequence
        await self._try_change(Retain(self._operator(), chat_id, self.rng.randint(1, head + 1)))

    def _operator(self) -> CommandContext:
        return replace(self._act(OWNER), operator=True, reason="a drill")

    async def _try_change(self, command: Command) -> None:
        """Change a chat through ingest, with the faults of a send."""
        server = self.server
        if server is not None:
            try:
                await server.durability.change(command, self.clock.monotonic() + 5)
            except HoldfastError:
                pass

    def _somebody(self) -> Device:
        return self.rng.choice(self.devices)

    def _some_chat(self) -> str:
        return self.rng.choice([chat_id for chat_id in self.founders if chat_id != ELSEWHERE])

    def _fault(self, name: str, began: float, device: Device) -> None:
        self._note_fault("connection", name, began, [device.name])

    def _note_fault(
        self, plane: FaultPlane, name: str, began: float, clients: Sequence[str] = ()
    ) -> None:
        """Record a fault from ``began`` until now."""
        now = self.clock.monotonic()
        self.record.note(FaultWindow(at=began, until=now, plane=plane, name=name, clients=clients))

    # The end

    async def _heal(self) -> None:
        self.plan.heal()
        self.shared.hub.odds = BusOdds()
        for device in self.devices:
            device.pause(False)
        for chat_id in self.founders:
            while (await self.disk.store.chat(chat_id)).halted is not None:
                await self._try_change(RecoverChat(self._operator(), chat_id))
                await asyncio.sleep(1.0)

    async def _settle(self) -> None:
        """Wait for all devices; return early when all are complete for a second."""
        complete = 0
        for _ in range(int(LIVENESS_SECONDS)):
            await asyncio.sleep(1.0)
            complete = complete + 1 if await self._all_have_all() else 0
            if complete == 2:
                return

    async def _all_have_all(self) -> bool:
        if any(device.unsent or device.wire is None for device in self.devices):
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

    async def _finish(self) -> None:
        if self.server is not None:
            await self.server.stop()
        self._over(list(self._disturbances))
        for device in self.devices:
            device.switch_off()
            device.note_copies((await self.disk.store.memberships([device.user]))[device.user])
        store = self.disk.store
        await note_store(self.record, store, store, self.founders, self.disk.keys())
        await note_log(self.record, self.disk.log)

    def _committed(self, entries: Sequence[LogEntry]) -> None:
        for entry in entries:
            if isinstance(entry.what, Message):
                sequence = entry.what.sequence
                at = self.clock.monotonic()
                self.record.note(CommitSeen(at=at, chat_id=entry.chat_id, sequence=sequence))


def play(seed: int, parts: Parts | None = None) -> History:
    """Run a seed; return its history."""
    parts = parts or Parts()
    options = parts.options(Options.derive(seed))

    async def run_world() -> History:
        return await World(options, parts).run()

    return run(run_world(), seed)
