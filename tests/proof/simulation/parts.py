"""The parts of a simulated server: the product's own, unless a control replaces one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.clock import Clock
from holdfast.eventlog.memory import MemoryEventLog
from holdfast.fanout.registry.contract import Registry
from holdfast.gateway.connection import Connection
from holdfast.gateway.gateway import Gateway
from holdfast.gateway.settings import GatewaySettings
from holdfast.ingest.contract import Durability
from holdfast.ingest.durability import StoreDurability
from holdfast.ingest.intake import Intake
from holdfast.message import LogEntry
from holdfast.session.session import Session
from holdfast.store.contract import ChatStore
from holdfast.store.memory import MemoryStore
from holdfast.verify.history import KeySeen
from proof.simulation.device import Device
from proof.simulation.options import Options


class SimulatedDisk:
    """The state that survives a kill: the store and the log of its commits."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.log = MemoryEventLog()
        store.on_commit(self.publish)

    def publish(self, entries: Sequence[LogEntry]) -> None:
        self.log.committed(entries)

    def sequences(self, chat_id: str) -> list[int]:
        return sorted(self.store._chats[chat_id].messages)

    def keys(self) -> dict[str, list[KeySeen]]:
        """Every idempotency key, which no contract shows."""
        return {
            chat_id: [
                KeySeen(sender, key, stored.message.sequence, stored.message.message_id)
                for (_, sender, key), stored in held.keys.items()
            ]
            for chat_id, held in self.store._chats.items()
        }


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run; ``options`` lets a control choose its faults, and ``disk``
    brings a store of its own.
    """

    disk: Callable[[], SimulatedDisk] | None = None
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
