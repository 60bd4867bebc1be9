"""docs/reference/alerts.md: every alert of ``telemetry.alerts``, with its PromQL."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.telemetry.alert import Alert, rules
from holdfast.telemetry.alerts import ALERTS
from holdfast.telemetry.expressions import Condition, duration, promql

INTRODUCTION = """# Alerts

Written by `docs/generate.py` from `holdfast.telemetry.alerts`; do not edit.

SEV-1 calls somebody at once, SEV-2 now, SEV-3 in working hours; a warning is yellow and
calls nobody. A node judges all of them over its own metrics every 5 s and needs nothing
else for that: `holdfast status` begins with those that fire, `holdfast alerts ls` lists
them, and `alerts.sinks` says where they go
([operating](../guides/operating.md#alerts)). For Prometheus the same alerts are in
[deploy/prometheus/rules.yml](../../deploy/prometheus/rules.yml), with their tests
beside it; scrape every 15 s or more often. Both judge a recorded series alike.

*For* is how long a condition must hold before the alert fires; until then it is
pending. An expression whose metric is not there cannot fire: `HoldfastMetricAbsent`
says so. An expression in a block runs in Prometheus as it is printed.

Where one alert follows from another, the node shows the cause first and the other under
it, however severe; in a notice it has the annotation `explained_by`.

| alert | severity | what it means | runbook |
|---|---|---|---|
"""


def page() -> str:
    rows = [
        f"| [{alert.name}](#{alert.name.lower()}) | {_severities(alert)} | {alert.means} |"
        f" [{_title(alert.runbook)}](../guides/{alert.runbook}) |"
        for alert in ALERTS
    ]
    return INTRODUCTION + "\n".join([*rows, "", *(line for a in ALERTS for line in _section(a))])


def _severities(alert: Alert) -> str:
    return ", ".join(str(rule.severity) for rule in rules([alert]))


def _title(runbook: str) -> str:
    return runbook.rpartition("/")[2].removesuffix(".md").replace("-", " ")


def _section(alert: Alert) -> Iterator[str]:
    yield f"## {alert.name}\n"
    yield alert.means + (f" Only {alert.where}." if alert.where else "") + "\n"
    for rule in rules([alert]):
        yield f"{rule.severity}{_held(rule.condition)}:\n"
        yield f"```promql\n{promql(rule.condition)}\n```\n"
    if alert.explains:
        yield (
            "What follows from it while it fires: "
            + ", ".join(f"[{name}](#{name.lower()})" for name in alert.explains)
            + ".\n"
        )
    if alert.stays_with:
        name = alert.stays_with
        yield f"On a node it goes on for as long as [{name}](#{name.lower()}) does.\n"
    if alert.rows:
        yield f"Asked for by document {'; '.join(alert.rows)}.\n"


def _held(condition: Condition) -> str:
    return f", for {duration(condition.for_seconds)}" if condition.for_seconds else ""
