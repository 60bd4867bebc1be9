"""The parts of a simulated server: the product's own, unless a control replaces one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.clock import Clock
from holdfast.fanout.registry.contract import Registry
from holdfast.gateway.connection import Connection
from holdfast.gateway.gateway import Gateway
from holdfast.gateway.settings import GatewaySettings
from holdfast.ingest.contract import Durability
from holdfast.ingest.durability import StoreDurability
from holdfast.ingest.intake import Intake
from holdfast.session.session import Session
from holdfast.store.contract import ChatStore
from holdfast.store.leases.memory import MemoryLeases
from proof.simulation.device import Device
from proof.simulation.disk import SimulatedDisk
from proof.simulation.options import Options


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run; ``options`` lets a control choose its faults, and ``disk``
    brings a store of its own.
    """

    disk: Callable[[], SimulatedDisk] | None = None
    leases: Callable[[MemoryLeases, Clock], MemoryLeases] = lambda leases, clock: leases
    around_store: Callable[[ChatStore], ChatStore] = lambda store: store
    durability: Callable[[ChatStore, Clock, Registry], Durability] = lambda store, clock, _: (
        StoreDurability(store, clock)
    )
    intake: type[Intake] = Intake
    connection: type[Connection] = Connection
    session: type[Session] = Session
    gateway: type[Gateway] = Gateway
    device: type[Device] = Device
    settings: Callable[[GatewaySettings], GatewaySettings] = lambda settings: settings
    options: Callable[[Options], Options] = field(default=lambda options: options)
