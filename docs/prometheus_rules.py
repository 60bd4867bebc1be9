"""deploy/prometheus/rules.yml and rules_test.yml, from ``telemetry.alerts``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from rule_cases import STEP_SECONDS, Case, Check, Key, cases, together

from holdfast.telemetry.alert import Alert, rules
from holdfast.telemetry.alerts import ALERTS
from holdfast.telemetry.expressions import PREFIX, Absent, LabelSet, duration, promql
from holdfast.telemetry.objectives import OBJECTIVES

HEAD = "# Written by docs/generate.py from holdfast.telemetry.alerts; do not edit.\n"


def rules_file() -> str:
    lines = [
        "# Scrape every 15 s or more often; name this file under rule_files.",
        "groups:",
        "  - name: holdfast",
        "    rules:",
    ]
    for rule in rules(ALERTS):
        lines += [
            f"      - alert: {rule.alert.name}",
            "        expr: |-",
            *(f"          {line}" for line in promql(rule.condition).splitlines()),
        ]
        if rule.condition.for_seconds:
            lines.append(f"        for: {duration(rule.condition.for_seconds)}")
        lines += ["        labels:", f"          severity: {rule.severity}", "        annotations:"]
        lines += [f"          {name}: {json.dumps(text)}" for name, text in _notes(rule.alert)]
    for objective in OBJECTIVES:
        lines += [
            f"      - record: holdfast:{objective.name}:1h",
            "        expr: |-",
            *(f"          {line}" for line in promql(objective.holds.value).splitlines()),
        ]
    return HEAD + "\n".join([*lines, ""])


def tests_file() -> str:
    """That a metric is absent is so of all instances: those cases are tests of their
    own.
    """
    absences = [alert for alert in ALERTS if isinstance(alert.when.value, Absent)]
    others = together(case for alert in ALERTS if alert not in absences for case in cases(alert))
    alone = [[case] for alert in absences for case in cases(alert)]
    return tests_text([others, *alone], "rules.yml")


def tests_text(groups: Iterable[Sequence[Case]], rules_name: str) -> str:
    """Cases as promtool reads them. Those of a group are one test: their series are all
    there, and the same series is the same in each.
    """
    lines = [
        "# Run by `promtool test rules rules_test.yml`.",
        f"rule_files: [{rules_name}]",
        f"evaluation_interval: {duration(STEP_SECONDS)}",
        "tests:",
    ]
    for members in groups:
        lines += [f"  - interval: {duration(STEP_SECONDS)}", "    input_series:"]
        known = set[Key]()
        for case in members:
            lines.append(f"      # {case.alert.name}: {case.name}")
            for (name, labels), segments in case.series.items():
                if (name, labels) in known:
                    continue
                known.add((name, labels))
                values = " ".join(str(each) for each in segments if each.count)
                lines += [
                    f"      - series: {json.dumps(_named(name, labels))}",
                    f"        values: {json.dumps(values)}",
                ]
        lines.append("    alert_rule_test:")
        lines += [line for case in members for c in case.checks for line in _check(case.alert, c)]
    return HEAD + "\n".join([*lines, ""])


def _named(name: str, labels: LabelSet) -> str:
    inside = ",".join(f'{label}="{value}"' for label, value in labels)
    return f"{PREFIX}{name}{{{inside}}}"


def _check(alert: Alert, check: Check) -> Iterator[str]:
    yield f"      - eval_time: {check.at_seconds}s"
    yield f"        alertname: {alert.name}"
    if not check.firing:
        yield "        exp_alerts: []"
        return
    yield "        exp_alerts:"
    for severity, labels in sorted(check.firing):
        wanted = {"severity": str(severity), **dict(labels)}
        yield f"          - exp_labels: {json.dumps(wanted)}"
        yield f"            exp_annotations: {json.dumps(dict(_notes(alert)))}"


def _notes(alert: Alert) -> list[tuple[str, str]]:
    return [("summary", alert.means), ("runbook", f"docs/guides/{alert.runbook}")]
