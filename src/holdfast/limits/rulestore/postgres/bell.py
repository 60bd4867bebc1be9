"""LISTEN on the primary; a standby refuses to listen."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import msgspec

from holdfast.limits.rulestore.bell import Bell
from holdfast.limits.rulestore.contract import Ring
from holdfast.limits.rulestore.postgres.connection import FOREIGN, PostgresSettings, unavailable

CHANNEL = "rule_changes"
_ring = msgspec.json.Decoder(Ring)


class PostgresBell:
    """``contract.Doorbell`` on a connection of its own, for as long as somebody iterates."""

    def __init__(self, settings: PostgresSettings) -> None:
        self._settings = settings

    async def rings(self) -> AsyncIterator[Ring]:
        bell = Bell()
        try:
            connection = await asyncpg.connect(self._settings.url, timeout=self._settings.connect_timeout_seconds)
        except FOREIGN as error:
            raise unavailable(error, "be listened to") from error

        def heard(_connection: object, _pid: int, _channel: str, payload: str) -> None:
            bell.ring(_ring.decode(payload))

        try:
            connection.add_termination_listener(lambda _: bell.close())
            rings = bell.rings()
            first = await anext(rings)
            await connection.add_listener(CHANNEL, heard)
            yield first
            async for ring in rings:
                yield ring
        except FOREIGN as error:
            raise unavailable(error, "be listened to") from error
        finally:
            connection.terminate()
