"""The registry, how a metric is made, and the metrics beside the message path.

Every name begins with ``holdfast_``; histograms are in seconds. In this order: the
process and its disk, REST, access (revocations, keys of token issuers), limits, work,
webhooks. ``ingest`` and ``messaging`` have the metrics of the message path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from holdfast.telemetry.logs import log
from holdfast.telemetry.marks import mark
from holdfast.telemetry.samples import SampleReader

REGISTRY = CollectorRegistry()
samples = SampleReader(REGISTRY).read
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def counter(
    name: str,
    help_text: str,
    labels: tuple[str, ...] = (),
    known: Iterable[str | tuple[str, ...]] = (),
) -> Counter:
    """``known``: values of the labels that are shown from the start, at 0. A rise from
    nothing to 1 is invisible to Prometheus, and an alert would miss the first event.
    """
    made = Counter(f"holdfast_{name}", help_text, labels, registry=REGISTRY)
    for values in known:
        made.labels(*([values] if isinstance(values, str) else values))
    return made


def gauge(name: str, help_text: str, labels: tuple[str, ...] = ()) -> Gauge:
    return Gauge(f"holdfast_{name}", help_text, labels, registry=REGISTRY)


def histogram(
    name: str,
    help_text: str,
    labels: tuple[str, ...] = (),
    buckets: Sequence[float] = LATENCY_BUCKETS,
) -> Histogram:
    return Histogram(f"holdfast_{name}", help_text, labels, registry=REGISTRY, buckets=buckets)


_defects = counter(
    "defects",
    "Errors of our own, by part; each is in the log",
    ("part",),
    known=(
        *("answer", "bus", "fanout", "gateway", "ingest", "limits", "replies"),
        *("store", "streaming", "watermarks", "work"),
    ),
)
_settings_changed = gauge(
    "setting_changed", "1 for every setting that is not at its default", ("path",)
)


def part_started(part: str) -> None:
    """A background task runs, whose defects will be counted."""
    _defects.labels(part)


def defect(part: str, error: BaseException) -> None:
    """An error of our own; the caller has limited the damage."""
    _defects.labels(part).inc()
    log.error("node.defect_found", part=part, exc_info=error)


def settings_changed(paths: Iterable[str]) -> None:
    """Labels are paths of settings, a closed set. Values may be private: left out."""
    _settings_changed.clear()
    for path in paths:
        _settings_changed.labels(path).set(1)


_alerts_firing = gauge("alerts_firing", "Alerts that fire here, by severity", ("severity",))
_alert_notices = counter(
    "alert_notices",
    "Notices of alerts to sinks, by kind of sink and how they ended",
    ("kind", "outcome"),
    known=[(kind, end) for kind in ("log", "webhook", "command") for end in ("ok", "failed")],
)


def alerts_firing(by_severity: Mapping[str, int]) -> None:
    for severity, count in by_severity.items():
        _alerts_firing.labels(severity).set(count)


def alert_notice(kind: str, *, failed: bool) -> None:
    _alert_notices.labels(kind, "failed" if failed else "ok").inc()


_disk = gauge("state_disk_bytes", "Size of the disk of the state directory")
_disk_free = gauge("state_disk_free_bytes", "What is free for this process on that disk")


def disk(size_bytes: int, free_bytes: int) -> None:
    _disk.set(size_bytes)
    _disk_free.set(free_bytes)


_requests = counter(
    "api_requests", "REST requests answered, by endpoint and status", ("endpoint", "status")
)
_request_seconds = histogram(
    "api_request_seconds", "From a REST request to its answer", ("endpoint",)
)


def request_answered(endpoint: str, status: int, seconds: float | None) -> None:
    """``endpoint`` is a name in the table of endpoints, or "none".

    ``seconds`` is None for a streamed answer: its length says nothing about this node.
    """
    _answered(endpoint, status).inc()
    if seconds is not None:
        _seconds(endpoint).observe(seconds)


@cache
def _answered(endpoint: str, status: int) -> Counter:
    """Cached: finding a metric by its labels takes longer than counting."""
    return _requests.labels(endpoint, str(status))


@cache
def _seconds(endpoint: str) -> Histogram:
    return _request_seconds.labels(endpoint)


_revocations = gauge(
    "access_revocations", "Revocations, bans and mutes of tenants that this node holds"
)
_refused = counter(
    "access_revocation_refusals",
    "Tokens refused and sockets closed because of a revocation, by its kind (token, user, device,"
    " ban, tenant)",
    ("kind",),
)
_jwks_fetches = counter(
    "access_jwks_fetches",
    "Fetches of the keys of token issuers, by how they ended; ok is the only good one",
    ("outcome",),
    known=(*("ok", "invalid", "no_usable_key", "redirect", "status", "too_large", "unreachable"),),
)


def revocations_held(entries: int) -> None:
    _revocations.set(entries)


def revocation_refused(kind: str) -> None:
    """``kind`` is one of ``access.revocations.contract.RevocationKind``."""
    _refused.labels(kind).inc()


def jwks_fetched(issuer: str, keys: int, *, new: bool) -> None:
    """``new``: the keys changed, or this is the first good fetch after failures."""
    _jwks_fetches.labels("ok").inc()
    if new:
        log.info("access.jwks_fetched", issuer=issuer, keys=keys)


def jwks_failed(issuer: str, reason: str, why: str, keys: int, *, new: bool) -> None:
    """``new``: the reason changed; a repeated reason is counted, not logged.

    ``keys``: how many known keys stay in use.
    """
    _jwks_fetches.labels(reason).inc()
    if new:
        log.warning(
            "access.jwks_fetch_failed", issuer=issuer, reason=reason, detail=why, keys_known=keys
        )


def kept_keys_unreadable(file: str, why: str) -> None:
    log.warning("access.kept_keys_unreadable", file=file, detail=why)


def kept_keys_unwritten(file: str, why: str) -> None:
    log.warning("access.kept_keys_unwritten", file=file, detail=why)


_checks = counter(
    "limits_checks",
    "Checks answered, by what decided and what it said (exceeded: over a limit in shadow mode)",
    ("decided_by", "decision"),
)
_limits_batch = gauge("limits_batch_keys", "Keys in the last call to the counters")
_lease_stock = gauge("limits_lease_tokens", "Tokens leased from the counters and not yet spent")
_limits_nodes = gauge("limits_nodes", "Live nodes of this region, as last known")
_degraded_ratio = gauge(
    "limits_degraded_ratio",
    "Checks and heartbeats of the last 10 s that the shared counters did not answer ÷ all",
)
_redis_errors = counter(
    "limits_redis_errors",
    "What Redis did not do, by what it is used for and why",
    ("use", "reason"),
)  # use: counters, notifications, replies; reason: the closed set of drivers/redis.py
_staleness = gauge(
    "limits_rule_staleness_seconds",
    "Since this node last knew that it had every rule [rule staleness]",
)
_cursor_lag = gauge(
    "limits_cursor_lag",
    "Changes that the last sync found unannounced, or that were announced and are not read yet",
)
_rules_applied = counter(
    "limits_rules_applied", "Newer rules put in place, by how they came", ("by",)
)
_ADMIN_OPERATIONS = (
    *("create_rule", "update_rule", "delete_rule", "rollback_rule", "import_rules"),
    *("get_rule", "list_rules", "rule_history", "rule_changes"),
)
_admin_errors = counter(
    "admin_errors",
    "Failed admin calls, by operation and error [admin_errors_total]",
    ("operation", "error"),
    known=[(operation, "db_connection_failed") for operation in _ADMIN_OPERATIONS],
)  # error: db_connection_failed, version_conflict, commit_unknown, invalid, not_found


def limits_checked(tally: Mapping[str, Sequence[int]]) -> None:
    """Checks since the last call, by what decided: (refused, allowed, exceeded).

    *Exceeded* is over a limit in shadow mode.
    """
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
    """``use``: counters, notifications, replies (their pool and their log), registry or
    bus; ``reason``: of ``drivers.redis.REASONS``.
    """
    _redis_errors.labels(use, reason).inc()


def rule_staleness(seconds: float, cursor_lag: int) -> None:
    _staleness.set(seconds)
    _cursor_lag.set(cursor_lag)


def rules_applied(by: str, count: int) -> None:
    """``by``: start, disk, event, sync or snapshot."""
    _rules_applied.labels(by).inc(count)


def admin_error(operation: str, error: str) -> None:
    _admin_errors.labels(operation, error).inc()


_jobs_completed = counter("work_jobs_completed", "Jobs done, as their worker reported them")
_jobs_failed = counter(
    "work_jobs_failed", "Failed runs of jobs, by reason [failure_reason]", ("reason",)
)
_jobs_dead = counter(
    "work_jobs_dead",
    "Jobs that became dead letters, as their worker reported them, by reason",
    ("reason",),
    known=(
        *("transport_unavailable", "handler_exception", "validation_failure", "timeout_exceeded"),
        *("serialization_error", "dependency_failure", "poison_message", "throttled", "unknown"),
    ),
)
_lease_lost = counter("work_leases_lost", "Times this process was declared dead while it lived")
_reports_refused = counter(
    "work_reports_refused", "Reports of jobs that held a value the job store cannot take"
)
_runners_replaced = counter(
    "work_runners_replaced", "Runners that ended by what a handler did, and were replaced"
)
_restarted = counter(
    "work_workers_restarted", "Workers whose task was cancelled by the program, and started again"
)
_exhausted = counter(
    "work_runners_exhausted", "Times a worker lost all its runners to handlers that never end"
)
_stuck = gauge(
    "work_stuck_handlers", "Handlers that did not end when they were cancelled and still run"
)
_jobs = gauge("work_jobs", "Jobs that are not done, by state [jobs by status]", ("state",))
_jobs_by_reason = gauge(
    "work_jobs_waiting", "Failed jobs that wait, by reason [failure_reason]", ("reason",)
)
_jobs_by_attempt = gauge(
    "work_jobs_by_attempt",
    "Failed jobs that wait, by attempt; 10 stands for more too [attempts]",
    ("attempt",),
)
_next_due = gauge(
    "work_next_due_timestamp_seconds",
    "When the next waiting job is due; 0 if none waits [next_retry]",
)
_last_due = gauge(
    "work_last_due_timestamp_seconds",
    "When the last waiting job is due; 0 if none waits [last_retry]",
)
_work_dead = gauge("work_dead_letters", "Dead letters [dead_letters]")
_poison = gauge(
    "work_poison_candidates", "Failed jobs with ten attempts or more [poison_candidates]"
)
_scheduled = gauge("work_scheduled_jobs", "Jobs that wait for their time [scheduled_count]")
_oldest_job = gauge(
    "work_oldest_job_age_seconds",
    "How long the oldest job waits that should run, those of disabled endpoints left out"
    " [outbox oldest age]",
)
_blocked_streams = gauge("work_blocked_streams", "Streams that wait behind a failed head")
_work_breakers = gauge("work_breakers_open", "Job types whose breaker is open")


def work_completed(count: int) -> None:
    _jobs_completed.inc(count)


def work_failed(reason: str, *, is_dead: bool) -> None:
    """A run failed; ``is_dead``: the job became a dead letter by it."""
    _jobs_failed.labels(reason).inc()
    if is_dead:
        _jobs_dead.labels(reason).inc()


def work_lease_lost() -> None:
    _lease_lost.inc()
    mark("a worker lost its lease")


def work_report_refused() -> None:
    _reports_refused.inc()


def work_runner_replaced() -> None:
    _runners_replaced.inc()


def work_restarted() -> None:
    _restarted.inc()


def work_runners_exhausted() -> None:
    _exhausted.inc()


def work_stuck(count: int) -> None:
    _stuck.set(count)


def work_completion_refused() -> None:
    mark("a zombie's completion was refused")


def work_probed() -> None:
    mark("a job type was probed: half_open")


def work_known_already() -> None:
    mark("a message from outside was known already")


def work_counts(
    by_state: Mapping[str, int], by_reason: Mapping[str, int], open_breakers: int
) -> None:
    """Counts over the whole job store, as last read."""
    _jobs.clear()
    _jobs_by_reason.clear()
    for state, count in by_state.items():
        _jobs.labels(state).set(count)
    for reason, count in by_reason.items():
        _jobs_by_reason.labels(reason).set(count)
    _work_breakers.set(open_breakers)


def work_schedule(
    by_attempt: Mapping[int, int], next_due_at: float | None, last_due_at: float | None
) -> None:
    _jobs_by_attempt.clear()
    for attempt, count in by_attempt.items():
        _jobs_by_attempt.labels(str(min(attempt, 10))).inc(count)
    _next_due.set(next_due_at or 0.0)
    _last_due.set(last_due_at or 0.0)


def work_totals(
    dead: int, poison: int, scheduled: int, oldest_age_seconds: float, blocked_streams: int
) -> None:
    _work_dead.set(dead)
    _poison.set(poison)
    _scheduled.set(scheduled)
    _oldest_job.set(oldest_age_seconds)
    _blocked_streams.set(blocked_streams)


_webhooks_disabled = gauge("webhooks_endpoints_disabled", "Endpoints of webhooks that are disabled")
_webhooks_failing = gauge(
    "webhooks_endpoints_failing", "Endpoints of webhooks whose last delivery from here failed"
)
_webhooks_parked = gauge("webhooks_jobs_parked", "Jobs that wait for disabled endpoints")
_webhooks_expired = counter(
    "webhooks_jobs_expired", "Parked jobs that became dead letters: too many, or too old"
)


def webhooks_failing(endpoints: int) -> None:
    _webhooks_failing.set(endpoints)


def webhooks_parked(endpoints: int, jobs: int) -> None:
    _webhooks_disabled.set(endpoints)
    _webhooks_parked.set(jobs)


def webhooks_expired(count: int) -> None:
    _webhooks_expired.inc(count)
