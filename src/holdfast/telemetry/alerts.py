"""The alerts: every one of them, once, as values. (Pure.)

From this list come the rules for Prometheus (``deploy/prometheus/rules.yml``), their
tests, the page docs/reference/alerts.md, and what a node evaluates over its own metrics
(``telemetry.judge``). Names and severities are what other programs route by: they stay.

A SEV calls somebody: SEV-1 at once, SEV-2 now, SEV-3 in working hours. A warning is
yellow and calls nobody. ``rows``: where a design document asks for it, by number.
"""

from __future__ import annotations

from holdfast.telemetry.alert import (
    Alert,
    Severity,
    above,
    below,
    equals,
    expected_series,
    p99,
    rise,
    risen,
    series,
)
from holdfast.telemetry.alerts_beside import BESIDE, REPLIES
from holdfast.telemetry.expressions import Absent, Increase, Match, Plus, Ratio, Series

_MINUTE, _HOUR = 60, 3600
_5M = 5 * _MINUTE

_SENDS = risen("durability_outcomes", _5M, ("outcome",))
_SKIPPED = risen("fanout_delivery_skipped", _5M, ("reason",), (("reason", "!=", "offline"),))
_SKIP_RATE = Ratio(_SKIPPED, Plus(_SKIPPED, rise("fanout_messages_handed_over", _5M)))
_TURNED_AWAY = risen(
    "ingest_sends_turned_away", _MINUTE, ("reason",), (("reason", "!=", "stopping"),)
)
_TURNED_AWAY_RATE = Ratio(
    _TURNED_AWAY, Plus(_TURNED_AWAY, risen("durability_outcomes", _MINUTE, ("outcome",)))
)
_DISCONNECTS = rise("gateway_slow_consumer_disconnects", _MINUTE)
_PERSIST_P99 = p99("durability_persist_latency_seconds", _5M)
_DISK_LEFT = Ratio(Series("state_disk_free_bytes"), Series("state_disk_bytes"))
_CONFLICTS = Ratio(
    rise("durability_transaction_conflicts", _5M),
    Increase(Series("ingest_group_sends_count"), _5M),
)
_GAPS = rise("sequence_gaps", 15 * _MINUTE)
_OPEN: Match = ("state", "=", "open")
_BREAKERS = Series("circuit_breaker_state", (("dependency", "!~", "provider:.*"), _OPEN))


_TIER_1 = (
    Alert(
        "HoldfastCounterCorruption",
        Severity.SEV1,
        above(rise("durability_counter_corruption", _5M), 0),
        "A chat was found without its counter; it takes no messages until it is recovered.",
        "runbooks/counter-corruption.md",
        ("000 tier 1: durability.counter.corruption", "001 §12: counter_missing_errors"),
    ),
    Alert(
        "HoldfastDuplicateSequence",
        Severity.SEV1,
        above(rise("durability_duplicate_sequence", _5M), 0),
        "A chat's counter is behind its messages; it takes none until it is recovered.",
        "runbooks/counter-corruption.md",
        ("000 tier 1: durability.duplicate.sequence",),
    ),
    Alert(
        "HoldfastMessagesLost",
        Severity.SEV1,
        above(rise("durability_rollbacks_proven", _5M), 0),
        "A client has acknowledged messages that the store lost.",
        "runbooks/messages-lost.md",
    ),
    Alert(
        "HoldfastStoreDown",
        Severity.SEV1,
        equals(series("dependency_up", dependency="store"), 0, 10),
        "The store of chats does not answer: sends are refused, clients keep them.",
        "runbooks/breaker-open.md",
        ("000 tier 1: durability.dynamodb.available",),
    ),
    Alert(
        "HoldfastEventLogDown",
        Severity.SEV2,
        equals(series("dependency_up", dependency="eventlog"), 0, 30),
        "The event log cannot be read: nothing is delivered live.",
        "runbooks/fanout-lag.md",
        ("000 tier 1: durability.kafka.available",),
    ),
    Alert(
        "HoldfastChatsHalted",
        Severity.SEV2,
        above(Series("chats_halted"), 0),
        "Chats take no messages until an operator recovers them.",
        "runbooks/counter-corruption.md",
        ("000 B.4",),
    ),
)

_MESSAGING = (
    Alert(
        "HoldfastDiskFull",
        Severity.SEV2,
        below(_DISK_LEFT, 0.05),
        "The disk of the state directory is almost full: soon nothing can be stored.",
        "runbooks/disk-full.md",
        warning=below(_DISK_LEFT, 0.1),
    ),
    Alert(
        "HoldfastBreakerOpen",
        Severity.SEV2,
        equals(_BREAKERS, 1, _MINUTE),
        "A dependency has failed so often that it is not called.",
        "runbooks/breaker-open.md",
        ("000 tier 2: gateway.circuit_breaker.open", "000 B.2"),
        warning=equals(_BREAKERS, 1),
    ),
    Alert(
        "HoldfastSlowConsumers",
        Severity.SEV3,
        above(_DISCONNECTS, 50, _5M),
        "Many clients do not read fast enough and are disconnected.",
        "runbooks/slow-consumers.md",
        ("000 tier 2: gateway.slow_consumer.disconnects", "000 B.1"),
        warning=above(_DISCONNECTS, 10, _5M),
    ),
    Alert(
        "HoldfastPersistSlow",
        Severity.SEV3,
        above(_PERSIST_P99, 0.5, _5M),
        "1 % of the sends wait longer than half a second for their commit.",
        "runbooks/persist-slow.md",
        ("000 tier 2: durability.persist.latency_p99",),
        warning=above(_PERSIST_P99, 0.2, _5M),
    ),
    Alert(
        "HoldfastTransactionConflicts",
        Severity.SEV3,
        above(_CONFLICTS, 0.05, _5M),
        "Commits often meet another writer of the same chats.",
        "runbooks/persist-slow.md",
        ("000 tier 2: durability.transaction.conflict_rate",),
        warning=above(_CONFLICTS, 0.01, _5M),
    ),
    Alert(
        "HoldfastKeyRaces",
        Severity.WARNING,
        above(Ratio(rise("durability_key_races", _5M), _SENDS), 0.01, _5M),
        "Clients send one message twice at the same time.",
        "runbooks/client-retries.md",
        ("001 §12: transaction_conflict_rate",),
    ),
    Alert(
        "HoldfastFanoutLag",
        Severity.SEV3,
        above(Series("fanout_lag"), 10_000, _5M),
        "Stored messages wait long before they are routed to sessions.",
        "runbooks/fanout-lag.md",
        ("000 tier 2: fanout.kafka.consumer_lag", "000 B.3"),
        warning=above(Series("fanout_lag"), 1000, _5M),
    ),
    Alert(
        "HoldfastDeliverySlow",
        Severity.SEV3,
        above(p99("fanout_delivery_lag_seconds", _HOUR), 2),
        "1 % of the messages of the last hour reached their sessions after two seconds.",
        "runbooks/fanout-lag.md",
        ("000 SLO: delivery lag",),
    ),
    Alert(
        "HoldfastDeliveriesSkipped",
        Severity.SEV3,
        above(_SKIP_RATE, 0.2, _5M),
        "Many messages are not delivered live although somebody is connected.",
        "runbooks/fanout-lag.md",
        ("000 tier 2: fanout.delivery.skip_rate",),
        warning=above(_SKIP_RATE, 0.05, _5M),
    ),
    Alert(
        "HoldfastFanoutRestarted",
        Severity.WARNING,
        above(rise("fanout_consumer_restarts", _5M), 0),
        "The reader of the event log ended by an error and was started again.",
        "runbooks/fanout-lag.md",
        ("000 §3.1: fanout.consumer.restarts",),
    ),
    Alert(
        "HoldfastLogLost",
        Severity.SEV2,
        above(risen("log_losses", _5M, ("part",)), 0),
        "A reader's position is gone from the event log; it went on with the store's help.",
        "runbooks/fanout-lag.md",
    ),
    Alert(
        "HoldfastEpochsRaised",
        Severity.SEV1,
        above(rise("epochs_raised", _5M), 0),
        "PostgreSQL failed over or was restored, and commits may be lost: all epochs were raised.",
        "runbooks/postgres-failover.md",
    ),
    Alert(
        "HoldfastFanoutDeadLetters",
        Severity.SEV3,
        above(risen("fanout_dead_letters", _HOUR, ("reason",)), 100),
        "Many entries of the event log could not be used and were put aside.",
        "runbooks/fanout-dead-letters.md",
        ("000 §4: fanout.dlq.alert_threshold_per_hour",),
        warning=above(risen("fanout_dead_letters", _HOUR, ("reason",)), 0),
    ),
    Alert(
        "HoldfastSendsTurnedAway",
        Severity.SEV3,
        above(_TURNED_AWAY_RATE, 0.05, _MINUTE),
        "Sends are refused because too many wait already.",
        "runbooks/sends-turned-away.md",
        ("000 backpressure: SERVER_BUSY",),
        warning=above(_TURNED_AWAY, 0),
    ),
    Alert(
        "HoldfastSequenceGaps",
        Severity.SEV3,
        above(Ratio(_GAPS, rise("durability_messages_persisted", 15 * _MINUTE)), 0.05),
        "Sequences are missing in chats, which only a repair leaves out.",
        "runbooks/counter-corruption.md",
        ("001 §12: sequence_gap_rate",),
        warning=above(_GAPS, 0),
    ),
    Alert(
        "HoldfastRetryStorm",
        Severity.SEV3,
        above(Ratio(rise("durability_idempotency_hits", _5M), _SENDS), 0.1, _5M),
        "More than a tenth of the sends repeat an earlier one: a client's defect, or a storm.",
        "runbooks/client-retries.md",
        ("001 §12: idempotency_hit_rate",),
    ),
    Alert(
        "HoldfastAllocationSlow",
        Severity.SEV3,
        above(p99("sequence_allocation_latency_seconds", _5M), 0.05, _5M),
        "1 % of the commits take longer than 50 ms: the disk or the database is slow.",
        "runbooks/persist-slow.md",
        ("001 §12: sequence_allocation_latency_p99",),
    ),
    Alert(
        "HoldfastAllocationErrors",
        Severity.SEV3,
        above(Ratio(rise("sequence_allocation_errors", _5M), _SENDS), 0.001, _5M),
        "The store could not give sequences to sends.",
        "runbooks/breaker-open.md",
        ("001 §12: sequence_allocation_errors",),
    ),
    Alert(
        "HoldfastHotChats",
        Severity.WARNING,
        above(Series("hot_chats"), 0),
        "Chats with more than 100 messages a minute; `holdfast chat ls --hot` lists them.",
        "runbooks/sends-turned-away.md",
        ("001 §12: messages_per_chat_per_minute",),
    ),
    Alert(
        "HoldfastWritesOverdue",
        Severity.WARNING,
        above(Series("durability_overdue_lanes"), 0, _MINUTE),
        "A write hangs past its deadline; sends of its lane are refused.",
        "runbooks/persist-slow.md",
    ),
    Alert(
        "HoldfastStoreReopened",
        Severity.WARNING,
        above(rise("store_reopened", _5M), 0),
        "A database was opened again after an error: look at the disk.",
        "runbooks/persist-slow.md",
    ),
    Alert(
        "HoldfastDependencyDown",
        Severity.SEV3,
        equals(Series("dependency_up", (("dependency", "=~", "bus|registry"),)), 0, 30),
        "What nodes know of each other by does not answer: presence is incomplete.",
        "runbooks/nodes-apart.md",
        ("000 §4: gateway.redis.available",),
    ),
    Alert(
        "HoldfastAlertsUndelivered",
        Severity.SEV3,
        above(risen("alert_notices", _5M, ("kind", "outcome"), (("outcome", "=", "failed"),)), 0),
        "A sink of alerts does not take them; `holdfast alerts ls` says why.",
        "runbooks/defect.md",
    ),
    Alert(
        "HoldfastDefect",
        Severity.SEV3,
        above(risen("defects", _5M, ("part",)), 0),
        "An error of Holdfast itself was contained; the log has its cause, please report it.",
        "runbooks/defect.md",
    ),
)

_JUDGED = (*_TIER_1, *_MESSAGING, *BESIDE, *REPLIES)

ALERTS: tuple[Alert, ...] = (
    *_JUDGED,
    Alert(
        "HoldfastMetricAbsent",
        Severity.SEV3,
        equals(Absent(expected_series(_JUDGED)), 1, _5M),
        "A metric that alerts are made of is not there, so they cannot fire.",
        "runbooks/defect.md",
    ),
)
