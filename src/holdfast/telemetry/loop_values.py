"""A histogram for values that come with every token.

Without locks and checks a value takes 0.3 µs, not 1.3.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from holdfast.telemetry.metrics import REGISTRY


class LoopHistogram(Collector):
    """A histogram without labels whose values all come from the loop's thread."""

    _type, _labelnames = "histogram", ()  # as prometheus_client's have them

    def __init__(self, name: str, help_text: str, buckets: Sequence[float]) -> None:
        self._name, self._help = f"holdfast_{name}", help_text
        self._bounds = (*buckets, inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        REGISTRY.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        names = map(floatToGoString, self._bounds)
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)

    describe = collect
