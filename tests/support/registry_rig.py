"""Users who are connected to gateways, as a registry knows them."""

from __future__ import annotations

from holdfast.fanout.registry.contract import DeviceConnection, Registration, Registry
from holdfast.message import User

DEVICES_MAX = 5


def device(
    user: User,
    gateway: str,
    device_id: str = "phone",
    connection_id: str = "",
    since: int = 0,
    opened: int = 0,
) -> DeviceConnection:
    """A connection; its id says where it is, unless the test names it."""
    name = connection_id or f"{gateway}:{user.user_id}:{device_id}"
    return DeviceConnection(user, device_id or name, name, since, opened)


async def connect(registry: Registry, gateway: str, *users: User) -> Registration:
    """Each user's device of this gateway connects."""
    made = [device(user, gateway, f"of {gateway}") for user in users]
    return await registry.register(gateway, made, DEVICES_MAX)


async def disconnect(registry: Registry, gateway: str, *users: User) -> None:
    made = [device(user, gateway, f"of {gateway}") for user in users]
    await registry.unregister(gateway, made)
