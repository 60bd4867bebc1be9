"""Translates PostgreSQL's errors, so that no foreign error leaves the adapter.

The question is what happened: nothing, nothing now or ever, or nobody knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg

from holdfast.drivers.postgres import driver_text, no_address, reason, wrong_setting
from holdfast.errors import BadSetting, HoldfastError, InternalError, OutcomeUnknown, Unavailable
from holdfast.work.job import InvalidArgument

GIVEN_UP = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.QueryCanceledError,
    asyncpg.LockNotAvailableError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.DiskFullError,
)
"""The server rolled back: nothing happened, and a retry may succeed."""

CUT_OFF = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.IdleInTransactionSessionTimeoutError,
)
"""The connection failed: the outcome is unknown."""

REFUSED = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
)
"""The server refused a value: nothing happened, and a retry fails again."""

FOREIGN = (*GIVEN_UP, *CUT_OFF, asyncpg.PostgresError)


def refused(error: BaseException) -> bool:
    """Whether a value is at fault: refused by the server, or not encodable."""
    return isinstance(error, REFUSED) or (
        isinstance(error, asyncpg.InterfaceError) and isinstance(error, ValueError)
    )


def cut_off(error: BaseException) -> bool:
    """Whether the connection is at fault, and must not be used again."""
    return isinstance(error, CUT_OFF) and not refused(error)


def translate(error: BaseException) -> HoldfastError:
    """The Holdfast error that says what is known about the outcome."""
    text = str(error) or type(error).__name__
    if refused(error):
        return InvalidArgument(f"PostgreSQL cannot store a value: {text}")
    if isinstance(error, asyncpg.InvalidCatalogNameError):
        return Unavailable(f"PostgreSQL: {text}")  # it was dropped, and may be restored
    if isinstance(error, GIVEN_UP):
        return Unavailable(f"PostgreSQL gave up the transaction: {text}")
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        return BadSetting(f"PostgreSQL: {text}: see the roles in docs/guides/work.md")
    if isinstance(error, CUT_OFF):
        return OutcomeUnknown(f"the connection to PostgreSQL was lost: {reason(error)}")
    return InternalError(f"{type(error).__name__}: {text}")


@contextmanager
def translated() -> Iterator[None]:
    """Translate the foreign errors of the block."""
    try:
        yield
    except FOREIGN as error:
        raise translate(error) from error


@contextmanager
def reaching() -> Iterator[None]:
    """Translate the errors of a first connection, when nothing was asked yet.

    A server that is down may come back (Unavailable); a wrong setting stays wrong.
    """
    try:
        yield
    except asyncpg.ClientConfigurationError as error:
        raise wrong_setting(error) from error
    except ValueError:
        raise no_address() from None
    except (*GIVEN_UP, *CUT_OFF) as error:
        raise Unavailable(f"cannot connect to PostgreSQL: {driver_text(error)}") from error
    except asyncpg.PostgresError as error:
        raise BadSetting(f"PostgreSQL refuses the connection: {error}") from error
