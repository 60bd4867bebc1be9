"""A provider as routing sees it: whether it may be asked now, and what came of it.

Two things keep a provider from being asked. Its *breaker* opens after failures. A
*pause* follows an answer without room (429, 503, 529): that is no failure, and the
provider says itself when it has room again.

Some failures are a request's own: a prompt at which the provider drops the connection.
So a breaker that one payer's failures opened is open for that payer alone. Others still
ask: their first success closes it, their first failure opens it for everybody.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.errors import Unavailable
from holdfast.resilience import Backoff, BreakerSettings, BreakerState, DependencyBreaker
from holdfast.streaming.providers.contract import AttemptOutcome, Provider, ProviderFailed
from holdfast.streaming.reply import Payer

_BREAKER = BreakerSettings()


class ProviderStatus(NamedTuple):
    """A provider as operators see it."""

    name: str
    pool: str
    breaker: str
    paused_seconds: float
    """How long it still pauses; 0: it does not."""
    trouble: str
    """Why the last attempt failed; empty if it did not."""


class ProviderSource:
    """A provider, its breaker and its pause."""

    def __init__(self, provider: Provider, clock: Clock, backoff: Backoff) -> None:
        self.provider = provider
        self._clock, self._backoff = clock, backoff
        self._paused_until = 0.0
        self._capacity_failures = 0
        self._last_failed: Payer | None = None
        self._last_failed_at = self._another_failed_at = -math.inf
        """When the last failure was, and the last one of any other payer."""
        self._log = telemetry.ThrottledLog()
        self.breaker = DependencyBreaker(
            f"provider:{provider.name}",
            "the provider has failed too often",
            _BREAKER,
            clock,
            telemetry.dependency_state,
        )

    @property
    def paused_seconds(self) -> float:
        return max(self._paused_until - self._clock.monotonic(), 0.0)

    def is_available(self, payer: Payer | None = None) -> bool:
        """Whether it may be asked now; None: by anybody who has not failed."""
        if self.paused_seconds:
            return False
        return self.breaker.state is not BreakerState.OPEN or self._passes(payer)

    def refusal(self, payer: Payer) -> Unavailable | None:
        """Why its breaker refuses this payer; None: it waits for a result."""
        return None if self._passes(payer) else self.breaker.refusal()

    def _passes(self, payer: Payer | None) -> bool:
        """Whether the breaker opened because of one payer alone, and not this one."""
        if self.breaker.state is BreakerState.CLOSED or payer == self._last_failed:
            return False
        apart_seconds = self._last_failed_at - self._another_failed_at
        return apart_seconds > _BREAKER.failure_window_seconds

    def _pause(self, asked_seconds: float | None) -> None:
        """It has no room. It pauses as long as it asked for, within our bounds."""
        self._capacity_failures += 1
        bound = self._backoff.bound(self._capacity_failures)
        seconds = bound if asked_seconds is None else asked_seconds
        seconds = min(max(seconds, self._backoff.initial_seconds), self._backoff.cap_seconds)
        self._paused_until = max(self._paused_until, self._clock.monotonic() + seconds)

    def on_first_token(self, payer: Payer) -> None:
        """The breaker need not wait for the end, which may be minutes later."""
        self._capacity_failures = 0
        self._worked(payer)

    def _worked(self, payer: Payer) -> None:
        if self._passes(payer):
            self.breaker.recovered()
        else:
            self.breaker.succeeded()

    def _failed(self, payer: Payer, failure: ProviderFailed) -> None:
        if payer != self._last_failed:
            self._another_failed_at = self._last_failed_at
        self._last_failed, self._last_failed_at = payer, self._clock.monotonic()
        self.breaker.failed(failure.error.message)

    def on_failure(self, payer: Payer, failure: ProviderFailed, *, again: bool = False) -> None:
        """An attempt failed before its first token; ``again``: not the first one of its
        reply, which counts for the breaker only as a probe.
        """
        if failure.capacity:
            self.breaker.learned_nothing()
            self._pause(failure.retry_after_seconds)
        elif failure.final:
            self._worked(payer)  # the request is at fault
        elif again and self.breaker.state is BreakerState.CLOSED:
            self.breaker.learned_nothing()
        else:
            self._failed(payer, failure)
        self._report(_outcome(failure), failure)

    def on_break(self, payer: Payer, failure: ProviderFailed) -> None:
        """A stream failed after its first token."""
        self._failed(payer, failure)
        self._report("broken", failure)

    def on_done(self) -> None:
        self._report("done")

    def _report(self, outcome: AttemptOutcome, failure: ProviderFailed | None = None) -> None:
        telemetry.provider_attempt(self.provider.name, outcome)
        if failure is not None:
            self._log.info(
                "streaming.provider_failed",
                provider=self.provider.name,
                outcome=outcome,
                code=failure.error.code,
                detail=failure.error.message,
            )

    def status(self) -> ProviderStatus:
        return ProviderStatus(
            self.provider.name,
            self.provider.pool,
            self.breaker.state.value,
            self.paused_seconds,
            self.breaker.trouble or "",
        )


def _outcome(failure: ProviderFailed) -> AttemptOutcome:
    if failure.capacity:
        return "capacity"
    if failure.final:
        return "refused"
    match failure.error.code:
        case "upstream_timeout":
            return "timeout"
        case "upstream_unavailable":
            return "unavailable"
        case _:
            return "broken"
