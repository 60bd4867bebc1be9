"""Translates PostgreSQL's errors, so that no foreign error leaves the adapter.

The question is what happened: nothing, nothing now or ever, or nobody knows. A write is
one CALL that commits by itself, and a statement that was cancelled may have committed
before; so a write that failed is unknown unless its error can only come before the
commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg

from holdfast.drivers.postgres import driver_text, no_address, reason, wrong_setting
from holdfast.errors import (
    BadSetting,
    HoldfastError,
    InternalError,
    InvalidMessage,
    OutcomeUnknown,
    ServerBusy,
    Unavailable,
)

RETRY_AFTER_SECONDS = 1.0

NOTHING_HAPPENED = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.DiskFullError,
    asyncpg.ReadOnlySQLTransactionError,
)
"""The server rolled back; a retry may succeed."""

CONFLICTS = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.LockNotAvailableError,
)
"""Another writer was in the way."""

CUT_OFF = (
    OSError,
    TimeoutError,
    asyncpg.QueryCanceledError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.IdleInTransactionSessionTimeoutError,
)
"""The connection or the statement ended: of a write nobody knows."""

FOREIGN = (*CUT_OFF, asyncpg.PostgresError)

NO_STANDBY = "HF001"
"""The procedure's own SQLSTATE: see ``functions/append.sql``."""


def is_refused(error: BaseException) -> bool:
    """Whether a value is at fault: refused by the server, or not encodable."""
    return isinstance(error, asyncpg.DataError | asyncpg.ProgramLimitExceededError) or (
        isinstance(error, asyncpg.InterfaceError) and isinstance(error, ValueError)
    )


def is_cut_off(error: BaseException) -> bool:
    """Whether the connection must not be used again."""
    return isinstance(error, CUT_OFF) and not is_refused(error)


def translate(error: BaseException, *, write: bool) -> HoldfastError:
    """The Holdfast error that says what is known about the outcome."""
    if is_refused(error):
        return InvalidMessage("PostgreSQL cannot store a value of this request")
    if getattr(error, "sqlstate", None) == NO_STANDBY:
        return unavailable("no standby confirms commits, and cluster.failover is lossless")
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        return BadSetting(f"PostgreSQL: {error}: grant this role all rights on holdfast_chats")
    if isinstance(error, asyncpg.LockNotAvailableError):
        # An answer of a server that works: no breaker counts it.
        return ServerBusy("this chat is busy; try again", retry_after_seconds=RETRY_AFTER_SECONDS)
    if isinstance(error, asyncpg.InvalidCatalogNameError):
        return unavailable(f"PostgreSQL: {error}")  # it was dropped, and may be restored
    if isinstance(error, NOTHING_HAPPENED):
        return unavailable("PostgreSQL gave up the transaction")
    if isinstance(error, CUT_OFF):
        why = reason(error)
        if write:
            return OutcomeUnknown(f"the commit was not confirmed ({why}); repeat it to find out")
        return unavailable(f"PostgreSQL did not answer ({why})")
    return InternalError(f"{type(error).__name__}: {error}")


def unavailable(why: str) -> Unavailable:
    return Unavailable(f"{why}; try again", retry_after_seconds=RETRY_AFTER_SECONDS)


@contextmanager
def reaching(*, at_start: bool) -> Iterator[None]:
    """Translate the errors of a new connection, when nothing was asked yet.

    A server that is down may come back (Unavailable); a wrong setting stays wrong. At
    the start an operator reads the error, who may see hosts and ports, and a database
    that is not there is a wrong setting; later it was dropped.
    """
    try:
        yield
    except asyncpg.InsufficientPrivilegeError as error:
        raise translate(error, write=False) from error
    except asyncpg.ClientConfigurationError as error:
        raise wrong_setting(error) from error
    except (asyncpg.LockNotAvailableError, *NOTHING_HAPPENED, *CUT_OFF) as error:
        why = driver_text(error) if at_start else reason(error)
        raise unavailable(f"cannot connect to PostgreSQL ({why})") from error
    except ValueError:
        raise no_address() from None
    except asyncpg.PostgresError as error:
        if isinstance(error, asyncpg.InvalidCatalogNameError) and not at_start:
            raise translate(error, write=False) from error
        raise BadSetting(f"PostgreSQL refuses the connection: {error}") from error
