"""Whether dependencies answer, their breakers, and how fast their failures heal."""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.telemetry.logs import log
from holdfast.telemetry.marks import mark
from holdfast.telemetry.metrics import counter, gauge

HEALED_SECONDS = 30.0
"""A failure that ends within this time was transient, and healed."""

_dependency_up = gauge(
    "dependency_up",
    "Whether the last word of a dependency was good "
    "[durability.dynamodb.available] [durability.kafka.available] [gateway.redis.available]",
    ("dependency",),
)
_breaker = gauge(
    "circuit_breaker_state",
    "1 for the state a breaker is in [gateway.circuit_breaker.open]",
    ("dependency", "state"),
)
_failures = counter(
    "dependency_failures",
    "Times a dependency stopped answering: from a bad word to the next good one",
    ("dependency",),
)
_healed = counter(
    "dependency_failures_healed", "Such failures that ended within 30 s", ("dependency",)
)


class Outages:
    """Counts failures of dependencies when they begin, and as healed when they end in
    time.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._down_since: dict[str, float | None] = {}
        """None: it is up."""

    def report(self, dependency: str, up: bool) -> None:
        if dependency not in self._down_since:
            self._down_since[dependency] = None
            for metric in (_failures, _healed):
                metric.labels(dependency)  # shown at 0
        since = self._down_since[dependency]
        if up and since is not None:
            self._down_since[dependency] = None
            if self._monotonic() - since <= HEALED_SECONDS:
                _healed.labels(dependency).inc()
        elif not up and since is None:
            self._down_since[dependency] = self._monotonic()
            _failures.labels(dependency).inc()


_outages = Outages(time.monotonic)


def dependency_up(dependency: str, up: bool) -> None:
    _dependency_up.labels(dependency).set(up)
    _outages.report(dependency, up)


def breaker_state(dependency: str, state: str) -> None:
    mark("a breaker was", state)
    for each in ("closed", "open", "half_open"):
        _breaker.labels(dependency, each).set(each == state)


def dependency_state(dependency: str, up: bool, breaker: str, moved: bool) -> None:
    """The state of a dependency and its breaker; ``moved``: the breaker's changed."""
    dependency_up(dependency, up)
    breaker_state(dependency, breaker)
    if moved:
        log.warning("node.breaker_changed", dependency=dependency, state=breaker)
