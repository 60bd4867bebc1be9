"""Dead letters in memory, for the embedded server.

There the event itself stays in the log at its offset, so a bounded list in memory can
lose only the reminder.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from holdfast.fanout.dead_letters.contract import DeadLetter, DeadLetterAlarm, DeadLetterSettings


class RecentDeadLetters:
    """See ``contract.DeadLetters``."""

    def __init__(self, settings: DeadLetterSettings | None = None) -> None:
        settings = settings or DeadLetterSettings()
        self._letters: deque[DeadLetter] = deque(maxlen=settings.max_letters)
        self._alarm = DeadLetterAlarm(settings)

    async def put(self, letter: DeadLetter) -> None:
        self._letters.append(letter)
        self._alarm.count(letter, len(self._letters))

    async def read(self, limit: int) -> Sequence[DeadLetter]:
        return list(islice(reversed(self._letters), limit))
