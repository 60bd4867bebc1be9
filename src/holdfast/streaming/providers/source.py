"""A provider as routing sees it: whether it may be asked now, and what came of it.

Two things keep a provider from being asked. Its *breaker* opens after failures. A
*pause* follows an answer without room (429, 503, 529): that is no failure, and the
provider says itself when it has room again.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.resilience import Backoff, BreakerSettings, BreakerState, DependencyBreaker
from holdfast.streaming.providers.contract import AttemptOutcome, Provider, ProviderFailed


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
        self._log = telemetry.ThrottledLog()
        self.breaker = DependencyBreaker(
            f"provider:{provider.name}",
            "the provider has failed too often",
            BreakerSettings(),
            clock,
            telemetry.dependency_state,
        )

    @property
    def paused_seconds(self) -> float:
        return max(self._paused_until - self._clock.monotonic(), 0.0)

    @property
    def available(self) -> bool:
        return not self.paused_seconds and self.breaker.state is not BreakerState.OPEN

    def _pause(self, asked_seconds: float | None) -> None:
        """It has no room. It pauses as long as it asked for, within our bounds."""
        self._capacity_failures += 1
        bound = self._backoff.bound(self._capacity_failures)
        seconds = bound if asked_seconds is None else asked_seconds
        seconds = min(max(seconds, self._backoff.initial_seconds), self._backoff.cap_seconds)
        self._paused_until = max(self._paused_until, self._clock.monotonic() + seconds)

    def on_first_token(self) -> None:
        """The breaker need not wait for the end, which may be minutes later."""
        self._capacity_failures = 0
        self.breaker.succeeded()

    def on_failure(self, failure: ProviderFailed, *, again: bool = False) -> None:
        """An attempt failed before its first token; ``again``: not the first one of its
        reply, which counts for the breaker only as a probe.
        """
        if failure.capacity:
            self.breaker.learned_nothing()
            self._pause(failure.retry_after_seconds)
        elif failure.final:
            self.breaker.succeeded()  # it works: the request is at fault
        elif again and self.breaker.state is BreakerState.CLOSED:
            self.breaker.learned_nothing()
        else:
            self.breaker.failed(failure.error.message)
        self._report(_outcome(failure), failure)

    def on_break(self, failure: ProviderFailed) -> None:
        """A stream failed after its first token."""
        self.breaker.failed(failure.error.message)
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
