"""The whole error tree: whose fault it is, and what to do next. (Pure.)

    HoldfastError
    ├─ Refused             the caller's: nothing was changed; it will fail again
    │  ├─ InvalidMessage       INVALID_MESSAGE         ``details`` names the field
    │  ├─ MessageTooLarge      MESSAGE_TOO_LARGE
    │  ├─ InvalidContentType   INVALID_CONTENT_TYPE
    │  ├─ Unauthorized         UNAUTHORIZED            get a new token
    │  ├─ Forbidden            FORBIDDEN               credential or role
    │  ├─ NotAMember           NOT_A_MEMBER
    │  ├─ NotFound             NOT_FOUND
    │  ├─ KeyReused            IDEMPOTENCY_KEY_REUSED  same key, other content
    │  ├─ InvalidCheck         INVALID_CHECK           ``details`` names the field
    │  ├─ InvalidRule          INVALID_RULE            ``details["fields"]`` says why
    │  └─ VersionConflict      VERSION_CONFLICT        ``details``: what it is now
    ├─ Deferred            ours: nothing was changed; it may succeed later
    │  ├─ RateLimited          RATE_LIMITED            after ``retry_after_seconds``
    │  ├─ ServerBusy           SERVER_BUSY
    │  ├─ ChatHalted           CHAT_HALTED             after ``holdfast chat recover``
    │  └─ Unavailable          SERVICE_UNAVAILABLE     a dependency or its breaker
    ├─ OutcomeUnknown      SERVICE_UNAVAILABLE: retry with the same key
    ├─ InternalError       INTERNAL_ERROR: a defect; the log has its cause
    ├─ UnreadableEvent     an undecodable entry of the event log: a dead letter
    └─ OperatorError       the operator's: the message says what to do
       ├─ BadSetting
       ├─ StateDirectory       locked, unreadable, read-only
       │  ├─ StateInUse            another process has it
       │  └─ DiskFull              INSUFFICIENT_STORAGE: nothing was changed
       └─ StateCorrupted       damaged, or newer than this program

A timeout is unknown, never failed. Foreign errors are translated into these at the seam
where they arise. ``extra`` does so for the optional library of an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar


class HoldfastError(Exception):
    """Base of all; carries what the client gets."""

    code: ClassVar[str] = "INTERNAL_ERROR"
    retryable: ClassVar[bool] = False
    outcome: ClassVar[str] = "rejected"
    private: ClassVar[bool] = False
    """Whether its text is only for the log."""

    def __init__(
        self, message: str = "", *, retry_after_seconds: float | None = None, **details: Any
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_seconds = retry_after_seconds
        self.details = details

    @property
    def public(self) -> HoldfastError:
        """The error as a client gets it."""
        return InternalError("something went wrong here; it is logged") if self.private else self


class Refused(HoldfastError):
    """The caller's fault; a retry of the same request cannot succeed."""


class InvalidMessage(Refused):
    code = "INVALID_MESSAGE"


class MessageTooLarge(Refused):
    code = "MESSAGE_TOO_LARGE"


class InvalidContentType(Refused):
    code = "INVALID_CONTENT_TYPE"


class Unauthorized(Refused):
    code = "UNAUTHORIZED"


class Forbidden(Refused):
    code = "FORBIDDEN"


class NotAMember(Refused):
    code = "NOT_A_MEMBER"


class NotFound(Refused):
    code = "NOT_FOUND"


class KeyReused(Refused):
    code = "IDEMPOTENCY_KEY_REUSED"


class InvalidCheck(Refused):
    code = "INVALID_CHECK"


class InvalidRule(Refused):
    code = "INVALID_RULE"


class VersionConflict(Refused):
    code = "VERSION_CONFLICT"


class Deferred(HoldfastError):
    """Nothing was changed; a later retry may succeed."""

    retryable = True


class RateLimited(Deferred):
    code = "RATE_LIMITED"


class ServerBusy(Deferred):
    code = "SERVER_BUSY"


class ChatHalted(Deferred):
    code = "CHAT_HALTED"


class Unavailable(Deferred):
    code = "SERVICE_UNAVAILABLE"


class OutcomeUnknown(HoldfastError):
    """It may or may not have happened; a retry with the same key finds out."""

    code = "SERVICE_UNAVAILABLE"
    retryable = True
    outcome = "unknown"


class InternalError(HoldfastError):
    """A defect of ours. The client learns no more than that; the log has the cause."""

    code = "INTERNAL_ERROR"
    outcome = "unknown"
    private = True


class UnreadableEvent(HoldfastError):
    """The entry at ``offset`` of a log's ``shard`` cannot be decoded; ``data`` is what
    is there. ``tenant`` and ``chat_id`` are empty if they cannot be read either.
    """

    private = True

    def __init__(
        self,
        message: str,
        shard: int,
        offset: int,
        data: bytes,
        tenant: str = "",
        chat_id: str = "",
    ) -> None:
        super().__init__(message)
        self.shard = shard
        self.offset = offset
        self.data = data
        self.tenant = tenant
        self.chat_id = chat_id


class OperatorError(HoldfastError):
    """Stops the command; its message tells the operator what to change."""

    outcome = "unknown"
    private = True


class BadSetting(OperatorError):
    """A setting is unknown, of the wrong type or out of range; the message carries its
    path.
    """


class StateDirectory(OperatorError):
    """The state directory is locked by another process, unreadable or read-only."""


class StateInUse(StateDirectory):
    """Another process has it open."""


class DiskFull(StateDirectory):
    """There is no room for what was to be written, and nothing is left of it; the
    message says where to make some.
    """

    code = "INSUFFICIENT_STORAGE"
    outcome = "rejected"


class StateCorrupted(OperatorError):
    """A state file is damaged, or was written by a newer Holdfast."""


_KINDS: list[type[HoldfastError]] = [
    *Refused.__subclasses__(),
    *Deferred.__subclasses__(),
    InternalError,
]
_BY_CODE = {kind.code: kind for kind in _KINDS}


def error_of(
    code: str,
    message: str,
    *,
    outcome: str | None = None,
    retry_after_seconds: float | None = None,
    details: Mapping[str, Any] | None = None,
) -> HoldfastError:
    """The error of this tree for a server's answer.

    An unknown code, of a newer server, is an InternalError that names it.
    """
    unknown = outcome == OutcomeUnknown.outcome and code == OutcomeUnknown.code
    kind = OutcomeUnknown if unknown else _BY_CODE.get(code)
    error = kind(message) if kind is not None else InternalError(f"{code}: {message}")
    error.retry_after_seconds = retry_after_seconds
    error.details = dict(details or {})
    return error


@contextmanager
def extra(name: str) -> Iterator[None]:
    """BadSetting, with what to install, if the block imports a missing library."""
    try:
        yield
    except ImportError as error:
        raise BadSetting(
            f"{error.name} is not installed: in a checkout of Holdfast run `pip install"
            f" '.[{name}]'`, or for the locked version `pip install --require-hashes --no-deps -r"
            f" requirements/{name}.lock`"
        ) from None
