"""Leases in the database of the chats, by its clock, on a connection of their own."""

from __future__ import annotations

from typing import Any

from holdfast.store.leases.contract import Fence
from holdfast.store.postgres.connections import Lender
from holdfast.store.postgres.errors import FOREIGN, translate
from holdfast.store.postgres.server import ChatsServer

CALLS_WAITING_MAX = 100


class PostgresLeases:
    """See ``holdfast.store.leases.contract.Leases``. Close it with ``close``.

    ``holder`` is who holds a lease, for an operator who reads the table.
    """

    def __init__(self, server: ChatsServer, holder: str) -> None:
        self._connection = Lender(server, 1, CALLS_WAITING_MAX)
        self._holder = holder

    async def acquire(self, name: str, seconds: float) -> Fence | None:
        base, number = await self._call("lease_acquire", name, self._holder, seconds)
        return None if number is None else Fence(base, number)

    async def renew(self, name: str, fence: Fence, seconds: float) -> bool:
        (is_held,) = await self._call("lease_renew", name, *fence, seconds)
        return bool(is_held)

    async def release(self, name: str, fence: Fence) -> None:
        await self._call("lease_renew", name, *fence, 0.0)

    async def _call(self, statement: str, *values: Any) -> Any:
        try:
            async with self._connection.lend() as connection:
                return await connection.call(statement, *values)
        except FOREIGN as error:
            raise translate(error, write=True) from error

    def close(self) -> None:
        self._connection.close()
