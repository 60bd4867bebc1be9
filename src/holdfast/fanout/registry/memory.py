"""Who is online, for one process: the gateways here are all there are. Nothing expires, for nothing can vanish."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from holdfast import telemetry
from holdfast.message import User


class MemoryRegistry:
    """See ``holdfast.fanout.contract.Registry``. A gateway is known from its first announcement on."""

    def __init__(self) -> None:
        self._users: dict[str, set[User]] = {}

    async def announce(self, gateway: str, users: Iterable[User]) -> None:
        self._users.setdefault(gateway, set()).update(users)
        telemetry.healthy_gateways(len(self._users))

    async def withdraw(self, gateway: str, users: Iterable[User]) -> None:
        self._users.get(gateway, set()).difference_update(users)

    async def gateways_of(self, users: Iterable[User]) -> Mapping[str, Set[User]]:
        asked = users if isinstance(users, Set) else frozenset(users)
        found = {gateway: held & asked for gateway, held in self._users.items()}
        return {gateway: held for gateway, held in found.items() if held}
