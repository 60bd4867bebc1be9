"""docs/reference/metrics.md: every metric of ``telemetry.REGISTRY`` and its alert.

Names, types, labels and texts come from the registry; tiers 1 and 2 and their alerts
stand in CATALOGUE, everything else is tier 3. ``page`` refuses to be written when an
entry has no metric.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import NamedTuple

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from holdfast import telemetry

_DOCUMENT_NAME = re.compile(r" ?\[[^\]]+\]")
"""A HELP text ends with the metric's name in a design document, if it has one there."""


class Alert(NamedTuple):
    """``page``: when somebody is called; ``warning``: when it is only yellow."""

    page: str
    warning: str = ""


TIERS = {
    1: "correctness: call somebody at once",
    2: "capacity and performance: alert if it lasts",
    3: "operation: for dashboards",
}

NO_ALERT = Alert("")
CATALOGUE: dict[str, tuple[int, Alert]] = {
    "durability_counter_corruption": (
        1,
        Alert(
            "`increase(…_total[1m]) > 0`: SEV-1, "
            "[runbook](../guides/runbooks/counter-corruption.md)"
        ),
    ),
    "durability_duplicate_sequence": (
        1,
        Alert(
            "`increase(…_total[1m]) > 0`: SEV-1, "
            "[runbook](../guides/runbooks/counter-corruption.md)"
        ),
    ),
    "durability_rollbacks_proven": (
        1,
        Alert(
            "`increase(…_total[1m]) > 0`: SEV-1: acknowledged messages were lost under "
            "the server (a restored disk)"
        ),
    ),
    "dependency_up": (
        1,
        Alert(
            '`…{dependency="store"} == 0` for 10 s: SEV-1; `…{dependency="eventlog"} == '
            '0` for 30 s: SEV-2; `…{dependency="replies"} == 0` for 10 s: SEV-2, '
            "[runbook](../guides/runbooks/replies-redis-down.md)"
        ),
    ),
    "gateway_slow_consumer_disconnects": (
        2,
        Alert(
            (
                "`rate(…_total[5m]) * 60 > 50`: SEV-3, "
                "[runbook](../guides/runbooks/slow-consumers.md)"
            ),
            "10 to 50 a minute",
        ),
    ),
    "circuit_breaker_state": (
        2,
        Alert(
            (
                '`…{state="open"} == 1` for 1 min: SEV-2, '
                "[runbook](../guides/runbooks/breaker-open.md), of a provider "
                "[runbook](../guides/runbooks/reply-provider-down.md)"
            ),
            "any that is open",
        ),
    ),
    "durability_persist_latency_seconds": (
        2,
        Alert("`histogram_quantile(0.99, rate(…_bucket[5m])) > 0.5`: SEV-3", "0.2 to 0.5 s"),
    ),
    "durability_transaction_conflicts": (
        2,
        Alert(
            ("`rate(…_total[5m]) / rate(holdfast_ingest_group_sends_count[5m]) > 0.05`: SEV-3"),
            "1 to 5 %",
        ),
    ),
    "fanout_lag": (
        2,
        Alert(
            "`… > 10000` for 5 min: SEV-3, [runbook](../guides/runbooks/fanout-lag.md)",
            "1,000 to 10,000",
        ),
    ),
    "fanout_delivery_skipped": (
        2,
        Alert(
            (
                '`s / (s + h) > 0.2` with `s = sum(rate(…_total{reason!="offline"}[5m]))`, `h'
                " = rate(holdfast_fanout_messages_handed_over_total[5m])`: SEV-3 (that nobody"
                " is online is no failure)"
            ),
            "5 to 20 %",
        ),
    ),
    "log_losses": (
        2,
        Alert("`increase(…_total[5m]) > 0`: SEV-2, [runbook](../guides/runbooks/fanout-lag.md)"),
    ),
    "sequence_gaps": (
        2,
        Alert(
            (
                "`rate(…_total[15m]) / "
                "rate(holdfast_durability_messages_persisted_total[15m]) > 0.05`"
            ),
            "any: sequences are dense, only a repair leaves one out",
        ),
    ),
    "durability_idempotency_hits": (
        2,
        Alert(
            "`rate(…_total[5m]) / sum(rate(holdfast_durability_outcomes_total[5m])) > "
            "0.1`: a retry storm or a client's defect"
        ),
    ),
    "sequence_allocation_latency_seconds": (
        2,
        Alert("`histogram_quantile(0.99, rate(…_bucket[5m])) > 0.05`"),
    ),
    "sequence_allocation_errors": (
        2,
        Alert("`rate(…_total[5m]) / sum(rate(holdfast_durability_outcomes_total[5m])) > 0.001`"),
    ),
    "hot_chats": (2, Alert("", "any; `holdfast chat ls --hot` lists them")),
    "fanout_dead_letters": (
        2,
        Alert(
            (
                "`increase(…_total[1h]) > 100`; the server's log says it too "
                "(`fanout.dlq.alert_threshold_per_hour`)"
            ),
            "any",
        ),
    ),
    "reply_queue_depth": (
        2,
        Alert(
            (
                "`sum(…) > 8000` (80 % of `waiting_max`) for 1 min: SEV-3, "
                "[runbook](../guides/runbooks/replies-queue-full.md)"
            ),
            "from 50 %",
        ),
    ),
    "reply_pool_state": (
        2,
        Alert(
            (
                '`…{state="exhausted"} == 1` for 5 min: SEV-3, '
                "[runbook](../guides/runbooks/replies-queue-full.md)"
            ),
            "critical: above 90 %",
        ),
    ),
    "reply_queue_timeouts": (
        2,
        Alert(
            (
                "`increase(…_total[5m]) / "
                'increase(holdfast_reply_admissions_total{layer="queue"}[5m]) > 0.05`: SEV-3, '
                "[runbook](../guides/runbooks/replies-queue-timeouts.md)"
            ),
            "1 to 5 %",
        ),
    ),
    "reply_ends": (
        2,
        Alert(
            (
                '`d / a < 0.95` with `d = sum(rate(…_total{end="done"}[5m]))`, '
                '`a = sum(rate(…_total{end!="cancelled"}[5m]))`: SEV-2, '
                "[runbook](../guides/runbooks/reply-provider-down.md)"
            ),
            "below 98 %",
        ),
    ),
    "reply_not_resumable": (
        2,
        Alert("", "any; [runbook](../guides/runbooks/replies-not-resumable.md)"),
    ),
    "work_dead_letters": (2, Alert("more than 100 new ones an hour", "any")),
    "work_oldest_job_age_seconds": (2, Alert("`… > 30`")),
    "work_poison_candidates": (2, Alert("`… > 0`")),
    "limits_rule_staleness_seconds": (2, Alert("`… > 10`")),
    "admin_errors": (2, Alert('`increase(…_total{error="db_connection_failed"}[1m]) > 5`')),
    "defects": (
        2,
        Alert(
            "`increase(…_total[5m]) > 0`: a defect of Holdfast; the log has its cause, "
            "please report it"
        ),
    ),
    "durability_store_throttles": (2, NO_ALERT),
    "durability_overdue_writes": (2, NO_ALERT),
    "durability_overdue_lanes": (2, Alert("", "`… > 0` for a minute")),
    "store_reopened": (2, Alert("", "any: look at the disk")),
    "gateway_connection_timeouts": (2, NO_ALERT),
    "registry_errors": (2, NO_ALERT),
    "gateway_instances_healthy": (2, NO_ALERT),
    "fanout_retries": (2, NO_ALERT),
    "fanout_dlq_depth": (2, NO_ALERT),
    "fanout_consumer_restarts": (2, Alert("", "any")),
    "fanout_delivery_lag_seconds": (
        2,
        Alert("`histogram_quantile(0.99, rate(…_bucket[1h])) > 2` breaks the objective"),
    ),
}

INTRODUCTION = """# Metrics

Written by `docs/generate.py` from `holdfast.telemetry`; do not edit.

`GET /metrics` in Prometheus' text format, with an admin key of scope `status:read` (see
[access](../guides/access.md#metrics-and-health)). Counters end in `_total`, histograms
are in seconds, a ratio is two counters, an availability is
`holdfast_dependency_up{dependency}`, a breaker is a set of states. Labels are closed
sets: never a user, a chat or a token. In an alert, `…` stands for the metric's name. A
warning is yellow and pages nobody.

A name in brackets at the end of a HELP text is the metric's name in a design document;
the pages [messaging](../project/design-coverage-messaging.md) and
[limits](../project/design-coverage-limits.md) have the mapping.

## Objectives

| what | objective | measured by |
|---|---|---|
| availability of persistence | 99.9 % over 30 days | `holdfast_durability_outcomes_total`: \
persisted, deduplicated, refused and halted, of all |
| acknowledged messages lost | 0 | the proofs in RESULTS.md; in operation \
`holdfast_durability_rollbacks_proven_total` |
| persist p99 | < 500 ms over 1 h | `holdfast_durability_persist_latency_seconds` |
| delivery p99 | < 2 s over 1 h | `holdfast_fanout_delivery_lag_seconds` |
| forced resyncs | < 1 % of connections an hour, planned closes apart | \
`holdfast_client_resync_forced_total` / `holdfast_gateway_connections_active` |
| AI replies that end well | ≥ 95 % over 5 min, cancelled ones apart | \
`holdfast_reply_ends_total`: `done`, of all |
| AI replies that time out in the queue | < 5 % of those that queued | \
`holdfast_reply_queue_timeouts_total` / `holdfast_reply_admissions_total{layer="queue"}` |
| wait for an AI reply's turn, p99 | < 3 s over 1 h | `holdfast_reply_queue_wait_seconds` |
| transient failures healed | 99.9 % in 30 s | `holdfast_circuit_breaker_state`, \
`holdfast_dependency_up` |
"""


def page() -> str:
    metrics = {
        metric.name.removeprefix("holdfast_"): metric for metric in telemetry.REGISTRY.collect()
    }
    assert set(CATALOGUE) <= set(metrics), (
        f"alerts without a metric: {set(CATALOGUE) - set(metrics)}"
    )
    tiers = {**CATALOGUE, **{name: (3, NO_ALERT) for name in metrics if name not in CATALOGUE}}
    lines = [INTRODUCTION]
    for tier, meaning in TIERS.items():
        lines += [
            f"## Tier {tier}: {meaning}",
            "",
            "| metric | what | alert | warning |",
            "|---|---|---|---|",
        ]
        lines += [
            _row(metrics[name], alert) for name, (where, alert) in tiers.items() if where == tier
        ]
        lines.append("")
    return "\n".join(lines)


def _labels() -> dict[str, tuple[str, ...]]:
    """The labels of each metric; a registry has them only with samples."""
    parts = [part for part in vars(telemetry).values() if isinstance(part, ModuleType)]
    made = [
        value
        for part in parts
        for value in vars(part).values()
        if isinstance(value, MetricWrapperBase)
    ]
    return {metric._name: tuple(metric._labelnames) for metric in made}


def _row(metric: Metric, alert: Alert) -> str:
    name = metric.name + ("_total" if metric.type == "counter" else "")
    labels = ", ".join(_labels()[metric.name])
    shown = f"`{name}`" + (f" by {labels}" if labels else "") + f" ({metric.type})"
    text = _DOCUMENT_NAME.sub("", metric.documentation)
    cells = (shown, text, alert.page or "–", alert.warning or "–")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
