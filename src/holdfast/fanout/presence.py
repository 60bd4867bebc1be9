"""Reports who is connected to this gateway: to the registry and to other users.

The gateway calls ``on_user_connected``, ``on_user_disconnected`` and ``typing``, which
never wait. The registry gets the newest state of each user, in the order of the
changes. A failed update is retried, and each heartbeat repeats all users, so that
expiring entries last as long as their gateway. At most one update per user waits here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from holdfast import telemetry
from holdfast.clock import wait_at_most
from holdfast.errors import HoldfastError
from holdfast.fanout.contract import Registry
from holdfast.fanout.ephemeral import Ephemeral
from holdfast.message import User

CALL_SECONDS = 1.0
"""How long the registry may take. No setting: the next heartbeat repeats everything."""
RETRY_SECONDS = 1.0
"""How long to wait after a failed update."""


class PresenceReporter:
    """One gateway's users. ``run`` must be running; when it ends, all are withdrawn."""

    def __init__(
        self, gateway: str, registry: Registry, ephemeral: Ephemeral, heartbeat_seconds: float
    ) -> None:
        self._gateway = gateway
        self._registry = registry
        self._ephemeral = ephemeral
        self._heartbeat_seconds = heartbeat_seconds
        self._here: set[User] = set()
        self._changes: dict[User, bool] = {}
        self._woken = asyncio.Event()

    @property
    def here(self) -> Collection[User]:
        return self._here

    def on_user_connected(self, user: User) -> None:
        """The user's first connection to this gateway opened."""
        self._here.add(user)
        self._note(user, True)
        self._ephemeral.presence(user, "online")

    def on_user_disconnected(self, user: User) -> None:
        """The user's last connection to this gateway closed."""
        self._here.discard(user)
        self._note(user, False)
        self._ephemeral.presence(user, "offline")

    def typing(self, user: User, chat_id: str, active: bool) -> None:
        self._ephemeral.typing(user, chat_id, active)

    async def run(self) -> None:
        """Keep the registry up to date."""
        try:
            await self._report(self._here, ())
            while True:
                if await wait_at_most(self._woken, self._heartbeat_seconds):
                    await self._report_changes()
                else:
                    await self._report(self._here, ())
        finally:
            await self._report((), self._here)

    async def _report_changes(self) -> None:
        self._woken.clear()
        changes, self._changes = self._changes, {}
        connected = [user for user, here in changes.items() if here]
        if not await self._report(connected, [user for user, here in changes.items() if not here]):
            for user, here in changes.items():
                self._changes.setdefault(user, here)
            await asyncio.sleep(RETRY_SECONDS)
            self._woken.set()

    async def _report(self, connected: Collection[User], disconnected: Collection[User]) -> bool:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await self._registry.announce(self._gateway, list(connected))
                if disconnected:
                    await self._registry.withdraw(self._gateway, list(disconnected))
        except (HoldfastError, TimeoutError) as error:
            telemetry.registry_failed(error)
            return False
        return True

    def _note(self, user: User, here: bool) -> None:
        self._changes[user] = here
        self._woken.set()
