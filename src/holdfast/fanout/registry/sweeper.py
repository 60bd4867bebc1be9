"""Removes dead gateways from the registry: one node at a time, by lease.

A gateway is dead after ``LIVE_SECONDS`` without a renewal, so presence is right
``LIVE_SECONDS`` + ``SWEEP_SECONDS`` after a node's death. Two sweepers at once would do
no harm: each user who goes offline is in one answer.
"""

from __future__ import annotations

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.fanout.ephemeral import Ephemeral
from holdfast.fanout.registry.contract import Registry
from holdfast.store.leases.contract import Leases
from holdfast.store.leases.held import HeldLease

SWEEP_SECONDS = 5.0
LEASE = "registry sweep"


class RegistrySweeper:
    """``run`` must be running on every node."""

    def __init__(
        self, registry: Registry, ephemeral: Ephemeral, leases: Leases, clock: Clock
    ) -> None:
        self._registry = registry
        self._ephemeral = ephemeral
        self._lease = HeldLease(leases, LEASE, clock)

    async def run(self) -> None:
        await self._lease.repeat(SWEEP_SECONDS, self._sweep, telemetry.registry_failed)

    async def _sweep(self) -> None:
        for user, at in (await self._registry.sweep()).items():
            self._ephemeral.presence(user, "offline", at)
