"""Which connections are sessions, by the server process expected and the one met; and
what is told of an error.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import asyncpg
import pytest

from holdfast.drivers.postgres import reason, refuse_shared_sessions
from holdfast.errors import BadSetting
from holdfast.store.postgres import errors as chat_errors
from holdfast.work.postgres import errors as work_errors


class Connection:
    def __init__(self, expected: int, *met: int | Exception) -> None:
        self._expected, self._met, self.is_ended = expected, list(met), False

    def get_server_pid(self) -> int:
        return self._expected

    async def fetchval(self, _: str) -> int:
        met = self._met.pop(0) if len(self._met) > 1 else self._met[0]
        if isinstance(met, Exception):
            raise met
        return met

    def terminate(self) -> None:
        self.is_ended = True


def check(first: Connection, second: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(url: str, **options: Any) -> Connection:
        assert (url, options) == ("postgresql://x", {"timeout": 3})
        return second

    monkeypatch.setattr(asyncpg, "connect", connect)
    asyncio.run(refuse_shared_sessions(first, "postgresql://x", timeout=3))


def test_postgresql_itself_is_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    second = Connection(9, 9)
    check(Connection(7, 7), second, monkeypatch)
    assert not second.is_ended, "there was no second connection"


def test_two_connections_with_processes_of_their_own_are_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second = Connection(2, 72)
    check(Connection(1, 71), second, monkeypatch)
    assert second.is_ended


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((71,), (71,)),
        ((71, 72), (73,)),
        ((71, 71, 72), (73,)),
        ((71,), (72, 73)),
        ((71, asyncpg.InvalidSQLStatementNameError()), (72,)),
        ((71,), (asyncpg.DuplicatePreparedStatementError(),)),
    ],
    ids=[
        "one for both",
        "changes",
        "changes later",
        "the other one changes",
        "statement gone",
        "statement of another",
    ],
)
def test_connections_that_share_processes_are_refused(
    first: tuple[Any, ...], second: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadSetting, match="transaction mode"):
        check(Connection(1, *first), Connection(2, *second), monkeypatch)


@pytest.mark.parametrize(
    "reaching", [work_errors.reaching, functools.partial(chat_errors.reaching, at_start=True)]
)
def test_error_about_a_url_shows_no_part_of_its_password(
    reaching: Callable[[], AbstractContextManager[None]],
) -> None:
    with pytest.raises(BadSetting, match="no address of PostgreSQL") as refused, reaching():
        int("S3CRET")  # as the driver does with what it takes for the port
    assert "S3CRET" not in str(refused.value) and refused.value.__suppress_context__


NO_ENTRY = 'no pg_hba.conf entry for host "10.0.0.9", user "ops", database "chats"'


def untrusted() -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed for db.internal")
    error.verify_message = "self-signed certificate"
    return error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionRefusedError(111, "Connect call failed ('10.0.0.9', 5432)"), "refused"),
        (OSError("Multiple exceptions: [Errno 111] ('10.0.0.9', 5432)"), "cannot be connected to"),
        (TimeoutError(), "no answer in time"),
        (socket.gaierror(-2, "db.internal: Name or service not known"), "cannot be resolved"),
        (untrusted(), "not trusted: self-signed certificate"),
        (asyncpg.InvalidPasswordError('authentication failed for user "ops"'), "or the password"),
        (asyncpg.InvalidAuthorizationSpecificationError(NO_ENTRY), "refuses the role"),
        (asyncpg.TooManyConnectionsError("sorry, too many clients already"), "too many clients"),
        (
            asyncpg.InsufficientPrivilegeError("permission denied for table device\nDETAIL: 10.0"),
            "permission denied for table device",
        ),
        (asyncpg.ConnectionDoesNotExistError("connection was closed"), "connection was closed"),
        (asyncpg.InterfaceError("connection is closed"), "connection is closed"),
        (asyncpg.PostgresError(""), "PostgresError"),
        (asyncpg.InternalClientError("of db.internal"), "InternalClientError"),
    ],
)
def test_reason_is_told_without_hosts_roles_and_passwords(error: Exception, told: str) -> None:
    found = reason(error)
    assert told in found
    for hidden in ("10.0", "5432", "db.internal", "ops", "\n"):
        assert hidden not in found
