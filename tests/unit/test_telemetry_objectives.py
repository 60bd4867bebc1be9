"""The objectives, measured over a node's own last hour."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from holdfast import telemetry
from holdfast.telemetry.judge import Samples
from holdfast.telemetry.objectives import OBJECTIVES, MeasuredObjective, ObjectiveMeter

Counts = Mapping[str, float]
HOUR = 3600


def samples(sends: Counts, **single: float) -> Samples:
    """Counters as they are at one moment."""
    return {
        "ingest_sends_total": {(("answer", answer),): count for answer, count in sends.items()},
        **{f"{name}_total": {(): value} for name, value in single.items()},
    }


def measured(*moments: tuple[float, Samples]) -> dict[str, MeasuredObjective]:
    meter = ObjectiveMeter(moments[0][0])
    for now, taken in moments:
        found = meter.measure(taken, now)
    return {each.name: each for each in found}


NOTHING = {"persisted": 0, "deduplicated": 0, "refused": 0, "halted": 0, "turned_away": 0}


@pytest.mark.covers("000 availability 99.9 %")
@pytest.mark.parametrize(
    ("answers", "share"),
    [
        ({"persisted": 1000}, 1.0),
        ({"persisted": 500, "deduplicated": 300, "refused": 200}, 1.0),
        ({"persisted": 998, "turned_away": 2}, 0.998),
        ({"persisted": 998, "halted": 2}, 0.998),
    ],
)
def test_availability_counts_what_was_turned_away_and_halted(answers: Counts, share: float) -> None:
    found = measured((0, samples(NOTHING)), (600, samples({**NOTHING, **answers})))["availability"]
    assert found.value == pytest.approx(share)
    assert found.met is (share >= 0.999) and found.seconds == 600


def test_objective_without_anything_to_measure_is_neither_met_nor_missed() -> None:
    found = measured((0, samples(NOTHING)), (30, samples(NOTHING)))
    assert (found["availability"].value, found["availability"].met) == (None, None)


def test_asking_often_adds_nothing_and_the_same_moment_twice_is_no_error() -> None:
    meter = ObjectiveMeter(0.0)
    later = samples({**NOTHING, "persisted": 10})
    for now, taken in [(0.0, samples(NOTHING)), (0.0, samples(NOTHING)), (5.0, later)]:
        meter.measure(taken, now)
    kept = [each for rises in meter._windows._rises for each in rises.kept.values()]
    assert kept and {len(moments) for moments in kept} == {1}
    assert {each.name: each.value for each in meter.measure(later, 5.0)}["availability"] == 1.0


def test_only_the_last_hour_counts() -> None:
    bad, good = {**NOTHING, "turned_away": 100}, {**NOTHING, "turned_away": 100, "persisted": 100}
    moments = [(0.0, samples(NOTHING)), (60.0, samples(bad))]
    moments += [(60.0 + n * 30, samples(bad)) for n in range(1, HOUR // 30 + 2)]
    end = moments[-1][0]
    found = measured(*moments, (end + 30, samples(good)))["availability"]
    assert (found.value, found.seconds) == (1.0, HOUR)


def failures(failed: int, healed: int) -> Samples:
    store = (("dependency", "store"),)
    return {
        **samples(NOTHING),
        "dependency_failures_total": {store: failed},
        "dependency_failures_healed_total": {store: healed},
    }


@pytest.mark.covers("000 transient failures: 99.9 % healed within 30 s")
@pytest.mark.parametrize(("healed", "met"), [(2, True), (1, False)])
def test_failure_that_did_not_heal_in_time_misses_the_objective(healed: int, met: bool) -> None:
    found = measured((0, failures(0, 0)), (600, failures(2, healed)))["failures_healed"]
    assert found.value == pytest.approx(healed / 2) and found.met is met


@pytest.mark.covers("000 forced resync rate < 1 % of connections/hour")
def test_forced_resyncs_are_per_connection_and_hour() -> None:
    start = samples(NOTHING, client_resync_forced=0, gateway_connection_hours=0)
    end = samples(NOTHING, client_resync_forced=3, gateway_connection_hours=200)
    found = measured((0, start), (HOUR, end))["forced_resyncs"]
    assert found.value == pytest.approx(0.015) and found.met is False


def test_every_series_of_an_objective_is_a_metric_of_the_registry() -> None:
    telemetry.dependency_up("store", True)
    telemetry.connections_open(0)
    names = ObjectiveMeter(0).names
    assert set(telemetry.samples(names)) >= names
    assert len({each.name for each in OBJECTIVES}) == len(OBJECTIVES)
