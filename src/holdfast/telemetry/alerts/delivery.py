"""Alerts about messages on their way to clients: log, fanout, connections. (Pure.)"""

from __future__ import annotations

from holdfast.telemetry.alert import (
    FIVE_MINUTES,
    HOUR,
    MINUTE,
    Alert,
    Severity,
    above,
    equals,
    p99,
    rise,
    risen,
    series,
)
from holdfast.telemetry.expressions import Plus, Ratio, Series

_SKIPPED = risen(
    "fanout_delivery_skipped", FIVE_MINUTES, ("reason",), (("reason", "!=", "offline"),)
)
_SKIP_RATE = Ratio(_SKIPPED, Plus(_SKIPPED, rise("fanout_messages_handed_over", FIVE_MINUTES)))
_DISCONNECTS = rise("gateway_slow_consumer_disconnects", MINUTE)

DELIVERY = (
    Alert(
        "HoldfastEventLogDown",
        Severity.SEV2,
        equals(series("dependency_up", dependency="eventlog"), 0, 30),
        "The event log cannot be read: nothing is delivered live.",
        "runbooks/fanout-lag.md",
        ("000 tier 1: durability.kafka.available",),
        explains=("HoldfastFanoutLag", "HoldfastDeliverySlow", "HoldfastDeliveriesSkipped"),
    ),
    Alert(
        "HoldfastLogLost",
        Severity.SEV2,
        above(risen("log_losses", FIVE_MINUTES, ("part",)), 0),
        "A reader's position is gone from the event log; it went on with the store's help.",
        "runbooks/fanout-lag.md",
    ),
    Alert(
        "HoldfastFanoutLag",
        Severity.SEV3,
        above(Series("fanout_lag"), 10_000, FIVE_MINUTES),
        "Stored messages wait long before they are routed to sessions.",
        "runbooks/fanout-lag.md",
        ("000 tier 2: fanout.kafka.consumer_lag", "000 B.3"),
        warning=above(Series("fanout_lag"), 1000, FIVE_MINUTES),
        explains=("HoldfastDeliverySlow",),
    ),
    Alert(
        "HoldfastDeliverySlow",
        Severity.SEV3,
        above(p99("fanout_delivery_lag_seconds", HOUR), 2),
        "1 % of the messages of the last hour reached their sessions after two seconds.",
        "runbooks/fanout-lag.md",
        ("000 SLO: delivery lag",),
    ),
    Alert(
        "HoldfastDeliveriesSkipped",
        Severity.SEV3,
        above(_SKIP_RATE, 0.2, FIVE_MINUTES),
        "Many messages are not delivered live although somebody is connected.",
        "runbooks/fanout-lag.md",
        ("000 tier 2: fanout.delivery.skip_rate",),
        warning=above(_SKIP_RATE, 0.05, FIVE_MINUTES),
    ),
    Alert(
        "HoldfastFanoutRestarted",
        Severity.WARNING,
        above(rise("fanout_consumer_restarts", FIVE_MINUTES), 0),
        "The reader of the event log ended by an error and was started again.",
        "runbooks/fanout-lag.md",
        ("000 §3.1: fanout.consumer.restarts",),
    ),
    Alert(
        "HoldfastFanoutDeadLetters",
        Severity.SEV3,
        above(risen("fanout_dead_letters", HOUR, ("reason",)), 100),
        "Many entries of the event log could not be used and were put aside.",
        "runbooks/fanout-dead-letters.md",
        ("000 §4: fanout.dlq.alert_threshold_per_hour",),
        warning=above(risen("fanout_dead_letters", HOUR, ("reason",)), 0),
    ),
    Alert(
        "HoldfastSlowConsumers",
        Severity.SEV3,
        above(_DISCONNECTS, 50, FIVE_MINUTES),
        "Many clients do not read fast enough and are disconnected.",
        "runbooks/slow-consumers.md",
        ("000 tier 2: gateway.slow_consumer.disconnects", "000 B.1"),
        warning=above(_DISCONNECTS, 10, FIVE_MINUTES),
    ),
    Alert(
        "HoldfastDependencyDown",
        Severity.SEV3,
        equals(Series("dependency_up", (("dependency", "=~", "bus|registry"),)), 0, 30),
        "What nodes know of each other by does not answer: presence is incomplete.",
        "runbooks/nodes-apart.md",
        ("000 §4: gateway.redis.available",),
    ),
)
