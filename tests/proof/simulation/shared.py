"""What several servers share beside the disk, and its faults: bus and registry."""

from __future__ import annotations

import asyncio
import copy
import random
from dataclasses import dataclass
from typing import Any

from holdfast.fanout.bus.memory import MemoryHub
from holdfast.fanout.registry.memory import MemoryRegistry


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


class SimulatedRegistry(MemoryRegistry):
    """The registry of all servers, which may lose its state or go back in time."""

    def flush(self) -> None:
        self.__init__(self._clock)  # type: ignore[misc]

    def saved(self) -> Any:
        """A copy, as a snapshot file has it."""
        return copy.deepcopy((self._gateways, self._devices))

    def put_back(self, saved: Any) -> None:
        self._gateways, self._devices = copy.deepcopy(saved)
