"""The reporter between a gateway and the registry: who is online, who was displaced,
and what a registry that fails or forgets costs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import pytest
from registry_rig import connect
from scripted_durability import ANNA, BELA, CLEO

from holdfast.fanout.bus.contract import DeviceDisplaced, Notification
from holdfast.fanout.bus.memory import MemoryBus, MemoryHub
from holdfast.fanout.ephemeral import Ephemeral
from holdfast.fanout.presence import RETRY_SECONDS, PresenceReporter
from holdfast.fanout.registry.contract import (
    LIVE_SECONDS,
    RENEW_SECONDS,
    DeviceConnection,
    Registration,
)
from holdfast.fanout.registry.memory import MemoryRegistry
from holdfast.fanout.registry.sweeper import SWEEP_SECONDS, RegistrySweeper
from holdfast.message import User
from holdfast.store.leases.memory import MemoryLeases
from proof.faults import FaultPlan, Odds, faulty
from proof.virtual_loop import LoopClock


class RecordingEphemeral(Ephemeral):
    """Notes who it is to report, and sends nothing."""

    def __init__(self) -> None:
        self.presences: list[tuple[str, str]] = []

    def presence(self, user: User, status: str, at: int) -> None:
        self.presences.append((user.user_id, status))

    def take(self) -> list[tuple[str, str]]:
        taken, self.presences = self.presences, []
        return taken


class Gateway:
    """A gateway of which only its reporter is real."""

    def __init__(self, name: str, registry: MemoryRegistry, hub: MemoryHub) -> None:
        self.plan = FaultPlan(random.Random(1))
        self.ephemeral, self.bus = RecordingEphemeral(), MemoryBus(name, hub)
        self.reporter = PresenceReporter(
            name,
            faulty(registry, self.plan),
            self.ephemeral,
            self.bus,
            LoopClock(),
            devices_max=3,
        )
        self.closed: list[str] = []
        self.reporter.close_displaced = self.close
        self.notified: list[Notification] = []
        self.bus.subscribe(self.notified.append)

    def close(self, connection_ids: Iterable[str]) -> None:
        for connection_id in connection_ids:
            self.closed.append(connection_id)
            self.reporter.on_disconnected(connection_id)

    def open(self, user: User, connection_id: str, device_id: str = "phone") -> None:
        self.reporter.on_connected(user, device_id, connection_id)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.reporter.run()), asyncio.create_task(self.bus.run())]
        await asyncio.sleep(0)
        yield
        for task in tasks:
            assert not task.done()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def two_gateways(
    registry: MemoryRegistry | None = None,
) -> AsyncIterator[tuple[Gateway, Gateway, MemoryRegistry]]:
    registry, hub = registry or MemoryRegistry(LoopClock()), MemoryHub()
    east, west = Gateway("east", registry, hub), Gateway("west", registry, hub)
    async with east.running(), west.running():
        yield east, west, registry
    assert await registry.gateways_of([ANNA, BELA, CLEO]) == {}, "both have left"


async def settle() -> None:
    await asyncio.sleep(0.1)


async def test_connection_registered_late_does_not_displace_a_newer_one_elsewhere() -> None:
    """Its gateway did not reach the registry when it opened, nor notice that its client
    went to another one.
    """
    async with two_gateways() as (east, west, registry):
        await settle()
        east.plan.odds = {"*": Odds(fail=1.0)}
        east.open(ANNA, "old")
        await asyncio.sleep(2.0)
        west.open(ANNA, "new")
        await settle()
        east.plan.heal()
        await asyncio.sleep(RENEW_SECONDS)
        assert (east.closed, west.closed) == (["old"], [])
        assert await registry.gateways_of([ANNA]) == {"west": {ANNA}}
        west.reporter.on_disconnected("new")


class Delayed(MemoryRegistry):
    """Serves a registration long after it was sent."""

    delay_seconds = 0.0

    async def register(
        self, gateway: str, connections: Sequence[DeviceConnection], devices_max: int
    ) -> Registration:
        seconds, self.delay_seconds = self.delay_seconds, 0.0
        await asyncio.sleep(seconds)
        return await super().register(gateway, connections, devices_max)


async def test_registration_that_arrives_late_does_not_displace_a_newer_connection() -> None:
    registry = Delayed(LoopClock())
    async with two_gateways(registry) as (east, west, _):
        await settle()
        registry.delay_seconds = 0.9
        east.open(ANNA, "old")
        await asyncio.sleep(0.3)
        west.open(ANNA, "new")
        await asyncio.sleep(1)
        assert (east.closed, west.closed) == (["old"], [])
        assert await registry.gateways_of([ANNA]) == {"west": {ANNA}}
        west.reporter.on_disconnected("new")


async def test_first_and_last_connection_anywhere_decide_who_is_online() -> None:
    async with two_gateways() as (east, west, registry):
        east.open(ANNA, "c1")
        east.open(BELA, "c2")
        await settle()
        west.open(ANNA, "c3", "laptop")
        await settle()
        east.reporter.on_disconnected("c1")
        await settle()
        assert east.ephemeral.take() == [("anna", "online"), ("bela", "online")]
        assert west.ephemeral.take() == []
        assert await registry.gateways_of([ANNA, BELA]) == {"east": {BELA}, "west": {ANNA}}
        west.reporter.on_disconnected("c3")
        west.reporter.on_disconnected("c3")
        await settle()
        assert west.ephemeral.take() == [("anna", "offline")]


async def test_user_who_reconnects_at_once_is_not_shown_as_offline() -> None:
    async with two_gateways() as (east, _, registry):
        east.open(ANNA, "c1")
        await settle()
        east.reporter.on_disconnected("c1")
        east.open(ANNA, "c2")
        await settle()
        assert set(east.ephemeral.take()) == {("anna", "online")}
        assert await registry.gateways_of([ANNA]) == {"east": {ANNA}}
        east.reporter.on_disconnected("c2")
        await settle()
        assert east.ephemeral.take() == [("anna", "offline")]


async def test_device_that_connects_elsewhere_is_closed_by_the_bus() -> None:
    async with two_gateways() as (east, west, _):
        east.bus.subscribe(lambda n: east.reporter.on_notification(n))  # type: ignore[arg-type]
        east.open(ANNA, "c1")
        await settle()
        west.open(ANNA, "c2")
        await settle()
        assert east.notified == [DeviceDisplaced("east", ("c1",))]
        assert (east.closed, west.closed) == (["c1"], [])
        await settle()
        assert east.ephemeral.take() == [("anna", "online")]
        assert west.ephemeral.take() == []


async def test_lost_notification_costs_one_renewal() -> None:
    async with two_gateways() as (east, west, _):
        east.open(ANNA, "c1")
        await settle()
        west.open(ANNA, "c2")  # nobody listens to the bus on east
        await settle()
        assert east.closed == []
        await asyncio.sleep(RENEW_SECONDS)
        assert east.closed == ["c1"]
        await asyncio.sleep(RENEW_SECONDS)
        assert east.closed == ["c1"], "once"


async def test_fourth_device_displaces_the_oldest_wherever_it_is() -> None:
    async with two_gateways() as (east, west, _):
        for n in range(2):
            east.open(ANNA, f"c{n}", f"device {n}")
            await settle()
        for n in range(2, 4):
            west.open(ANNA, f"c{n}", f"device {n}")
            await settle()
        await asyncio.sleep(RENEW_SECONDS)
        assert (east.closed, west.closed) == (["c0"], [])


async def test_closed_device_does_not_count_against_the_bound() -> None:
    async with two_gateways() as (east, _, _):
        for n in range(3):
            east.open(ANNA, f"c{n}", f"device {n}")
        await settle()
        east.open(ANNA, "c3", "device 3")
        east.reporter.on_disconnected("c2")
        await settle()
        assert east.closed == []


async def test_flushed_registry_has_everything_again_within_a_renewal() -> None:
    async with two_gateways() as (east, west, registry):
        east.open(ANNA, "c1")
        west.open(BELA, "c2")
        await settle()
        before = await registry.connections_of("east")
        registry.__init__(LoopClock())  # type: ignore[misc]
        await asyncio.sleep(RENEW_SECONDS + 0.1)
        assert await registry.gateways_of([ANNA, BELA]) == {"east": {ANNA}, "west": {BELA}}
        assert await registry.connections_of("east") == before, "and it keeps its time"


async def test_old_copy_of_the_registry_is_corrected_within_a_renewal() -> None:
    async with two_gateways() as (east, _, registry):
        east.open(ANNA, "c1")
        await settle()
        east.open(BELA, "c2")
        east.reporter.on_disconnected("c1")
        await settle()
        await connect(registry, "east", CLEO)  # counted, and not by the gateway
        await asyncio.sleep(RENEW_SECONDS + 0.1)
        assert await registry.gateways_of([ANNA, BELA, CLEO]) == {"east": {BELA}}


async def test_device_that_moved_during_a_flush_stays_where_it_is_newest() -> None:
    async with two_gateways() as (east, west, registry):
        east.open(ANNA, "c1")
        await settle()
        registry.__init__(LoopClock())  # type: ignore[misc]
        west.open(ANNA, "c2")
        await asyncio.sleep(2 * RENEW_SECONDS)
        assert await registry.gateways_of([ANNA]) == {"west": {ANNA}}
        assert (east.closed, west.closed) == (["c1"], [])


@pytest.mark.covers("000 presence updates: stale, eventually consistent")
@pytest.mark.parametrize("fault", ["fail", "lost_reply", "hang"])
async def test_registry_that_was_unavailable_is_right_soon_after(fault: str) -> None:
    async with two_gateways() as (east, _, registry):
        east.open(CLEO, "c0")
        await settle()
        east.plan.odds = {"*": Odds(**{fault: 1.0})}
        east.open(ANNA, "c1")
        await asyncio.sleep(3 * RENEW_SECONDS)
        east.open(BELA, "c2")
        east.reporter.on_disconnected("c0")
        await settle()
        assert BELA not in set().union(*(await registry.gateways_of([BELA])).values())
        east.plan.heal()
        await asyncio.sleep(RETRY_SECONDS + 1.1)
        assert await registry.gateways_of([ANNA, BELA, CLEO]) == {"east": {ANNA, BELA}}
        shown = east.ephemeral.take()
        assert shown[0] == ("cleo", "online")
        assert set(shown[1:]) >= {("bela", "online"), ("cleo", "offline")}


async def test_gateway_that_died_is_offline_twenty_seconds_later() -> None:
    clock = LoopClock()
    registry, ephemeral = MemoryRegistry(clock), RecordingEphemeral()
    await connect(registry, "east", ANNA, BELA)
    sweeper = RegistrySweeper(registry, ephemeral, MemoryLeases(clock), clock)
    task = asyncio.create_task(sweeper.run())
    await asyncio.sleep(LIVE_SECONDS - 0.1)
    assert ephemeral.take() == []
    await asyncio.sleep(SWEEP_SECONDS)
    assert sorted(ephemeral.take()) == [("anna", "offline"), ("bela", "offline")]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_one_of_two_sweepers_works_and_the_other_takes_over() -> None:
    clock = LoopClock()
    registry, leases = MemoryRegistry(clock), MemoryLeases(clock)
    shown = [RecordingEphemeral(), RecordingEphemeral()]
    tasks = [
        asyncio.create_task(RegistrySweeper(registry, each, leases, clock).run()) for each in shown
    ]
    await connect(registry, "east", ANNA)
    await asyncio.sleep(LIVE_SECONDS + SWEEP_SECONDS)
    assert [each.take() for each in shown] == [[("anna", "offline")], []]
    tasks[0].cancel()
    await connect(registry, "east", BELA)
    await asyncio.sleep(LIVE_SECONDS + SWEEP_SECONDS)
    assert [each.take() for each in shown] == [[], [("bela", "offline")]]
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
