"""The histogram of values that come with every token."""

from __future__ import annotations

from prometheus_client import Histogram

from holdfast.telemetry.loop_values import LoopHistogram
from holdfast.telemetry.metrics import REGISTRY


def test_histogram_of_the_loop_shows_what_prometheus_own_would() -> None:
    ours = LoopHistogram("test_loop_seconds", "test", (0.01, 0.5, 2.0))
    own = Histogram("holdfast_test_own_seconds", "test", buckets=(0.01, 0.5, 2.0), registry=None)
    try:
        for value in (0.0, 0.01, 0.02, 0.5, 1.0, 2.0, 2.1, 1e9):
            ours.observe(value)
            own.observe(value)
        shown = [
            {
                (s.name.rpartition("_")[2], *s.labels.values()): s.value
                for family in each.collect()
                for s in family.samples
                if not s.name.endswith("_created")
            }
            for each in (ours, own)
        ]
        assert shown[0] == shown[1] and len(shown[0]) == 6
    finally:
        REGISTRY.unregister(ours)
