"""A PostgreSQL database for small adapters: a pool, and what PostgreSQL's errors mean.

A host that vanishes closes nothing: its connections keep their locks until the server
drops them. So every session asks the server to end it when it is idle inside a
transaction. (Work has its own connections, because a handler may hold a transaction
much longer.)

``Database`` translates asyncpg's errors; no error it raises contains a host name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import asyncpg

from holdfast import telemetry
from holdfast.drivers.postgres import (
    SessionConnection,
    addresses,
    connect,
    driver_text,
    end_at_once,
    reason,
    refuse_shared_sessions,
)
from holdfast.errors import HoldfastError, OutcomeUnknown, Unavailable

RETRY_AFTER_SECONDS = 5.0

CUT_OFF = (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""The connection must not be used again."""
FOREIGN = (*CUT_OFF, asyncpg.PostgresError)
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


class DatabaseUse(NamedTuple):
    """What a database is for, as errors and the log name it."""

    part: str
    """The folder whose log event a failure is."""
    contents: str

    def unavailable(self, error: BaseException, what: str) -> HoldfastError:
        """Unavailable: nothing happened. The log has all that the driver says."""
        event = f"{self.part}.database_unavailable"
        telemetry.log.warning(event, what=what, error=driver_text(error))
        failure = Unavailable(
            f"the database of the {self.contents} cannot {what} now ({reason(error)})",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )
        failure.__cause__ = error
        return failure


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


def storable(text: str) -> str:
    """Text that PostgreSQL can store: no U+0000, no half of a surrogate pair."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


CheckConnection = Callable[[Any], Awaitable[None]]


class Database:
    """A pool that connects on first use and reconnects as needed."""

    def __init__(
        self,
        settings: PostgresSettings,
        use: DatabaseUse,
        *,
        session: Mapping[str, str] | None = None,
        check: CheckConnection | None = None,
    ) -> None:
        """``session``: settings of every connection. ``check`` is called with each new
        connection. If it raises, the connection is not used; if Unavailable, the next
        server that the URL names is tried."""
        self.settings = settings
        self._addresses = addresses(settings.url)
        self._last_used = 0
        self._session = {**_looked_after(settings), **(session or {})}
        self._use = use
        self._check = check
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
                except (*CUT_OFF, asyncio.CancelledError):
                    end_at_once(connection)  # returning it to the pool would wait for it
                    raise
        except FOREIGN as error:
            raise self._use.unavailable(error, what) from error

    @asynccontextmanager
    async def committing(self, what: str) -> AsyncIterator[Any]:
        """A transaction. An error before COMMIT means that nothing happened; an error
        at COMMIT, or a cancellation, leaves the outcome unknown."""
        async with self.connection(what) as connection:
            # Not the database's default: after waiting for a lock we must see what was
            # committed meanwhile.
            transaction = connection.transaction(isolation="read_committed")
            await transaction.start()
            try:
                yield connection
            except asyncio.CancelledError:
                # no round trip for a rollback: the server rolls back a lost client
                end_at_once(connection)
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
                end_at_once(connection)
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
            self._pool = asyncpg.create_pool(
                self.settings.url,
                connect=self._connect,
                connection_class=SessionConnection,
                min_size=0,  # so nothing waits here, and no second caller sees a half-made pool
                max_size=self.settings.connections_max,
                timeout=self.settings.connect_timeout_seconds,
                command_timeout=self.settings.timeout_seconds,
            )
            await self._pool
        return self._pool

    async def _connect(self, url: str, **options: Any) -> Any:
        """For the pool: a new connection, checked."""
        if self._check is None:
            return await connect(url, settings=self._session, **options)
        failure: BaseException | None = None
        for n in range(len(self._addresses)):
            place = (self._last_used + n) % len(self._addresses)
            try:
                connection = await self._connect_checked(place, self._check, options)
            except (*FOREIGN, Unavailable) as error:
                failure = failure or error
            else:
                self._last_used = place
                return connection
        assert failure is not None
        raise failure

    async def _connect_checked(
        self, place: int, check: CheckConnection, options: Mapping[str, Any]
    ) -> Any:
        connection = await connect(self._addresses[place], settings=self._session, **options)
        try:
            await check(connection)
        except BaseException:
            end_at_once(connection)
            raise
        return connection


def _looked_after(settings: PostgresSettings) -> dict[str, str]:
    return {
        "idle_in_transaction_session_timeout": milliseconds(settings.timeout_seconds),
    }
