"""Alerts about what is stored: numbering, halted chats, lost messages. (Pure.)"""

from __future__ import annotations

from holdfast.telemetry.alert import (
    FIVE_MINUTES,
    MINUTE,
    Alert,
    Severity,
    above,
    rise,
)
from holdfast.telemetry.expressions import Ratio, Series

_GAPS = rise("sequence_gaps", 15 * MINUTE)

CORRECTNESS = (
    Alert(
        "HoldfastCounterCorruption",
        Severity.SEV1,
        above(rise("durability_counter_corruption", FIVE_MINUTES), 0),
        "A chat was found without its counter; it takes no messages until it is recovered.",
        "runbooks/counter-corruption.md",
        ("000 tier 1: durability.counter.corruption", "001 §12: counter_missing_errors"),
        explains=("HoldfastChatsHalted", "HoldfastAllocationErrors"),
        stays_with="HoldfastChatsHalted",
    ),
    Alert(
        "HoldfastDuplicateSequence",
        Severity.SEV1,
        above(rise("durability_duplicate_sequence", FIVE_MINUTES), 0),
        "A chat's counter is behind its messages; it takes none until it is recovered.",
        "runbooks/counter-corruption.md",
        ("000 tier 1: durability.duplicate.sequence",),
        explains=("HoldfastChatsHalted", "HoldfastAllocationErrors"),
        stays_with="HoldfastChatsHalted",
    ),
    Alert(
        "HoldfastMessagesLost",
        Severity.SEV1,
        above(rise("durability_rollbacks_proven", FIVE_MINUTES), 0),
        "A client has acknowledged messages that the store lost.",
        "runbooks/messages-lost.md",
    ),
    Alert(
        "HoldfastEpochsRaised",
        Severity.SEV1,
        above(rise("epochs_raised", FIVE_MINUTES), 0),
        "PostgreSQL failed over or was restored, and commits may be lost: all epochs were raised.",
        "runbooks/postgres-failover.md",
        explains=("HoldfastLogLost",),
    ),
    Alert(
        "HoldfastChatsHalted",
        Severity.SEV2,
        above(Series("chats_halted"), 0),
        "Chats take no messages until an operator recovers them.",
        "runbooks/counter-corruption.md",
        ("000 B.4",),
        explains=("HoldfastAllocationErrors",),
    ),
    Alert(
        "HoldfastSequenceGaps",
        Severity.SEV3,
        above(Ratio(_GAPS, rise("durability_messages_persisted", 15 * MINUTE)), 0.05),
        "Sequences are missing in chats, which only a repair leaves out.",
        "runbooks/counter-corruption.md",
        ("001 §12: sequence_gap_rate",),
        warning=above(_GAPS, 0),
    ),
)
