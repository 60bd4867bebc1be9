"""The faults of a run that the world itself makes: of connections, nodes and engines.

Faults of single calls are ``proof.faults``, those of the log ``log``, and those of a
node's links ``link``.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, cast

from holdfast import telemetry
from holdfast.clock import wait_at_most
from holdfast.verify.history import CommitsLost, FaultPlane
from proof.simulation.device import Device
from proof.simulation.disk import SavedDisk
from proof.simulation.link import Cut, Dependency
from proof.simulation.people import STRANGER, USERS, Act
from proof.simulation.shared import noise
from proof.virtual_loop import VirtualLoop

if TYPE_CHECKING:
    from proof.simulation.world import Node, World

CHATS: frozenset[Dependency] = frozenset({"store", "log", "leases"})
OTHERS: frozenset[Dependency] = frozenset({"registry", "bus"})
PARTITIONS: tuple[frozenset[Dependency], ...] = (CHATS, OTHERS, CHATS | OTHERS | {"jobs"})
WRITER_PAUSED = 0.3
"""Of the pauses."""
WRITER_SECONDS = 5.0
BEHIND_SECONDS_MAX = 2.0
"""Of a standby."""


class Disturbances:
    """The faults of one run, all of which end by themselves."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng: random.Random = world.rng
        self._now = world.clock.monotonic

    def acts(self) -> list[tuple[Act, int]]:
        options = self._world.options
        return [
            (self._cut, options.cuts),
            (self._open_hole, options.holes),
            (self._stall, options.stalls),
            (self._crash_device, options.device_crashes),
            (self._kill, options.server_crashes),
            (self._pause, options.pauses),
            (self._partition, options.partitions),
            (self._fail_over, options.failovers),
            (self._raise_all, options.epoch_raises),
            (self._flush_registry, options.registry_flushes),
            (self._restore_registry, options.registry_restores),
            (self._make_noise, options.bus_noise),
        ]

    # --- connections and devices ------------------------------------------------------

    async def _cut(self) -> None:
        device = self._world.somebody()
        self._note("cut", self._now(), device)
        if device.wire is not None:
            device.wire.cut()

    async def _open_hole(self) -> None:
        """Drop one device's bytes for a while; then break its connection."""
        device, seconds = self._world.somebody(), self._rng.uniform(1, 20)
        wire = device.wire
        if wire is None or wire.hole:
            return
        wire.hole = True
        began = self._now()
        if not await wait_at_most(wire.ended, seconds):
            wire.cut()
        self._note("hole", began, device)

    async def _stall(self) -> None:
        device, seconds = self._world.somebody(), self._rng.uniform(1, 20)
        if device.paused:
            return
        began = self._now()
        device.pause(True)
        await asyncio.sleep(seconds)
        device.pause(False)
        self._note("stall", began, device)

    async def _crash_device(self) -> None:
        device = self._world.somebody()
        self._note("device crash", self._now(), device)
        device.crash()

    def _note(self, name: str, began: float, device: Device) -> None:
        self._world.note_fault("connection", name, began, [device.name])

    # --- nodes ------------------------------------------------------------------------

    async def _kill(self) -> None:
        """Kill a node while the others go on. After a long outage its clients come back
        late: their network was out too.
        """
        node = self._some_node()
        if node is None:
            return
        server, node.server = node.server, None
        assert server is not None
        if server.committing:
            telemetry.mark("the server was killed while a commit was open")
        server.kill()
        self._world.end_disturbances(server.link)
        began, down = self._now(), self._rng.uniform(0.1, self._world.options.outage_seconds)
        for device in self._world.devices:
            if down > 2 and server.link.clients.get(device.name, 0.0) > began:
                self._world.away_until[device.name] = began + down
        await asyncio.sleep(down)
        clients = server.link.served_since(began)
        self._world.note_fault("process", "kill -9", began, clients)
        self._world.start_node(node)

    async def _pause(self) -> None:
        """SIGSTOP, then SIGCONT: a zombie that does not know that it was away. Perhaps
        it was about to write under its lease.
        """
        seconds = self._rng.choice([self._rng.uniform(0, 6), self._rng.uniform(6, 20)])
        node = self._some_node()
        if self._rng.random() < WRITER_PAUSED:
            node = await self._writing_node() or self._some_node()
        if node is None:
            return
        assert node.server is not None
        loop, link = cast(VirtualLoop, asyncio.get_running_loop()), node.server.link
        began, node.is_paused = self._now(), True
        loop.pause(link)
        await asyncio.sleep(seconds)
        loop.resume(link)
        node.is_paused = False
        clients = link.served_since(began)
        planes: tuple[FaultPlane, ...] = ("connection", "process")
        for plane in planes:
            self._world.note_fault(plane, "SIGSTOP", began, clients)

    async def _writing_node(self) -> Node | None:
        try:
            async with asyncio.timeout(WRITER_SECONDS):
                writer = await self._world.shared.jobs.next_writer()
        except TimeoutError:
            return None
        nodes = (node for node in self._world.nodes if node.is_up and node.server)
        return next((node for node in nodes if node.server.link is writer), None)  # type: ignore[union-attr]

    async def _partition(self) -> None:
        """Each call that it disturbs is recorded by itself."""
        node, seconds = self._some_node(), self._rng.uniform(0.5, 10)
        if node is None or node.server is None or node.server.link.cut is not None:
            return
        link = node.server.link
        loses = self._rng.choice(["requests", "replies", "late"])
        link.cut = cut = Cut(self._rng.choice(PARTITIONS), loses)  # type: ignore[arg-type]
        await asyncio.sleep(seconds)
        link.cut = None
        cut.healed.set()

    def _some_node(self) -> Node | None:
        up = [node for node in self._world.nodes if node.is_up]
        return self._rng.choice(up) if up else None

    # --- engines ----------------------------------------------------------------------

    async def _fail_over(self) -> None:
        """Promote a standby, which may be behind: what it has not is lost."""
        world = self._world
        if not world.is_engine_up:
            return
        saved = world.disk.saved()
        await asyncio.sleep(self._rng.choice([0.0, self._rng.uniform(0, BEHIND_SECONDS_MAX)]))
        began, world.is_engine_up = self._now(), False
        self._lose(saved)
        await asyncio.sleep(self._rng.uniform(0, 2))
        world.is_engine_up = True
        planes: tuple[FaultPlane, ...] = ("durability", "history", "fanout")
        for plane in planes:
            world.note_fault(plane, "failover", began)

    def _lose(self, saved: SavedDisk) -> None:
        world, lost = self._world, dict[str, list[str]]()
        for message in world.disk.promote(saved):
            lost.setdefault(message.chat_id, []).append(message.message_id)
            world.shared.jobs.excuse(message.message_id)
        world.shared.leases.fail_over(world.disk.base)
        for chat_id, message_ids in lost.items():
            held = saved.chats.get(chat_id)
            kept = 0 if held is None else held.head
            at = self._now()
            world.record.note(
                CommitsLost(at=at, chat_id=chat_id, kept=kept, message_ids=message_ids)
            )
        if lost:
            telemetry.mark("a failover lost commits")
        for chat_id in [each for each in world.people.founders if each not in saved.chats]:
            del world.people.founders[chat_id]

    async def _raise_all(self) -> None:
        self._world.disk.raise_all(moves_base=False)

    async def _flush_registry(self) -> None:
        self._world.shared.registry.flush()

    async def _restore_registry(self) -> None:
        registry = self._world.shared.registry
        saved = registry.saved()
        await asyncio.sleep(self._rng.uniform(0, 10))
        registry.put_back(saved)

    async def _make_noise(self) -> None:
        chats = list(self._world.people.founders)
        await self._world.shared.hub.send(noise(self._rng, [*USERS, STRANGER], chats))
