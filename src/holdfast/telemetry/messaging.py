"""Metrics and log events of the message path.

In this order: the gateway and its sessions; the store (damage and repair); fanout (from
the log to the gateways). ``ingest`` has what becomes of sends and reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.telemetry.dependencies import dependency_up
from holdfast.telemetry.ingest import send_turned_away, sends_refused
from holdfast.telemetry.logs import log
from holdfast.telemetry.marks import mark
from holdfast.telemetry.metrics import counter, gauge, histogram
from holdfast.telemetry.urgent import urgent

_connections = gauge("gateway_connections_active", "Open connections [gateway.connections.active]")
_connected = counter("gateway_connections", "Connections opened [gateway.connections.rate]")
_closed = counter("gateway_closed", "Connections closed by the server, by reason", ("reason",))
_lost = counter("gateway_connections_lost", "Connections that ended without a closing of ours")
_timeouts = counter(
    "gateway_connection_timeouts", "Connections closed for silence [gateway.connection.timeout]"
)
_connection_hours = counter(
    "gateway_connection_hours", "How long connections were open, all together, in hours"
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

_FORCED_PULLS = frozenset({"delivery_skipped", "acks_stale"})


def connection_opened(active: int) -> None:
    _connected.inc()
    _connections.set(active)


def connection_ended(active: int) -> None:
    _connections.set(active)


def connection_closed(reason: str, *, forces_resync: bool) -> None:
    """The server closes a connection."""
    mark("a connection was closed", reason)
    _closed.labels(reason).inc()
    if reason == "slow_consumer":
        _slow_disconnects.inc()
    elif reason == "idle_timeout":
        _timeouts.inc()
    if forces_resync:
        _forced_resyncs.inc()


def connection_aborted() -> None:
    """The server ends a connection after a defect, without a closing frame."""
    _forced_resyncs.inc()


def connections_open(seconds: float) -> None:
    """``seconds``: of all connections together, since the last call."""
    _connection_hours.inc(seconds / 3600)


def connection_lost() -> None:
    """The client or the network ended the connection."""
    _lost.inc()


def session_noticed(sign: str) -> None:
    mark("a session noticed", sign)
    _signs.labels(sign).inc()
    if sign in _FORCED_PULLS:
        _forced_resyncs.inc()
    elif sign == "send_refused":
        sends_refused()
    elif sign == "send_turned_away":
        send_turned_away("connection")


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


_counter_corruption = counter(
    "durability_counter_corruption",
    "Chats found without their counter, SEV-1 [durability.counter.corruption]"
    " [counter_missing_errors]",
)
_duplicate_sequence = counter(
    "durability_duplicate_sequence",
    "Sequences found already taken, SEV-1 [durability.duplicate.sequence]",
)
_halted = gauge("chats_halted", "Chats that take no messages until an operator recovers them")
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
    urgent()


def duplicate_sequence(chat_id: str) -> None:
    """A chat's next sequence is taken; the chat is halted until it is recovered."""
    _duplicate_sequence.inc()
    mark("a sequence was taken")
    log.critical("store.sequence_duplicated", severity="SEV-1", chat_id=chat_id)
    urgent()


def chats_halted(count: int) -> None:
    _halted.set(count)


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
    known=("offline", "members_unknown"),  # offline: nobody of the chat is connected here
)
_retries = counter("fanout_retries", "Reads of joined chats tried again [fanout.retry.count]")
_dead_letters = counter(
    "fanout_dead_letters",
    "Events that could not be used, by reason",
    ("reason",),
    known=("undecodable", "event", "defect"),
)
_dead_letter_depth = gauge("fanout_dlq_depth", "Dead letters kept [fanout.dlq.depth]")
_restarts = counter(
    "fanout_consumer_restarts",
    "Ends of the fanout role by a fatal error [fanout.consumer.restarts]",
)
_log_losses = counter(
    "log_losses",
    "Reads of the log from a position that it lost, by part",
    ("part",),
    known=("fanout", "webhooks", "assistants"),
)
_epochs_raised = counter(
    "epochs_raised", "Times that all epochs were raised: a failover may have lost commits"
)
_old_primaries = counter(
    "old_primary_refused", "Connections to an old primary of PostgreSQL that were not used"
)
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


def dead_letters_kept(count: int) -> None:
    _dead_letter_depth.set(count)


def dead_letter(reason: str, shard: int, offset: int, chat_id: str) -> None:
    """Without its data: a log line has no content of messages."""
    _dead_letters.labels(reason).inc()
    log.error(
        "fanout.event_dead_lettered",
        reason=reason,
        shard=shard,
        offset=offset,
        chat_id=chat_id,
    )


def many_dead_letters(in_hour: int) -> None:
    log.critical(
        "fanout.dead_letters_exceeded",
        detail="more in this hour than fanout.dlq.alert_threshold_per_hour",
        dead_letters=in_hour,
    )


def fanout_ended(error: BaseException, *, is_defect: bool) -> None:
    """Not a defect: something that it needs is unavailable, and it starts again."""
    _restarts.inc()
    (log.critical if is_defect else log.warning)("fanout.reader_ended", error=repr(error))


def log_lost(part: str, offsets: Sequence[int]) -> None:
    """A reader's position is gone from the log; it goes on with the store's help."""
    mark("the log was lost at a reader's position")
    _log_losses.labels(part).inc()
    log.error("fanout.log_lost", reader=part, position=list(offsets), severity="SEV-2")


def epochs_raised(base: int) -> None:
    """Every node counts it once. Clients read their chats again."""
    _epochs_raised.inc()
    log.critical("fanout.epochs_raised", base=base, severity="SEV-1")
    urgent()


def old_primary_refused(timeline: int, *, is_first: bool) -> None:
    """Only the first connection to a server is logged: nodes try again and again."""
    _old_primaries.inc()
    if is_first:
        log.critical("store.old_primary_refused", timeline=timeline, severity="SEV-2")


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
