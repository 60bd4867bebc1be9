"""A PostgreSQL primary and its standby, on two ports that stay: roles change by
failover, and an old primary comes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import asyncpg
from work_rigs import until

from engines import Server, postgres
from engines.fixtures import had


class PostgresPair:
    """``primary`` and ``replica``; after ``fail_over`` there is no replica until
    ``rebuild``.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._settings = dict(settings)
        self.primary: Server = had("postgres", lambda: postgres.start(**self._settings))
        self.replica: Server = postgres.standby(self.primary, **self._settings)
        self.old: Server | None = None
        """The primary before the last failover."""
        ports = (self.primary.port, self.replica.port)
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        self.url = f"postgresql://postgres@{hosts}/postgres"

    @classmethod
    @contextmanager
    def started(cls, **settings: str) -> Iterator[Self]:
        pair = cls(settings)
        try:
            yield pair
        finally:
            for server in (pair.primary, pair.replica, pair.old):
                if server is not None:
                    server.stop()

    async def is_streaming(self) -> None:
        """Wait until the standby has what the primary has committed until now."""
        end = await self.ask("SELECT pg_current_wal_flush_lsn()::text")
        replicated = f"flush_lsn >= '{end}'::pg_lsn"
        await until(
            lambda: self.ask(f"SELECT count(*) = 1 FROM pg_stat_replication WHERE {replicated}")
        )

    async def cut_standby(self) -> None:
        """It receives nothing more."""
        await _set(self.replica, "primary_conninfo", "")
        await until(lambda: self.ask("SELECT count(*) = 0 FROM pg_stat_replication"))

    async def fail_over(self) -> None:
        """The primary dies, the standby is promoted."""
        postgres.kill(self.primary)
        await ask(self.replica, "SELECT pg_promote()")
        self.old, self.primary = self.primary, self.replica

    async def bring_back_old(self) -> None:
        assert self.old is not None
        self.old = await asyncio.to_thread(postgres.again, self.old, **self._settings)

    async def restart_primary(self) -> None:
        postgres.kill(self.primary)
        again = await asyncio.to_thread(postgres.again, self.primary, **self._settings)
        self.primary = self.replica = again

    async def rebuild(self) -> None:
        """The old primary's place is taken by a new standby."""
        assert self.old is not None
        port, old, self.old = self.old.port, self.old, None
        await asyncio.to_thread(old.stop)
        self.replica = await asyncio.to_thread(
            postgres.standby, self.primary, port, **self._settings
        )

    async def ask(self, query: str, *values: Any) -> Any:
        """One value from the primary."""
        return await ask(self.primary, query, *values)


async def name_synchronous(server: Server, names: str) -> None:
    """Which standbys a commit of this server waits for, from now on."""
    await _set(server, "synchronous_standby_names", names)
    wanted = f"SELECT current_setting('synchronous_standby_names') = '{names}'"
    await until(lambda: ask(server, wanted))


async def _set(server: Server, name: str, value: str) -> None:
    await ask(server, f"ALTER SYSTEM SET {name} = '{value}'")
    await ask(server, "SELECT pg_reload_conf()")


async def ask(server: Server, query: str, *values: Any) -> Any:
    """One value from a server."""
    connection = await asyncpg.connect(server.url)
    try:
        return await connection.fetchval(query, *values)
    finally:
        await connection.close()
