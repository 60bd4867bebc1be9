"""The list of alerts: complete, over metrics that exist, with the documents' numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast import telemetry
from holdfast.telemetry.alert import Alert, Severity, rules
from holdfast.telemetry.alerts import ALERTS
from holdfast.telemetry.expressions import Absent, Condition, Series, promql, series_of

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
BY_NAME = {alert.name: alert for alert in ALERTS}

# As the design documents have them: severity, threshold, seconds; of the warning too.
DOCUMENTED = {
    "HoldfastCounterCorruption": ("SEV-1", 0, 0, None),
    "HoldfastDuplicateSequence": ("SEV-1", 0, 0, None),
    "HoldfastStoreDown": ("SEV-1", 0, 10, None),
    "HoldfastEventLogDown": ("SEV-2", 0, 30, None),
    "HoldfastSlowConsumers": ("SEV-3", 50, 300, 10),
    "HoldfastBreakerOpen": ("SEV-2", 1, 60, 1),
    "HoldfastPersistSlow": ("SEV-3", 0.5, 300, 0.2),
    "HoldfastTransactionConflicts": ("SEV-3", 0.05, 300, 0.01),
    "HoldfastFanoutLag": ("SEV-3", 10_000, 300, 1000),
    "HoldfastDeliveriesSkipped": ("SEV-3", 0.2, 300, 0.05),
    "HoldfastSequenceGaps": ("SEV-3", 0.05, 0, 0),
    "HoldfastRetryStorm": ("SEV-3", 0.1, 300, None),
    "HoldfastAllocationSlow": ("SEV-3", 0.05, 300, None),
    "HoldfastAllocationErrors": ("SEV-3", 0.001, 300, None),
    "HoldfastFanoutDeadLetters": ("SEV-3", 100, 0, 0),
    "HoldfastRulesStale": ("SEV-3", 10, 0, None),
    "HoldfastAdminDatabaseErrors": ("SEV-3", 5, 0, None),
    "HoldfastJobsOld": ("SEV-3", 30, 60, None),
    "HoldfastPoisonJobs": ("SEV-3", 0, 0, None),
    "HoldfastReplyQueueFull": ("SEV-3", 0.8, 60, 0.5),
    "HoldfastReplyQueueTimeouts": ("SEV-3", 0.05, 300, 0.01),
    "HoldfastRepliesFailing": ("SEV-2", 0.95, 300, 0.98),
    "HoldfastReplyPoolExhausted": ("SEV-3", 1, 300, 1),
    "HoldfastProviderBreakerOpen": ("SEV-2", 1, 60, None),
    "HoldfastRepliesDown": ("SEV-2", 0, 10, None),
    "HoldfastChatsHalted": ("SEV-2", 0, 0, None),
    "HoldfastDeliverySlow": ("SEV-3", 2, 0, None),
    "HoldfastKeyRaces": ("warning", 0.01, 300, None),
    "HoldfastHotChats": ("warning", 0, 0, None),
    "HoldfastSendsTurnedAway": ("SEV-3", 0.05, 60, 0),
    "HoldfastFanoutRestarted": ("warning", 0, 0, None),
    "HoldfastDependencyDown": ("SEV-3", 0, 30, None),
    "HoldfastRulesPrimaryDown": ("SEV-2", 0, 30, None),
    "HoldfastCountersUnavailable": ("SEV-3", 0, 30, None),
    "HoldfastJobDeadLetters": ("SEV-3", 100, 0, 0),
    "HoldfastJobBreakerOpen": ("SEV-3", 0, 60, None),
}
WINDOWS = {
    "HoldfastCounterCorruption": "5m",
    "HoldfastDuplicateSequence": "5m",
    "HoldfastSlowConsumers": "1m",
    "HoldfastPersistSlow": "5m",
    "HoldfastTransactionConflicts": "5m",
    "HoldfastDeliveriesSkipped": "5m",
    "HoldfastDeliverySlow": "1h",
    "HoldfastSequenceGaps": "15m",
    "HoldfastRetryStorm": "5m",
    "HoldfastFanoutDeadLetters": "1h",
    "HoldfastJobDeadLetters": "1h",
    "HoldfastAdminDatabaseErrors": "1m",
    "HoldfastReplyQueueTimeouts": "5m",
    "HoldfastRepliesFailing": "5m",
}
"""Over which time what happened is counted."""


@pytest.mark.parametrize("name", DOCUMENTED)
def test_alert_of_a_document_has_its_numbers(name: str) -> None:
    alert = BY_NAME[name]
    warned = None if alert.warning is None else alert.warning.threshold
    found = (alert.severity, alert.when.threshold, alert.when.for_seconds, warned)
    assert found == DOCUMENTED[name]
    assert alert.rows, "it names its document"


def test_every_alert_that_a_document_asks_for_has_its_numbers_here() -> None:
    assert {alert.name for alert in ALERTS if alert.rows} == set(DOCUMENTED)


@pytest.mark.parametrize("name", WINDOWS)
def test_alert_of_a_document_counts_over_its_window(name: str) -> None:
    printed = " ".join(promql(rule.condition) for rule in rules([BY_NAME[name]]))
    assert set(re.findall(r"\[(\w+)\]", printed)) == {WINDOWS[name]}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alert_is_complete(alert: Alert) -> None:
    assert re.fullmatch(r"Holdfast([A-Z][a-z]+)+", alert.name)
    assert alert.means.endswith(".") and alert.means.count(". ") == 0, "one sentence"
    assert alert.runbook.startswith("runbooks/") and alert.runbook != "runbooks/README.md"
    page = (GUIDES / alert.runbook).read_text()
    what = page.split("**Alert.**")[1].split("**What it means.**")[0]
    assert f"`{alert.name}`" in what, f"{alert.runbook} is about other alerts"
    parts = [page.index(part) for part in ("## Look", "## Do", "## Afterwards")]
    assert parts == sorted(parts), "first look, then act, then see that it is over"
    if alert.severity is Severity.WARNING:
        assert alert.warning is None


def test_names_of_alerts_are_unique() -> None:
    assert len(BY_NAME) == len(ALERTS)


def test_every_series_of_an_alert_is_a_metric_with_these_labels() -> None:
    types = {}
    labels = {}
    for metric in set(telemetry.REGISTRY._names_to_collectors.values()):
        name = metric._name.removeprefix("holdfast_")  # type: ignore[attr-defined]
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count"]}
        for suffix in suffixes.get(metric._type, [""]):  # type: ignore[attr-defined]
            types[name + suffix] = metric._type  # type: ignore[attr-defined]
            labels[name + suffix] = set(metric._labelnames)  # type: ignore[attr-defined]
    for rule in rules(ALERTS):
        for series in series_of(rule.condition.value):
            assert series.name in types, f"{rule.alert.name} reads {series.name}"
            assert {label for label, _, _ in series.matches} <= labels[series.name]


def test_labelled_counter_of_an_alert_is_shown_before_its_first_event() -> None:
    """Prometheus cannot see the rise of a series that was not there."""
    shown = {
        sample.name.removeprefix("holdfast_"): True
        for metric in telemetry.REGISTRY.collect()
        for sample in metric.samples
    }
    counters = {
        series.name
        for rule in rules(ALERTS)
        for series in series_of(rule.condition.value)
        if series.name.endswith(("_total", "_bucket", "_count"))
    }
    assert counters and counters <= set(shown), counters - set(shown)


def test_absent_metrics_are_those_of_every_alert_that_is_not_optional() -> None:
    absent = BY_NAME["HoldfastMetricAbsent"].when.value
    assert isinstance(absent, Absent)
    for rule in rules(ALERTS):
        expected = not rule.alert.where
        for series in series_of(rule.condition.value):
            assert (series in absent.series) == expected, f"{rule.alert.name}: {series}"


def test_expressions_are_printed_as_promql() -> None:
    printed = {(rule.alert.name, rule.severity): promql(rule.condition) for rule in rules(ALERTS)}
    assert printed["HoldfastSlowConsumers", Severity.WARNING] == (
        "increase(holdfast_gateway_slow_consumer_disconnects_total[1m]) > 10"
    )
    skipped = (
        'sum without (reason) (increase(holdfast_fanout_delivery_skipped_total{reason!="offline"}'
        "[5m]))"
    )
    assert printed["HoldfastDeliveriesSkipped", Severity.SEV3] == (
        f"{skipped} / ({skipped} + increase(holdfast_fanout_messages_handed_over_total[5m])) > 0.2"
    )
    assert printed["HoldfastProviderBreakerOpen", Severity.SEV2] == (
        'holdfast_circuit_breaker_state{dependency=~"provider:.*",state="open"} == 1'
    )
    assert printed["HoldfastPersistSlow", Severity.SEV3] == (
        "histogram_quantile(0.99,"
        " increase(holdfast_durability_persist_latency_seconds_bucket[5m])) > 0.5"
    )
    assert promql(Condition(Absent((Series("a"), Series("b", (("c", "=", "d"),)))), "==", 1)) == (
        '(label_replace(absent(holdfast_a), "metric", "holdfast_a", "", "")\n'
        'or label_replace(absent(holdfast_b{c="d"}), "metric", "holdfast_b", "", "")) == 1'
    )
