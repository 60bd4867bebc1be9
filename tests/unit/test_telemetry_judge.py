"""The judge of alerts: states, windows and what it costs.

That it judges as Prometheus does is in tests/integration/test_prometheus.py.
"""

from __future__ import annotations

import math

import pytest

from holdfast import telemetry
from holdfast.telemetry.alert import Alert, Severity, above, equals, p99, rise
from holdfast.telemetry.alerts import ALERTS
from holdfast.telemetry.expressions import Absent, Expression, LabelSet, Series
from holdfast.telemetry.judge import Judge, Samples


def alert(value: Expression, threshold: float = 0, for_seconds: int = 0) -> Alert:
    return Alert("A", Severity.SEV3, above(value, threshold, for_seconds), "It is.", "x.md")


def gauge(value: float, *labels: tuple[str, str]) -> Samples:
    return {"g": {labels: value}}


def test_alert_is_pending_then_firing_then_resolved() -> None:
    judge = Judge([alert(Series("g"), 5, for_seconds=10)])
    assert judge.judge(gauge(5), 0) == [] and judge.alerts == []
    assert judge.judge(gauge(6), 5) == []
    assert [(each.state, each.since) for each in judge.alerts] == [("pending", 5)]
    assert judge.judge(gauge(7), 14) == []
    (fired,) = judge.judge(gauge(8), 15)
    assert (fired.state, fired.since, fired.fired_at, fired.value) == ("firing", 5, 15, 8)
    assert judge.judge(gauge(9), 20) == [], "reported once"
    assert [each.value for each in judge.alerts] == [9]
    (ended,) = judge.judge(gauge(1), 25)
    assert (ended.state, ended.fired_at) == ("resolved", 15) and judge.alerts == []


def test_alert_that_was_only_pending_is_not_resolved() -> None:
    judge = Judge([alert(Series("g"), 5, for_seconds=10)])
    judge.judge(gauge(6), 0)
    assert judge.judge(gauge(1), 5) == [] and judge.alerts == []
    judge.judge(gauge(6), 8)
    assert judge.judge(gauge(6), 12) == [], "it begins again"


def test_each_set_of_labels_has_its_own_alert() -> None:
    judge = Judge([alert(Series("g"), 0)])
    one, two = (("d", "1"),), (("d", "2"),)
    assert len(judge.judge({"g": {one: 1.0, two: 1.0}}, 0)) == 2
    (ended,) = judge.judge({"g": {one: 0.0, two: 1.0}}, 5)
    assert (ended.labels, ended.state) == (one, "resolved")
    assert [each.labels for each in judge.alerts] == [two]


def test_series_that_is_gone_resolves_its_alert_and_absence_is_told() -> None:
    absent = Alert("B", Severity.SEV3, equals(Absent((Series("g"),)), 1, 5), "It is.", "x.md")
    judge = Judge([alert(Series("g")), absent])
    judge.judge(gauge(1), 0)
    assert [each.state for each in judge.judge({}, 5)] == ["resolved"]
    (missing,) = judge.judge({}, 10)
    assert (missing.state, missing.labels) == ("firing", (("metric", "holdfast_g"),))


def test_rise_of_a_counter_is_seen_within_its_window_and_forgotten_after() -> None:
    judge = Judge([alert(rise("c", 60))])
    states = []
    for second in range(0, 120, 5):
        judge.judge({"c_total": {(): 1.0 if second >= 10 else 0.0}}, second)
        states.append([each.state for each in judge.alerts])
    assert states == [[]] * 2 + [["firing"]] * 12 + [[]] * 10
    (rises,) = judge._windows._rises
    assert len(rises.kept[()]) == 13, "a window keeps what it needs"
    judge.judge({}, 175)
    assert len(rises.kept[()]) == 1
    judge.judge({}, 180)
    assert rises.kept == {}, "nothing of a series that is gone"


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((0, 100, 100, 100), 0.199),
        ((100, 100, 100, 100), 0.099),
        ((0, 0, 100, 100), 0.497),
        ((0, 0, 0, 100), 0.5),
        ((50, 98, 100, 100), 0.35),
    ],
)
def test_quantile_lies_within_its_bucket(counts: tuple[float, ...], expected: float) -> None:
    judge = Judge([alert(p99("h", 60))])
    bounds = ("0.1", "0.2", "0.5", "+Inf")
    for moment, share in ((0, 0.0), (60, 1.0)):
        values: dict[LabelSet, float] = {
            (("le", bound),): count * share for bound, count in zip(bounds, counts, strict=True)
        }
        judge.judge({"h_bucket": values}, moment)
    (fired,) = judge.alerts
    assert fired.value == pytest.approx(expected)
    assert not math.isnan(fired.value)


def test_registry_of_this_process_can_be_judged() -> None:
    judge = Judge(ALERTS)
    samples = telemetry.samples(judge.names)
    assert judge.names >= set(samples)
    assert samples["fanout_lag"].keys() == {()}
    for second in range(0, 400, 5):
        judge.judge(telemetry.samples(judge.names), second)
