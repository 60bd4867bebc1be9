"""What PostgreSQL's errors mean here. Nothing foreign leaves the adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg

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
"""The server says that nothing happened."""

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
"""Nobody knows whether it happened."""

REFUSED = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, asyncpg.ProgramLimitExceededError)
"""The server says that a value is wrong: nothing happened, and nothing will the next time."""

FOREIGN = (*GIVEN_UP, *CUT_OFF, asyncpg.PostgresError)


def refused(error: BaseException) -> bool:
    """Whether a value is at fault, by the server's word or by that of asyncpg, which could not encode it."""
    return isinstance(error, REFUSED) or (isinstance(error, asyncpg.InterfaceError) and isinstance(error, ValueError))


def cut_off(error: BaseException) -> bool:
    """Whether the connection is at fault: it is not used again."""
    return isinstance(error, CUT_OFF) and not refused(error)


def translate(error: BaseException) -> HoldfastError:
    """The error of ours that says what is known."""
    text = str(error) or type(error).__name__
    if refused(error):
        return InvalidArgument(f"PostgreSQL cannot store a value: {text}")
    if isinstance(error, GIVEN_UP):
        return Unavailable(f"PostgreSQL gave up the transaction: {text}")
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        return BadSetting(f"PostgreSQL: {text}: see the roles in docs/guides/work.md")
    if isinstance(error, CUT_OFF):
        # Its text may name hosts and ports; who may see this error need not know them. The log has the cause.
        return OutcomeUnknown(f"the connection to PostgreSQL was lost: {type(error).__name__}")
    return InternalError(f"{type(error).__name__}: {text}")


@contextmanager
def translated() -> Iterator[None]:
    """Foreign errors end here."""
    try:
        yield
    except FOREIGN as error:
        raise translate(error) from error


@contextmanager
def reaching() -> Iterator[None]:
    """Around a first connection, when nothing was asked yet: what is away may come back, what is wrong will not."""
    try:
        yield
    except ValueError as error:
        raise BadSetting(f"this is no address of PostgreSQL: {error}") from error
    except (*GIVEN_UP, *CUT_OFF) as error:
        raise Unavailable(f"cannot connect to PostgreSQL: {str(error) or type(error).__name__}") from error
    except asyncpg.PostgresError as error:
        raise BadSetting(f"PostgreSQL refuses the connection: {error}") from error
