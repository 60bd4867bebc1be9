"""docs/reference/metrics.md: every metric of ``telemetry.REGISTRY`` and its alerts.

Names, types, labels and texts come from the registry, alerts from ``telemetry.alerts``;
metrics that are not in TIER_1 or TIER_2 are tier 3.
"""

from __future__ import annotations

import re
from types import ModuleType

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from holdfast import telemetry
from holdfast.telemetry.alert import Alert, rules
from holdfast.telemetry.alerts import ALERTS
from holdfast.telemetry.expressions import Absent, series_of
from holdfast.telemetry.loop_values import LoopHistogram

_DOCUMENT_NAME = re.compile(r" ?\[[^\]]+\]")
"""A HELP text ends with the metric's name in a design document, if it has one there."""

TIERS = {
    1: "correctness: call somebody at once",
    2: "capacity and performance: alert if it lasts",
    3: "operation: for dashboards",
}

TIER_1 = (
    "durability_counter_corruption",
    "durability_duplicate_sequence",
    "durability_rollbacks_proven",
    "epochs_raised",
    "chats_halted",
    "dependency_up",
)
TIER_2 = (
    "gateway_slow_consumer_disconnects",
    "circuit_breaker_state",
    "durability_persist_latency_seconds",
    "durability_transaction_conflicts",
    "durability_key_races",
    "fanout_lag",
    "fanout_delivery_skipped",
    "log_losses",
    "sequence_gaps",
    "durability_idempotency_hits",
    "sequence_allocation_latency_seconds",
    "sequence_allocation_errors",
    "hot_chats",
    "fanout_dead_letters",
    "reply_queue_depth",
    "reply_pool_state",
    "reply_queue_timeouts",
    "reply_ends",
    "reply_not_resumable",
    "work_dead_letters",
    "work_oldest_job_age_seconds",
    "work_poison_candidates",
    "limits_rule_staleness_seconds",
    "admin_errors",
    "defects",
    "durability_store_throttles",
    "durability_overdue_writes",
    "durability_overdue_lanes",
    "store_reopened",
    "gateway_connection_timeouts",
    "registry_errors",
    "gateway_instances_healthy",
    "fanout_retries",
    "fanout_dlq_depth",
    "fanout_consumer_restarts",
    "fanout_delivery_lag_seconds",
    "ingest_sends_turned_away",
    "state_disk_free_bytes",
    "work_jobs_dead",
    "work_blocked_streams",
    "work_breakers_open",
    "work_stuck_handlers",
    "webhooks_endpoints_failing",
    "webhooks_endpoints_disabled",
    "access_jwks_fetches",
)

INTRODUCTION = """# Metrics

Written by `docs/generate.py` from `holdfast.telemetry`; do not edit.

`GET /metrics` in Prometheus' text format, with an admin key of scope `status:read` (see
[access](../guides/access.md#metrics-and-health)). Counters end in `_total`, histograms
are in seconds, a ratio is two counters, an availability is
`holdfast_dependency_up{dependency}`, a breaker is a set of states. Labels are closed
sets: never a user, a chat or a token. What an alert means and when it fires is on the
page [alerts](alerts.md).

A name in brackets at the end of a HELP text is the metric's name in a design document;
the pages [messaging](../project/design-coverage-messaging.md) and
[limits](../project/design-coverage-limits.md) have the mapping.

## Objectives

| what | objective | measured by |
|---|---|---|
| availability of persistence | 99.9 % over 30 days | `holdfast_ingest_sends_total`: \
persisted, deduplicated and refused (the sender's own mistake), of all |
| acknowledged messages lost | 0 | the proofs in RESULTS.md; in operation \
`holdfast_durability_rollbacks_proven_total` |
| persist p99 | < 500 ms over 1 h | `holdfast_durability_persist_latency_seconds` |
| delivery p99 | < 2 s over 1 h | `holdfast_fanout_delivery_lag_seconds` |
| forced resyncs | < 1 % of connections an hour, planned closes apart | \
`holdfast_client_resync_forced_total` / `holdfast_gateway_connection_hours_total` |
| AI replies that end well | ≥ 95 % over 5 min, cancelled ones apart | \
`holdfast_reply_ends_total`: `done`, of all |
| AI replies that time out in the queue | < 5 % of those that queued | \
`holdfast_reply_queue_timeouts_total` / `holdfast_reply_admissions_total{layer="queue"}` |
| wait for an AI reply's turn, p99 | < 3 s over 1 h | `holdfast_reply_queue_wait_seconds` |
| transient failures healed | 99.9 % in 30 s | `holdfast_dependency_failures_healed_total` / \
`holdfast_dependency_failures_total` |

`holdfast status --slo` measures those of messaging over a node's own last hour, and
`deploy/prometheus/rules.yml` records them: `holdfast:availability:1h`,
`holdfast:messages_lost:1h`, `holdfast:persist_p99:1h`, `holdfast:delivery_p99:1h`,
`holdfast:forced_resyncs:1h` and `holdfast:failures_healed:1h`.
"""


def page() -> str:
    metrics = {
        metric.name.removeprefix("holdfast_"): metric for metric in telemetry.REGISTRY.collect()
    }
    rest = [name for name in metrics if name not in (*TIER_1, *TIER_2)]
    lines = [INTRODUCTION]
    for (tier, meaning), names in zip(TIERS.items(), (TIER_1, TIER_2, rest), strict=True):
        lines += [f"## Tier {tier}: {meaning}", "", "| metric | what | alerts |", "|---|---|---|"]
        lines += [_row(metrics[name], _alerts_on(name)) for name in names]
        lines.append("")
    return "\n".join(lines)


def _alerts_on(name: str) -> list[Alert]:
    """The alerts that read a metric."""
    sampled = {name + suffix for suffix in ("", "_total", "_bucket", "_count")}
    return [
        alert
        for alert in ALERTS
        if any(
            series.name in sampled
            for rule in rules([alert])
            if not isinstance(rule.condition.value, Absent)
            for series in series_of(rule.condition.value)
        )
    ]


def _labels() -> dict[str, tuple[str, ...]]:
    """The labels of each metric; a registry has them only with samples."""
    parts = [part for part in vars(telemetry).values() if isinstance(part, ModuleType)]
    made = [
        value
        for part in parts
        for value in vars(part).values()
        if isinstance(value, MetricWrapperBase | LoopHistogram)
    ]
    return {metric._name: tuple(metric._labelnames) for metric in made}


def _row(metric: Metric, alerts: list[Alert]) -> str:
    name = metric.name + ("_total" if metric.type == "counter" else "")
    labels = ", ".join(_labels()[metric.name])
    shown = f"`{name}`" + (f" by {labels}" if labels else "") + f" ({metric.type})"
    text = _DOCUMENT_NAME.sub("", metric.documentation)
    links = [f"[{alert.name}](alerts.md#{alert.name.lower()})" for alert in alerts]
    cells = (shown, text, ", ".join(links) or "–")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
