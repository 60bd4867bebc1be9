"""How a worker runs. (Pure: values.)"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.bounds import positive
from holdfast.resilience import BreakerSettings


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of a worker.

    ``jobs_max``, ``bytes_max`` and ``per_stream_max`` bound the memory. ``poll_…``
    bound the interval at which an idle worker polls the store, should a wake-up be
    lost.
    """

    concurrency: int = 100
    jobs_max: int = 4096
    bytes_max: int = 32 << 20
    per_stream_max: int = 256
    poll_min_seconds: float = 0.02
    poll_max_seconds: float = 1.0
    balance_seconds: float = 5.0
    drain_seconds: float = 30.0
    """How long a stopped worker lets its jobs run; then it cancels them."""
    cancel_seconds: float = 5.0
    """How long a cancelled handler may take to end; then it is given up as stuck."""
    stuck_max: int = 100
    """How many stuck handlers cost nothing; each one more costs the worker a runner.

    A worker without runners leaves; with ``stuck_loop_seconds`` its process ends, with
    exit code 70."""
    stuck_loop_seconds: float = 0.0
    """The watchdog ends a process whose event loop has not run for this time, with exit
    code 70. 0: never."""
    slow_seconds: float = 1.0
    """A destination is slow if its last run took longer; see ``destinations``."""
    breaker: BreakerSettings = field(default_factory=BreakerSettings)

    def __post_init__(self) -> None:
        positive(
            self,
            *(name for name in self.__slots__ if name not in ("breaker", "stuck_loop_seconds")),
        )
        if not 0 <= self.stuck_loop_seconds < float("inf"):
            raise ValueError("stuck_loop_seconds must be 0 (never) or a number of seconds")
        if self.jobs_max < self.concurrency or self.poll_max_seconds < self.poll_min_seconds:
            raise ValueError(
                "concurrency <= jobs_max and poll_min_seconds <= poll_max_seconds must hold"
            )

    def runners(self, stuck: int) -> int:
        """The number of runners while this number of handlers are stuck."""
        return max(0, self.concurrency - max(0, stuck - self.stuck_max))
