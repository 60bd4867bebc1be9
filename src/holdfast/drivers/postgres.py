"""Connections to PostgreSQL that keep one session each, and notice a dead peer.

A host that vanishes closes nothing. So both sides probe a silent connection after 5 s,
and end one that is not answered 11 s long. The probes alone would not do: the kernel
sends none while sent bytes wait for their confirmation, and repeats those for a quarter
of an hour.

Advisory locks, LISTEN, prepared statements and settings belong to a session. Behind a
pooler in transaction mode (PgBouncer's ``pool_mode = transaction`` or ``statement``) a
connection gets another session with every transaction: most things seem to work, but
locks and notifications are sometimes lost. Such a pooler is refused. A pooler that
keeps one session per connection (``pool_mode = session``) is accepted.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import asyncpg

from holdfast.errors import BadSetting

_NOT_OURS = (asyncpg.DuplicatePreparedStatementError, asyncpg.InvalidSQLStatementNameError)
"""Errors of a shared session: another client's statement met ours."""


_SILENT_SECONDS, _PROBE_SECONDS, _PROBES = 5, 2, 3
_DEAD_SECONDS = _SILENT_SECONDS + _PROBE_SECONDS * _PROBES
_WATCHED_BY_SERVER = {
    "tcp_keepalives_idle": str(_SILENT_SECONDS),
    "tcp_keepalives_interval": str(_PROBE_SECONDS),
    "tcp_keepalives_count": str(_PROBES),
    "tcp_user_timeout": str(_DEAD_SECONDS * 1000),
}


class SessionConnection(asyncpg.Connection):  # type: ignore[misc]  # it has no types
    """Applies its settings by SET, again after a pool resets it.

    Poolers refuse most settings at startup. ``was_closed`` says whether this program
    closed the connection; otherwise it was lost.
    """

    __slots__ = ("_closed_here", "set_again")

    async def close(self, *, timeout: float | None = None) -> None:
        self._closed_here = True
        await super().close(timeout=timeout)

    def terminate(self) -> None:
        self._closed_here = True
        super().terminate()

    def was_closed(self) -> bool:
        return getattr(self, "_closed_here", False)

    def get_reset_query(self) -> str:
        return f"{super().get_reset_query()}\n{self.set_again}"


def addresses(url: str) -> list[str]:
    """A URL for each server that ``url`` names: ``user@one:5432,two:5432/chats``."""
    scheme, separator, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    user, at, hosts = place.rpartition("@")
    return [f"{scheme}{separator}{user}{at}{host}{slash}{path}" for host in hosts.split(",")]


def driver_text(error: BaseException) -> str:
    """What asyncpg or the system says, without passwords; it may name hosts."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"(://[^:/@\s]*):[^@\s]*@", r"\1:…@", text)


def reason(error: BaseException) -> str:
    """Why PostgreSQL could not be used, for everybody: without hosts, roles and
    passwords. ``driver_text`` has more, for the log.
    """
    text = "it cannot be connected to"
    match error:
        case TimeoutError():
            text = "no answer in time"
        case socket.gaierror():
            text = "its name cannot be resolved"
        case ssl.SSLCertVerificationError():
            text = f"its certificate is not trusted: {error.verify_message}"
        case OSError(errno=int(number)):
            text = os.strerror(number)
        case asyncpg.InvalidAuthorizationSpecificationError():
            text = "it refuses the role or the password"
        case asyncpg.PostgresError() | asyncpg.InterfaceError() if str(error):
            text = str(error).splitlines()[0]
        case asyncpg.PostgresError() | asyncpg.InterfaceError() | asyncpg.InternalClientError():
            text = type(error).__name__
    return text


def wrong_setting(error: asyncpg.ClientConfigurationError) -> BadSetting:
    """The URL, or a file that it names, is at fault: no retry helps."""
    text = driver_text(error)
    if "root certificate" in text:
        text = f"{text} Or add &sslrootcert=FILE to the URL, with the server's authority"
    return BadSetting(f"PostgreSQL cannot be connected to with this URL: {text}")


def no_address() -> BadSetting:
    """The driver's own text may quote a part of the password as the port."""
    return BadSetting(
        "this is no address of PostgreSQL: a port is a number, and characters such as / # ? @ in"
        " a password are written as %XX"
    )


async def connect(
    url: str | None = None, *, settings: Mapping[str, str] | None = None, **options: Any
) -> Any:
    """A connection with these settings. Raises what asyncpg raises."""
    connection = await asyncpg.connect(url, **{**options, "connection_class": SessionConnection})
    _watch_server(connection)
    every = {**_WATCHED_BY_SERVER, **(settings or {})}
    connection.set_again = "\n".join(f"SET {name} = '{value}';" for name, value in every.items())
    try:
        await connection.execute(connection.set_again)
    except BaseException:
        connection.terminate()
        raise
    return connection


def end_at_once(connection: Any) -> None:
    """Close it without a round trip. The server may have closed it already."""
    with suppress(asyncpg.InterfaceError):
        connection.terminate()


def _watch_server(connection: Any) -> None:
    peer = connection._transport.get_extra_info("socket")
    if peer is None or peer.family not in (socket.AF_INET, socket.AF_INET6):
        return
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _SILENT_SECONDS),
        ("TCP_KEEPINTVL", _PROBE_SECONDS),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", _DEAD_SECONDS * 1000),
    ):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def pool(url: str, *, settings: Mapping[str, str], **options: Any) -> asyncpg.Pool:
    """A pool of such connections, not yet open."""

    async def connected(*where: Any, **how: Any) -> Any:
        return await connect(*where, settings=settings, **how)

    return asyncpg.create_pool(
        url, connect=connected, connection_class=SessionConnection, **options
    )


async def refuse_shared_sessions(connection: Any, url: str, **options: Any) -> None:
    """BadSetting if the connection has no session of its own. Raises what asyncpg
    raises.

    A pooler does not know which server process will serve a client, so it invents a
    process id. If the real one differs from the announced one, a second connection
    shows whether each of the two keeps a process of its own.
    """
    try:
        first = await _process(connection)
        if first == connection.get_server_pid():
            return
        second = await asyncpg.connect(url, **options)
        try:
            # Ask each twice in a row: asked alternately, a pooler that alternates
            # between two processes would go unnoticed.
            its = {await _process(second), await _process(second)}
            ours = {first, await _process(connection), await _process(connection)}
        finally:
            second.terminate()
    except _NOT_OURS as error:
        raise _refusal() from error
    if len(ours) > 1 or len(its) > 1 or ours == its:
        raise _refusal()


async def _process(connection: Any) -> int:
    return int(await connection.fetchval("SELECT pg_backend_pid()"))


def _refusal() -> BadSetting:
    return BadSetting(
        "a connection pooler in transaction mode stands before PostgreSQL: locks, notifications and"
        " prepared statements need a session for each connection; connect to PostgreSQL itself, or"
        " set pool_mode = session for this database"
    )
