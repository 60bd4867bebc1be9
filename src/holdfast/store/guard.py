"""A breaker around one dependency, and what it shows to operators."""

from __future__ import annotations

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.errors import Unavailable
from holdfast.resilience import Breaker, BreakerSettings, BreakerState

HANGING_RETRY_SECONDS = 1.0
"""Nobody knows when a call that hangs will end; when it does, the next one may go out at once."""


class DependencyBreaker:
    """Says whether a call may go out, and learns how it ended.

    Every admission must be followed by exactly one of ``succeeded``, ``failed`` and ``learned_nothing``. Only
    infrastructure failures are failures: a refusal, a full quota or a halted chat proves that the dependency works.
    ``refusal`` is what a caller is told while the breaker is open. A call that hangs past its deadline holds it open:
    nothing is sent after it, so nothing else would ever fail.

    Without calls nothing is learned: somebody should try one now and then, see ``worked_since_asked``.
    """

    def __init__(self, dependency: str, refusal: str, settings: BreakerSettings, clock: Clock) -> None:
        self._dependency = dependency
        self._refusal = refusal
        self._breaker = Breaker(settings)
        self._clock = clock
        self._shown: BreakerState | None = None
        self._up: bool | None = None
        self._open_since: float | None = None
        self._hanging = False
        self._worked = False
        self._why = ""
        self._show(up=True)  # it was opened a moment ago

    @property
    def state(self) -> BreakerState:
        return BreakerState.OPEN if self._hanging else self._breaker.state(self._clock.monotonic())

    @property
    def open_seconds(self) -> float:
        """For how long the breaker has not been closed; a failed probe does not start this anew."""
        return 0.0 if self._open_since is None else self._clock.monotonic() - self._open_since

    @property
    def trouble(self) -> str | None:
        """Why the last call failed; None if it did not."""
        return None if self._up else self._why

    def worked_since_asked(self) -> bool:
        """Whether a call succeeded since this was asked last: if not, try one, so that an end of it is seen, or of
        its trouble."""
        worked, self._worked = self._worked, False
        return worked

    def refusal(self) -> Unavailable | None:
        """None: the call is admitted."""
        if self._hanging:
            return Unavailable(self._refusal, retry_after_seconds=HANGING_RETRY_SECONDS)
        now = self._clock.monotonic()
        admitted = self._breaker.admit(now)
        self._show()
        if admitted:
            return None
        return Unavailable(self._refusal, retry_after_seconds=round(self._breaker.retry_after(now), 1))

    def hangs(self, hanging: bool) -> None:
        """Whether a call goes on past its deadline."""
        self._hanging = hanging
        self._show()

    def succeeded(self) -> None:
        self._worked = True
        self._breaker.success(self._clock.monotonic())
        self._show(up=True)

    def failed(self, why: str) -> None:
        """``why`` in words for an operator."""
        self._why = why
        self._breaker.failure(self._clock.monotonic())
        self._show(up=False)

    def learned_nothing(self) -> None:
        self._breaker.neither()

    def _show(self, up: bool | None = None) -> None:
        """Metrics on a change only: this is called for every group."""
        if up is not None and up is not self._up:
            self._up = up
            telemetry.dependency_up(self._dependency, up)
        state = self.state
        if state is self._shown:
            return
        if state is BreakerState.CLOSED:
            self._open_since = None
        elif self._open_since is None:
            self._open_since = self._clock.monotonic()
        if self._shown is not None:
            telemetry.log.warning("breaker", dependency=self._dependency, state=state.value)
        self._shown = state
        telemetry.breaker_state(self._dependency, state.value)
