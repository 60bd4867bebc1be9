"""Fanout: from the log to the gateways."""

from __future__ import annotations

from holdfast.telemetry.dependencies import dependency_up
from holdfast.telemetry.logs import log
from holdfast.telemetry.marks import sometimes
from holdfast.telemetry.metrics import counter, gauge, histogram

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
    sometimes("a delivery was skipped", reason)
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
