"""The metrics and named events we emit, one function each; nothing else in Holdfast names a metric.

Names are the seeds' dotted names made Prometheus-like; HELP texts carry the dotted name in brackets, and
``docs/reference/metrics.md`` is generated from here. Labels are closed sets: never a user, a chat or a token.
Histograms are in seconds.
"""

from __future__ import annotations

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

log: structlog.stdlib.BoundLogger = structlog.get_logger("holdfast")


def counter(name: str, help_text: str, labels: tuple[str, ...] = ()) -> Counter:
    return Counter(f"holdfast_{name}", help_text, labels, registry=REGISTRY)


def gauge(name: str, help_text: str, labels: tuple[str, ...] = ()) -> Gauge:
    return Gauge(f"holdfast_{name}", help_text, labels, registry=REGISTRY)


def histogram(name: str, help_text: str, labels: tuple[str, ...] = ()) -> Histogram:
    return Histogram(f"holdfast_{name}", help_text, labels, registry=REGISTRY, buckets=LATENCY_BUCKETS)
