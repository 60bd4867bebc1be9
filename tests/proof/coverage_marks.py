"""Coverage marks: rare events that a proof must reach to count for them.

The code marks them (``telemetry.mark``). A proof collects the marks while it runs
and passes only if it reached each of ``MUST_HAPPEN[its name]``. ``collected`` is for a
proof in this process. A process that may be killed at any time writes its marks with
``write_marks``, one line each, unbuffered, and the proof reads them afterwards.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from holdfast import telemetry

MUST_HAPPEN: Mapping[str, frozenset[str]] = {
    "simulation": frozenset(
        {
            "sends were answered: deduplicated",
            "sends were answered: unknown",
            "sends were answered: deferred",
            "sends were answered: refused",
            "a send was turned away: age",
            "a write ended after its deadline",
            "a lane hung and others went on",
            "a breaker was: open",
            "a breaker was: half_open",
            "a delivery was skipped: members_unknown",
            "a delivery was tried again",
            "the log was lost at a reader's position",
            "the registry failed",
            "a session noticed: delivery_skipped",
            "a session noticed: slow_consumer_warned",
            "a session noticed: slow_consumer_recovered",
            "a connection was closed: slow_consumer",
            "a connection was closed: idle_timeout",
            "a connection was closed: upstream_failure",
            "a connection was closed: duplicate_connection",
            "the server was killed while a commit was open",
            "a device dropped its copy for a newer epoch",
            "a device was displaced by a connection to another node",
            "a failover lost commits",
            "a lease moved to another node",
            "a node caught up after it lost the log",
            "a reader was overtaken: what it made was refused",
            "presence was corrected after a node's death",
            "the renewal of a lease that had ended was refused",
        }
    ),
    "kill -9": frozenset(
        {
            "the server was killed: chats.commit.before",
            "the server was killed: chats.commit.after",
            "sends were answered: deduplicated",
        }
    ),
    "disk faults": frozenset(
        {
            "a breaker was: open",
            "a breaker was: half_open",
            "a database was opened again",
            "a write ended after its deadline",
            "sends were answered: unknown",
            "sends were answered: deduplicated",
        }
    ),
    "simulation of jobs": frozenset(
        {
            "a worker lost its lease",
            "a zombie's completion was refused",
            "a job type was probed: half_open",
            "a message from outside was known already",
        }
    ),
}
"""The marks that each proof, by its row in RESULTS.md, must reach."""


@contextmanager
def collected() -> Iterator[Counter[str]]:
    """Count how often this process reaches each mark inside the block."""
    counts: Counter[str] = Counter()

    def reached(name: str) -> None:
        if is_rare(name):
            counts[name] += 1

    stop = telemetry.on_mark(reached)
    try:
        yield counts
    finally:
        stop()


def write_marks(path: Path) -> None:
    """Append each mark to a file; a kill leaves a line whole or absent."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def reached(name: str) -> None:
        if is_rare(name):
            os.write(file, f"{name}\n".encode())

    telemetry.on_mark(reached)


def is_rare(name: str) -> bool:
    """Every commit reaches two marks of one word, such as ``chats.commit.after``: they
    are acted on, and prove nothing.
    """
    return " " in name or ".commit." not in name


def read_marks(path: Path) -> Counter[str]:
    """The counts that all processes have written with ``write_marks``."""
    return Counter(path.read_text().splitlines()) if path.exists() else Counter()


def missed(
    proof: str,
    reached: Mapping[str, int],
    must_happen: Mapping[str, frozenset[str]] = MUST_HAPPEN,
) -> list[str]:
    """The marks that this proof must reach and did not."""
    met = {name for name, times in reached.items() if times > 0}
    return sorted(must_happen.get(proof, frozenset()) - met)
