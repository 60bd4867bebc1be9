"""The registry of all nodes in PostgreSQL: unlogged tables, one statement per call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final

import msgspec

from holdfast.drivers.postgres_database import Database
from holdfast.drivers.postgres_schema import migrate
from holdfast.drivers.statements import statements
from holdfast.fanout.registry.contract import (
    LIVE_SECONDS,
    DeviceConnection,
    Displacement,
    Registration,
    Renewal,
)
from holdfast.message import User

PACKAGE: Final = "holdfast.fanout.registry.postgres"
SQL = statements(PACKAGE)

_Times = list[tuple[str, str, int]]
_encode = msgspec.json.Encoder().encode
_registration = msgspec.json.Decoder(tuple[list[int], list[Displacement], _Times]).decode
_renewal = msgspec.json.Decoder(tuple[int, list[str], int, int]).decode
_times = msgspec.json.Decoder(_Times).decode


class PostgresRegistry:
    """See ``contract.Registry``. ``open`` makes one."""

    def __init__(self, database: Database, clock_us: Callable[[], int] | None = None) -> None:
        self._database = database
        self._clock_us: Callable[[], int | None] = clock_us or (lambda: None)
        self._live = int(LIVE_SECONDS * 1_000_000)
        self._last = 0
        """The highest time this node was given: a new primary's clock may be behind."""

    @classmethod
    async def open(
        cls, database: Database, clock_us: Callable[[], int] | None = None
    ) -> PostgresRegistry:
        """``clock_us`` replaces the time of PostgreSQL, for tests."""
        await migrate(database, "registry", PACKAGE)
        return cls(database, clock_us)

    async def register(
        self, gateway: str, connections: Sequence[DeviceConnection], devices_max: int
    ) -> Registration:
        packed = [(*c.user, c.device_id, c.connection_id, c.since, c.opened) for c in connections]
        answer = await self._change("register", gateway, _text(packed), devices_max, self._last)
        since, displaced, online = _registration(answer)
        self._last = max(self._last, *since, 0)
        return Registration(
            {c.connection_id: stamp for c, stamp in zip(connections, since, strict=True)},
            displaced,
            self._given(online),
        )

    async def unregister(
        self, gateway: str, connections: Sequence[DeviceConnection]
    ) -> Mapping[User, int]:
        packed = [(*c.user, c.device_id, c.connection_id) for c in connections]
        answer = await self._change("unregister", gateway, _text(packed), self._last)
        return self._given(_times(answer))

    async def renew(self, gateway: str) -> Renewal:
        answer = await self._change("renew", gateway, self._live, self._last)
        renewal = Renewal(*_renewal(answer))
        self._last = renewal.at
        return renewal

    async def connections_of(self, gateway: str) -> Sequence[DeviceConnection]:
        async with self._database.connection("be read") as db:
            rows = await db.fetch(SQL["connections"], gateway)
        return [DeviceConnection(User(*row[:2]), *row[2:]) for row in rows]

    async def leave(self, gateway: str) -> Mapping[User, int]:
        return self._given(_times(await self._change("drop", gateway, self._live, self._last)))

    async def sweep(self) -> Mapping[User, int]:
        return self._given(_times(await self._change("drop", None, self._live, self._last)))

    async def gateways_of(self, users: Iterable[User]) -> Mapping[str, Set[User]]:
        asked = list(users)
        async with self._database.connection("be read") as db:
            rows = await db.fetch(
                SQL["lookup"], [user.tenant for user in asked], [user.user_id for user in asked]
            )
        found: dict[str, set[User]] = {}
        for gateway, tenant, user_id in rows:
            found.setdefault(gateway, set()).add(User(tenant, user_id))
        return found

    async def _change(self, statement: str, *arguments: Any) -> str:
        async with self._database.connection("be changed") as db:
            answer: str = await db.fetchval(SQL[statement], *arguments, self._clock_us())
            return answer

    def _given(self, times: _Times) -> dict[User, int]:
        self._last = max([self._last, *(at for _, _, at in times)])
        return {User(tenant, user_id): at for tenant, user_id, at in times}


def _text(value: object) -> str:
    return _encode(value).decode()
