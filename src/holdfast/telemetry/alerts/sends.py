"""Alerts about sends on their way into the store. (Pure.)"""

from __future__ import annotations

from holdfast.telemetry.alert import (
    FIVE_MINUTES,
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
from holdfast.telemetry.expressions import Increase, Match, Plus, Ratio, Series

_OPEN: Match = ("state", "=", "open")
_BREAKERS = Series("circuit_breaker_state", (("dependency", "!~", "provider:.*"), _OPEN))
_PERSIST_P99 = p99("durability_persist_latency_seconds", FIVE_MINUTES)
_SENDS = risen("durability_outcomes", FIVE_MINUTES, ("outcome",))
_CONFLICTS = Ratio(
    rise("durability_transaction_conflicts", FIVE_MINUTES),
    Increase(Series("ingest_group_sends_count"), FIVE_MINUTES),
)
_TURNED_AWAY = risen(
    "ingest_sends_turned_away", MINUTE, ("reason",), (("reason", "!=", "stopping"),)
)
_TURNED_AWAY_RATE = Ratio(
    _TURNED_AWAY, Plus(_TURNED_AWAY, risen("durability_outcomes", MINUTE, ("outcome",)))
)

SENDS = (
    Alert(
        "HoldfastStoreDown",
        Severity.SEV1,
        equals(series("dependency_up", dependency="store"), 0, 10),
        "The store of chats does not answer: sends are refused, clients keep them.",
        "runbooks/breaker-open.md",
        ("000 tier 1: durability.dynamodb.available",),
        explains=(
            "HoldfastBreakerOpen",
            "HoldfastStoreReopened",
            "HoldfastWritesOverdue",
            "HoldfastAllocationErrors",
            "HoldfastSendsTurnedAway",
        ),
    ),
    Alert(
        "HoldfastBreakerOpen",
        Severity.SEV2,
        equals(_BREAKERS, 1, MINUTE),
        "A dependency has failed so often that it is not called.",
        "runbooks/breaker-open.md",
        ("000 tier 2: gateway.circuit_breaker.open", "000 B.2"),
        warning=equals(_BREAKERS, 1),
    ),
    Alert(
        "HoldfastPersistSlow",
        Severity.SEV3,
        above(_PERSIST_P99, 0.5, FIVE_MINUTES),
        "1 % of the sends wait longer than half a second for their commit.",
        "runbooks/persist-slow.md",
        ("000 tier 2: durability.persist.latency_p99",),
        warning=above(_PERSIST_P99, 0.2, FIVE_MINUTES),
        explains=("HoldfastSendsTurnedAway",),
    ),
    Alert(
        "HoldfastAllocationSlow",
        Severity.SEV3,
        above(p99("sequence_allocation_latency_seconds", FIVE_MINUTES), 0.05, FIVE_MINUTES),
        "1 % of the commits take longer than 50 ms: the disk or the database is slow.",
        "runbooks/persist-slow.md",
        ("001 §12: sequence_allocation_latency_p99",),
        explains=("HoldfastPersistSlow", "HoldfastSendsTurnedAway"),
    ),
    Alert(
        "HoldfastAllocationErrors",
        Severity.SEV3,
        above(Ratio(rise("sequence_allocation_errors", FIVE_MINUTES), _SENDS), 0.001, FIVE_MINUTES),
        "The store could not give sequences to sends.",
        "runbooks/breaker-open.md",
        ("001 §12: sequence_allocation_errors",),
    ),
    Alert(
        "HoldfastTransactionConflicts",
        Severity.SEV3,
        above(_CONFLICTS, 0.05, FIVE_MINUTES),
        "Commits often meet another writer of the same chats.",
        "runbooks/persist-slow.md",
        ("000 tier 2: durability.transaction.conflict_rate",),
        warning=above(_CONFLICTS, 0.01, FIVE_MINUTES),
    ),
    Alert(
        "HoldfastWritesOverdue",
        Severity.WARNING,
        above(Series("durability_overdue_lanes"), 0, MINUTE),
        "A write hangs past its deadline; sends of its lane are refused.",
        "runbooks/persist-slow.md",
    ),
    Alert(
        "HoldfastStoreReopened",
        Severity.WARNING,
        above(rise("store_reopened", FIVE_MINUTES), 0),
        "A database was opened again after an error: look at the disk.",
        "runbooks/persist-slow.md",
    ),
    Alert(
        "HoldfastSendsTurnedAway",
        Severity.SEV3,
        above(_TURNED_AWAY_RATE, 0.05, MINUTE),
        "Sends are refused because too many wait already.",
        "runbooks/sends-turned-away.md",
        ("000 backpressure: SERVER_BUSY",),
        warning=above(_TURNED_AWAY, 0),
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
        "HoldfastKeyRaces",
        Severity.WARNING,
        above(Ratio(rise("durability_key_races", FIVE_MINUTES), _SENDS), 0.01, FIVE_MINUTES),
        "Clients send one message twice at the same time.",
        "runbooks/client-retries.md",
        ("001 §12: transaction_conflict_rate",),
    ),
    Alert(
        "HoldfastRetryStorm",
        Severity.SEV3,
        above(Ratio(rise("durability_idempotency_hits", FIVE_MINUTES), _SENDS), 0.1, FIVE_MINUTES),
        "More than a tenth of the sends repeat an earlier one: a client's defect, or a storm.",
        "runbooks/client-retries.md",
        ("001 §12: idempotency_hit_rate",),
    ),
)
