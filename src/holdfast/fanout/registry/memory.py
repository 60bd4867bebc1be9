"""The registry of the gateways of one process: one value that they share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from holdfast.clock import Clock
from holdfast.fanout.registry.contract import (
    LIVE_SECONDS,
    DeviceConnection,
    Displacement,
    Registration,
    Renewal,
)
from holdfast.message import User


@dataclass(slots=True)
class _Gateway:
    lives_until: float
    changes: int = 0
    users: set[User] = field(default_factory=set)
    displaced: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Entry:
    gateway: str
    connection_id: str
    since: int


class MemoryRegistry:
    """See ``contract.Registry``. The first call of a gateway makes it known."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._gateways: dict[str, _Gateway] = {}
        self._devices: dict[User, dict[str, _Entry]] = {}
        self._last = 0

    async def register(
        self, gateway: str, connections: Sequence[DeviceConnection], devices_max: int
    ) -> Registration:
        known = self._changing(gateway)
        since: dict[str, int] = {}
        displaced: list[Displacement] = []
        online: dict[User, int] = {}
        for user, device_id, connection_id, given, opened in connections:
            devices = self._devices.setdefault(user, {})
            stamp = since[connection_id] = given or self._opened(devices, opened) or self._stamp()
            self._last = max(self._last, stamp)
            if not devices:
                online[user] = self._stamp()
            old = devices.get(device_id)
            if old is not None and old.connection_id == connection_id:
                since[connection_id] = old.since = max(old.since, stamp)
                continue
            if old is not None and old.since > stamp:
                displaced.append(self._displace(_Entry(gateway, connection_id, stamp)))
                continue
            devices[device_id] = _Entry(gateway, connection_id, stamp)
            known.users.add(user)
            displaced += self._make_room(user, devices, old, devices_max)
        return Registration(since, displaced, online)

    def _opened(self, devices: Mapping[str, _Entry], opened: int) -> int:
        """When a new connection opened; 0 if that is unknown, or a clock was set."""
        highest = max((entry.since for entry in devices.values()), default=0)
        now = self._now()
        return opened if opened < now and highest <= now else 0

    def _now(self) -> int:
        return int(self._clock.now() * 1_000_000)

    def _stamp(self) -> int:
        self._last = max(self._now(), self._last + 1)
        return self._last

    def _make_room(
        self, user: User, devices: dict[str, _Entry], old: _Entry | None, devices_max: int
    ) -> list[Displacement]:
        """Displace the device's old connection and the oldest devices beyond the
        bound."""
        gone = [] if old is None else [old]
        oldest = sorted(devices, key=lambda each: devices[each].since)[:-devices_max]
        gone += [devices.pop(device_id) for device_id in oldest]
        for entry in gone:
            self._let_go(user, entry.gateway)
        return [self._displace(entry) for entry in gone]

    def _displace(self, entry: _Entry) -> Displacement:
        if (gateway := self._gateways.get(entry.gateway)) is not None:
            gateway.displaced[entry.connection_id] = None
        return Displacement(entry.gateway, entry.connection_id)

    def _let_go(self, user: User, gateway: str) -> None:
        """The user may have no connection to this gateway any more."""
        held = self._devices.get(user, {}).values()
        if all(entry.gateway != gateway for entry in held) and gateway in self._gateways:
            self._gateways[gateway].users.discard(user)

    async def unregister(
        self, gateway: str, connections: Sequence[DeviceConnection]
    ) -> Mapping[User, int]:
        known = self._changing(gateway)
        offline: dict[User, int] = {}
        for user, device_id, connection_id, *_ in connections:
            known.displaced.pop(connection_id, None)
            devices = self._devices.get(user, {})
            entry = devices.get(device_id)
            if entry is not None and (entry.gateway, entry.connection_id) == (
                gateway,
                connection_id,
            ):
                del devices[device_id]
                self._let_go(user, gateway)
            if not devices:
                self._devices.pop(user, None)
                offline[user] = self._stamp()
        return offline

    def _changing(self, gateway: str) -> _Gateway:
        known = self._living(gateway)
        known.changes += 1
        return known

    def _living(self, gateway: str) -> _Gateway:
        until = self._clock.monotonic() + LIVE_SECONDS
        known = self._gateways.setdefault(gateway, _Gateway(until))
        if not self._lives(known):
            known.changes = 0
        known.lives_until = until
        return known

    def _lives(self, gateway: _Gateway) -> bool:
        return gateway.lives_until > self._clock.monotonic()

    async def renew(self, gateway: str) -> Renewal:
        known = self._living(gateway)
        living = sum(map(self._lives, self._gateways.values()))
        return Renewal(known.changes, list(known.displaced), living, self._stamp())

    async def connections_of(self, gateway: str) -> Sequence[DeviceConnection]:
        known = self._gateways.get(gateway)
        return [
            DeviceConnection(user, device_id, entry.connection_id, entry.since)
            for user in (() if known is None else known.users)
            for device_id, entry in self._devices[user].items()
            if entry.gateway == gateway
        ]

    async def leave(self, gateway: str) -> Mapping[User, int]:
        known = self._gateways.pop(gateway, None)
        offline: dict[User, int] = {}
        for user in set() if known is None else known.users:
            devices = self._devices[user]
            for device_id in [each for each, held in devices.items() if held.gateway == gateway]:
                del devices[device_id]
            if not devices:
                del self._devices[user]
                offline[user] = self._stamp()
        return offline

    async def sweep(self) -> Mapping[User, int]:
        offline: dict[User, int] = {}
        for name, gateway in list(self._gateways.items()):
            if not self._lives(gateway):
                offline.update(await self.leave(name))
        return offline

    async def gateways_of(self, users: Iterable[User]) -> Mapping[str, Set[User]]:
        found: dict[str, set[User]] = {}
        for user in users:
            for entry in self._devices.get(user, {}).values():
                found.setdefault(entry.gateway, set()).add(user)
        return found
