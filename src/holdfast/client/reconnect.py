"""Whether and when to reconnect after a connection ended. (Pure.)

The range of the close code decides: 4500-4999 stop the client, every other end leads to
another try, without limit. A refused handshake is final only if the server itself sent
the refusal, and its status says so; a proxy's refusal never is.

The delay is the one in the server's closing frame, if any (the server spreads its
clients); else full jitter, doubling from 1 to 16 s, and not before ``Retry-After``, or
30 s after 4009.

The second half makes the exceptions that the application gets for a final refusal, of a
connection or of a send: the reason, and what to do next.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

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
from holdfast.resilience import Backoff
from holdfast.wire.close_codes import CloseReason
from holdfast.wire.frames import ConnectionClosing, Error

RATE_LIMITED_SECONDS = 30.0
"""The least delay after 4009 if the server names none."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again after ``delay_seconds``; with a new token if ``new_token``."""

    delay_seconds: float
    reason: str
    new_token: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """Never try again: ``error`` says why."""

    error: HoldfastError


ReconnectVerdict = Retry | Stop


class Reconnect:
    """Counts failures.

    ``can_renew``: there is a provider that can replace an expired token.
    """

    def __init__(self, backoff: Backoff, rng: random.Random, can_renew: bool) -> None:
        self._backoff = backoff
        self._rng = rng
        self._can_renew = can_renew
        self._failures = 0
        self._lasted = False
        self._renewed = False
        self._closing: ConnectionClosing | None = None

    def on_lasted(self) -> None:
        """The connection lasted long enough: start the backoff over."""
        self._failures = 0
        self._lasted = True

    def on_established(self) -> None:
        """The server accepted the token."""
        self._renewed = False

    def on_announced(self, closing: ConnectionClosing) -> None:
        """The server announced that it will close, and why."""
        self._closing = closing

    def on_closed(self, code: int | None) -> ReconnectVerdict:
        """The connection ended with ``code``; None: without a closing handshake."""
        closing, self._closing = self._closing, None
        lasted, self._lasted = self._lasted, False
        reason = closing.reason if closing else _reason_of(code)
        if (code is not None and 4500 <= code <= 4999) or (
            closing and not closing.reconnect_allowed
        ):
            return Stop(close_error(reason, closing.message if closing else ""))
        if code == CloseReason.TOKEN_EXPIRED.code or reason == CloseReason.TOKEN_EXPIRED.reason:
            return self._renew("the token has expired")
        if closing and closing.reconnect_delay_ms > 0:
            self._failures += not lasted  # a restart is no failure; one that takes longer is
            return Retry(closing.reconnect_delay_ms / 1000, reason)
        return self._later(
            reason, RATE_LIMITED_SECONDS if code == CloseReason.RATE_LIMITED.code else None
        )

    def on_refused(self, status: int, retry_after: float | None, message: str) -> ReconnectVerdict:
        """The handshake got another status than 101; ``message``: the server's."""
        if status == 401:
            return self._renew(message or "the server does not accept the token")
        error = final_refusal(status, message)
        if error is not None:
            return Stop(error)
        return self._later(retry_reason(status, message), retry_after)

    def on_unreachable(self, reason: str) -> Retry:
        return self._later(reason)

    def _later(self, reason: str, at_least: float | None = None) -> Retry:
        self._failures += 1
        return Retry(self._backoff.delay(self._failures, self._rng, at_least), reason)

    def _renew(self, message: str) -> ReconnectVerdict:
        """Try one new token; if the server refuses that too, another would not help."""
        if not self._can_renew or self._renewed:
            return Stop(token_refusal(message, self._can_renew))
        self._renewed = True
        self._failures += 1
        return Retry(self._backoff.delay(self._failures, self._rng), message, new_token=True)


def _reason_of(code: int | None) -> str:
    if code is None:
        return "the connection broke"
    return next(
        (closing.reason for closing in CloseReason if closing.code == code), f"closed with {code}"
    )


_NEXT: Mapping[str, str] = {
    Forbidden.code: "ask an owner or admin of the chat",
    InternalError.code: "ask the server's operator, whose log has the cause",
    InvalidContentType.code: "send it as text/plain or text/markdown",
    InvalidMessage.code: "correct it and send it again",
    KeyReused.code: "send it under a client_message_id of its own",
    MessageTooLarge.code: "split it",
    NotAMember.code: "ask an owner or admin of the chat to add you",
    NotFound.code: "check the chat's id",
    Unauthorized.code: "get a new token",
}


_CLOSED: Mapping[str, tuple[type[HoldfastError], str]] = {
    CloseReason.DUPLICATE_CONNECTION.reason: (
        Forbidden,
        (
            "another client took its place: give each running client a state file or device_id of"
            " its own, and end one if there are more than the server allows per user"
        ),
    ),
    CloseReason.PROTOCOL_ERROR.reason: (
        InvalidMessage,
        "do client and server have versions that go together?",
    ),
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
    """The error of a send that is not retried; it names an unknown outcome."""
    what_next = _NEXT.get(error.code, _NEXT[InternalError.code])
    if error.details and error.details.keys() & {"scope", "claim"}:
        what_next = "get a token that allows it"
    if error.outcome == "unknown":
        what_next = (
            "the message may be stored all the same: look before you send it again, and"
            f" {what_next}"
        )
    return error_of(error.code, f"{error.message}; {what_next}", details=error.details)


def close_error(reason: str, message: str) -> HoldfastError:
    """The server closed the connection for good."""
    kind, what_next = _CLOSED.get(reason, (Forbidden, "ask the server's operator"))
    return kind(f"the server closed the connection for good: {message or reason}; {what_next}")


def final_refusal(status: int, message: str) -> HoldfastError | None:
    """The error of a handshake that was refused for good; None if a retry may succeed.

    ``message`` is the server's own. Without one, something in between answered, such as
    a proxy during a deployment, and its status is not final.
    """
    if status in _MOVED:
        return InvalidMessage(f"the server redirects to {message}; use that address")
    if status not in _STATUS or not message:
        return None
    kind, what_next = _STATUS[status]
    return kind(f"{message}; {what_next}")


def retry_reason(status: int, message: str) -> str:
    """The reason of a refused handshake that will be retried."""
    if 300 <= status < 400:
        return (
            f"the handshake was sent on to {message}; until it is answered here it is tried again"
        )
    what_next = f"; {_STATUS[status][1]}" if status in _STATUS else ""
    return f"the handshake was answered with {status}{what_next}"


def token_refusal(message: str, can_renew: bool) -> HoldfastError:
    """The server refuses the token, and there is no other."""
    if can_renew:
        return Unauthorized(f"{message}; a new token was refused too: was it made for this server?")
    return Unauthorized(f"{message}; a new one is needed")
