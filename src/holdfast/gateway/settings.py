"""The bounds of a gateway as a whole; one connection's are in ``session.settings``."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.bounds import positive
from holdfast.resilience import BreakerSettings
from holdfast.session.settings import (
    BackpressureSettings,
    PageSettings,
    SessionSettings,
    TimeoutSettings,
)


@dataclass(frozen=True, slots=True)
class ShutdownSettings:
    """A drain asks every client to reconnect later, and closes what is left."""

    drain_timeout_seconds: float = 30
    """How long a drain waits for open requests; what is left is answered ``unknown``
    and closed (server_shutdown, 4000).
    """

    def __post_init__(self) -> None:
        positive(self, "drain_timeout_seconds")


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The gateway of one node."""

    backpressure: BackpressureSettings = field(default_factory=BackpressureSettings)
    circuit_breaker: BreakerSettings = field(default_factory=BreakerSettings)
    """The breaker before the store's writes."""
    timeouts: TimeoutSettings = field(default_factory=TimeoutSettings)
    pages: PageSettings = field(default_factory=PageSettings)
    shutdown: ShutdownSettings = field(default_factory=ShutdownSettings)
    memory_budget_bytes: int = 0
    """Bytes in all outbound buffers of this node, HTTP answers too; 0 is a quarter of
    the machine's memory. Above: the fullest connections are shed (memory_pressure,
    4003).
    """
    reconnect_spread_seconds: float = 10
    """Clients that are closed together are asked to reconnect spread over this time at
    most; fewer than 5,000 over less, 500 a second.
    """
    upstream_failure_close_seconds: float = 0
    """Writes refused by the breaker for this long: close every connection
    (upstream_failure, 4007). 0: never; sends fail fast and deliveries go on.
    """
    connections_per_user: int = 5
    """One device more closes the user's oldest connection (duplicate_connection, 4500).
    """

    def __post_init__(self) -> None:
        positive(self, "reconnect_spread_seconds", "connections_per_user")
        if self.memory_budget_bytes < 0 or self.upstream_failure_close_seconds < 0:
            raise ValueError(
                "memory_budget_bytes and upstream_failure_close_seconds must not be negative"
            )

    @property
    def session(self) -> SessionSettings:
        return SessionSettings(self.backpressure, self.timeouts, self.pages)
