"""What the judge of alerts reads is what a scrape says."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from holdfast import telemetry
from holdfast.telemetry.expressions import LabelSet
from holdfast.telemetry.samples import SampleReader


def scraped(registry: CollectorRegistry) -> dict[str, dict[LabelSet, float]]:
    found: dict[str, dict[LabelSet, float]] = {}
    for metric in registry.collect():
        for sample in metric.samples:
            series = found.setdefault(sample.name.removeprefix("holdfast_"), {})
            series[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_every_metric_of_this_process_is_read_as_it_is_scraped() -> None:
    telemetry.delivery_lag(0.3)
    telemetry.message_step("commit", 0.02)
    telemetry.reply_gap(0.004)
    telemetry.send_turned_away("halted")
    expected = scraped(telemetry.REGISTRY)
    assert len(expected) > 150
    assert telemetry.samples(expected) == expected


def test_children_that_come_and_go_are_read_as_they_are() -> None:
    registry = CollectorRegistry()
    many = Counter("holdfast_many", "", ("zone", "area"), registry=registry)
    times = Histogram("holdfast_times", "", ("zone",), registry=registry, buckets=(1, 2.5))
    level = Gauge("holdfast_level", "", registry=registry)
    reader = SampleReader(registry)
    names = ("many_total", "times_bucket", "times_count", "level", "absent")
    assert reader.read(names) == {"level": {(): 0.0}}
    many.labels("z", "a").inc(3)
    times.labels("z").observe(2)
    level.set(-1)
    assert reader.read(names) == {
        "many_total": {(("area", "a"), ("zone", "z")): 3},
        "times_bucket": {
            (("le", "1.0"), ("zone", "z")): 0,
            (("le", "2.5"), ("zone", "z")): 1,
            (("le", "+Inf"), ("zone", "z")): 1,
        },
        "times_count": {(("zone", "z"),): 1},
        "level": {(): -1},
    }
    many.clear()
    times.labels("y").observe(0.5)
    later = reader.read(names)
    assert "many_total" not in later and later["times_count"] == {
        (("zone", "z"),): 1, (("zone", "y"),): 1,
    }  # fmt: skip


def test_metric_that_is_made_later_is_read_then() -> None:
    registry = CollectorRegistry()
    reader = SampleReader(registry)
    assert reader.read(["late"]) == {}
    Gauge("holdfast_late", "", registry=registry).set(7)
    assert reader.read(["late"]) == {"late": {(): 7}}
