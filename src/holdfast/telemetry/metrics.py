"""Our registry, and how a metric is made: every name begins with ``holdfast_``, histograms are in seconds."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def counter(name: str, help_text: str, labels: tuple[str, ...] = ()) -> Counter:
    return Counter(f"holdfast_{name}", help_text, labels, registry=REGISTRY)


def gauge(name: str, help_text: str, labels: tuple[str, ...] = ()) -> Gauge:
    return Gauge(f"holdfast_{name}", help_text, labels, registry=REGISTRY)


def histogram(name: str, help_text: str, labels: tuple[str, ...] = ()) -> Histogram:
    return Histogram(f"holdfast_{name}", help_text, labels, registry=REGISTRY, buckets=LATENCY_BUCKETS)
