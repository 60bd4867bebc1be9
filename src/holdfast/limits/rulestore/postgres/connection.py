"""Connections to PostgreSQL, what its errors mean here, and the rule reader.

A host that vanishes closes nothing: its connections keep their locks until the server
drops them. So every session asks the server to end it when it is idle inside a
transaction, and to detect a dead peer within seconds by TCP keepalives. (Work has its
own connections, because a handler may hold a transaction much longer.)

``Database`` is the pool, and translates asyncpg's errors; no error it raises contains a
host name. ``PostgresRuleReader`` is what a node follows: the primary, or a replica that
may lag.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import asyncpg

from holdfast import telemetry
from holdfast.drivers.postgres import connect, pool, refuse_shared_sessions
from holdfast.drivers.statements import statements
from holdfast.errors import HoldfastError, OutcomeUnknown, Unavailable
from holdfast.limits.rule_changes import RuleChange
from holdfast.limits.rules import RuleSnapshot
from holdfast.limits.rulestore.contract import CHANGES_PER_READ, RuleLogHead
from holdfast.limits.rulestore.serialization import change_of, snapshot_of

SQL = statements("holdfast.limits.rulestore.postgres")
WRITERS_LOCK = 0x686F6C64_6C696D01
HEARTBEAT_LOCK = 0x686F6C64_6C696D02
SCHEMA_LOCK = 0x686F6C64_6C696D03
RETRY_AFTER_SECONDS = 5.0

FOREIGN = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError)
"""Everything asyncpg raises."""


@dataclass(frozen=True, slots=True)
class PostgresSettings:
    """A database by URL.

    At most ``connections_max`` callers are served at a time; others wait
    ``timeout_seconds``.
    """

    url: str
    connections_max: int = 4
    connect_timeout_seconds: float = 2.0
    timeout_seconds: float = 5.0

    def __post_init__(self) -> None:
        if (
            self.connections_max < 1
            or self.connect_timeout_seconds <= 0
            or self.timeout_seconds <= 0
        ):
            raise ValueError(
                "connections_max, connect_timeout_seconds and timeout_seconds must be greater"
                " than 0"
            )


def _end(connection: Any) -> None:
    """Close at once, without a round trip. The server may have closed it already."""
    with suppress(asyncpg.InterfaceError):
        connection.terminate()


async def connected(settings: PostgresSettings) -> Any:
    """A connection outside the pool. Raises what asyncpg raises."""
    return await connect(
        settings.url,
        settings=_looked_after(settings),
        timeout=settings.connect_timeout_seconds,
        command_timeout=settings.timeout_seconds,
    )


def milliseconds(seconds: float) -> str:
    """As PostgreSQL reads it; 0 would mean never."""
    return str(max(1, round(seconds * 1000)))


def _looked_after(settings: PostgresSettings) -> dict[str, str]:
    return {
        "idle_in_transaction_session_timeout": milliseconds(settings.timeout_seconds),
        "tcp_keepalives_idle": "5",
        "tcp_keepalives_interval": "2",
        "tcp_keepalives_count": "3",
    }


def unavailable(error: BaseException, what: str) -> HoldfastError:
    """Unavailable: nothing happened. The cause goes to the log, not to the caller."""
    telemetry.log.warning("limits.database_unavailable", what=what, error=type(error).__name__)
    failure = Unavailable(
        f"the database of the rules cannot {what} now", retry_after_seconds=RETRY_AFTER_SECONDS
    )
    failure.__cause__ = error
    return failure


class Database:
    """A pool that connects on first use and reconnects as needed."""

    def __init__(self, settings: PostgresSettings) -> None:
        self.settings = settings
        self._pool: asyncpg.Pool | None = None
        self._is_checked = False

    @asynccontextmanager
    async def connection(self, what: str) -> AsyncIterator[Any]:
        """Lend a connection; asyncpg's errors become Unavailable.

        If the caller is cancelled, the connection is closed at once.
        """
        try:
            opened = await self._pooled()
            async with opened.acquire(timeout=self.settings.timeout_seconds) as connection:
                await self._checked(connection)
                try:
                    yield connection
                except (OSError, asyncpg.InterfaceError, TimeoutError, asyncio.CancelledError):
                    _end(connection)  # returning it to the pool would wait for it
                    raise
        except FOREIGN as error:
            raise unavailable(error, what) from error

    @asynccontextmanager
    async def committing(self, what: str) -> AsyncIterator[Any]:
        """A transaction. An error before COMMIT means that nothing happened; an error
        at COMMIT, or a cancellation, leaves the outcome unknown."""
        async with self.connection(what) as connection:
            # Not the database's default: after waiting for the writers' lock we must
            # see what was committed meanwhile.
            transaction = connection.transaction(isolation="read_committed")
            await transaction.start()
            try:
                yield connection
            except asyncio.CancelledError:
                # no round trip for a rollback: the server rolls back a lost client
                _end(connection)
                raise
            except BaseException:
                if not connection.is_closed():
                    await transaction.rollback()
                raise
            try:
                await transaction.commit()
            except asyncpg.IntegrityConstraintViolationError:
                raise
            except FOREIGN as error:
                _end(connection)
                raise OutcomeUnknown(
                    "the commit was not confirmed; repeat the call with the same key to find out"
                ) from error

    async def close(self) -> None:
        opened, self._pool = self._pool, None
        if opened is not None:
            opened.terminate()

    async def _checked(self, connection: Any) -> None:
        """Check the first connection; all others are like it."""
        if not self._is_checked:
            timeout = self.settings.connect_timeout_seconds
            await refuse_shared_sessions(connection, self.settings.url, timeout=timeout)
            self._is_checked = True

    async def _pooled(self) -> asyncpg.Pool:
        if self._pool is None:
            self._pool = pool(
                self.settings.url,
                settings=_looked_after(self.settings),
                min_size=0,  # so nothing waits here, and no second caller sees a half-made pool
                max_size=self.settings.connections_max,
                timeout=self.settings.connect_timeout_seconds,
                command_timeout=self.settings.timeout_seconds,
            )
            await self._pool
        return self._pool


class PostgresRuleReader:
    """``contract.RuleReader`` on any PostgreSQL that has the tables.

    ``async with`` closes its connections.
    """

    def __init__(self, settings: PostgresSettings) -> None:
        self.database = Database(settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.database.close()

    async def check(self) -> None:
        """BadSetting if it is reachable and cannot store rules."""
        with suppress(Unavailable):
            async with self.database.connection("be reached"):
                pass

    async def head(self) -> RuleLogHead:
        async with self.database.connection("be read") as db:
            return RuleLogHead(*await db.fetchrow(SQL["head"]))

    async def changes_after(self, seq: int, limit: int = CHANGES_PER_READ) -> Sequence[RuleChange]:
        return [change_of(row[0]) for row in await self.fetch("changes_after", seq, limit)]

    async def snapshot(self) -> RuleSnapshot:
        async with (
            self.database.connection("be read") as db,
            db.transaction(isolation="repeatable_read", readonly=True),
        ):
            head = RuleLogHead(*await db.fetchrow(SQL["head"]))
            return snapshot_of(
                head.epoch,
                head.seq,
                head.store,
                (row[0] for row in await db.fetch(SQL["all_rules"])),
            )

    async def fetch(self, statement: str, *values: Any) -> list[Any]:
        async with self.database.connection("be read") as db:
            rows: list[Any] = await db.fetch(SQL[statement], *values)
            return rows
