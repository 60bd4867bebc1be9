"""A dead letter, what a store of them promises, and when they raise an alert.

Adapters: recent (in memory), postgres. Each dead letter is also logged as an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from holdfast import telemetry
from holdfast.bounds import positive

DATA_BYTES_MAX = 64 * 1024
_HOUR = len("2026-01-01T00")
"""The leading characters of a timestamp that identify its hour."""


@dataclass(frozen=True, slots=True)
class DeadLetterSettings:
    """How dead letters are kept, and when they raise an alert."""

    alert_threshold_per_hour: int = 100
    """More dead letters in one hour of the clock: one critical log line."""
    max_letters: int = 1000
    """Dead letters remembered for ``holdfast status``; older ones are forgotten, the
    events stay in the log.
    """

    def __post_init__(self) -> None:
        positive(self, "alert_threshold_per_hour", "max_letters")


class DeadLetter(Struct, frozen=True):
    """One event: where it is in the log, and when and why it was put aside."""

    shard: int
    offset: int
    reason: str
    message: str
    data: bytes
    at: str


class DeadLetters(Protocol):
    """Where the last ``max_letters`` are kept. ``put`` must not fail because of one
    letter's content; it raises Unavailable if nothing can be kept at all.
    """

    async def put(self, letter: DeadLetter) -> None: ...

    async def read(self, limit: int) -> Sequence[DeadLetter]:
        """The newest letters, newest first."""
        ...


class DeadLetterAlarm:
    """Counts dead letters, and alerts an operator when an hour has more than
    ``alert_threshold_per_hour``, once in that hour.
    """

    def __init__(self, settings: DeadLetterSettings) -> None:
        self._settings = settings
        self._hour = ""
        self._in_hour = 0

    def count(self, letter: DeadLetter, kept: int) -> None:
        """A letter was put; ``kept`` are there now."""
        telemetry.dead_letter(letter.reason, letter.shard, letter.offset, kept)
        if (hour := letter.at[:_HOUR]) != self._hour:
            self._hour, self._in_hour = hour, 0
        self._in_hour += 1
        if self._in_hour == self._settings.alert_threshold_per_hour + 1:
            telemetry.many_dead_letters(self._in_hour)
