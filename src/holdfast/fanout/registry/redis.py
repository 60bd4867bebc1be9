"""The registry of all nodes in Redis: one script call for each call
(``lua/registry.lua``).

Redis sees the ids of users and devices: a node that removes a dead gateway must name
its users to others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final

import msgspec

from holdfast import telemetry
from holdfast.drivers.redis import RedisReason, trouble_of
from holdfast.drivers.redis_scripts import Script, ScriptRunner
from holdfast.errors import BadSetting
from holdfast.fanout.registry.contract import (
    CONNECTIONS_PER_CALL,
    LIVE_SECONDS,
    DeviceConnection,
    Displacement,
    Registration,
    Renewal,
)
from holdfast.message import User

PREFIX: Final = "gateways:"

REGISTRY = Script("holdfast.fanout.registry", "registry")
_encode = msgspec.msgpack.Encoder().encode
_Times = list[tuple[str, int]]
_ANSWERS: Final[Mapping[str, Any]] = {
    "register": tuple[list[int], list[tuple[str, str]], _Times],
    "unregister": _Times,
    "renew": tuple[int, list[str], int, int],
    "connections": tuple[str, list[tuple[str, str, str, int]]],
    "dead": list[str],
    "drop": tuple[bool, _Times],
    "lookup": list[list[str]],
}
_READ = {verb: msgspec.msgpack.Decoder(answer).decode for verb, answer in _ANSWERS.items()}
"""An answer of another shape leaves the outcome unknown, like any garbage."""


_ADVICE: Final[Mapping[RedisReason, str]] = {
    "auth": "Redis refuses the user or the password: correct the URL, or the file it names",
    "tls": "the certificate of Redis is not trusted: name its authority by ?ssl_ca_certs=…",
    "not_redis": "what answers there is no Redis: correct host and port",
}
"""What stays wrong until an operator does something."""


class RedisRegistry:
    """See ``contract.Registry``. Close it with ``close``."""

    def __init__(
        self, url: str, *, prefix: str = PREFIX, clock_us: Callable[[], int] | None = None
    ) -> None:
        """``clock_us`` replaces the time of Redis, for tests."""
        self._url = url
        self._prefix = prefix
        self._clock_us = clock_us
        self._live = int(LIVE_SECONDS * 1_000_000)
        self._last = 0
        """The highest time this node was given: a new primary's clock may be behind."""
        self._scripts = ScriptRunner(url, "the registry", self._on_trouble)
        self.trouble: tuple[RedisReason, str] | None = None
        """Why the last call failed that did."""

    async def check(self) -> None:
        """BadSetting if it answers and cannot be used; it may be unavailable. Each
        connection checks again.
        """
        await self._scripts.require_fit("cluster.redis")
        if self.trouble is not None and (advice := _ADVICE.get(self.trouble[0])):
            raise BadSetting(f"cluster.redis: {advice} ({self.trouble[1]})")

    async def close(self) -> None:
        await self._scripts.aclose()

    async def register(
        self, gateway: str, connections: Sequence[DeviceConnection], devices_max: int
    ) -> Registration:
        packed = [
            (_key(c.user), c.device_id, c.connection_id, c.since, c.opened) for c in connections
        ]
        body = (gateway, self._last, devices_max, packed)
        since, displaced, online = await self._call("register", body)
        self._last = max(self._last, *since, 0)
        return Registration(
            {c.connection_id: stamp for c, stamp in zip(connections, since, strict=True)},
            [Displacement(*each) for each in displaced],
            self._times(online),
        )

    async def unregister(
        self, gateway: str, connections: Sequence[DeviceConnection]
    ) -> Mapping[User, int]:
        packed = [(_key(c.user), c.device_id, c.connection_id) for c in connections]
        return self._times(await self._call("unregister", (gateway, self._last, packed)))

    async def renew(self, gateway: str) -> Renewal:
        body = (gateway, self._live, self._last)
        renewal = Renewal(*await self._call("renew", body))
        self._last = renewal.at
        return renewal

    async def connections_of(self, gateway: str) -> Sequence[DeviceConnection]:
        cursor, found = "0", dict[str, DeviceConnection]()
        while True:
            body = (gateway, cursor, CONNECTIONS_PER_CALL)
            cursor, page = await self._call("connections", body)
            for user, device_id, connection_id, since in page:
                found[connection_id] = DeviceConnection(
                    _user(user), device_id, connection_id, since
                )
            if cursor == "0":
                return list(found.values())

    async def leave(self, gateway: str) -> Mapping[User, int]:
        return await self._drop(gateway, 0)

    async def sweep(self) -> Mapping[User, int]:
        offline: dict[User, int] = {}
        for gateway in await self._call("dead", (self._live,)):
            offline |= await self._drop(gateway, self._live)
        return offline

    async def _drop(self, gateway: str, live: int) -> dict[User, int]:
        offline: dict[User, int] = {}
        more = True
        while more:
            body = (gateway, self._last, CONNECTIONS_PER_CALL, live)
            more, users = await self._call("drop", body)
            offline |= self._times(users)
        return offline

    async def gateways_of(self, users: Iterable[User]) -> Mapping[str, Set[User]]:
        asked = list(users)
        found: dict[str, set[User]] = {}
        for start in range(0, len(asked), CONNECTIONS_PER_CALL):
            part = asked[start : start + CONNECTIONS_PER_CALL]
            answers = await self._call("lookup", list(map(_key, part)))
            for user, gateways in zip(part, answers, strict=True):
                for gateway in gateways:
                    found.setdefault(gateway, set()).add(user)
        return found

    async def _call(self, verb: str, body: Any) -> Any:
        now = "" if self._clock_us is None else str(self._clock_us())
        arguments = (self._prefix, verb, now, _encode(body))
        return await self._scripts.run(REGISTRY, [], arguments, _READ[verb])

    def _times(self, users: _Times) -> dict[User, int]:
        times = {_user(user): at for user, at in users}
        self._last = max(self._last, *times.values(), 0)
        return times

    def _on_trouble(self, error: Exception | str) -> None:
        self.trouble = trouble_of(error, self._url)
        telemetry.redis_failed("registry", self.trouble[0])


def _key(user: User) -> str:
    return f"{user.tenant}\0{user.user_id}"


def _user(key: str) -> User:
    tenant, _, user_id = key.partition("\0")
    return User(tenant, user_id)
