"""Dead letters in memory, for tests and simulations."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import islice

from msgspec.structs import replace

from holdfast import telemetry
from holdfast.fanout.dead_letters.contract import DeadLetter, DeadLetterAlarm, DeadLetterSettings


class RecentDeadLetters:
    """See ``contract.DeadLetters``."""

    def __init__(self, settings: DeadLetterSettings | None = None) -> None:
        settings = settings or DeadLetterSettings()
        self._letters: deque[DeadLetter] = deque(maxlen=settings.max_letters)
        self._alarm = DeadLetterAlarm(settings)
        self._last = 0

    async def put(self, letter: DeadLetter) -> None:
        if any(_event(kept) == _event(letter) for kept in self._letters):
            return
        self._last += 1
        self._letters.append(replace(letter, number=self._last))
        self._alarm.count(letter, len(self._letters))

    async def read(self, limit: int, before: int | None = None) -> Sequence[DeadLetter]:
        older = (x for x in reversed(self._letters) if before is None or x.number < before)
        return list(islice(older, limit))

    async def get(self, number: int) -> DeadLetter | None:
        return next((letter for letter in self._letters if letter.number == number), None)

    async def counts(self) -> Mapping[str, int]:
        return Counter(letter.reason for letter in self._letters)

    async def remove(self, numbers: Sequence[int]) -> int:
        left = [letter for letter in self._letters if letter.number not in numbers]
        removed = len(self._letters) - len(left)
        self._keep(left)
        telemetry.dead_letters_kept(len(left))
        return removed

    async def forget_user(self, user_id: str) -> None:
        name = user_id.encode()
        self._keep([replace(x, data=b"") if name in x.data else x for x in self._letters])

    def _keep(self, letters: Sequence[DeadLetter]) -> None:
        self._letters.clear()
        self._letters.extend(letters)


def _event(letter: DeadLetter) -> tuple[int, int, str]:
    return letter.shard, letter.offset, letter.reason
