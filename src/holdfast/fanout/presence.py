"""Keeps the registry true about this gateway, and learns from it who is online.

The gateway calls ``on_connected``, ``on_disconnected`` and ``typing``, which never
wait. Changes go to the registry in batches. Its answers say whose first connection
anywhere opened and whose last one closed, which other users see as presence, and which
connections a newer one displaced.

Every ``renew_seconds`` the gateway renews itself. If the registry's count of
changes is not this gateway's own, or after a call that failed, it compares everything
the registry has with its own connections and corrects the difference. So a connection
that could not be registered is not kept: the comparison finds it. What a lost answer
had said of a user is asked for again, or is plain from the comparison.

A connection counts from the moment it opened, by the registry's clock as the last
renewal told it: when a registration arrives late, its device may have a newer one
elsewhere by now, which it must not displace.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from holdfast import telemetry
from holdfast.clock import Clock, wait_at_most
from holdfast.errors import HoldfastError
from holdfast.fanout.bus.contract import Bus, DeviceDisplaced
from holdfast.fanout.ephemeral import Ephemeral
from holdfast.fanout.registry.contract import (
    CONNECTIONS_PER_CALL,
    RENEW_SECONDS,
    DeviceConnection,
    Displacement,
    Registry,
)
from holdfast.message import User

T = TypeVar("T")

CALL_SECONDS = 1.0
"""How long a call of the registry may take. No setting: a comparison repairs it."""
RETRY_SECONDS = 1.0
"""How long to wait after a call that failed."""
UNSURE_MAX = 10_000
"""Connections closed while the registry fails whose users are asked for afterwards."""


class PresenceReporter:
    """One gateway's connections. ``run`` must be running; when it ends, the gateway
    leaves the registry. ``devices_max`` is the bound per user.
    """

    def __init__(
        self,
        gateway: str,
        registry: Registry,
        ephemeral: Ephemeral,
        bus: Bus,
        clock: Clock,
        devices_max: int,
        renew_seconds: float = RENEW_SECONDS,
    ) -> None:
        self._gateway = gateway
        self._registry = registry
        self._ephemeral = ephemeral
        self._bus = bus
        self._clock = clock
        self._devices_max = devices_max
        self._renew_seconds = renew_seconds
        self._here: dict[str, DeviceConnection] = {}
        self._changed: dict[str, DeviceConnection] = {}
        self._opened_at: dict[str, float] = {}
        """Of the connections that are not registered yet."""
        self._registry_time = (0, 0.0)
        """The registry's, and this node's when it asked for it: not before that."""
        self._changes = 0
        """As the registry should have counted them."""
        self._unsure: dict[str, DeviceConnection] = {}
        """Opened or closed by a call that failed, or closed while all calls fail."""
        self._failing = True
        self._is_logged = False
        self._reason = "it has not answered yet"
        self._renew_at = clock.monotonic()
        self._woken = asyncio.Event()
        self.close_displaced: Callable[[Iterable[str]], None] = lambda connection_ids: None
        """Closes those of these connections that are open here."""

    # --- called by the gateway and the bus --------------------------------------------

    def on_connected(self, user: User, device_id: str, connection_id: str) -> None:
        self._here[connection_id] = DeviceConnection(user, device_id, connection_id)
        self._opened_at[connection_id] = self._clock.monotonic()
        self._note(self._here[connection_id])

    def on_disconnected(self, connection_id: str) -> None:
        """Harmless if it is repeated."""
        if (connection := self._here.pop(connection_id, None)) is not None:
            self._opened_at.pop(connection_id, None)
            self._note(connection)

    def _note(self, connection: DeviceConnection) -> None:
        if not self._failing:  # else a comparison will find it
            self._changed[connection.connection_id] = connection
            self._woken.set()
        elif connection.connection_id not in self._here and len(self._unsure) < UNSURE_MAX:
            self._unsure[connection.connection_id] = connection

    def typing(self, user: User, chat_id: str, active: bool) -> None:
        self._ephemeral.typing(user, chat_id, active)

    def on_notification(self, notification: DeviceDisplaced) -> None:
        if notification.gateway == self._gateway:
            self.close_displaced(notification.connection_ids)

    @property
    def registry_up(self) -> bool:
        """Whether the registry has all connections of this gateway."""
        return not self._failing

    @property
    def registry_trouble(self) -> str | None:
        """Why it has not; None while it has."""
        return self._reason if self._failing else None

    # --- the registry -----------------------------------------------------------------

    async def run(self) -> None:
        """Keep the registry up to date."""
        try:
            while True:
                self._woken.clear()
                try:
                    await self._step()
                except (HoldfastError, TimeoutError) as error:
                    telemetry.registry_failed(error, is_first=not self._is_logged)
                    self._failing = self._is_logged = True
                    self._reason = str(error) or "no answer in time"
                    self._renew_at = self._clock.monotonic() + RETRY_SECONDS
                rest = self._renew_at - self._clock.monotonic()
                if self._failing:
                    await asyncio.sleep(rest)
                else:
                    await wait_at_most(self._woken, rest)
        finally:
            await self._leave()

    async def _step(self) -> None:
        now = self._clock.monotonic()
        if now >= self._renew_at:
            self._renew_at = now + self._renew_seconds
            await self._renew()
        if self._changed:
            changed, self._changed = self._changed, {}
            await self._apply(
                [self._here[each] for each in changed if each in self._here],
                [connection for each, connection in changed.items() if each not in self._here],
            )

    async def _renew(self) -> None:
        asked_at = self._clock.monotonic()
        renewal = await _in_time(self._registry.renew(self._gateway))
        self._registry_time = (renewal.at, asked_at)
        telemetry.registry_answered(is_first=self._is_logged)
        self._is_logged = False
        telemetry.healthy_gateways(renewal.gateways)
        self.close_displaced(renewal.displaced)
        if self._failing or renewal.changes != self._changes:
            await self._compare()

    async def _compare(self) -> None:
        """Make the registry's connections of this gateway equal to its own."""
        recorded = {
            connection.connection_id: connection
            for connection in await _in_time(self._registry.connections_of(self._gateway))
        }
        here, unsure = dict(self._here), self._unsure
        maybe_there = unsure | self._changed | recorded
        self._changed, self._unsure, self._failing = {}, {}, False
        await self._apply(
            [connection for each, connection in here.items() if each not in recorded],
            [connection for each, connection in maybe_there.items() if each not in here],
        )
        self._keep({each: connection.since for each, connection in recorded.items()})
        renewal = await _in_time(self._registry.renew(self._gateway))
        self._changes = renewal.changes
        for each, connection in unsure.items():
            if each in recorded and each in self._here:
                self._ephemeral.presence(connection.user, "online", renewal.at)

    def _dated(self, connection: DeviceConnection) -> DeviceConnection:
        """With the moment at which it opened, by the registry's clock."""
        opened_at = self._opened_at.get(connection.connection_id)
        if connection.since or opened_at is None:
            return connection
        registry_time, asked_at = self._registry_time
        opened = registry_time + int((opened_at - asked_at) * 1_000_000)
        return connection._replace(opened=max(opened, 1))

    async def _apply(
        self, opened: Sequence[DeviceConnection], closed: Sequence[DeviceConnection]
    ) -> None:
        """Closed ones first, so that they do not count against the bound per user.

        Of a user who reconnected in the same batch only the last state is shown.
        """
        online: dict[User, int] = {}
        offline: dict[User, int] = {}
        self._unsure = {connection.connection_id: connection for connection in (*opened, *closed)}
        try:
            for part in _parts(closed):
                offline |= await _in_time(self._registry.unregister(self._gateway, part))
                self._changes += 1
            for part in _parts([self._dated(connection) for connection in opened]):
                made = await _in_time(
                    self._registry.register(self._gateway, part, self._devices_max)
                )
                self._changes += 1
                online |= made.online
                self._keep(made.since)
                self._on_displaced(made.displaced)
            self._unsure = {}
        finally:
            for user, at in offline.items():
                if user not in online:
                    self._ephemeral.presence(user, "offline", at)
            for user, at in online.items():
                self._ephemeral.presence(user, "online", at)

    def _keep(self, since: Mapping[str, int]) -> None:
        """Registered again, a connection keeps its time."""
        for connection_id, stamp in since.items():
            self._opened_at.pop(connection_id, None)
            if (connection := self._here.get(connection_id)) is not None:
                self._here[connection_id] = connection._replace(since=stamp)

    def _on_displaced(self, displaced: Sequence[Displacement]) -> None:
        by_gateway: defaultdict[str, list[str]] = defaultdict(list)
        for gateway, connection_id in displaced:
            by_gateway[gateway].append(connection_id)
        self.close_displaced(by_gateway.pop(self._gateway, ()))
        for gateway, connection_ids in by_gateway.items():
            self._bus.publish(DeviceDisplaced(gateway, tuple(connection_ids)))

    async def _leave(self) -> None:
        try:
            for user, at in (await _in_time(self._registry.leave(self._gateway))).items():
                self._ephemeral.presence(user, "offline", at)
        except (HoldfastError, TimeoutError) as error:
            telemetry.registry_failed(error)


async def _in_time(call: Awaitable[T]) -> T:
    async with asyncio.timeout(CALL_SECONDS):
        return await call


def _parts(connections: Sequence[DeviceConnection]) -> Iterator[Sequence[DeviceConnection]]:
    for start in range(0, len(connections), CONNECTIONS_PER_CALL):
        yield connections[start : start + CONNECTIONS_PER_CALL]
