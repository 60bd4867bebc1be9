"""The metrics and named events we emit, one function each; nothing else in Holdfast names a metric.

Names are the seeds' dotted names made Prometheus-like; HELP texts carry the dotted name in brackets, and
``docs/reference/metrics.md`` is generated from here. Labels are closed sets: never a user, a chat or a token.
Histograms are in seconds.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, TextIO

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

log: structlog.stdlib.BoundLogger = structlog.get_logger("holdfast")


def counter(name: str, help_text: str, labels: tuple[str, ...] = ()) -> Counter:
    return Counter(f"holdfast_{name}", help_text, labels, registry=REGISTRY)


def gauge(name: str, help_text: str, labels: tuple[str, ...] = ()) -> Gauge:
    return Gauge(f"holdfast_{name}", help_text, labels, registry=REGISTRY)


def histogram(name: str, help_text: str, labels: tuple[str, ...] = ()) -> Histogram:
    return Histogram(f"holdfast_{name}", help_text, labels, registry=REGISTRY, buckets=LATENCY_BUCKETS)


# --- proof: the rare moments that tests must have met -----------------------------------------------------

# The gateway.

_connections = gauge("gateway_connections_active", "Open connections [gateway.connections.active]")
_connected = counter("gateway_connections", "Connections opened [gateway.connections.rate]")
_closed = counter("gateway_closed", "Connections closed by the server, by reason", ("reason",))
_lost = counter("gateway_connections_lost", "Connections that ended without a closing of ours")
_timeouts = counter("gateway_connection_timeouts", "Connections closed for silence [gateway.connection.timeout]")
_slow_disconnects = counter(
    "gateway_slow_consumer_disconnects", "Slow consumers closed [gateway.slow_consumer.disconnects]"
)
_forced_resyncs = counter(
    "client_resync_forced",
    "Closes and resyncs that make a client pull, planned closes apart [client.resync.forced_rate]",
)
_signs = counter("gateway_signs", "What sessions noticed, by sign", ("sign",))
_refused_frames = counter("gateway_frames_refused", "Frames that could not be decoded")
_refused_handshakes = counter("gateway_handshakes_refused", "Handshakes refused, by status", ("status",))
_outbound = gauge("gateway_outbound_buffer_bytes", "Bytes that wait in all outbound buffers")
_defects = counter("defects", "Errors of our own, by part; each is in the log", ("part",))
_settings_changed = gauge("setting_changed", "1 for every setting that is not at its default", ("path",))

_FORCED_CLOSES = frozenset({"slow_consumer", "memory_pressure", "state_diverged", "overloaded"})
_FORCED_PULLS = frozenset({"delivery_skipped", "acks_stale"})


def connection_opened(active: int) -> None:
    _connected.inc()
    _connections.set(active)


def connection_ended(active: int) -> None:
    _connections.set(active)


def connection_closed(reason: str) -> None:
    """The server closes a connection."""
    sometimes(f"a connection was closed: {reason}")
    _closed.labels(reason).inc()
    if reason == "slow_consumer":
        _slow_disconnects.inc()
    elif reason == "idle_timeout":
        _timeouts.inc()
    if reason in _FORCED_CLOSES:
        _forced_resyncs.inc()


def connection_lost() -> None:
    """The client or the network ended it."""
    _lost.inc()


def session_noticed(sign: str) -> None:
    sometimes(f"a session noticed: {sign}")
    _signs.labels(sign).inc()
    if sign in _FORCED_PULLS:
        _forced_resyncs.inc()


def frame_refused() -> None:
    _refused_frames.inc()


def handshake_refused(status: int) -> None:
    _refused_handshakes.labels(str(status)).inc()


def outbound_buffers(waiting_bytes: int) -> None:
    _outbound.set(waiting_bytes)


def defect(part: str, error: BaseException) -> None:
    """Something that must not happen did; the caller has limited the damage."""
    _defects.labels(part).inc()
    log.error("defect", part=part, exc_info=error)


def settings_changed(paths: Iterable[str]) -> None:
    """Labels are paths of settings, which are a closed set; values may be private and are not told."""
    _settings_changed.clear()
    for path in paths:
        _settings_changed.labels(path).set(1)


def heads_unread(error: Exception) -> None:
    """Heads could not be asked for; the next heartbeat interval asks again."""
    log.warning("heads unread", error=str(error))


_reached: set[str] | None = None


def sometimes(name: str) -> None:
    """Mark a rare moment. It costs one comparison unless a test collects the marks."""
    if _reached is not None:
        _reached.add(name)


def collect_sometimes(into: set[str] | None) -> None:
    """Collect marks into this set from now on; None stops."""
    global _reached
    _reached = into


# --- ingest: what becomes of sends ------------------------------------------------------------------------

_waiting = gauge("ingest_sends_waiting", "Sends that wait for their group")
_turned_away = counter(
    "ingest_sends_turned_away", "Sends refused before anything was tried, by reason", ("reason",)
)  # reason: total, chat, bytes, age, deadline, follower, stopping
_group_sends = Histogram(
    "holdfast_ingest_group_sends",
    "Sends committed together",
    registry=REGISTRY,
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
)
_persist_latency = histogram(
    "durability_persist_latency_seconds",
    "From admission to answer, of the longest-waiting send of each group [durability.persist.latency_p99]",
)
_persisted = counter("durability_messages_persisted", "Messages newly committed [durability.messages.persisted_rate]")
_outcomes = counter("durability_outcomes", "Sends answered by the durability plane, by outcome", ("outcome",))
_idempotency_hits = counter(
    "durability_idempotency_hits",
    "Sends answered by an earlier message of the same key [durability.idempotency.hit_rate] [idempotency_hit_rate]",
)
_allocation_latency = histogram(
    "sequence_allocation_latency_seconds",
    "The store's commit of a group, in which its sequences are allocated [sequence_allocation_latency_p99]",
)
_allocation_errors = counter(
    "sequence_allocation_errors",
    "Sends for which the store could not allocate a sequence [sequence_allocation_errors]",
)
_gaps = counter(
    "sequence_gaps", "Sequences missing between two neighbours of a chat in the event log [sequence_gap_rate]"
)
_conflicts = counter(
    "durability_transaction_conflicts",
    "Commits that met another writer [durability.transaction.conflict_rate] [transaction_conflict_rate]",
)
_throttled = counter(
    "durability_store_throttles", "Sends the store put off for its quota [durability.dynamodb.throttle_count]"
)
_hot_chats = gauge("hot_chats", "Chats above 100 messages in the last full minute [messages_per_chat_per_minute]")
_overdue = counter("durability_overdue_writes", "Writes that ended after their deadline, by how", ("ended",))
_marks = counter("durability_watermarks", "Watermarks by what became of them", ("outcome",))  # stored, failed, dropped
_rollbacks = counter(
    "durability_rollbacks_proven", "Cursors beyond the head in the same epoch: the store lost messages, SEV-1"
)
_reads = counter("history_reads", "Reads for sessions and REST, by outcome", ("outcome",))
_read_latency = histogram("history_read_latency_seconds", "Reads for sessions and REST")

_dependency_up = gauge(
    "dependency_up",
    "Whether the last word of a dependency was good "
    "[durability.dynamodb.available] [durability.kafka.available] [gateway.redis.available]",
    ("dependency",),
)
_breaker = gauge(
    "circuit_breaker_state", "1 for the state a breaker is in [gateway.circuit_breaker.open]", ("dependency", "state")
)


def sends_waiting(count: int) -> None:
    _waiting.set(count)


def send_turned_away(reason: str) -> None:
    sometimes(f"a send was turned away: {reason}")
    _turned_away.labels(reason).inc()


def group_persisted(sends: int, oldest_seconds: float) -> None:
    _group_sends.observe(sends)
    _persist_latency.observe(oldest_seconds)


def sends_answered(outcome: str, count: int) -> None:
    """``outcome``: persisted, deduplicated, refused, throttled, deferred, halted or unknown."""
    sometimes(f"sends were answered: {outcome}")
    _outcomes.labels(outcome).inc(count)
    if outcome == "persisted":
        _persisted.inc(count)
    elif outcome == "deduplicated":
        _idempotency_hits.inc(count)
    elif outcome != "refused":
        _allocation_errors.inc(count)
    if outcome == "throttled":
        _throttled.inc(count)


def sequences_allocated(seconds: float) -> None:
    _allocation_latency.observe(seconds)


def sequence_gap(missing: int) -> None:
    _gaps.inc(missing)
    log.error("sequences are missing in the event log", missing=missing)


def transaction_conflict() -> None:
    _conflicts.inc()


def hot_chats(count: int) -> None:
    _hot_chats.set(count)


def write_overdue(ended: str) -> None:
    """A write went on past its deadline; ``ended``: done, failed."""
    sometimes("a write ended after its deadline")
    _overdue.labels(ended).inc()


def watermarks(outcome: str, count: int) -> None:
    _marks.labels(outcome).inc(count)


def rollback_proven(chat_id: str, epoch: int, cursor: int, head: int) -> None:
    sometimes("a rollback was proven")
    _rollbacks.inc()
    log.critical(
        "SEV-1: a client has messages that the store does not: raising the chat's epoch",
        chat_id=chat_id, epoch=epoch, cursor=cursor, head=head,
    )  # fmt: skip


def history_read(outcome: str, seconds: float) -> None:
    """``outcome``: done, refused, failed, timeout, busy or breaker_open."""
    _reads.labels(outcome).inc()
    _read_latency.observe(seconds)


def dependency_up(dependency: str, up: bool) -> None:
    _dependency_up.labels(dependency).set(up)


def breaker_state(dependency: str, state: str) -> None:
    sometimes(f"a breaker was {state}")
    for each in ("closed", "open", "half_open"):
        _breaker.labels(dependency, each).set(each == state)


# --- fanout: from the log to the gateways -----------------------------------------------------------------

_lag = gauge("fanout_lag", "Entries of the event log not yet routed [fanout.kafka.consumer_lag]")
_delivery_lag = histogram(
    "fanout_delivery_lag_seconds", "From a message's stamp to its hand-over, of the oldest of each batch"
)
_delivered = counter("fanout_messages_delivered", "Messages handed to sessions [fanout.messages.delivered_rate]")
_handed_over = counter("fanout_messages_handed_over", "Messages handed to gateways, once per gateway")
_skipped = counter(
    "fanout_delivery_skipped",
    "Messages not handed to a gateway, or to nobody, by reason [fanout.delivery.skip_rate]",
    ("reason",),
)  # reason: offline, unreachable, registry_down, timeout, members_unknown
_retries = counter("fanout_retries", "Deliveries tried again [fanout.retry.count]")
_dead_letters = counter("fanout_dead_letters", "Events that could not be used, by reason", ("reason",))
_dead_letter_depth = gauge("fanout_dlq_depth", "Dead letters kept [fanout.dlq.depth]")
_restarts = counter("fanout_consumer_restarts", "Ends of the fanout role by a fatal error [fanout.consumer.restarts]")
_registry_errors = counter("registry_errors", "Failed calls of the registry [gateway.redis.connection_errors]")
_healthy_gateways = gauge("gateway_instances_healthy", "Gateways the registry knows [gateway.instances.healthy]")
_ephemeral = counter(
    "fanout_ephemeral", "Typing, presence and receipts, by what became of them", ("kind", "outcome")
)  # outcome: told, merged, dropped


def fanout_lag(entries: int) -> None:
    _lag.set(entries)


def delivery_lag(seconds: float) -> None:
    _delivery_lag.observe(seconds)


def delivered(messages: int) -> None:
    _delivered.inc(messages)


def handed_over(messages: int) -> None:
    _handed_over.inc(messages)


def delivery_skipped(reason: str, messages: int) -> None:
    sometimes(f"a delivery was skipped: {reason}")
    _skipped.labels(reason).inc(messages)


def delivery_retried() -> None:
    sometimes("a delivery was tried again")
    _retries.inc()


def dead_letter(reason: str, position: int, depth: int) -> None:
    _dead_letters.labels(reason).inc()
    _dead_letter_depth.set(depth)
    log.error("an event could not be used and went to the dead letters", reason=reason, position=position)


def many_dead_letters(in_hour: int) -> None:
    log.critical("more dead letters in this hour than fanout.dlq.alert_threshold_per_hour", dead_letters=in_hour)


def fanout_ended(error: BaseException) -> None:
    _restarts.inc()
    log.critical("fanout ends", error=repr(error))


def registry_failed(error: Exception) -> None:
    sometimes("the registry failed")
    _registry_errors.inc()
    dependency_up("registry", False)
    log.warning("the registry does not answer: delivering to local connections only", error=str(error))


def healthy_gateways(count: int) -> None:
    _healthy_gateways.set(count)


def ephemeral(kind: str, outcome: str, count: int = 1) -> None:
    _ephemeral.labels(kind, outcome).inc(count)


# --- store: damage and repair -----------------------------------------------------------------------------

_counter_corruption = counter(
    "durability_counter_corruption",
    "Chats found without their counter, SEV-1 [durability.counter.corruption] [counter_missing_errors]",
)
_duplicate_sequence = counter(
    "durability_duplicate_sequence", "Sequences found already taken, SEV-1 [durability.duplicate.sequence]"
)
_store_reopened = counter("store_reopened", "Times the database was closed and opened again after an error")


def counter_corruption(chat_id: str) -> None:
    """A chat has no counter; it is halted until an operator recovers it."""
    _counter_corruption.inc()
    sometimes("a chat had no counter")
    log.critical("durability.counter.corruption", severity="SEV-1", chat_id=chat_id)


def duplicate_sequence(chat_id: str) -> None:
    """A chat's next sequence is already taken; it is halted until an operator recovers it."""
    _duplicate_sequence.inc()
    sometimes("a sequence was taken")
    log.critical("durability.duplicate.sequence", severity="SEV-1", chat_id=chat_id)


def store_reopened(cause: str) -> None:
    """After an error whose outcome is unknown a database handle is never used again."""
    _store_reopened.inc()
    sometimes("a database was opened again")
    log.error("store.reopened", cause=cause)


# --- api: requests ----------------------------------------------------------------------------------------

_requests = counter("api_requests", "REST requests answered, by endpoint and status", ("endpoint", "status"))
_request_seconds = histogram("api_request_seconds", "From a REST request to its answer", ("endpoint",))


def request_answered(endpoint: str, status: int, seconds: float) -> None:
    """``endpoint`` is a name of the table of endpoints, or "none"."""
    _requests.labels(endpoint, str(status)).inc()
    _request_seconds.labels(endpoint).observe(seconds)


# --- logs -------------------------------------------------------------------------------------------------

LOG_VALUE_CHARACTERS_MAX = 2000
_SECRET = re.compile(r"hf_(?:tenant|admin)_[\w-]+|eyJ[\w-]+\.[\w-]+\.[\w-]*|(?i:bearer[ .])[\w.~+/=-]{8,}")


def safe_text(value: str) -> str:
    """A text as it may stand in a log: without secrets, without control characters, not too long."""
    value = _SECRET.sub("[secret]", value)
    if len(value) > LOG_VALUE_CHARACTERS_MAX:
        value = value[:LOG_VALUE_CHARACTERS_MAX] + f"… ({len(value)} characters)"
    return value


def _safe(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if not isinstance(value, int | float | None):
            event[name] = safe_text(value if isinstance(value, str) else repr(value))
    return event


def _escaped(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """For people's terminals, which obey control characters; JSON escapes them by itself."""
    for name, value in event.items():
        if isinstance(value, str) and name != "exception":
            event[name] = "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)
    return event


def configure_logging(json: bool, level: str = "info", stream: TextIO | None = None) -> None:
    """Every log line, ours and our libraries', to ``stream`` (stderr): JSON for machines or text for people."""
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _safe,
    ]
    last = (
        [structlog.processors.JSONRenderer()]
        if json
        else [_escaped, structlog.dev.ConsoleRenderer(colors=(stream or sys.stderr).isatty())]
    )
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(stream or sys.stderr),
    )
    output = logging.StreamHandler(stream or sys.stderr)
    remove = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    output.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[remove, *last])
    )  # fmt: skip
    logging.basicConfig(handlers=[output], level=max(number, logging.INFO), force=True)


# --- limits: who may do how much --------------------------------------------------------------------------

_checks = counter("limits_checks", "Checks answered, by what decided and what it said", ("decided_by", "decision"))
_limits_batch = gauge("limits_batch_keys", "Keys in the last call to the counters")
_lease_stock = gauge("limits_lease_tokens", "Tokens leased from the counters and not yet spent")
_limits_nodes = gauge("limits_nodes", "Live nodes of this region, as last known")
_staleness = gauge("limits_rule_staleness_seconds", "Since this node last knew that it had every rule [rule staleness]")
_cursor_lag = gauge("limits_cursor_lag", "Changes of the log this node has not read yet")
_rules_applied = counter("limits_rules_applied", "Newer rules put in place, by how they came", ("by",))
_admin_errors = counter(
    "admin_errors", "Failed admin calls, by operation and error [admin_errors_total]", ("operation", "error")
)  # error: db_connection_failed, version_conflict, commit_unknown, invalid, not_found


def limits_checked(tally: Mapping[tuple[str, bool], int]) -> None:
    """How many checks were decided by what, and allowed or refused, since the last call."""
    for (decided_by, allowed), count in tally.items():
        _checks.labels(decided_by, "allowed" if allowed else "refused").inc(count)


def limits_state(batch_keys: int, lease_tokens: int, nodes: int) -> None:
    _limits_batch.set(batch_keys)
    _lease_stock.set(lease_tokens)
    _limits_nodes.set(nodes)


def rule_staleness(seconds: float, cursor_lag: int) -> None:
    _staleness.set(seconds)
    _cursor_lag.set(cursor_lag)


def rules_applied(by: str, count: int) -> None:
    """``by``: event, sync, snapshot or disk."""
    _rules_applied.labels(by).inc(count)


def admin_error(operation: str, error: str) -> None:
    _admin_errors.labels(operation, error).inc()


# Work: jobs and what became of them.

_jobs_completed = counter("work_jobs_completed", "Jobs done, as their worker reported them")
_jobs_failed = counter("work_jobs_failed", "Failed runs of jobs, by reason [failure_reason]", ("reason",))
_lease_lost = counter("work_leases_lost", "Times this process was declared dead while it lived")
_jobs = gauge("work_jobs", "Jobs that are not done, by state [jobs by status]", ("state",))
_jobs_by_reason = gauge("work_jobs_waiting", "Failed jobs that wait, by reason [failure_reason]", ("reason",))
_work_dead = gauge("work_dead_letters", "Dead letters [dead_letters]")
_poison = gauge("work_poison_candidates", "Failed jobs with ten attempts or more [poison_candidates]")
_scheduled = gauge("work_scheduled_jobs", "Jobs that wait for their time [scheduled_count]")
_oldest_job = gauge("work_oldest_job_age_seconds", "Age of the oldest job that is not done [outbox oldest age]")
_blocked_streams = gauge("work_blocked_streams", "Streams that wait behind a failed head")
_work_breakers = gauge("work_breakers_open", "Job types whose breaker is open")


def work_completed(count: int) -> None:
    _jobs_completed.inc(count)


def work_failed(reason: str) -> None:
    _jobs_failed.labels(reason).inc()


def work_lease_lost() -> None:
    _lease_lost.inc()


def work_counts(by_state: Mapping[str, int], by_reason: Mapping[str, int], open_breakers: int) -> None:
    """The state of the whole store, as last read."""
    _jobs.clear()
    _jobs_by_reason.clear()
    for state, count in by_state.items():
        _jobs.labels(state).set(count)
    for reason, count in by_reason.items():
        _jobs_by_reason.labels(reason).set(count)
    _work_breakers.set(open_breakers)


def work_totals(dead: int, poison: int, scheduled: int, oldest_age_seconds: float, blocked_streams: int) -> None:
    _work_dead.set(dead)
    _poison.set(poison)
    _scheduled.set(scheduled)
    _oldest_job.set(oldest_age_seconds)
    _blocked_streams.set(blocked_streams)
