"""What a node depends on: whether it answers, and the breaker before it."""

from __future__ import annotations

from holdfast.telemetry.marks import sometimes
from holdfast.telemetry.metrics import gauge

_dependency_up = gauge(
    "dependency_up",
    "Whether the last word of a dependency was good "
    "[durability.dynamodb.available] [durability.kafka.available] [gateway.redis.available]",
    ("dependency",),
)
_breaker = gauge(
    "circuit_breaker_state", "1 for the state a breaker is in [gateway.circuit_breaker.open]", ("dependency", "state")
)


def dependency_up(dependency: str, up: bool) -> None:
    _dependency_up.labels(dependency).set(up)


def breaker_state(dependency: str, state: str) -> None:
    sometimes("a breaker was", state)
    for each in ("closed", "open", "half_open"):
        _breaker.labels(dependency, each).set(each == state)
