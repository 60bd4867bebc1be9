"""Limits: who may do how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.telemetry.metrics import counter, gauge

_checks = counter(
    "limits_checks",
    "Checks answered, by what decided and what it said (exceeded: over a limit in shadow mode)",
    ("decided_by", "decision"),
)
_limits_batch = gauge("limits_batch_keys", "Keys in the last call to the counters")
_lease_stock = gauge("limits_lease_tokens", "Tokens leased from the counters and not yet spent")
_limits_nodes = gauge("limits_nodes", "Live nodes of this region, as last known")
_degraded_ratio = gauge(
    "limits_degraded_ratio", "Checks and heartbeats of the last 10 s that the shared counters did not answer ÷ all"
)
_redis_errors = counter(
    "limits_redis_errors", "What Redis did not do, by what it is used for and why", ("use", "reason")
)  # use: counters, notifications; reason: the closed set of drivers/redis.py
_staleness = gauge("limits_rule_staleness_seconds", "Since this node last knew that it had every rule [rule staleness]")
_cursor_lag = gauge(
    "limits_cursor_lag", "Changes that the last sync found and no doorbell had told of, or heard of and not read yet"
)
_rules_applied = counter("limits_rules_applied", "Newer rules put in place, by how they came", ("by",))
_admin_errors = counter(
    "admin_errors", "Failed admin calls, by operation and error [admin_errors_total]", ("operation", "error")
)  # error: db_connection_failed, version_conflict, commit_unknown, invalid, not_found


def limits_checked(tally: Mapping[str, Sequence[int]]) -> None:
    """How many checks were refused, allowed, and over a limit in shadow mode, by what decided, since the last call."""
    for decided_by, counts in tally.items():
        for decision, count in zip(("refused", "allowed", "exceeded"), counts, strict=True):
            if count:
                _checks.labels(decided_by, decision).inc(count)


def limits_state(batch_keys: int, lease_tokens: int, nodes: int, degraded_ratio: float) -> None:
    _limits_batch.set(batch_keys)
    _lease_stock.set(lease_tokens)
    _limits_nodes.set(nodes)
    _degraded_ratio.set(degraded_ratio)


def redis_failed(use: str, reason: str) -> None:
    """``use``: counters or notifications; ``reason``: one of ``drivers.redis.REASONS``."""
    _redis_errors.labels(use, reason).inc()


def rule_staleness(seconds: float, cursor_lag: int) -> None:
    _staleness.set(seconds)
    _cursor_lag.set(cursor_lag)


def rules_applied(by: str, count: int) -> None:
    """``by``: start, disk, event, sync or snapshot."""
    _rules_applied.labels(by).inc(count)


def admin_error(operation: str, error: str) -> None:
    _admin_errors.labels(operation, error).inc()
