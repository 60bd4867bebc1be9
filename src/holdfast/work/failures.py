"""Why a job failed: exceptions become reasons, by one table and the user's own hook before it."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Mapping, Sequence

import msgspec

from holdfast import telemetry
from holdfast.errors import Deferred, HoldfastError, OutcomeUnknown, RateLimited, Refused
from holdfast.work.job import ERROR_BYTES_MAX, TRACE_BYTES_MAX, Failure, Reason

Hook = Callable[[BaseException], Reason | None]
"""The user's say: the reason for an exception, or None to leave it to the table."""


KIND_BYTES_MAX = 200
RETRY_AFTER_MAX_SECONDS = 86400.0
"""The longest wait an exception may ask for: what asks for more is tried again after a day."""


class JobFailed(Exception):
    """Raised by a handler that knows why it failed, and perhaps when to come again."""

    def __init__(self, reason: Reason, message: str = "", *, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class UnknownType(Exception):
    """No handler here knows this job type."""


REASONS: Sequence[tuple[type[BaseException], Reason]] = (
    (msgspec.MsgspecError, Reason.SERIALIZATION_ERROR),
    (UnicodeError, Reason.SERIALIZATION_ERROR),
    (RecursionError, Reason.SERIALIZATION_ERROR),
    (RateLimited, Reason.THROTTLED),
    (Refused, Reason.VALIDATION_FAILURE),
    (Deferred, Reason.DEPENDENCY_FAILURE),
    (OutcomeUnknown, Reason.DEPENDENCY_FAILURE),
    (TimeoutError, Reason.TIMEOUT_EXCEEDED),
    (OSError, Reason.TRANSPORT_UNAVAILABLE),
    (UnknownType, Reason.UNKNOWN),
    (Exception, Reason.HANDLER_EXCEPTION),
)
"""The first row that fits decides."""

AWAY: Mapping[str, Reason] = {
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
"""How well-known libraries say that the other side is away, where they do not say it with an OSError.

By package and name, so that none of them is needed here. An outage must not turn jobs into dead letters.
"""


def classify(error: BaseException, hook: Hook | None = None) -> Failure:
    """The failure as it is kept: bounded texts and a fingerprint that is equal for equal failures."""
    reason = _reason(error, hook)
    kind = kind_of(error)
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename}:{frame.name}" for frame in frames[-8:]]
    fingerprint = hashlib.sha256("\n".join([reason.name, kind, *places]).encode()).hexdigest()[:16]
    message = error.message if isinstance(error, HoldfastError) else str(error)
    trace = "".join(traceback.format_exception(error))
    texts = clipped(message, ERROR_BYTES_MAX), clipped(trace, TRACE_BYTES_MAX)
    return Failure(reason, kind, *texts, fingerprint, _retry_after(error))


def kind_of(error: BaseException) -> str:
    """The name of its class, which may be made up at run time: bounded like its text."""
    return clipped(type(error).__qualname__, KIND_BYTES_MAX)


def _reason(error: BaseException, hook: Hook | None) -> Reason:
    if isinstance(error, JobFailed):
        return error.reason if isinstance(error.reason, Reason) else Reason.UNKNOWN
    told = _asked(hook, error) if hook is not None else None
    listed = next((reason for kind, reason in REASONS if isinstance(error, kind)), Reason.UNKNOWN)
    return told or _away(type(error)) or listed


def _asked(hook: Hook, error: BaseException) -> Reason | None:
    """A hook that fails, or answers with something else, has no say: the job must not suffer for it."""
    try:
        told = hook(error)
        if told is not None and not isinstance(told, Reason):
            raise TypeError(f"the hook must answer with a Reason or None, not {told!r}")
    except Exception as defect:
        telemetry.defect("work", defect)
        return None
    return told


def _retry_after(error: BaseException) -> float:
    """Other libraries' exceptions may carry anything under this name."""
    told = getattr(error, "retry_after_seconds", None)
    if not isinstance(told, int | float) or not told > 0:
        return 0.0
    return float(min(told, RETRY_AFTER_MAX_SECONDS))


def _away(kind: type[BaseException]) -> Reason | None:
    names = (f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in kind.__mro__)
    return next((AWAY[name] for name in names if name in AWAY), None)


def clipped(text: str, bytes_max: int) -> str:
    """The end of a text that may be too long (the cause stands last), without what no database can keep."""
    data = text.replace("\x00", "�").encode("utf-8", "replace")
    if len(data) <= bytes_max:
        return data.decode()
    return "…" + data[len(data) - bytes_max + 3 :].decode("utf-8", "ignore")
