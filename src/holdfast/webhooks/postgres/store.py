"""Webhook endpoints in PostgreSQL; changes of any node are noticed within a second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from msgspec.structs import astuple, replace

from holdfast.drivers.postgres_database import Database, storable
from holdfast.drivers.postgres_schema import migrate
from holdfast.drivers.statements import statements
from holdfast.errors import HoldfastError, NotFound
from holdfast.webhooks.contract import DELIVERIES_KEPT_PER_ENDPOINT, Delivery, WebhookEndpoint

PACKAGE = "holdfast.webhooks.postgres"
SQL = statements(PACKAGE)
FOLLOW_SECONDS = 1.0


class PostgresEndpoints:
    """See ``contract.WebhookEndpoints``. ``opened`` makes one.

    ``server`` is the permanent name of the cluster. ``version`` is the stored one, as
    far as it was read.
    """

    def __init__(self, database: Database, server: str, version: int) -> None:
        self.server = server
        self._database = database
        self._version = version
        self._changed = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, database: Database, follow_seconds: float = FOLLOW_SECONDS
    ) -> AsyncIterator[PostgresEndpoints]:
        """The endpoints, which look for changes of other nodes while the block runs."""
        await migrate(database, "endpoints", PACKAGE)
        async with database.connection("be read") as db:
            endpoints = cls(database, *await db.fetchrow(SQL["head"]))
        following = asyncio.create_task(endpoints._follow(follow_seconds))
        try:
            yield endpoints
        finally:
            following.cancel()
            await asyncio.wait([following])

    @property
    def version(self) -> int:
        return self._version

    async def stored_version(self) -> int:
        self._notice((await self._fetch("version"))[0][0])
        return self._version

    async def changed(self, version: int) -> None:
        while self._version == version:
            await self._changed.wait()

    async def add(self, endpoint: WebhookEndpoint) -> None:
        stored = replace(endpoint, description=storable(endpoint.description))
        async with self._changing() as db:
            await db.execute(SQL["add"], *astuple(stored))

    async def get(self, endpoint_id: str) -> WebhookEndpoint:
        rows = await self._fetch("get", endpoint_id)
        if not rows:
            raise _missing(endpoint_id)
        return WebhookEndpoint(*rows[0])

    async def all(self) -> Sequence[WebhookEndpoint]:
        return [WebhookEndpoint(*row) for row in await self._fetch("all")]

    async def disable(self, endpoint_id: str, why: str, at: str) -> None:
        await self._change("disable", endpoint_id, storable(why), at)

    async def enable(self, endpoint_id: str) -> None:
        await self._change("enable", endpoint_id)

    async def remove(self, endpoint_id: str) -> None:
        await self._change("remove", endpoint_id)

    async def removed(self, endpoint_id: str) -> bool:
        return bool((await self._fetch("removed", endpoint_id))[0][0])

    async def log(self, delivery: Delivery) -> None:
        stored = replace(delivery, error=storable(delivery.error))
        async with self._database.connection("be changed") as db:
            await db.execute(SQL["log"], *astuple(stored), DELIVERIES_KEPT_PER_ENDPOINT)

    async def deliveries(self, endpoint_id: str, limit: int = 100) -> Sequence[Delivery]:
        return [Delivery(*row) for row in await self._fetch("deliveries", endpoint_id, limit)]

    async def last_seconds(self) -> dict[str, float]:
        return dict(await self._fetch("last_seconds"))

    async def _fetch(self, statement: str, *values: Any) -> Sequence[Any]:
        async with self._database.connection("be read") as db:
            rows: Sequence[Any] = await db.fetch(SQL[statement], *values)
            return rows

    async def _change(self, statement: str, endpoint_id: str, *values: Any) -> None:
        async with self._changing() as db:
            if await db.fetchval(SQL[statement], endpoint_id, *values) is None:
                raise _missing(endpoint_id)

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[Any]:
        """A transaction that counts as one change."""
        async with self._database.committing("be changed") as db:
            version = await db.fetchval(SQL["change"])
            yield db
        self._notice(version)

    async def _follow(self, follow_seconds: float) -> None:
        while True:
            await asyncio.sleep(follow_seconds)
            with suppress(HoldfastError):  # the next round tries again
                await self.stored_version()

    def _notice(self, version: int) -> None:
        if version != self._version:
            self._version = version
            self._changed.set()
            self._changed = asyncio.Event()


def _missing(endpoint_id: str) -> NotFound:
    return NotFound(f"no webhook endpoint {endpoint_id}")
