"""Which chats are hot: above 100 messages in a minute. (Pure.)

Counted in whole minutes of monotonic time. Bounded: in a minute with more chats than ``max_chats`` the later ones
are not counted; a node that serves so many has no use for the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast.bounds import positive


@dataclass(frozen=True, slots=True)
class HotSettings:
    messages_per_minute: int = 100
    max_chats: int = 100_000

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)


class HotChats:
    """Counts committed messages by chat."""

    def __init__(self, settings: HotSettings | None = None) -> None:
        self._settings = settings or HotSettings()
        self._minute = 0
        self._counts: dict[str, int] = {}
        self._hot: dict[str, int] = {}

    def count(self, chat_ids: Iterable[str], now: float) -> None:
        """One more message in each of these."""
        self._roll(now)
        counts = self._counts
        for chat_id in chat_ids:
            if chat_id in counts:
                counts[chat_id] += 1
            elif len(counts) < self._settings.max_chats:
                counts[chat_id] = 1

    def hot(self, now: float) -> Mapping[str, int]:
        """The hot chats of the last full minute, with their messages."""
        self._roll(now)
        return self._hot

    def _roll(self, now: float) -> None:
        minute = int(now // 60)
        if minute == self._minute:
            return
        limit = self._settings.messages_per_minute
        follows = minute == self._minute + 1
        self._hot = {chat: n for chat, n in self._counts.items() if n > limit} if follows else {}
        self._counts = {}
        self._minute = minute
