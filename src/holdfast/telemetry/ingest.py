"""Ingest and history: what becomes of sends and reads."""

from __future__ import annotations

from prometheus_client import Histogram

from holdfast.telemetry.logs import log
from holdfast.telemetry.marks import sometimes
from holdfast.telemetry.metrics import REGISTRY, counter, gauge, histogram

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
_hot_chats = gauge(
    "hot_chats",
    "Chats above durability.intake.hot_messages_per_minute in the last full minute [messages_per_chat_per_minute]",
)
_overdue = counter("durability_overdue_writes", "Writes that ended after their deadline, by how", ("ended",))
_marks = counter("durability_watermarks", "Watermarks by what became of them", ("outcome",))  # stored, failed, dropped
_rollbacks = counter(
    "durability_rollbacks_proven", "Cursors beyond the head in the same epoch: the store lost messages, SEV-1"
)
_unproven = counter(
    "durability_cursors_unproven", "Requests with a cursor beyond the head and no proof: that device alone is reset"
)
_reads = counter("history_reads", "Reads for sessions and REST, by outcome", ("outcome",))
_read_latency = histogram("history_read_latency_seconds", "Reads for sessions and REST")


def sends_waiting(count: int) -> None:
    _waiting.set(count)


def send_turned_away(reason: str) -> None:
    sometimes("a send was turned away", reason)
    _turned_away.labels(reason).inc()


def group_persisted(sends: int, oldest_seconds: float) -> None:
    _group_sends.observe(sends)
    _persist_latency.observe(oldest_seconds)


def sends_answered(outcome: str, count: int) -> None:
    """``outcome``: persisted, deduplicated, refused, throttled, deferred, halted or unknown."""
    sometimes("sends were answered", outcome)
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


def rollback_proven(chat_id: str, user_id: str, epoch: int, cursor: int, head: int) -> None:
    """``user_id``: whose cursor is the proof."""
    sometimes("a rollback was proven")
    _rollbacks.inc()
    log.critical(
        "SEV-1: a client has messages that the store does not: raising the chat's epoch",
        severity="SEV-1", chat_id=chat_id, user_id=user_id, epoch=epoch, cursor=cursor, head=head,
    )  # fmt: skip


def cursor_unproven() -> None:
    sometimes("a cursor was unproven")
    _unproven.inc()


def history_read(outcome: str, seconds: float) -> None:
    """``outcome``: done, refused, failed, timeout, busy or breaker_open."""
    _reads.labels(outcome).inc()
    _read_latency.observe(seconds)
