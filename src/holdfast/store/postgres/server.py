"""Opens connections to the database of the chats, and uses none before it is checked.

Each new connection sets what the store relies on and reads it back: a commit that
returned is on disk (and on the standby, if one is named), and every statement of a
transaction sees what was committed before it. Then it compares the server with the one
that the database remembers; see ``identity``.

A write that waits for a hanging standby is ended by ``statement_timeout``: it is
committed on this server and visible, but perhaps nowhere else. The server says so by a
warning, which makes the outcome unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import asyncpg

from holdfast import telemetry
from holdfast.bounds import at_most, positive
from holdfast.drivers.postgres import addresses, connect, refuse_shared_sessions
from holdfast.errors import BadSetting, OutcomeUnknown, Unavailable
from holdfast.store.postgres.errors import reaching, unavailable
from holdfast.store.postgres.identity import EpochBase, SeenServers, ServerIdentity
from holdfast.store.postgres.schema import CONNECTION_NAME, SQL, migrate

SERVER_VERSION_MIN = 15
CHANNEL = "holdfast_chats"
"""Notifications that something was committed; they carry nothing."""
ADOPTIONS_MAX = 3
"""How often a connection looks again if another node adopts the server meanwhile."""
_LOST = "a reader or a client has more than the survivor"


@dataclass(frozen=True, slots=True)
class PostgresStoreSettings:
    """The database of the chats, and how it is used. ``url`` may name several servers,
    of which one is the primary.

    A node has 26 connections: for groups of sends, for changes, for reads, and two that
    notify and listen for notifications. Leases and node records have theirs beside.
    """

    url: str
    lossless: bool = False
    """The operator promises that no failover loses a commit: then epochs stay."""
    shards: int = 16
    """Of a new database. It is fixed when the schema is created."""
    groups_at_once: int = 8
    changes_at_once: int = 4
    """Commands, watermarks and records: they never wait behind sends, nor sends behind
    them.
    """
    reads_at_once: int = 12
    waiting_max: int = 10_000
    """Calls that wait for a connection. The next: SERVER_BUSY."""
    connect_timeout_seconds: float = 2.0
    lock_timeout_seconds: float = 2.0
    statement_timeout_seconds: float = 4.0
    poll_seconds: float = 0.1
    """How often the log looks for commits that nobody announced."""

    def __post_init__(self) -> None:
        positive(
            self,
            "shards",
            "groups_at_once",
            "changes_at_once",
            "reads_at_once",
            "waiting_max",
            "connect_timeout_seconds",
            "lock_timeout_seconds",
            "statement_timeout_seconds",
            "poll_seconds",
        )
        at_most(self, shards=256)

    @property
    def connections_max(self) -> int:
        return self.groups_at_once + self.changes_at_once + self.reads_at_once + 2

    @property
    def session(self) -> dict[str, str]:
        """What every connection sets."""
        return {
            "application_name": CONNECTION_NAME,
            "synchronous_commit": "on",
            "default_transaction_isolation": "read committed",
            "lock_timeout": _milliseconds(self.lock_timeout_seconds),
            "statement_timeout": _milliseconds(self.statement_timeout_seconds),
            # A plan made for one group would be made again for the next: a third of the
            # cost of a send. What is made once must not be for a table that is small.
            "plan_cache_mode": "force_generic_plan",
            "enable_seqscan": "off",
            "enable_hashjoin": "off",
            "enable_mergejoin": "off",
            "jit": "off",
        }


class ServerConnection:
    """A checked connection. Raises what asyncpg raises, and OutcomeUnknown."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self._was_warned = False
        raw.add_log_listener(self._on_notice)

    async def call(self, name: str, *values: Any) -> Any:
        """CALL a procedure, which commits. Its row; None if it has no results."""
        self._was_warned = False
        row = await self.raw.fetchrow(SQL[name], *values)
        if self._was_warned:
            raise OutcomeUnknown("no standby confirmed the commit; repeat it to find out")
        return row

    async def fetch(self, name: str, *values: Any) -> list[Any]:
        return list(await self.raw.fetch(SQL[name], *values))

    async def fetchrow(self, name: str, *values: Any) -> Any:
        return await self.raw.fetchrow(SQL[name], *values)

    def terminate(self) -> None:
        """Close at once, without a round trip."""
        with suppress(asyncpg.InterfaceError):
            self.raw.terminate()

    def _on_notice(self, _: Any, message: Any) -> None:
        if message.severity_en == "WARNING":
            self._was_warned = True


class ChatsServer:
    """Where the chats are: opens checked connections, and follows a failover."""

    def __init__(self, settings: PostgresStoreSettings) -> None:
        self.settings = settings
        self.shards = settings.shards
        self.seen = SeenServers()
        self._old: set[ServerIdentity] = set()
        """Old primaries that were met and logged."""
        self._addresses = addresses(settings.url)
        self._last_used = 0

    async def prepare(self) -> ServerConnection:
        """Check the server and bring the schema up to date; a connection to it. Raises
        an OperatorError, or Unavailable if no server can be used now.
        """
        return await self._of_any_address(self._prepare, at_start=True)

    async def connect(self) -> ServerConnection:
        """A connection that may be used. Unavailable, or an OperatorError."""
        return await self._of_any_address(self._use, at_start=False)

    async def _of_any_address(
        self, use: Callable[[Any, str], Awaitable[ServerConnection]], *, at_start: bool
    ) -> ServerConnection:
        """Try the addresses in turn, the one used last first: of several servers one is
        the primary.
        """
        failure: Unavailable | None = None
        for n in range(len(self._addresses)):
            place = (self._last_used + n) % len(self._addresses)
            try:
                raw = await self._connected(self._addresses[place], at_start)
                try:
                    with reaching(at_start=at_start):
                        connection = await use(raw, self._addresses[place])
                except BaseException:
                    raw.terminate()
                    raise
            except Unavailable as error:
                failure = failure or error
            else:
                self._last_used = place
                return connection
        assert failure is not None
        raise failure

    async def _prepare(self, raw: Any, address: str) -> ServerConnection:
        version = raw.get_server_version().major
        if version < SERVER_VERSION_MIN:
            raise BadSetting(
                f"PostgreSQL {version} is too old: the chats need {SERVER_VERSION_MIN} or newer"
            )
        timeout = self.settings.connect_timeout_seconds
        await refuse_shared_sessions(raw, address, timeout=timeout)
        facts = await raw.fetchrow(SQL["server"])
        check_server(facts, self.settings)
        await _check_notifications(raw, timeout)
        if self.settings.lossless and not facts["standbys"]:
            raise BadSetting(
                "cluster.failover is lossless, but PostgreSQL names no synchronous standby: set"
                " synchronous_standby_names, or do not promise it"
            )
        await migrate(raw, self.settings.shards, _identity(facts))
        return await self._use(raw, address)

    async def _use(self, raw: Any, _address: str) -> ServerConnection:
        facts = await raw.fetchrow(SQL["server"])
        check_server(facts, self.settings)
        connection = ServerConnection(raw)
        await self._recognise(connection, _identity(facts))
        return connection

    async def check_connection(self, raw: Any) -> None:
        """Unavailable unless this connection, of another part of the node, is to the
        server that the chats are on. It adopts none: the chats do.
        """
        facts = await raw.fetchrow(SQL["server"])
        stored = _stored(await raw.fetchrow(SQL["cluster"]))
        if self.seen.judge(_identity(facts), stored) != "same":
            raise unavailable("this PostgreSQL is not the primary that the chats are on")

    async def raise_all_epochs(self, connection: ServerConnection, base: int) -> None:
        """Commits under ``base`` were lost although no failover was seen, or one that
        was declared lossless. Once: if the base is another, somebody raised it.
        """
        stored = _stored(await connection.fetchrow("cluster"))
        if stored.base == base:
            await self._adopt(connection, stored.server, stored, _LOST, is_raised=True)
            stored = _stored(await connection.fetchrow("cluster"))
        self.seen.on_used(stored.base)

    async def raise_epochs(self, connection: ServerConnection, reason: str) -> int:
        """Because an operator says so; the new base."""
        stored = _stored(await connection.fetchrow("cluster"))
        await self._adopt(connection, stored.server, stored, reason, is_raised=True)
        base = _stored(await connection.fetchrow("cluster")).base
        self.seen.on_used(base)
        return base

    async def _connected(self, address: str, at_start: bool) -> Any:
        with reaching(at_start=at_start):
            return await connect(
                address,
                settings=self.settings.session,
                timeout=self.settings.connect_timeout_seconds,
                max_cached_statement_lifetime=0,
            )

    async def _recognise(self, connection: ServerConnection, server: ServerIdentity) -> None:
        for _ in range(ADOPTIONS_MAX):
            row = await connection.fetchrow("cluster")
            stored = _stored(row)
            verdict = self.seen.judge(server, stored)
            if verdict == "old":
                is_first = server not in self._old
                self._old.add(server)
                telemetry.old_primary_refused(server.timeline, is_first=is_first)
                raise unavailable("this PostgreSQL is an old primary: another one was promoted")
            if verdict == "same":
                self.seen.on_used(stored.base)
                self.shards = row["shards"]
                return
            is_lost = self.seen.is_lost((await connection.fetchrow("log_ends"))["ends"])
            why = _LOST if is_lost else "another server"
            is_raised = is_lost or not self.settings.lossless
            await self._adopt(connection, server, stored, why, is_raised=is_raised)
        raise unavailable("several nodes find another PostgreSQL at once")

    async def _adopt(
        self,
        connection: ServerConnection,
        server: ServerIdentity,
        stored: EpochBase,
        why: str,
        *,
        is_raised: bool,
    ) -> None:
        before = stored.server
        after = (server.system, server.timeline, self.seen.base + 1 if is_raised else None, why)
        try:
            row = await connection.call(
                "adopt", stored.base, before.system, before.timeline, *after
            )
        except OutcomeUnknown as error:
            raise unavailable("no standby confirmed that the server was adopted") from error
        if row["was_first"]:
            log = telemetry.log.critical if is_raised else telemetry.log.warning
            fields = {"severity": "SEV-1"} if is_raised else {}
            log("store.server_changed", reason=why, base=row["new_base"], **fields)


def check_server(facts: Mapping[str, Any], settings: PostgresStoreSettings) -> None:
    """Unavailable for a standby; BadSetting if a commit that returned could be lost."""
    if facts["in_recovery"]:
        raise unavailable("PostgreSQL is a standby: connect to the primary")
    for name in ("fsync", "full_page_writes"):
        if facts[name] != "on":
            raise BadSetting(
                f"PostgreSQL runs with {name} = off: a crash would lose acknowledged"
                " messages; switch it on"
            )
    wanted = {
        "synchronous_commit": "on",
        "transaction_isolation": "read committed",
        "lock_timeout": int(settings.session["lock_timeout"]),
        "statement_timeout": int(settings.session["statement_timeout"]),
        "plan_cache_mode": "force_generic_plan",
    }
    for name, value in wanted.items():
        if facts[name] != value:
            raise BadSetting(
                f"PostgreSQL does not keep the setting {name}: {facts[name]}, not {value};"
                " is there a connection pooler?"
            )


async def _check_notifications(raw: Any, seconds: float) -> None:
    """BadSetting unless a notification to oneself arrives: a pooler may lose it."""
    heard = asyncio.Event()

    def on_notification(*_: object) -> None:
        heard.set()

    await raw.add_listener(CHANNEL, on_notification)
    await raw.execute(SQL["notify"])
    try:
        async with asyncio.timeout(seconds):
            await heard.wait()
    except TimeoutError:
        raise BadSetting(
            "a notification of PostgreSQL does not arrive: a connection pooler in transaction mode"
            " stands before it; connect to PostgreSQL itself, or set pool_mode = session"
        ) from None
    await raw.remove_listener(CHANNEL, on_notification)


def _identity(facts: Any) -> ServerIdentity:
    return ServerIdentity(facts["system"], facts["timeline"])


def _stored(row: Any) -> EpochBase:
    return EpochBase(ServerIdentity(row["system"], row["timeline"]), row["epoch_base"])


def _milliseconds(seconds: float) -> str:
    """As PostgreSQL reads it; 0 would mean never."""
    return str(max(1, round(seconds * 1000)))
