"""LISTEN on the primary; a standby refuses to listen.

A network that swallows everything is noticed: the connection is asked now and then whether it is still there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from holdfast.limits.rulestore.bell import LocalNotifications
from holdfast.limits.rulestore.contract import CHANNEL, ChangeNotification
from holdfast.limits.rulestore.postgres.connection import FOREIGN, PostgresSettings, connected, unavailable
from holdfast.limits.rulestore.reading import heard_ring


class PostgresNotifications:
    """``contract.Doorbell`` on a connection of its own, for as long as somebody iterates."""

    def __init__(self, settings: PostgresSettings, quiet_seconds: float = 5.0) -> None:
        self._settings = settings
        self._quiet_seconds = quiet_seconds

    async def rings(self) -> AsyncIterator[ChangeNotification]:
        bell = LocalNotifications()
        try:
            connection = await connected(self._settings)
        except FOREIGN as error:
            raise unavailable(error, "be listened to") from error

        def heard(_connection: object, _pid: int, _channel: str, payload: str) -> None:
            bell.notify(heard_ring(payload))

        watch = asyncio.create_task(self._watch(connection, bell))
        try:
            connection.add_termination_listener(lambda _: bell.close())
            rings = bell.notifications()
            first = await anext(rings)
            await connection.add_listener(CHANNEL, heard)
            yield first
            async for ring in rings:
                yield ring
        except FOREIGN as error:
            raise unavailable(error, "be listened to") from error
        finally:
            watch.cancel()
            connection.terminate()

    async def _watch(self, connection: Any, bell: LocalNotifications) -> None:
        try:
            while True:
                await asyncio.sleep(self._quiet_seconds)
                await connection.fetchval("SELECT 1", timeout=self._quiet_seconds)
        except FOREIGN:
            bell.close()
