"""The bus of all nodes by NOTIFY and LISTEN, for a cluster without Redis.

Both go over one connection of their own, outside every transaction of the data: a
transaction that notifies takes a lock of the whole server when it commits. A payload
must be below 8,000 bytes and without U+0000, which JSON does not contain.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from holdfast import telemetry
from holdfast.clock import wait_at_most
from holdfast.drivers.postgres_database import FOREIGN, Database
from holdfast.errors import HoldfastError, Unavailable
from holdfast.fanout.bus.batches import SEND_SECONDS, BusInbox, BusOutbox

CHANNEL: Final = "holdfast_bus"
PAYLOAD_BYTES_MAX = 7_999
QUIET_SECONDS = 5.0
"""How often a connection is queried: a network that drops everything closes nothing."""
AGAIN_SECONDS = 1.0


class PostgresBus:
    """See ``contract.Bus``. It keeps one connection of the database."""

    def __init__(self, database: Database, sender: str, channel: str = CHANNEL) -> None:
        """``sender`` is unlike that of any other node."""
        self._database = database
        self._channel = channel
        self._outbox = BusOutbox(sender, PAYLOAD_BYTES_MAX)
        self._inbox = BusInbox(sender)
        self._connection: Any = None
        self._turn = asyncio.Lock()
        """A connection serves one call at a time."""
        self.publish = self._outbox.add
        self.subscribe = self._inbox.subscribe

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._outbox.run(self._send))
            while True:
                try:
                    async with self._database.connection("be listened to") as connection:
                        await self._listen(connection)
                except HoldfastError:
                    telemetry.dependency_up("bus", False)
                await asyncio.sleep(AGAIN_SECONDS)

    async def _send(self, payload: bytes) -> None:
        async with self._turn:
            if (connection := self._connection) is None:
                raise Unavailable("the bus is not connected")
            try:
                await connection.execute(
                    "SELECT pg_notify($1, $2)",
                    self._channel,
                    payload.decode(),
                    timeout=SEND_SECONDS,
                )
            except FOREIGN as error:
                connection.terminate()  # ``run`` opens another one
                raise Unavailable("the bus cannot be published to") from error

    async def _listen(self, connection: Any) -> None:
        """Until the connection breaks. Raises what asyncpg raises."""
        ended = asyncio.Event()
        connection.add_termination_listener(lambda _: ended.set())
        await connection.add_listener(self._channel, self._on_notification)
        self._connection = connection
        telemetry.dependency_up("bus", True)
        try:
            while not ended.is_set():
                async with self._turn:
                    await connection.fetchval("SELECT 1", timeout=QUIET_SECONDS)
                await wait_at_most(ended, QUIET_SECONDS)
        finally:
            self._connection = None
        raise ConnectionError("the connection was closed")

    def _on_notification(self, _connection: object, _pid: int, _channel: str, text: str) -> None:
        self._inbox.on_payload(text)
