"""Why a job failed: from an exception to a reason and a stored failure.

In order: the reason that ``JobFailed`` carries, the handler's own table, the user's
hook, the errors of well-known libraries (``LIBRARY_REASONS``), the table ``REASONS``.
"""

from __future__ import annotations

import errno
import hashlib
import socket
import ssl
import traceback
from collections.abc import Callable, Mapping, Sequence

from holdfast import telemetry
from holdfast.errors import Deferred, HoldfastError, OutcomeUnknown, RateLimited, Refused
from holdfast.work.job import ERROR_BYTES_MAX, TRACE_BYTES_MAX, Failure, InvalidArgument, Reason

Hook = Callable[[BaseException], Reason | None]
"""The user's reason for an exception; None leaves it to the tables."""
Reasons = Mapping[type[BaseException], Reason]
"""A handler's own table: the nearest listed base class gives the reason."""
KIND_BYTES_MAX = 200
_CAUSES_MAX = 100
RETRY_AFTER_MAX_SECONDS = 86400.0
"""The longest delay that an exception can ask for: one day."""


class JobFailed(Exception):
    """Raised by a handler that knows why it failed, and perhaps when to retry."""

    def __init__(
        self, reason: Reason, message: str = "", *, retry_after_seconds: float = 0.0
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class JobPostponed(JobFailed):
    """Raised by a handler that cannot do the job now: it is retried after
    ``retry_after_seconds``, without counting an attempt or a strike."""


class UnknownType(Exception):
    """No handler here knows this job type."""


class PayloadUnreadable(Exception):
    """The payload cannot be decoded as the type that its handler is registered for."""


class LoopStuck(TimeoutError):
    """The handler blocked the event loop for too long, and its process was ended."""


class ReportRefused(Exception):
    """The store refuses the report of the run because of a value in it."""


_qualname = type.__dict__["__qualname__"].__get__
"""The name that Python keeps, which a metaclass cannot change."""

REASONS: Sequence[tuple[type[BaseException], Reason]] = (
    (PayloadUnreadable, Reason.SERIALIZATION_ERROR),
    (UnknownType, Reason.UNKNOWN),
    (RateLimited, Reason.THROTTLED),
    (InvalidArgument, Reason.HANDLER_EXCEPTION),
    (Refused, Reason.VALIDATION_FAILURE),
    (Deferred, Reason.DEPENDENCY_FAILURE),
    (OutcomeUnknown, Reason.DEPENDENCY_FAILURE),
    (TimeoutError, Reason.TIMEOUT_EXCEEDED),
    (ConnectionError, Reason.TRANSPORT_UNAVAILABLE),
    (socket.gaierror, Reason.TRANSPORT_UNAVAILABLE),
    (socket.herror, Reason.TRANSPORT_UNAVAILABLE),
    (ssl.SSLError, Reason.TRANSPORT_UNAVAILABLE),
    (BaseException, Reason.HANDLER_EXCEPTION),
)
"""The first matching row decides, except for an OSError with one of ``NETWORK_ERRORS``.
The last row is a mistake of the handler, and a strike: a missing file, a full disk,
infinite recursion, broken JSON from elsewhere.
"""

NETWORK_ERRORS = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
"""An OSError with one of these numbers means Reason.TRANSPORT_UNAVAILABLE."""

LIBRARY_REASONS: Mapping[str, Reason] = {
    "asyncpg.PostgresConnectionError": Reason.DEPENDENCY_FAILURE,
    "asyncpg.AdminShutdownError": Reason.DEPENDENCY_FAILURE,
    "asyncpg.CrashShutdownError": Reason.DEPENDENCY_FAILURE,
    "asyncpg.CannotConnectNowError": Reason.DEPENDENCY_FAILURE,
    "psycopg.OperationalError": Reason.DEPENDENCY_FAILURE,
    "sqlalchemy.OperationalError": Reason.DEPENDENCY_FAILURE,
    "redis.ConnectionError": Reason.DEPENDENCY_FAILURE,
    "redis.TimeoutError": Reason.DEPENDENCY_FAILURE,
    "aiohttp.ClientConnectionError": Reason.TRANSPORT_UNAVAILABLE,
    "httpx.TransportError": Reason.TRANSPORT_UNAVAILABLE,
}
"""Exceptions of well-known libraries that mean an outage but are no ConnectionError.

By package and name, so that none of them is imported here. An outage must not turn jobs
into dead letters.
"""


def classify(error: BaseException, hook: Hook | None = None, own: Reasons | None = None) -> Failure:
    """The failure to store: bounded texts and a fingerprint that groups equal failures.

    ``own`` is the table of the job's handler.
    """
    reason = _reason(error, hook, own or {})
    kind = kind_of(error)
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename}:{frame.name}" for frame in frames[-8:]]
    fingerprint = hashlib.sha256(
        "\n".join([reason.name, kind, *places]).encode("utf-8", "replace")
    ).hexdigest()[:16]
    message = _readable(lambda: error.message if isinstance(error, HoldfastError) else str(error))
    trace = _readable(lambda: "".join(traceback.format_exception(error)))
    texts = clipped(message, ERROR_BYTES_MAX), clipped(trace, TRACE_BYTES_MAX)
    return Failure(
        reason, kind, *texts, fingerprint, _retry_after(error), isinstance(error, JobPostponed)
    )


def _readable(text: Callable[[], str]) -> str:
    """An exception's text; its code is the user's and may raise or return anything."""
    try:
        found = text()
        return (
            found
            if isinstance(found, str)
            else f"its text is no text but {type(found).__qualname__}"
        )
    except BaseException as defect:
        return f"its text could not be read: {kind_of(defect)}"


def kind_of(error: BaseException) -> str:
    """The name of its class; bounded, because classes can be made at run time."""
    return clipped(_qualname(type(error)), KIND_BYTES_MAX)


def _reason(error: BaseException, hook: Hook | None, own: Reasons) -> Reason:
    if isinstance(error, JobFailed):
        return error.reason if isinstance(error.reason, Reason) else Reason.UNKNOWN
    kind = type(error)
    listed = next((own[base] for base in kind.__mro__ if base in own), None)
    reason = _by_hook(hook, error) if listed is None and hook is not None else listed
    return reason or _by_library(kind) or _by_table(error)


def _by_table(error: BaseException) -> Reason:
    reason = next(reason for kind, reason in REASONS if isinstance(error, kind))
    if (
        reason is Reason.HANDLER_EXCEPTION
        and isinstance(error, OSError)
        and error.errno in NETWORK_ERRORS
    ):
        return Reason.TRANSPORT_UNAVAILABLE
    return reason


def carries(error: BaseException, cause: BaseException) -> bool:
    """Whether ``error`` is ``cause``, was raised from it, or is a group with it."""
    chain: list[BaseException] = [error]
    for each in chain:  # the list grows during the loop
        if each is cause:
            return True
        if len(chain) < _CAUSES_MAX:
            chain += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
            chain += [each.__cause__] if each.__cause__ is not None else []
    return False


def _by_hook(hook: Hook, error: BaseException) -> Reason | None:
    """The hook's reason; None if the hook fails or returns anything else."""
    try:
        reason = hook(error)
        if reason is not None and not isinstance(reason, Reason):
            raise TypeError(
                f"the hook must answer with a Reason or None, not {type(reason).__qualname__}"
            )
    except BaseException as defect:
        telemetry.defect("work", defect)
        return None
    return reason


def _retry_after(error: BaseException) -> float:
    """The delay that the exception asks for; the name may hold anything elsewhere."""
    try:
        seconds = getattr(error, "retry_after_seconds", None)
        return (
            float(min(seconds, RETRY_AFTER_MAX_SECONDS))
            if isinstance(seconds, int | float) and seconds > 0
            else 0.0
        )
    except BaseException:
        return 0.0


def _by_library(kind: type[BaseException]) -> Reason | None:
    names = (f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in kind.__mro__)
    return next((LIBRARY_REASONS[name] for name in names if name in LIBRARY_REASONS), None)


def clipped(text: str, bytes_max: int) -> str:
    """The end of a text, where the cause is, without NUL and lone surrogates."""
    data = text[-bytes_max:].replace("\x00", "�").encode("utf-8", "replace")
    if len(data) <= bytes_max and len(text) <= bytes_max:
        return data.decode()
    return "…" + data[len(data) - bytes_max + 3 :].decode("utf-8", "ignore")
