"""The objectives: every one of them, once, as values, and how a node measures them over
its own last hour. (Pure.)

From this list come the recording rules for Prometheus (``deploy/prometheus/rules.yml``)
and ``holdfast status --slo``. The documents' windows that are longer than an hour are
Prometheus' business: it has the past, a node has only its own hour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from holdfast.telemetry.alert import at_least, below, equals, p99, rise, risen
from holdfast.telemetry.expressions import Condition, Ratio
from holdfast.telemetry.judge import Samples, Windows

_HOUR = 3600
_GOOD = "persisted|deduplicated|refused"
_MEASURE_SECONDS = 30.0
"""Between two samples: the node's own hour is 120 of them, about a megabyte."""


@dataclass(frozen=True, slots=True)
class Objective:
    """``holds``: when it is met. ``holdfast:NAME:1h`` is its recording rule."""

    name: str
    means: str
    holds: Condition
    unit: Literal["share", "seconds", "count"] = "share"


OBJECTIVES = (
    Objective(
        "availability",
        "sends answered persisted, deduplicated or refused as their sender's own mistake, of all"
        " that reached the node",
        at_least(
            Ratio(
                risen("ingest_sends", _HOUR, ("answer",), (("answer", "=~", _GOOD),)),
                risen("ingest_sends", _HOUR, ("answer",)),
            ),
            0.999,
        ),
    ),
    Objective(
        "messages_lost",
        "proofs that acknowledged messages were lost",
        equals(rise("durability_rollbacks_proven", _HOUR), 0),
        "count",
    ),
    Objective(
        "persist_p99",
        "from admission to answer, of 99 % of the groups of sends",
        below(p99("durability_persist_latency_seconds", _HOUR), 0.5),
        "seconds",
    ),
    Objective(
        "delivery_p99",
        "from a message's stamp to its hand-over, of 99 % of the batches",
        below(p99("fanout_delivery_lag_seconds", _HOUR), 2),
        "seconds",
    ),
    Objective(
        "forced_resyncs",
        "closes and resyncs that make a client pull, per connection and hour, planned closes apart",
        below(
            Ratio(rise("client_resync_forced", _HOUR), rise("gateway_connection_hours", _HOUR)),
            0.01,
        ),
    ),
    Objective(
        "failures_healed",
        "failures of dependencies that ended within 30 s, of all",
        at_least(
            Ratio(
                risen("dependency_failures_healed", _HOUR, ("dependency",)),
                risen("dependency_failures", _HOUR, ("dependency",)),
            ),
            0.999,
        ),
    ),
)


class MeasuredObjective(Struct, frozen=True):
    """``value``: over the last ``seconds``; null: nothing happened that it could be
    measured by. ``met`` is null then, too.
    """

    name: str
    means: str
    unit: str
    target: str
    value: float | None
    met: bool | None
    seconds: float


class ObjectiveMeter:
    """Measures the objectives from the samples of a node."""

    def __init__(self, now: float) -> None:
        self._windows = Windows(each.holds.value for each in OBJECTIVES)
        self.names = self._windows.names
        """The names of the samples that it needs."""
        self._began = now
        self._due = now

    def is_due(self, now: float) -> bool:
        return now >= self._due

    def measure(self, samples: Samples, now: float) -> Sequence[MeasuredObjective]:
        """The objectives over the last hour, or since the beginning. The samples are
        kept if they are due: whoever asks more often adds nothing to the windows.
        """
        found = self._windows.take(samples, now)
        seconds = min(now - self._began, float(_HOUR))
        measured = [
            _measured(each, values.get(()), seconds)
            for each, values in zip(OBJECTIVES, found, strict=True)
        ]
        if self.is_due(now):
            self._due = now + _MEASURE_SECONDS
        else:
            self._windows.forget(now)
        return measured


def _measured(objective: Objective, value: float | None, seconds: float) -> MeasuredObjective:
    holds = objective.holds
    known = None if value is None or math.isnan(value) else value
    return MeasuredObjective(
        objective.name,
        objective.means,
        objective.unit,
        f"{holds.compare} {holds.threshold:g}",
        known,
        None if known is None else holds.holds(known),
        seconds,
    )
