"""The bounds of a gateway as a whole; those of one connection are in ``session.limits``."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.bounds import positive
from holdfast.resilience import BreakerSettings
from holdfast.session.limits import Backpressure, Pages, SessionLimits, Timeouts


@dataclass(frozen=True, slots=True)
class Shutdown:
    """A drain asks every client to come back later and elsewhere; what is left after it is closed."""

    drain_timeout_seconds: float = 30

    def __post_init__(self) -> None:
        positive(self, "drain_timeout_seconds")


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """The connection plane.

    ``memory_budget_bytes`` bounds what waits in all outbound buffers together (0: a quarter of the machine's
    memory); above it the fullest connections are shed. ``reconnect_spread_seconds`` is the span over which
    clients that are sent away together are asked to return. ``upstream_failure_close_seconds``: close connections
    when the breaker has been open that long (0: never; sends fail fast and deliveries go on).
    """

    backpressure: Backpressure = field(default_factory=Backpressure)
    circuit_breaker: BreakerSettings = field(default_factory=BreakerSettings)
    timeouts: Timeouts = field(default_factory=Timeouts)
    pages: Pages = field(default_factory=Pages)
    shutdown: Shutdown = field(default_factory=Shutdown)
    memory_budget_bytes: int = 0
    reconnect_spread_seconds: float = 10
    upstream_failure_close_seconds: float = 0
    connections_per_user: int = 5

    def __post_init__(self) -> None:
        positive(self, "reconnect_spread_seconds", "connections_per_user")
        if self.memory_budget_bytes < 0 or self.upstream_failure_close_seconds < 0:
            raise ValueError("memory_budget_bytes and upstream_failure_close_seconds must not be negative")

    @property
    def session(self) -> SessionLimits:
        return SessionLimits(self.backpressure, self.timeouts, self.pages)
