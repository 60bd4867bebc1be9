"""What the nodes share beside the disk, and its faults: bus, registry, leases, jobs."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast import telemetry
from holdfast.fanout.bus.contract import (
    DeviceDisplaced,
    Notification,
    PresenceChanged,
    ReceiptMoved,
    RevocationsChanged,
    TypingChanged,
)
from holdfast.fanout.bus.memory import MemoryHub
from holdfast.fanout.registry.memory import MemoryRegistry
from holdfast.message import User
from proof.simulation.reader import SimulatedJobs, SimulatedLeases


@dataclass(frozen=True, slots=True)
class BusOdds:
    """The probability of each fault per payload and receiver."""

    lose: float = 0.0
    repeat: float = 0.0
    late: float = 0.0
    """Delayed by up to ``seconds_max``, behind later ones."""
    seconds_max: float = 1.0


class FaultyHub(MemoryHub):
    """A bus that loses, repeats and reorders payloads."""

    def __init__(self, rng: random.Random, odds: BusOdds) -> None:
        super().__init__()
        self._rng = rng
        self.odds = odds
        self.injected = 0

    async def send(self, payload: bytes) -> None:
        for receive in list(self.receivers):
            rng, odds = self._rng, self.odds
            if rng.random() < odds.lose:
                self.injected += 1
                continue
            times = 1 + (rng.random() < odds.repeat)
            for _ in range(times):
                delay = rng.random() * odds.seconds_max if rng.random() < odds.late else 0.0
                self.injected += delay > 0 or times > 1
                asyncio.get_running_loop().call_later(delay, receive, payload)


def noise(rng: random.Random, users: Sequence[User], chat_ids: Sequence[str]) -> bytes:
    """A payload of another node: notes about anybody in any chat, and garbage."""
    user, chat_id = rng.choice(users), rng.choice(chat_ids)
    notes: list[Notification] = [
        TypingChanged(user, chat_id, active=rng.random() < 0.5),
        PresenceChanged(user, rng.choice(["online", "offline"]), rng.randrange(2**53), (chat_id,)),
        ReceiptMoved(user, rng.choice(users), chat_id, rng.randrange(99), rng.randrange(99)),
        DeviceDisplaced("node-0", (f"conn_{rng.randrange(99)}",)),
        RevocationsChanged(),
    ]
    parts = [msgspec.json.encode(rng.choice(notes)), b'{"type":"newer"}', b"{}"]
    rng.shuffle(parts)
    whole = b'{"sender":"elsewhere","notifications":[%b]}' % b",".join(parts)
    return whole if rng.random() < 0.8 else whole[: rng.randrange(len(whole))]


class SimulatedRegistry(MemoryRegistry):
    """The registry of all servers, which may lose its state or go back in time."""

    async def sweep(self) -> Mapping[User, int]:
        dead = [name for name, each in self._gateways.items() if not self._lives(each)]
        if any(self._gateways[name].users for name in dead):
            telemetry.mark("presence was corrected after a node's death")
        return await super().sweep()

    def flush(self) -> None:
        self.__init__(self._clock)  # type: ignore[misc]

    def saved(self) -> Any:
        """A copy, as a snapshot file has it."""
        return copy.deepcopy((self._gateways, self._devices))

    def put_back(self, saved: Any) -> None:
        self._gateways, self._devices = copy.deepcopy(saved)


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What the nodes reach each other by; it outlives them."""

    registry: SimulatedRegistry
    hub: FaultyHub
    leases: SimulatedLeases
    jobs: SimulatedJobs
