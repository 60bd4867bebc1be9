"""Events that cannot be used: kept for an operator, so that reading can go on.

The contract, and the adapter of the embedded server. There the event itself is still in the log at its position, so
a bounded list in memory loses nothing but the reminder; each letter is also an error in the server's log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from msgspec import Struct

from holdfast import telemetry

TOPIC = "dead_letters.messages"
DATA_BYTES_MAX = 64 * 1024


class DeadLetter(Struct, frozen=True):
    """One event, where it stands, when and why it was put aside."""

    position: int
    reason: str
    message: str
    data: bytes
    at: str


class DeadLetters(Protocol):
    """Where letters go. ``put`` must not fail for one letter's sake; Unavailable if it cannot be kept at all."""

    async def put(self, letter: DeadLetter) -> None: ...

    async def read(self, limit: int) -> Sequence[DeadLetter]:
        """The newest letters, newest first."""
        ...


class RecentDeadLetters:
    """The last ``max_letters``; older ones are forgotten."""

    topic = TOPIC

    def __init__(self, max_letters: int = 1000) -> None:
        if max_letters <= 0:
            raise ValueError("max_letters must be greater than 0")
        self._letters: deque[DeadLetter] = deque(maxlen=max_letters)

    async def put(self, letter: DeadLetter) -> None:
        self._letters.append(letter)
        telemetry.dead_letter(letter.reason, letter.position, len(self._letters))

    async def read(self, limit: int) -> Sequence[DeadLetter]:
        return list(islice(reversed(self._letters), limit))
