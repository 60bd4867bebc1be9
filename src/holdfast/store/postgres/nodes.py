"""Node records in the database of the chats, on a connection of their own.

The connection holds an advisory lock for the node's name: the server releases it when
the process ends, however it ends, and keeps it while the process is frozen. A host that
vanished closes nothing; the server notices after about ten seconds, by keepalives.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from holdfast.clock import timestamp
from holdfast.errors import BadSetting
from holdfast.store.nodes.contract import (
    GONE_SECONDS,
    LIVE_SECONDS,
    ConnectionSum,
    DatabaseView,
    GoneNode,
    LeaseView,
    LivingNode,
    NodeRecord,
)
from holdfast.store.postgres.errors import FOREIGN, translate
from holdfast.store.postgres.server import ChatsServer, ServerConnection

NAME_TRIES_MAX = 30
NAME_TRY_SECONDS = 0.1
"""A process that was killed and started again waits until the server has noticed."""
CALL_SECONDS_MAX = 5.0

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(NodeRecord).decode


class PostgresNodes:
    """See ``holdfast.store.nodes.contract.Nodes``. Close it with ``close``."""

    def __init__(self, server: ChatsServer) -> None:
        self._server = server
        self._name = ""
        self._connection: ServerConnection | None = None
        self._turn = asyncio.Lock()
        """A connection serves one call at a time."""

    async def join(self, record: NodeRecord) -> None:
        self._name = record.name
        for _ in range(NAME_TRIES_MAX):
            try:
                total = await self._put(record, is_start=True)
                break
            except _NameTaken as error:
                taken = error
                await asyncio.sleep(NAME_TRY_SECONDS)
        else:
            raise taken
        if total.wanted > total.available:
            self.close()
            others = total.wanted - record.connections
            raise BadSetting(
                f"PostgreSQL has {total.available} connections for nodes, and {total.wanted} are"
                f" needed: up to {record.connections} by this node and {others} by those that run;"
                f" raise max_connections of PostgreSQL by {total.wanted - total.available} or more"
            )

    async def renew(self, record: NodeRecord) -> ConnectionSum:
        return await self._put(record, is_start=False)

    async def leave(self) -> None:
        if not self._name:
            return
        async with self._named() as connection:
            await connection.call("node_leave", self._name)
        self._name = ""
        self.close()

    async def living(self) -> Sequence[LivingNode]:
        async with self._named() as connection:
            rows = await connection.fetch("nodes", LIVE_SECONDS)
        return [LivingNode(_decode(row["record"]), row["age_seconds"]) for row in rows]

    async def gone(self) -> Sequence[GoneNode]:
        async with self._named() as connection:
            rows = await connection.fetch("nodes_gone", LIVE_SECONDS, GONE_SECONDS)
        return [
            GoneNode(_decode(row["record"]), timestamp(row["since"]), row["age_seconds"])
            for row in rows
        ]

    async def leases(self) -> Sequence[LeaseView]:
        async with self._named() as connection:
            return [LeaseView(*row) for row in await connection.fetch("leases")]

    async def database(self) -> DatabaseView:
        async with self._named() as connection:
            row = await connection.fetchrow("database", LIVE_SECONDS)
            facts = await connection.fetchrow("server")
        lossless = self._server.settings.lossless
        return DatabaseView(
            version=row["version"],
            system=facts["system"],
            timeline=facts["timeline"],
            epoch_base=row["epoch_base"],
            failover="lossless" if lossless else "undeclared",
            standbys=facts["standbys"],
            connections=ConnectionSum(row["wanted"], row["available"]),
        )

    def close(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
        self._connection = None

    async def _put(self, record: NodeRecord, *, is_start: bool) -> ConnectionSum:
        values = (record.name, _encode(record).decode(), record.connections, LIVE_SECONDS, is_start)
        async with self._named() as connection:
            return ConnectionSum(*await connection.call("node_renew", *values))

    @asynccontextmanager
    async def _named(self) -> AsyncIterator[ServerConnection]:
        """The connection that holds the name, opened again if it was lost."""
        async with self._turn:
            try:
                async with asyncio.timeout(CALL_SECONDS_MAX):
                    if self._connection is None or self._connection.raw.is_closed():
                        self._connection = await self._opened()
                    yield self._connection
            except FOREIGN as error:
                self.close()
                raise translate(error, write=False) from error
            except asyncio.CancelledError:
                self.close()
                raise

    async def _opened(self) -> ServerConnection:
        connection = await self._server.connect()
        try:
            if not (await connection.fetchrow("take_name", _lock_of(self._name)))[0]:
                raise _NameTaken(self._name, await connection.fetchrow("node", self._name))
        except BaseException:
            connection.terminate()
            raise
        return connection


class _NameTaken(BadSetting):
    """Another connection holds the name. ``row``: its record, if it has one by now."""

    def __init__(self, name: str, row: Sequence[str] | None) -> None:
        where = "" if row is None else f" at {_decode(row[0]).address}"
        super().__init__(
            f"another node of this cluster, which runs{where}, has the name {name}: give each node"
            " a server.node_id of its own, or leave it out; if the state directory was copied from"
            " another node, delete name.json in it. A node whose machine is gone keeps its name"
            " for about 15 s"
        )


def _lock_of(name: str) -> int:
    digest = hashlib.blake2b(f"holdfast.node:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
