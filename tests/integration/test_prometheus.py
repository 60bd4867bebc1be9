"""The rules for Prometheus, judged by its own promtool."""

from __future__ import annotations

import importlib
import json
import math
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from engines.promtool import Promtool
from holdfast.telemetry.alert import Alert, rules
from holdfast.telemetry.alerts import ALERTS
from holdfast.telemetry.expressions import Absent, Condition, Quantile, Series, series_of

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import prometheus_rules  # noqa: E402
import rule_cases  # noqa: E402
from rule_cases import STEP_SECONDS, Case, Check, Key, Segment, Shape  # noqa: E402

RULES = ROOT / "deploy/prometheus/rules.yml"
RECORDING = ROOT / "tests/golden/recorded_series.json"
STEPS = 48
JUDGED = [alert for alert in ALERTS if not isinstance(alert.when.value, Absent)]


@pytest.mark.covers("000 `durability.counter.corruption`, any: SEV-1")
@pytest.mark.covers("000 `durability.duplicate.sequence`, any: SEV-1")
@pytest.mark.covers("000 `durability.dynamodb.available`, 0 for > 10 s: SEV-1")
@pytest.mark.covers("000 `durability.kafka.available`, 0 for > 30 s: SEV-2")
@pytest.mark.covers("000 `gateway.slow_consumer.disconnects`, > 50/min for 5 min: SEV-3")
@pytest.mark.covers("000 `gateway.circuit_breaker.open`, > 1 min: SEV-2")
@pytest.mark.covers("000 `durability.persist.latency_p99`, > 500 ms for 5 min: SEV-3")
@pytest.mark.covers("000 `durability.transaction.conflict_rate`, > 5 % for 5 min: SEV-3")
@pytest.mark.covers("000 `fanout.kafka.consumer_lag`, > 10K for 5 min: SEV-3")
@pytest.mark.covers("000 `fanout.delivery.skip_rate`, > 20 % for 5 min: SEV-3")
@pytest.mark.covers("000 tier 1 metrics alert correctly")
@pytest.mark.covers("001 `sequence_allocation_latency_p99`, > 50 ms")
@pytest.mark.covers("001 `sequence_allocation_errors`, > 0.1 %")
@pytest.mark.covers("001 `counter_missing_errors`, > 0")
@pytest.mark.covers("001 `idempotency_hit_rate`, > 10 %")
@pytest.mark.covers("001 `sequence_gap_rate`, > 5 %")
@pytest.mark.covers("001 `transaction_conflict_rate`, > 1 %")
@pytest.mark.covers("001 alert above 5 % over 15 min")
@pytest.mark.covers("004 alert: admin database errors > 5 in 1 min")
@pytest.mark.covers("003 2: manual, alert the operations team")
@pytest.mark.covers("003 3: alert and investigate")
def test_every_rule_fires_on_series_that_should_and_on_no_other(promtool: Promtool) -> None:
    checked, said = promtool.run("check", "rules", RULES)
    assert checked, said
    passed, said = promtool.run("test", "rules", RULES.with_name("rules_test.yml"))
    assert passed, said
    tests = RULES.with_name("rules_test.yml").read_text()
    for rule in rules(ALERTS):
        for what in ("fires and clears", "stays silent"):
            assert f"# {rule.alert.name}: {rule.severity} {what}\n" in tests


WRONG = {
    "HoldfastFanoutLag": ("lag > 1000\n", "lag > 940\n"),
    "HoldfastJobStoreDown": ('dependency="jobs"} == 0', 'dependency="rules"} == 0'),
    "HoldfastStreamsBlocked": ("streams > 0\n        for: 5m", "streams > 0"),
}


def test_tests_of_the_rules_notice_each_wrong_rule(promtool: Promtool, tmp_path: Path) -> None:
    text = RULES.read_text()
    for right, wrong in WRONG.values():
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    (tmp_path / "rules.yml").write_text(text)
    touched = [alert for alert in ALERTS if alert.name in {*WRONG, "HoldfastJobsOld"}]
    cases = rule_cases.together(case for alert in touched for case in rule_cases.cases(alert))
    (tmp_path / "test.yml").write_text(prometheus_rules.tests_text([cases], "rules.yml"))
    passed, said = promtool.run("test", "rules", tmp_path / "test.yml")
    assert not passed and set(re.findall(r"alertname: (\w+),", said)) == set(WRONG)


def test_expressions_of_the_page_are_promql(promtool: Promtool, tmp_path: Path) -> None:
    page = (ROOT / "docs/reference/alerts.md").read_text()
    blocks = re.findall(r"```promql\n(.*?)\n```", page, re.DOTALL)
    assert len(blocks) == len(list(rules(ALERTS)))
    listed = [{"alert": "A", "expr": text, "labels": {"n": n}} for n, text in enumerate(blocks)]
    file = tmp_path / "page.yml"
    file.write_text(json.dumps({"groups": [{"name": "page", "rules": listed}]}))
    passed, said = promtool.run("check", "rules", file)
    assert passed, said


def test_queries_of_the_dashboard_are_promql_over_metrics_that_exist(
    promtool: Promtool, tmp_path: Path
) -> None:
    board = json.loads((ROOT / "deploy/grafana/holdfast.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert len(queries) > 70 and [row.split(":")[0] for row in rows] == [
        *("Tier 1", "Planes", "Tier 2", "Tier 3", "Work", "Limits"),
    ]
    labels = docs_module("metrics_page")._labels()
    for _, panels in docs_module("dashboard").ROWS:
        for panel in panels:
            for series in series_of(panel.value):
                name = re.sub(r"_(total|bucket|count)$", "", f"holdfast_{series.name}")
                assert name in labels, f"{panel.title} reads {series.name}"
                assert {label for label, _, _ in series.matches} <= {*labels[name], "le"}
                assert not panel.legend or panel.legend in labels[name], panel.title
    listed = [{"record": f"q:{n}", "expr": text} for n, text in enumerate(queries)]
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "board", "rules": listed}]}))
    passed, said = promtool.run("check", "rules", file)
    assert passed, said
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places), "two panels in one place"


def docs_module(name: str) -> Any:
    return importlib.import_module(name)


def test_node_and_prometheus_judge_recorded_series_alike(
    promtool: Promtool, tmp_path: Path
) -> None:
    """Of a real node under load and faults (``record_series``): every alert is compared
    at every minute.
    """
    series = {
        _key(name): [Segment(*each) for each in segments]
        for name, segments in json.loads(RECORDING.read_text()).items()
    }
    assert len(series) >= 200
    absent = next(a.when.value for a in ALERTS if isinstance(a.when.value, Absent))
    missing = [each for each in absent.series if not any(_reads([each], key) for key in series)]
    assert not missing, "record again: python tests/support/record_series.py"
    cases = [_judged_case(alert, series) for alert in ALERTS]
    fired = {case.alert.name for case in cases for check in case.checks if check.firing}
    assert fired >= FIRED, f"worth judging; not {FIRED - fired}"
    _agreed(promtool, tmp_path, [cases])


FIRED = {
    *("HoldfastCounterCorruption", "HoldfastChatsHalted", "HoldfastStoreDown"),
    *("HoldfastBreakerOpen", "HoldfastPersistSlow", "HoldfastAllocationErrors"),
    *("HoldfastSendsTurnedAway", "HoldfastRetryStorm", "HoldfastDiskFull"),
    *("HoldfastWebhookFailing", "HoldfastJobsOld", "HoldfastAlertsUndelivered"),
    *("HoldfastHotChats", "HoldfastRepliesFailing"),
}


def _key(name: str) -> Key:
    """Of a series as it is recorded: name{label="value",…}."""
    metric, _, labels = name.rstrip("}").partition("{")
    return metric, tuple(sorted(re.findall(r'(\w+)="([^"]*)"', labels)))


def _reads(read: Iterable[Series], key: Key) -> bool:
    return any(each.name == key[0] and each.accepts(key[1]) for each in read)


def _judged_case(alert: Alert, series: Mapping[Key, list[Segment]]) -> Case:
    """The alert on the series that it reads, and what the node says at every minute."""
    own = rule_cases.reads(alert, series)
    states = rule_cases.judged(alert, own) if own else []
    minute = 60 // STEP_SECONDS
    places = range(0, len(states), minute)
    return Case(alert, "recorded", own, [Check(n * STEP_SECONDS, states[n]) for n in places])


def _agreed(promtool: Promtool, folder: Path, groups: Iterable[list[Case]]) -> None:
    file = folder / "series.yml"
    file.write_text(prometheus_rules.tests_text(groups, str(RULES)))
    agreed, said = promtool.run("test", "rules", file)
    assert agreed, said[:5000]


def test_node_and_prometheus_judge_series_about_the_thresholds_alike(
    promtool: Promtool, tmp_path: Path
) -> None:
    """12 minutes each, with restarts and gaps; every alert twice."""
    rng = random.Random(14)
    generated = [_generated(alert, rng) for alert in (*JUDGED, *JUDGED)]
    fired = {case.alert.name for case in generated for check in case.checks if check.firing}
    assert len(fired) > 0.6 * len(JUDGED), "the series must be worth judging"
    _agreed(promtool, tmp_path, [rule_cases.together(generated)])


def _generated(alert: Alert, rng: random.Random) -> Case:
    """A few minutes at a time the value of one of the rules is about its threshold."""
    paces = [_pace(rng.choice(list(rules([alert]))).condition, rng) for _ in range(STEPS // 12)]
    keys = {key for pace in paces for key in (*pace.gauges, *pace.rates)}
    return _judged_case(alert, {key: list(_samples(key, paces, rng)) for key in sorted(keys)})


def _pace(condition: Condition, rng: random.Random) -> Shape:
    about = rng.choice((0.0, 0.6, 0.97, 1.0, 1.03, 1.5))
    shape = Shape()
    value = condition.threshold * about if condition.threshold else float(about > 1)
    if condition.compare == "==":
        value = float(about > 0.97)
    shape.give(condition.value, min(value, 0.999) if condition.compare == "<" else value)
    if isinstance(condition.value, Quantile):
        slow = rng.choice((0.004, 0.009, 0.011, 0.05))  # about the last hundredth
        for (name, labels), each in shape.rates.items():
            if not each and labels != (("le", "0.001"),):
                shape.rates[name, labels] = 10.0 * (1 - slow)
    return shape


def _samples(key: Key, paces: list[Shape], rng: random.Random) -> Iterator[Segment]:
    """With restarts of a counter, gaps and, in a gauge, noise."""
    value, gone = rng.choice((0.0, 1000.0)), 0
    for place in range(STEPS):
        pace = paces[place // 12]
        if key in pace.gauges:
            value = pace.gauges[key]
        else:
            restarted = not key[0].endswith("_bucket") and rng.random() < 0.01
            value = (0.0 if restarted else value) + pace.rates.get(key, 0.0) * STEP_SECONDS
        gone = gone - 1 if gone else rng.choice((0,) * 12 + (1, 2, 3))
        yield Segment(math.nan if gone else round(value, 9), 0, 1)


SERIES = {
    'ingest_sends_total{answer="persisted"}': 1,
    'ingest_sends_total{answer="halted"}': 1,
    "client_resync_forced_total": 1,
    "gateway_connection_hours_total": 4,
    'dependency_failures_total{dependency="store"}': 2,
    'dependency_failures_healed_total{dependency="store"}': 1,
    "durability_rollbacks_proven_total": 0,
}
"""By how much each rises in a minute."""
RECORDS = {"availability": 0.5, "forced_resyncs": 0.25, "failures_healed": 0.5, "messages_lost": 0}


def test_recording_rules_measure_the_objectives(promtool: Promtool, tmp_path: Path) -> None:
    lines = [f"rule_files: [{RULES}]", "evaluation_interval: 10m"]
    lines += ["tests:", "  - interval: 1m", "    input_series:"]
    for name, rise in SERIES.items():
        lines += [f"      - series: 'holdfast_{name}'", f"        values: '0+{rise}x60'"]
    lines.append("    promql_expr_test:")
    for name, value in RECORDS.items():
        record = f"holdfast:{name}:1h"
        lines += [f"      - expr: {record}", "        eval_time: 1h", "        exp_samples:"]
        lines += [f"          - labels: '{record}'", f"            value: {value}"]
    (tmp_path / "test.yml").write_text("\n".join(lines))
    passed, said = promtool.run("test", "rules", tmp_path / "test.yml")
    assert passed, said
