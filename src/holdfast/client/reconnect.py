"""When to come back after a connection ended, and when not to. (Pure.)

The close code's range is the rule: 4500-4999 do not reconnect; everything else does, for ever. A handshake refused by
the server itself is final where its status says so; by anybody else it is not. The delay is the server's if its closing
names one (it spreads its clients), else full jitter, doubling from 1 to 16 s, and not sooner than ``Retry-After``, or
30 s after 4009.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from holdfast.client.refusals import kept_out, locked_out, stopped, turned_away
from holdfast.errors import HoldfastError
from holdfast.resilience import Backoff
from holdfast.wire.closing import CloseReason
from holdfast.wire.frames import ConnectionClosing

RATE_LIMITED_SECONDS = 30.0
"""How long to stay away after 4009 if the server did not say."""


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
    """Counts failures. ``can_renew``: a new token can be had, so an expired one is not the end."""

    def __init__(self, backoff: Backoff, rng: random.Random, can_renew: bool) -> None:
        self._backoff = backoff
        self._rng = rng
        self._can_renew = can_renew
        self._failures = 0
        self._lasted = False
        self._renewed = False
        self._closing: ConnectionClosing | None = None

    def lasted(self) -> None:
        """The connection has lived long enough to be called good: the next failure is a first one again."""
        self._failures = 0
        self._lasted = True

    def established(self) -> None:
        """The server took the token."""
        self._renewed = False

    def announced(self, closing: ConnectionClosing) -> None:
        """The server said that it will close, and why."""
        self._closing = closing

    def closed(self, code: int | None) -> ReconnectVerdict:
        """The connection ended with ``code``; None: without a closing handshake."""
        closing, self._closing = self._closing, None
        lasted, self._lasted = self._lasted, False
        reason = closing.reason if closing else _reason_of(code)
        if (code is not None and 4500 <= code <= 4999) or (closing and not closing.reconnect_allowed):
            return Stop(stopped(reason, closing.message if closing else ""))
        if code == CloseReason.TOKEN_EXPIRED.code or reason == CloseReason.TOKEN_EXPIRED.reason:
            return self._renew("the token has expired")
        if closing and closing.reconnect_delay_ms > 0:
            self._failures += not lasted  # a restart is no failure: if it takes longer, the next try is the first retry
            return Retry(closing.reconnect_delay_ms / 1000, reason)
        return self._later(reason, RATE_LIMITED_SECONDS if code == CloseReason.RATE_LIMITED.code else None)

    def refused(self, status: int, retry_after: float | None, message: str) -> ReconnectVerdict:
        """The handshake was answered with an HTTP status other than 101; ``message``: the server's own, or empty."""
        if status == 401:
            return self._renew(message or "the server does not accept the token")
        error = kept_out(status, message)
        if error is not None:
            return Stop(error)
        return self._later(turned_away(status, message), retry_after)

    def unreachable(self, reason: str) -> Retry:
        return self._later(reason)

    def _later(self, reason: str, at_least: float | None = None) -> Retry:
        self._failures += 1
        return Retry(self._backoff.delay(self._failures, self._rng, at_least), reason)

    def _renew(self, message: str) -> ReconnectVerdict:
        """A new token may help once; a second one refused without a connection between proves it does not."""
        if not self._can_renew or self._renewed:
            return Stop(locked_out(message, self._can_renew))
        self._renewed = True
        self._failures += 1
        return Retry(self._backoff.delay(self._failures, self._rng), message, new_token=True)


def _reason_of(code: int | None) -> str:
    if code is None:
        return "the connection broke"
    return next((closing.reason for closing in CloseReason if closing.code == code), f"closed with {code}")
