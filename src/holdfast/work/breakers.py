"""One breaker per job type: while its dependency fails, its jobs are put off instead of tried. (Pure.)

Each worker judges by its own runs; an open breaker is published, so that the others need not learn it the hard way.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.clock import Clock
from holdfast.resilience import Breaker, BreakerSettings, BreakerState


class Breakers:
    """The breakers of the job types, and what other workers said about theirs."""

    def __init__(self, settings: BreakerSettings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._own: dict[str, Breaker] = {}
        self._open_elsewhere: dict[str, float] = {}
        self._published: set[str] = set()

    def put_off(self, job_type: str) -> float | None:
        """None: run it (and tell ``succeeded``, ``failed`` or ``neither``); else for how many seconds to put it off."""
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
        """Whether a run that may start now tries out whether the dependency is back."""
        breaker = self._own.get(job_type)
        return breaker is not None and breaker.state(self._clock.monotonic()) is BreakerState.HALF_OPEN

    def paused_types(self) -> tuple[list[str], list[str]]:
        """The types that are not closed, here or elsewhere, and those of them that a probe may be run of now."""
        now = self._clock.monotonic()
        away = {job_type for job_type, until in self._open_elsewhere.items() if until > now}
        own = {t for t, breaker in self._own.items() if breaker.state(now) is not BreakerState.CLOSED}
        return sorted(away | own), sorted(t for t in own - away if self._own[t].would_admit(now))

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

    def news(self) -> tuple[dict[str, float], list[str]]:
        """Own types that are open, with the seconds left, and those that have closed since they were published."""
        now = self._clock.monotonic()
        states = {job_type: breaker.state(now) for job_type, breaker in self._own.items()}
        opened = {t: self._own[t].retry_after(now) for t, state in states.items() if state is BreakerState.OPEN}
        closed = [t for t in self._published if states.get(t) is BreakerState.CLOSED]
        self._published = (self._published | set(opened)) - set(closed)
        return opened, closed

    def heard(self, open_types: Mapping[str, float]) -> None:
        """What the store knows as open, with the seconds left."""
        now = self._clock.monotonic()
        self._open_elsewhere = {t: now + left for t, left in open_types.items() if t not in self._published}
