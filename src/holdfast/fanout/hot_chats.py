"""Which chats are hot: above a number of messages in a minute. (Pure.)

Counted by the feed, so that the sends of all nodes count, in whole minutes of monotonic
time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.message import LogEntry, Message

CHATS_MAX = 100_000
"""In a minute with more chats the later ones are not counted. No setting: it bounds the
memory, and a node with that many active chats has no use for a longer list.
"""


class HotChats:
    """Counts committed messages by chat; above ``messages_per_minute`` one is hot."""

    def __init__(self, messages_per_minute: int) -> None:
        self._messages_per_minute = messages_per_minute
        self._minute = 0
        self._counts: dict[str, int] = {}
        self._hot: dict[str, int] = {}

    def count(self, entries: Iterable[LogEntry], now: float) -> None:
        """Count the messages among these entries."""
        self._roll(now)
        counts = self._counts
        for entry in entries:
            if not isinstance(entry.what, Message):
                continue
            chat_id = entry.chat_id
            if chat_id in counts:
                counts[chat_id] += 1
            elif len(counts) < CHATS_MAX:
                counts[chat_id] = 1

    def hot(self, now: float) -> Mapping[str, int]:
        """The hot chats of the last full minute, with their numbers of messages."""
        self._roll(now)
        return self._hot

    def _roll(self, now: float) -> None:
        minute = int(now // 60)
        if minute == self._minute:
            return
        limit = self._messages_per_minute
        follows = minute == self._minute + 1
        self._hot = {chat: n for chat, n in self._counts.items() if n > limit} if follows else {}
        self._counts = {}
        self._minute = minute
