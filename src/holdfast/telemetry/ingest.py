"""Metrics of ingest and history: what becomes of sends and reads, and how long each
step of a message's path takes.
"""

from __future__ import annotations

from functools import cache

from prometheus_client import Histogram

from holdfast.telemetry.logs import log
from holdfast.telemetry.marks import mark
from holdfast.telemetry.metrics import LATENCY_BUCKETS, REGISTRY, counter, gauge, histogram
from holdfast.telemetry.urgent import urgent

_steps = histogram(
    "message_step_seconds",
    "Steps of a message's path, each once per group, batch or turn of the loop, of the oldest:"
    " admit (limits), wait (for its group's commit), commit, publish (from the commit's"
    " notification to the entries read from the log), fan_out (to the sessions), write (to the"
    " sockets) [durability.kafka.produce_latency_p99]",
    ("step",),
    (0.0001, 0.00025, 0.0005, *LATENCY_BUCKETS),
)
_OUTCOMES = ("persisted", "deduplicated", "refused", "halted", "throttled", "deferred", "unknown")
_sends = counter(
    "ingest_sends",
    "Sends that reached the node, by their answer, those refused before they were tried"
    " included; the good ones are persisted, deduplicated and refused (the sender's own mistake)",
    ("answer",),
    known=(*_OUTCOMES, "turned_away"),
)
_waiting = gauge("ingest_sends_waiting", "Sends that wait for their group")
_turned_away = counter(
    "ingest_sends_turned_away",
    "Sends refused before anything was tried, by reason",
    ("reason",),
    known=(
        *("connection", "total", "chat", "bytes", "age", "deadline", "follower", "stopping"),
        *("request", "defect"),
    ),
)
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
    "durability_outcomes",
    "Sends answered by the durability plane, by outcome",
    ("outcome",),
    known=_OUTCOMES,
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
    "Commits of chats that met another writer and were given up"
    " [durability.transaction.conflict_rate]",
)
_key_races = counter(
    "durability_key_races",
    "Sends whose key another send of the same key stored while they were under way"
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


def message_step(step: str, seconds: float) -> None:
    """``step``: admit, wait, commit, publish, fan_out or write."""
    _step(step).observe(seconds)


@cache
def _step(step: str) -> Histogram:
    """Cached: finding a metric by its labels takes longer than counting."""
    return _steps.labels(step)


def sends_waiting(count: int) -> None:
    _waiting.set(count)


def send_turned_away(reason: str) -> None:
    mark("a send was turned away", reason)
    _turned_away.labels(reason).inc()
    _sends.labels("turned_away").inc()


def sends_refused(count: int = 1) -> None:
    """Sends refused before ingest for what their sender did: invalid, not allowed, or
    above a limit.
    """
    _sends.labels("refused").inc(count)


def group_persisted(sends: int, oldest_seconds: float) -> None:
    _group_sends.observe(sends)
    _persist_latency.observe(oldest_seconds)


def sends_answered(outcome: str, count: int) -> None:
    """``outcome`` is a label of ``durability_outcomes``."""
    mark("sends were answered", outcome)
    _outcomes.labels(outcome).inc(count)
    _sends.labels(outcome).inc(count)
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
    message_step("commit", seconds)


def sequence_gap(missing: int) -> None:
    _gaps.inc(missing)
    log.error("fanout.gap_found", missing=missing)


def transaction_conflict() -> None:
    _conflicts.inc()


def key_races_lost(count: int) -> None:
    _key_races.inc(count)


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
    urgent()


def cursor_unproven() -> None:
    mark("a cursor was unproven")
    _unproven.inc()


def history_read(outcome: str, seconds: float) -> None:
    """``outcome``: done, refused, failed, timeout, busy or breaker_open."""
    _reads.labels(outcome).inc()
    _read_latency.observe(seconds)
