"""The store: damage and repair."""

from __future__ import annotations

from holdfast.telemetry.logs import log
from holdfast.telemetry.marks import sometimes
from holdfast.telemetry.metrics import counter

_counter_corruption = counter(
    "durability_counter_corruption",
    "Chats found without their counter, SEV-1 [durability.counter.corruption] [counter_missing_errors]",
)
_duplicate_sequence = counter(
    "durability_duplicate_sequence", "Sequences found already taken, SEV-1 [durability.duplicate.sequence]"
)
_store_reopened = counter("store_reopened", "Times the database was closed and opened again after an error")


def counter_corruption(chat_id: str) -> None:
    """A chat has no counter; it is halted until an operator recovers it."""
    _counter_corruption.inc()
    sometimes("a chat had no counter")
    log.critical("durability.counter.corruption", severity="SEV-1", chat_id=chat_id)


def duplicate_sequence(chat_id: str) -> None:
    """A chat's next sequence is already taken; it is halted until an operator recovers it."""
    _duplicate_sequence.inc()
    sometimes("a sequence was taken")
    log.critical("durability.duplicate.sequence", severity="SEV-1", chat_id=chat_id)


def store_reopened(cause: str) -> None:
    """After an error whose outcome is unknown a database handle is never used again."""
    _store_reopened.inc()
    sometimes("a database was opened again")
    log.error("store.reopened", cause=cause)


def store_moved(file: str) -> None:
    """A database is open under a name that is not its own any more: what is written there would be lost."""
    log.critical(
        "store.moved",
        severity="SEV-1",
        file=file,
        advice="nothing is written until it is back; do not stop the server before you have saved what it has open: "
        "docs/guides/runbooks/file-gone.md",
    )
