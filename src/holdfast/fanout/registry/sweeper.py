"""Removes dead gateways from the registry: one node at a time, by lease.

A gateway is dead after ``LIVE_SECONDS`` without a renewal, so presence is right
``LIVE_SECONDS`` + ``SWEEP_SECONDS`` after a node's death. Two sweepers at once would do
no harm: each user who goes offline is in one answer.
"""

from __future__ import annotations

import asyncio

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.errors import HoldfastError
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
        async with asyncio.TaskGroup() as group:
            group.create_task(self._lease.run())
            while True:
                await asyncio.sleep(SWEEP_SECONDS)
                if self._lease.fence is not None:
                    await self._sweep()

    async def _sweep(self) -> None:
        try:
            async with asyncio.timeout(SWEEP_SECONDS):
                offline = await self._registry.sweep()
        except (HoldfastError, TimeoutError) as error:
            telemetry.registry_failed(error)
            return
        for user, at in offline.items():
            self._ephemeral.presence(user, "offline", at)
