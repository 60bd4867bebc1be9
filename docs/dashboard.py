"""deploy/grafana/holdfast.json: the dashboard, from the alerts and the metrics.

Tiers 1 and 2 have a panel for each alert, with its thresholds; the other rows are
listed here. Expressions are values, as in the alerts; a test gives each to promtool.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from holdfast.telemetry.alert import Alert, Severity, p99, rise, risen, series
from holdfast.telemetry.alerts import ALERTS
from holdfast.telemetry.expressions import (
    Absent,
    Expression,
    Increase,
    Plus,
    Quantile,
    Ratio,
    Series,
    Sum,
    promql,
    series_of,
)

MINUTE, WINDOW = 60, 300
WIDTH, HEIGHT, COLUMNS = 8, 7, 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Panel(NamedTuple):
    """``legend``: the label that tells its lines apart, besides the node."""

    title: str
    value: Expression
    unit: str = "short"
    legend: str = ""
    about: str = ""
    warning: float | None = None
    page: float | None = None


PLANES = (
    Panel("Dependencies that answer", Series("dependency_up"), "bool_on_off", "dependency"),
    Panel(
        "Breakers that are open",
        series("circuit_breaker_state", state="open"),
        "short",
        "dependency",
    ),
    Panel("Connection: open connections", Series("gateway_connections_active")),
    Panel(
        "Connection: bytes that wait to be sent", Series("gateway_outbound_buffer_bytes"), "bytes"
    ),
    Panel(
        "Durability: sends a minute, by outcome",
        rise("durability_outcomes", MINUTE),
        "short",
        "outcome",
    ),
    Panel("Durability: sends that wait", Series("ingest_sends_waiting")),
    Panel(
        "Durability: sends turned away a minute",
        rise("ingest_sends_turned_away", MINUTE),
        "short",
        "reason",
    ),
    Panel("Fanout: entries behind", Series("fanout_lag")),
    Panel("Fanout: delivery p99", p99("fanout_delivery_lag_seconds", WINDOW), "s"),
)

TIER_3 = (
    Panel("Connections opened a minute", rise("gateway_connections", MINUTE)),
    Panel(
        "Connections closed a minute, by reason", rise("gateway_closed", MINUTE), "short", "reason"
    ),
    Panel("Messages persisted a minute", rise("durability_messages_persisted", MINUTE)),
    Panel("Messages delivered a minute", rise("fanout_messages_delivered", MINUTE)),
    Panel("Forced resyncs a minute", risen("client_resync_forced", MINUTE, ("reason",))),
    Panel("Reads of joined chats tried again a minute", rise("fanout_retries", MINUTE)),
    Panel("AI: wait for a turn, p99", p99("reply_queue_wait_seconds", WINDOW), "s"),
    Panel("AI: ends a minute", risen("reply_ends", MINUTE, ("surface",)), "short", "end"),
    Panel("AI: tokens a minute", rise("reply_tokens", MINUTE), "short", "kind"),
    Panel(
        "REST answers a minute, by status",
        risen("api_requests", MINUTE, ("endpoint",)),
        "short",
        "status",
    ),
    Panel("Alerts that fire", Series("alerts_firing"), "short", "severity"),
    Panel("Settings that are not at their default", Series("setting_changed"), "short", "path"),
)

WORK = (
    Panel("Jobs, by state", Series("work_jobs"), "short", "state"),
    Panel("Failed jobs that wait, by reason", Series("work_jobs_waiting"), "short", "reason"),
    Panel("Failed runs a minute, by reason", rise("work_jobs_failed", MINUTE), "short", "reason"),
    Panel("Jobs done a minute", rise("work_jobs_completed", MINUTE)),
    Panel("Dead letters of jobs", Series("work_dead_letters")),
    Panel("Age of the oldest job", Series("work_oldest_job_age_seconds"), "s"),
    Panel("Streams that are blocked", Series("work_blocked_streams")),
    Panel("Webhook endpoints that fail", Series("webhooks_endpoints_failing")),
    Panel("Jobs parked for disabled endpoints", Series("webhooks_jobs_parked")),
)

LIMITS = (
    Panel(
        "Checks a minute, by what decided",
        risen("limits_checks", MINUTE, ("decision",)),
        "short",
        "decided_by",
    ),
    Panel(
        "Checks a minute, by decision",
        risen("limits_checks", MINUTE, ("decided_by",)),
        "short",
        "decision",
    ),
    Panel(
        "Checks that the counters did not answer", Series("limits_degraded_ratio"), "percentunit"
    ),
    Panel("Age of the rules", Series("limits_rule_staleness_seconds"), "s"),
    Panel(
        "What Redis did not do a minute",
        risen("limits_redis_errors", MINUTE, ("use",)),
        "short",
        "reason",
    ),
    Panel("Live nodes of this region", Series("limits_nodes")),
)


def _of_alert(alert: Alert) -> Panel:
    """An alert's value with its thresholds."""
    condition = alert.when
    label = {
        "dependency_up": "dependency",
        "circuit_breaker_state": "dependency",
        "reply_pool_state": "pool",
    }
    warned = alert.warning is not None and alert.warning.value == condition.value
    return Panel(
        alert.name.removeprefix("Holdfast"),
        condition.value,
        _unit(condition.value),
        label.get(series_of(condition.value)[0].name, ""),
        f"{alert.means} {alert.severity}: docs/guides/{alert.runbook}",
        alert.warning.threshold if alert.warning is not None and warned else None,
        condition.threshold if condition.compare in (">", ">=") else None,
    )


def _unit(value: Expression) -> str:
    if isinstance(value, Ratio):
        return "percentunit"
    seconds = isinstance(value, Quantile) or series_of(value)[0].name.endswith("_seconds")
    return "s" if seconds else "short"


_OF_ALERTS = [alert for alert in ALERTS if not isinstance(alert.when.value, Absent)]
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Tier 1: correctness",
        tuple(_of_alert(each) for each in _OF_ALERTS if each.severity is Severity.SEV1),
    ),
    ("Planes", PLANES),
    (
        "Tier 2: capacity and performance",
        tuple(_of_alert(each) for each in _OF_ALERTS if each.severity is not Severity.SEV1),
    ),
    ("Tier 3: operation", TIER_3),
    ("Work", WORK),
    ("Limits", LIMITS),
)


def on_nodes(value: Expression) -> Expression:
    """The same for the nodes that are chosen on the dashboard."""
    match value:
        case Series():
            return _chosen(value)
        case Increase(of=of, seconds=seconds):
            return Increase(_chosen(of), seconds)
        case Sum(of=of, without=without):
            inner = on_nodes(of)
            assert isinstance(inner, Series | Increase)
            return Sum(inner, without)
        case Quantile(quantile=quantile, of=of):
            return Quantile(quantile, Increase(_chosen(of.of), of.seconds))
        case Ratio(part=part, whole=whole):
            return Ratio(on_nodes(part), on_nodes(whole))
        case Plus(left=left, right=right):
            return Plus(on_nodes(left), on_nodes(right))
        case Absent(series=absent):
            return Absent(tuple(_chosen(each) for each in absent))


def _chosen(of: Series) -> Series:
    return Series(of.name, (*of.matches, ("instance", "=~", "$instance")))


def page() -> str:
    panels: list[dict[str, Any]] = []
    top = 0
    for title, listed in ROWS:
        panels.append(_row(title, top, len(panels)))
        top += 1
        for place, panel in enumerate(listed):
            left = place * WIDTH % COLUMNS
            panels.append(_panel(panel, left, top + place * WIDTH // COLUMNS * HEIGHT, len(panels)))
        top += -(-len(listed) * WIDTH // COLUMNS) * HEIGHT
    board = {
        "title": "Holdfast",
        "uid": "holdfast",
        "tags": ["holdfast"],
        "description": "Written by docs/generate.py; do not edit.",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": panels,
    }
    return json.dumps(board, indent=1, ensure_ascii=False) + "\n"


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    yield {
        "name": "instance",
        "label": "Node",
        "type": "query",
        "datasource": DATASOURCE,
        "query": "label_values(holdfast_gateway_connections_active, instance)",
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


def _row(title: str, top: int, number: int) -> dict[str, Any]:
    place = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
    return {"id": number + 1, "type": "row", "title": title, "gridPos": place, "panels": []}


def _panel(panel: Panel, left: int, top: int, number: int) -> dict[str, Any]:
    legend = f"{{{{instance}}}} {{{{{panel.legend}}}}}" if panel.legend else "{{instance}}"
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.warning is not None and panel.page is not None and panel.warning < panel.page:
        steps.append({"color": "yellow", "value": panel.warning})
    if panel.page is not None:
        steps.append({"color": "red", "value": panel.page})
    custom = {"thresholdsStyle": {"mode": "line" if len(steps) > 1 else "off"}}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": left, "y": top},
        "targets": [{"refId": "A", "expr": promql(on_nodes(panel.value)), "legendFormat": legend}],
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "custom": custom,
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [],
        },
    }
