"""The metrics of AI replies: pool, queue, ends, providers, log.

Labels are pools and providers of the settings, and closed sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from holdfast.telemetry.loop_values import LoopHistogram
from holdfast.telemetry.marks import mark
from holdfast.telemetry.metrics import counter, gauge, histogram

LONG_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
SURFACES = ("chat", "responses", "native", "assistant")
POOL_STATES = ("healthy", "degraded", "critical", "exhausted")

_active = gauge("reply_active", "Active generations over all nodes, by pool", ("pool",))
_depth = gauge("reply_queue_depth", "Requests that wait, over all nodes, by pool", ("pool",))
_limit = gauge("reply_queue_limit", "The most requests that may wait, over all nodes")
_bytes = gauge("reply_queue_bytes", "Request bodies that arrive, wait or run on this node")
_pool_state = gauge("reply_pool_state", "1 for the state a pool is in", ("pool", "state"))
_queue_wait = LoopHistogram(
    "reply_queue_wait_seconds", "Waits in the queue that ended with a lease", LONG_BUCKETS
)
_first_token = histogram(
    "reply_first_token_seconds",
    "Until the first token, since the request arrived or since it had its lease",
    ("since",),
    buckets=LONG_BUCKETS,
)
_gap = LoopHistogram("reply_gap_seconds", "Between two chunks of a provider", LONG_BUCKETS)
_whole = LoopHistogram("reply_seconds", "From a request to the reply's end", LONG_BUCKETS)
_admissions = counter(
    "reply_admissions",
    "Requests admitted: at once (pool) or after a wait (queue)",
    ("layer",),
    known=("pool", "queue"),
)
_refusals = counter("reply_refusals", "Requests refused before they ran, by cause", ("cause",))
_ends = counter(
    "reply_ends",
    "Ends of replies",
    ("surface", "end"),
    known=[(surface, "done") for surface in SURFACES],
)
_cancels = counter("reply_cancels", "Replies cancelled, by cause", ("cause",))
_timeouts = counter("reply_queue_timeouts", "Requests that waited too long in the queue")
_tokens = counter("reply_tokens", "Tokens, as providers count them or estimated", ("kind",))
_leases_freed = counter("reply_leases_freed", "Leases freed by others than their node", ("cause",))
_log_bytes = counter("reply_log_bytes", "Bytes written to the log of replies")
_not_resumable = counter(
    "reply_not_resumable",
    "Replies that cannot be resumed although they should be",
    ("cause",),
    known=("bounds", "late", "log", "lost", "memory"),
)
_assistant_jobs = counter(
    "reply_assistant_jobs", "Jobs of assistants that ended: message stored or not", ("outcome",)
)
_characters_replaced = counter(
    "reply_characters_replaced", "U+0000 in assistants' replies, stored as U+FFFD"
)
_attempts = counter(
    "reply_provider_attempts", "Attempts at providers, by outcome", ("provider", "outcome")
)


@cache
def _child(metric: Any, *labels: str) -> Any:
    """Cached: finding a metric by its labels takes longer than counting."""
    return metric.labels(*labels)


def pool_state(
    active: Mapping[str, int], waiting: Mapping[str, int], states: Mapping[str, str]
) -> None:
    """Active generations, depth of the queue and state, each by pool."""
    for pool, count in active.items():
        _active.labels(pool).set(count)
    for pool, count in waiting.items():
        _depth.labels(pool).set(count)
    for pool, state in states.items():
        for each in POOL_STATES:
            _pool_state.labels(pool, each).set(each == state)


def reply_queue_limit(waiting_max: int) -> None:
    _limit.set(waiting_max)


def reply_bytes(count: int) -> None:
    _bytes.set(count)


def reply_admitted(layer: str) -> None:
    _child(_admissions, layer).inc()


def reply_refused(cause: str) -> None:
    """queue, tenant, user, off, rate, tokens, bytes, memory, log, model, draining"""
    _refusals.labels(cause).inc()


def reply_granted(waited_seconds: float) -> None:
    _queue_wait.observe(waited_seconds)


def reply_first_token(since_arrival: float, since_grant: float) -> None:
    _child(_first_token, "arrival").observe(since_arrival)
    _child(_first_token, "grant").observe(since_grant)


reply_gap = _gap.observe  # for every token: without a call around it


def reply_ended(surface: str, end: str, seconds: float) -> None:
    mark("a reply ended with", end)
    _child(_ends, surface, end).inc()
    _whole.observe(seconds)
    if end == "queue_timeout":
        _timeouts.inc()


def reply_cancelled(cause: str) -> None:
    """owner, operator, unread, revoked, elsewhere"""
    _cancels.labels(cause).inc()


def reply_tokens(prompt: int, completion: int) -> None:
    _child(_tokens, "prompt").inc(prompt)
    _child(_tokens, "completion").inc(completion)


def reply_lease_freed(cause: str, count: int = 1) -> None:
    """node_dead, unconfirmed, unannounced"""
    _leases_freed.labels(cause).inc(count)


def reply_log_written(size_bytes: int) -> None:
    _log_bytes.inc(size_bytes)


def reply_not_resumable(cause: str) -> None:
    mark("a reply is not resumable:", cause)
    _not_resumable.labels(cause).inc()


def assistant_job_ended(outcome: str) -> None:
    """sent, unwanted, failed"""
    _assistant_jobs.labels(outcome).inc()


def reply_characters_replaced(count: int) -> None:
    _characters_replaced.inc(count)


def provider_attempt(provider: str, outcome: str) -> None:
    _child(_attempts, provider, outcome).inc()
