"""One circuit breaker per job type: while its dependency fails, its jobs are postponed.
(Pure.)

Each worker judges by its own runs and publishes its open breakers, so that other
workers need not fail first.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.clock import Clock
from holdfast.resilience import Breaker, BreakerSettings, BreakerState


class Breakers:
    """This worker's breakers, and the open breakers of other workers."""

    def __init__(self, settings: BreakerSettings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._own: dict[str, Breaker] = {}
        self._open_elsewhere: dict[str, float] = {}
        self._published: set[str] = set()

    def postpone_seconds(self, job_type: str) -> float | None:
        """The seconds to postpone a job of this type; None: run it.

        After the run, call ``succeeded``, ``failed`` or ``neither``.
        """
        if job_type not in self._own and job_type not in self._open_elsewhere:
            return None
        now = self._clock.monotonic()
        until = self._open_elsewhere.get(job_type)
        if until is not None and until > now:
            return until - now
        breaker = self._own.get(job_type)
        if breaker is None or breaker.admit(now):
            return None
        return breaker.retry_after(now)

    def is_probe(self, job_type: str) -> bool:
        """Whether a run that starts now probes if the dependency has recovered."""
        breaker = self._own.get(job_type)
        return (
            breaker is not None and breaker.state(self._clock.monotonic()) is BreakerState.HALF_OPEN
        )

    def paused_types(self) -> tuple[list[str], list[str]]:
        """The types whose breaker is open here or elsewhere, and those to probe now."""
        now = self._clock.monotonic()
        elsewhere = {job_type for job_type, until in self._open_elsewhere.items() if until > now}
        own = {
            t for t, breaker in self._own.items() if breaker.state(now) is not BreakerState.CLOSED
        }
        return sorted(elsewhere | own), sorted(
            t for t in own - elsewhere if self._own[t].would_admit(now)
        )

    def succeeded(self, job_type: str) -> None:
        breaker = self._own.get(job_type)
        if breaker is not None:
            breaker.success(self._clock.monotonic())

    def failed(self, job_type: str) -> None:
        """The dependency of this type failed."""
        breaker = self._own.get(job_type)
        if breaker is None:
            breaker = self._own[job_type] = Breaker(self._settings)
        breaker.failure(self._clock.monotonic())

    def neither(self, job_type: str) -> None:
        """The run said nothing about the dependency."""
        breaker = self._own.get(job_type)
        if breaker is not None:
            breaker.neither()

    def changes(self) -> tuple[dict[str, float], list[str]]:
        """Own open types with the seconds left, and published types now closed."""
        now = self._clock.monotonic()
        states = {job_type: breaker.state(now) for job_type, breaker in self._own.items()}
        opened = {
            t: self._own[t].retry_after(now)
            for t, state in states.items()
            if state is BreakerState.OPEN
        }
        closed = [t for t in self._published if states.get(t) is BreakerState.CLOSED]
        self._published = (self._published | set(opened)) - set(closed)
        return opened, closed

    def update_elsewhere(self, open_types: Mapping[str, float]) -> None:
        """Replace the open types of other workers by these, with the seconds left."""
        now = self._clock.monotonic()
        self._open_elsewhere = {
            t: now + left for t, left in open_types.items() if t not in self._published
        }
