"""Metrics and log events of the message path.

In this order: the gateway and its sessions; ingest and history (what becomes of sends
and reads); the store (damage and repair); fanout (from the log to the gateways).
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Histogram

from holdfast.telemetry.logs import log
from holdfast.telemetry.marks import mark
from holdfast.telemetry.metrics import REGISTRY, counter, dependency_up, gauge, histogram

_connections = gauge("gateway_connections_active", "Open connections [gateway.connections.active]")
_connected = counter("gateway_connections", "Connections opened [gateway.connections.rate]")
_closed = counter("gateway_closed", "Connections closed by the server, by reason", ("reason",))
_lost = counter("gateway_connections_lost", "Connections that ended without a closing of ours")
_timeouts = counter(
    "gateway_connection_timeouts", "Connections closed for silence [gateway.connection.timeout]"
)
_slow_disconnects = counter(
    "gateway_slow_consumer_disconnects", "Slow consumers closed [gateway.slow_consumer.disconnects]"
)
_forced_resyncs = counter(
    "client_resync_forced",
    "Closes and resyncs that make a client pull, planned closes apart [client.resync.forced_rate]",
)
_signs = counter("gateway_signs", "What sessions noticed, by sign", ("sign",))
_refused_frames = counter("gateway_frames_refused", "Frames that could not be decoded")
_refused_handshakes = counter(
    "gateway_handshakes_refused", "Handshakes refused, by status", ("status",)
)
_http_connections = gauge(
    "gateway_http_connections_active", "Open connections that are no WebSocket"
)
_refused_http_connections = counter(
    "gateway_http_connections_refused",
    "HTTP connections refused because their address or the node holds its most",
)
_shed_http_connections = counter(
    "gateway_http_connections_shed",
    "HTTP connections cut off above the memory budget, because they read no answer",
)
_outbound = gauge(
    "gateway_outbound_buffer_bytes", "Bytes that wait in all outbound buffers, HTTP answers too"
)

_FORCED_CLOSES = frozenset({"slow_consumer", "memory_pressure", "state_diverged", "overloaded"})
_FORCED_PULLS = frozenset({"delivery_skipped", "acks_stale"})


def connection_opened(active: int) -> None:
    _connected.inc()
    _connections.set(active)


def connection_ended(active: int) -> None:
    _connections.set(active)


def connection_closed(reason: str) -> None:
    """The server closes a connection."""
    mark("a connection was closed", reason)
    _closed.labels(reason).inc()
    if reason == "slow_consumer":
        _slow_disconnects.inc()
    elif reason == "idle_timeout":
        _timeouts.inc()
    if reason in _FORCED_CLOSES:
        _forced_resyncs.inc()


def connection_lost() -> None:
    """The client or the network ended the connection."""
    _lost.inc()


def session_noticed(sign: str) -> None:
    mark("a session noticed", sign)
    _signs.labels(sign).inc()
    if sign in _FORCED_PULLS:
        _forced_resyncs.inc()


def frame_refused() -> None:
    _refused_frames.inc()


def handshake_refused(status: int) -> None:
    _refused_handshakes.labels(str(status)).inc()


def http_connections(active: int) -> None:
    _http_connections.set(active)


def http_connection_shed() -> None:
    _shed_http_connections.inc()


def http_connection_refused() -> None:
    _refused_http_connections.inc()


def outbound_buffers(waiting_bytes: int) -> None:
    _outbound.set(waiting_bytes)


def unread(what: str, many: int, error: Exception) -> None:
    """Heads or memberships could not be read; the next heartbeat interval retries."""
    log.warning("gateway.read_failed", what=what, many=many, error=str(error))


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
    "From admission to answer, of the longest-waiting send of each group"
    " [durability.persist.latency_p99]",
)
_persisted = counter(
    "durability_messages_persisted", "Messages newly committed [durability.messages.persisted_rate]"
)
_outcomes = counter(
    "durability_outcomes", "Sends answered by the durability plane, by outcome", ("outcome",)
)
_idempotency_hits = counter(
    "durability_idempotency_hits",
    "Sends answered by an earlier message of the same key [durability.idempotency.hit_rate]"
    " [idempotency_hit_rate]",
)
_allocation_latency = histogram(
    "sequence_allocation_latency_seconds",
    "The store's commit of a group, in which its sequences are allocated"
    " [sequence_allocation_latency_p99]",
)
_allocation_errors = counter(
    "sequence_allocation_errors",
    "Sends for which the store could not allocate a sequence [sequence_allocation_errors]",
)
_gaps = counter(
    "sequence_gaps",
    "Sequences missing between two neighbours of a chat in the event log [sequence_gap_rate]",
)
_conflicts = counter(
    "durability_transaction_conflicts",
    "Commits that met another writer [durability.transaction.conflict_rate]"
    " [transaction_conflict_rate]",
)
_throttled = counter(
    "durability_store_throttles",
    "Sends the store put off for its quota [durability.dynamodb.throttle_count]",
)
_hot_chats = gauge(
    "hot_chats",
    "Chats above durability.intake.hot_messages_per_minute in the last full minute"
    " [messages_per_chat_per_minute]",
)
_overdue = counter(
    "durability_overdue_writes", "Writes that ended after their deadline, by how", ("ended",)
)
_overdue_lanes = gauge(
    "durability_overdue_lanes",
    "Lanes of the store with a write that goes on past its deadline: their sends are refused",
)
# stored, failed, dropped
_marks = counter("durability_watermarks", "Watermarks by what became of them", ("outcome",))
_rollbacks = counter(
    "durability_rollbacks_proven",
    "Cursors beyond the head in the same epoch: the store lost messages, SEV-1",
)
_unproven = counter(
    "durability_cursors_unproven",
    "Requests with a cursor beyond the head and no proof: that device alone is reset",
)
_reads = counter("history_reads", "Reads for sessions and REST, by outcome", ("outcome",))
_read_latency = histogram("history_read_latency_seconds", "Reads for sessions and REST")


def sends_waiting(count: int) -> None:
    _waiting.set(count)


def send_turned_away(reason: str) -> None:
    mark("a send was turned away", reason)
    _turned_away.labels(reason).inc()


def group_persisted(sends: int, oldest_seconds: float) -> None:
    _group_sends.observe(sends)
    _persist_latency.observe(oldest_seconds)


def sends_answered(outcome: str, count: int) -> None:
    """``outcome`` is a label of ``durability_outcomes``."""
    mark("sends were answered", outcome)
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
    log.error("fanout.gap_found", missing=missing)


def transaction_conflict() -> None:
    _conflicts.inc()


def hot_chats(count: int) -> None:
    _hot_chats.set(count)


def write_overdue(ended: str) -> None:
    """A write ended after its deadline; ``ended``: done or failed."""
    mark("a write ended after its deadline")
    _overdue.labels(ended).inc()


def lanes_overdue(count: int, at_once: int) -> None:
    """``count`` lanes wait for the end of an overdue write; with ``at_once`` of them
    nothing is written.
    """
    if 0 < count < at_once:
        mark("a lane hung and others went on")
    _overdue_lanes.set(count)


def watermarks(outcome: str, count: int) -> None:
    _marks.labels(outcome).inc(count)


def rollback_proven(chat_id: str, user_id: str, epoch: int, cursor: int, head: int) -> None:
    """``user_id``: the user whose cursor is the proof."""
    mark("a rollback was proven")
    _rollbacks.inc()
    log.critical(
        "store.rollback_proven", severity="SEV-1",
        detail="a client has messages that the store does not: raising the chat's epoch",
        chat_id=chat_id, user_id=user_id, epoch=epoch, cursor=cursor, head=head,
    )  # fmt: skip


def cursor_unproven() -> None:
    mark("a cursor was unproven")
    _unproven.inc()


def history_read(outcome: str, seconds: float) -> None:
    """``outcome``: done, refused, failed, timeout, busy or breaker_open."""
    _reads.labels(outcome).inc()
    _read_latency.observe(seconds)


_counter_corruption = counter(
    "durability_counter_corruption",
    "Chats found without their counter, SEV-1 [durability.counter.corruption]"
    " [counter_missing_errors]",
)
_duplicate_sequence = counter(
    "durability_duplicate_sequence",
    "Sequences found already taken, SEV-1 [durability.duplicate.sequence]",
)
_store_reopened = counter(
    "store_reopened", "Times the database was closed and opened again after an error"
)
_log_entries_unknown = counter(
    "log_entries_unknown", "Entries of the event log left out: of a kind of a newer release"
)


def counter_corruption(chat_id: str) -> None:
    """A chat has no counter; it is halted until an operator recovers it."""
    _counter_corruption.inc()
    mark("a chat had no counter")
    log.critical("store.counter_corrupted", severity="SEV-1", chat_id=chat_id)


def duplicate_sequence(chat_id: str) -> None:
    """A chat's next sequence is taken; the chat is halted until it is recovered."""
    _duplicate_sequence.inc()
    mark("a sequence was taken")
    log.critical("store.sequence_duplicated", severity="SEV-1", chat_id=chat_id)


def store_reopened(cause: str) -> None:
    """A handle is never used again after an error with an unknown outcome."""
    _store_reopened.inc()
    mark("a database was opened again")
    log.error("store.file_reopened", cause=cause)


def log_entries_unknown(count: int) -> None:
    """Entries of a newer release were left out of the log."""
    _log_entries_unknown.inc(count)


def store_moved(file: str) -> None:
    """The open database was moved or removed: what is written to it would be lost."""
    log.critical(
        "store.file_moved",
        severity="SEV-1",
        file=file,
        advice=(
            "nothing is written until it is back; do not stop the server before you have saved what"
            " it has open: docs/guides/runbooks/file-gone.md"
        ),
    )


_lag = gauge("fanout_lag", "Entries of the event log not yet routed [fanout.kafka.consumer_lag]")
_delivery_lag = histogram(
    "fanout_delivery_lag_seconds",
    "From a message's stamp to its hand-over, of the oldest of each batch",
)
_delivered = counter(
    "fanout_messages_delivered", "Messages handed to sessions [fanout.messages.delivered_rate]"
)
_handed_over = counter(
    "fanout_messages_handed_over", "Messages of chats with a session on this node"
)
_skipped = counter(
    "fanout_delivery_skipped",
    "Messages for nobody here, and joined chats not read, by reason [fanout.delivery.skip_rate]",
    ("reason",),
)  # reason: offline (nobody of the chat is connected to this node), members_unknown
_retries = counter("fanout_retries", "Reads of joined chats tried again [fanout.retry.count]")
_dead_letters = counter(
    "fanout_dead_letters", "Events that could not be used, by reason", ("reason",)
)
_dead_letter_depth = gauge("fanout_dlq_depth", "Dead letters kept [fanout.dlq.depth]")
_restarts = counter(
    "fanout_consumer_restarts",
    "Ends of the fanout role by a fatal error [fanout.consumer.restarts]",
)
_log_losses = counter(
    "log_losses", "Reads of the log from a position that it lost, by part", ("part",)
)  # part: fanout, webhooks, assistants
_registry_errors = counter(
    "registry_errors", "Failed calls of the registry [gateway.redis.connection_errors]"
)
_healthy_gateways = gauge(
    "gateway_instances_healthy", "Gateways the registry knows [gateway.instances.healthy]"
)
_ephemeral = counter(
    "fanout_ephemeral", "Typing, presence and receipts, by what became of them", ("kind", "outcome")
)  # outcome: told, merged, dropped
_bus = counter(
    "fanout_bus_notifications",
    "Notifications between nodes, by what became of them",
    ("outcome",),
)  # outcome: sent, received, dropped, unreadable


def fanout_lag(entries: int) -> None:
    _lag.set(entries)


def delivery_lag(seconds: float) -> None:
    _delivery_lag.observe(seconds)


def delivered(messages: int) -> None:
    _delivered.inc(messages)


def handed_over(messages: int) -> None:
    _handed_over.inc(messages)


def delivery_skipped(reason: str, messages: int) -> None:
    mark("a delivery was skipped", reason)
    _skipped.labels(reason).inc(messages)


def delivery_retried() -> None:
    mark("a delivery was tried again")
    _retries.inc()


def dead_letter(reason: str, shard: int, offset: int, depth: int) -> None:
    _dead_letters.labels(reason).inc()
    _dead_letter_depth.set(depth)
    log.error(
        "fanout.event_dead_lettered",
        reason=reason,
        shard=shard,
        offset=offset,
    )


def many_dead_letters(in_hour: int) -> None:
    log.critical(
        "fanout.dead_letters_exceeded",
        detail="more in this hour than fanout.dlq.alert_threshold_per_hour",
        dead_letters=in_hour,
    )


def fanout_ended(error: BaseException) -> None:
    _restarts.inc()
    log.critical("fanout.reader_ended", error=repr(error))


def log_lost(part: str, offsets: Sequence[int]) -> None:
    """A reader's position is gone from the log; it goes on with the store's help."""
    mark("the log was lost at a reader's position")
    _log_losses.labels(part).inc()
    log.error("fanout.log_lost", reader=part, position=list(offsets), severity="SEV-2")


def registry_failed(error: Exception, *, is_first: bool = False) -> None:
    """Only the first failure of a row is logged."""
    mark("the registry failed")
    _registry_errors.inc()
    dependency_up("registry", False)
    if is_first:
        log.warning("fanout.registry_failed", error=str(error) or type(error).__name__)


def registry_answered(*, is_first: bool) -> None:
    """``is_first``: after a failure that was logged."""
    dependency_up("registry", True)
    if is_first:
        log.info("fanout.registry_restored")


def healthy_gateways(count: int) -> None:
    _healthy_gateways.set(count)


def ephemeral(kind: str, outcome: str, count: int = 1) -> None:
    _ephemeral.labels(kind, outcome).inc(count)


def bus_notifications(outcome: str, count: int = 1) -> None:
    _bus.labels(outcome).inc(count)
