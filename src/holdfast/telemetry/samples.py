"""Reads the present samples of some metrics, for the judge of alerts.

A scrape builds an object for every sample, 5 µs each, and an idle node is judged every
few seconds: this reads the numbers where prometheus_client keeps them, 0.4 µs each. It
keeps them in private attributes; a test compares every metric with its scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from holdfast.telemetry.expressions import PREFIX, LabelSet
from holdfast.telemetry.judge import Samples

_M = TypeVar("_M", bound=MetricWrapperBase)
_Reader = Callable[[], Mapping[LabelSet, float]]


class SampleReader:
    """Reads the metrics of a registry. What it knows of a metric are its labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._readers: dict[str, _Reader] = {}

    def read(self, names: Iterable[str]) -> Samples:
        """The present samples of these names, given without ``holdfast_``; those of a
        name without any are left out.
        """
        found = {}
        for name in names:
            reader = self._readers.get(name) or self._open(name)
            if reader is not None and (values := reader()):
                found[name] = values
        return found

    def _open(self, name: str) -> _Reader | None:
        collector = self._registry._names_to_collectors.get(PREFIX + name)
        match collector:
            case None:
                return None
            case Counter() if name.endswith("_total"):
                reader = _single(collector)
            case Gauge():
                reader = _single(collector)
            case Histogram() if name.endswith("_bucket"):
                reader = _buckets(collector)
            case _:
                reader = _scraped(collector, name)
        self._readers[name] = reader
        return reader


def _single(metric: Counter | Gauge) -> _Reader:
    known: dict[Sequence[str], LabelSet] = {}

    def read() -> Mapping[LabelSet, float]:
        found = {}
        for values, child in _children(metric):
            if (labels := known.get(values)) is None:
                labels = known[values] = _labels(metric, values)
            found[labels] = child._value.get()
        return found

    return read


def _buckets(metric: Histogram) -> _Reader:
    known: dict[Sequence[str], list[LabelSet]] = {}

    def read() -> Mapping[LabelSet, float]:
        found: dict[LabelSet, float] = {}
        for values, child in _children(metric):
            if (buckets := known.get(values)) is None:
                bounds = map(floatToGoString, child._upper_bounds)
                buckets = known[values] = [_labels(metric, values, le=each) for each in bounds]
            counts = accumulate(bucket.get() for bucket in child._buckets)
            found.update(zip(buckets, counts, strict=True))
        return found

    return read


def _scraped(collector: Collector, name: str) -> _Reader:
    def read() -> Mapping[LabelSet, float]:
        return {
            tuple(sorted(sample.labels.items())): sample.value
            for metric in collector.collect()
            for sample in metric.samples
            if sample.name == PREFIX + name
        }

    return read


def _children(metric: _M) -> list[tuple[Sequence[str], _M]]:
    if not metric._labelnames:
        return [((), metric)]
    with metric._lock:
        return cast("list[tuple[Sequence[str], _M]]", list(metric._metrics.items()))


def _labels(metric: MetricWrapperBase, values: Sequence[str], **others: str) -> LabelSet:
    return tuple(sorted([*zip(metric._labelnames, values, strict=True), *others.items()]))
