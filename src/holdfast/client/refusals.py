"""What the server refused for good, as the exception the application gets: why, and what to do next. (Pure.)"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.errors import (
    Forbidden,
    HoldfastError,
    InternalError,
    InvalidContentType,
    InvalidMessage,
    KeyReused,
    MessageTooLarge,
    NotAMember,
    NotFound,
    Unauthorized,
    error_of,
)
from holdfast.wire.closing import CloseReason
from holdfast.wire.frames import Error

_NEXT: Mapping[str, str] = {
    Forbidden.code: "ask an owner or admin of the chat",
    InternalError.code: "tell the server's operator, whose log has the cause",
    InvalidContentType.code: "send it as text/plain or text/markdown",
    InvalidMessage.code: "correct it and send it again",
    KeyReused.code: "send it under a client_message_id of its own",
    MessageTooLarge.code: "split it",
    NotAMember.code: "ask an owner or admin of the chat to add you",
    NotFound.code: "check the chat's id",
    Unauthorized.code: "get a new token",
}

_STOPPED: Mapping[str, tuple[type[HoldfastError], str]] = {
    CloseReason.DUPLICATE_CONNECTION.reason: (
        Forbidden,
        "another client took its place: give each running client a state file or device_id of its own, "
        "and end one if there are more than the server allows per user",
    ),
    CloseReason.PROTOCOL_ERROR.reason: (InvalidMessage, "do client and server have versions that go together?"),
    CloseReason.UNAUTHORIZED.reason: (Unauthorized, "get a new token"),
}
_STATUS: Mapping[int, tuple[type[HoldfastError], str]] = {
    400: (InvalidMessage, "do client and server have versions that go together?"),
    403: (Forbidden, "ask the server's operator to let you in"),
    404: (NotFound, "is this the address of a Holdfast server?"),
    426: (InvalidMessage, "do client and server, and a proxy between them, speak WebSocket?"),
}
_MOVED = frozenset({301, 308})


def refusal(error: Error) -> HoldfastError:
    """A send's: never retried. One of unknown outcome says so."""
    what_next = _NEXT.get(error.code, _NEXT[InternalError.code])
    if error.details and error.details.keys() & {"scope", "claim"}:
        what_next = "get a token that allows it"
    if error.outcome == "unknown":
        what_next = f"the message may be stored all the same: look before you send it anew, and {what_next}"
    return error_of(error.code, f"{error.message}; {what_next}", details=error.details)


def stopped(reason: str, message: str) -> HoldfastError:
    """The server closed the connection and does not want it back."""
    kind, what_next = _STOPPED.get(reason, (Forbidden, "ask the server's operator"))
    return kind(f"the server closed the connection for good: {message or reason}; {what_next}")


def kept_out(status: int, message: str) -> HoldfastError | None:
    """The answer to a handshake, where it is final; None if a later one may be answered otherwise.

    ``message`` is the server's own. Without one somebody between us answered, a proxy while the server is replaced,
    and means nothing by it.
    """
    if status in _MOVED:
        return InvalidMessage(f"the server redirects to {message}; use that address")
    if status not in _STATUS or not message:
        return None
    kind, what_next = _STATUS[status]
    return kind(f"{message}; {what_next}")


def turned_away(status: int, message: str) -> str:
    """The answer to a handshake, where it is not final."""
    if 300 <= status < 400:
        return f"the handshake was sent on to {message}; until it is answered here it is tried again"
    what_next = f"; {_STATUS[status][1]}" if status in _STATUS else ""
    return f"the handshake was answered with {status}{what_next}"


def locked_out(message: str, can_renew: bool) -> HoldfastError:
    """The token is not taken, and there is no other."""
    if can_renew:
        return Unauthorized(f"{message}; a new token was refused too: was it made for this server?")
    return Unauthorized(f"{message}; a new one is needed")
