"""How a worker runs. (Pure: values.)"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.bounds import positive
from holdfast.resilience import BreakerSettings


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """``jobs_max``, ``bytes_max`` and ``per_stream_max`` bound the memory; ``poll`` is the fallback when idle."""

    concurrency: int = 100
    jobs_max: int = 4096
    bytes_max: int = 32 << 20
    per_stream_max: int = 256
    poll_min_seconds: float = 0.02
    poll_max_seconds: float = 1.0
    balance_seconds: float = 5.0
    drain_seconds: float = 30.0
    """How long ``run`` waits, once stopped, for what runs; then it is cancelled, and its jobs are given back."""
    cancel_seconds: float = 5.0
    """How long a handler may take to end when it is cancelled; then it is given up and its job gets its outcome."""
    stuck_max: int = 100
    """Handlers that were given up and still run, without costing a runner; each one more costs one.

    A worker without runners gives up its seat; with ``stuck_loop_seconds`` its process ends, with exit code 70."""
    stuck_loop_seconds: float = 0.0
    """A process whose event loop has not run for so long is ended, with exit code 70: see ``watchdog``. 0: never."""
    slow_seconds: float = 1.0
    """A destination whose last run took longer is slow: all slow ones together leave an eighth of the runners to the
    others, see ``destinations``."""
    breaker: BreakerSettings = field(default_factory=BreakerSettings)

    def __post_init__(self) -> None:
        positive(self, *(name for name in self.__slots__ if name not in ("breaker", "stuck_loop_seconds")))
        if not 0 <= self.stuck_loop_seconds < float("inf"):
            raise ValueError("stuck_loop_seconds must be 0 (never) or a number of seconds")
        if self.jobs_max < self.concurrency or self.poll_max_seconds < self.poll_min_seconds:
            raise ValueError("concurrency <= jobs_max and poll_min_seconds <= poll_max_seconds must hold")

    def runners(self, stuck: int) -> int:
        """How many runners there shall be while so many handlers are stuck."""
        return max(0, self.concurrency - max(0, stuck - self.stuck_max))
