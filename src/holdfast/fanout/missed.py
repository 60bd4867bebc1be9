"""What a reader missed, read from the store: the messages since a moment, by chat.

The chats are looked through in the store's order, and each active one is read forward
from its first message since the moment. A failed read is repeated, and what was read is
given again until the reader is done with it. Chats and messages are bounded per call,
so the size of the store bounds nothing but the time.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.eventlog.contract import Position
from holdfast.message import LogEntry, PageToken
from holdfast.store.contract import ChatStore

MESSAGES_PER_READ = 500
BYTES_PER_READ = 1 << 20


class MissedMessages:
    """One pass over the store. ``end`` and ``began_at`` are from before it: what is
    committed later is in the log behind ``end``.
    """

    def __init__(self, chats: ChatStore, since: str, end: Position, began_at: float) -> None:
        self._store, self._since = chats, since
        self.end, self.began_at = end, began_at
        self._chats: list[tuple[str, str]] = []
        self._after: PageToken | None = None
        self._is_last = False
        self._sequence: int | None = None
        """Of the first chat: the last one that was read; None: it is not begun."""
        self._given: Sequence[LogEntry] | None = None

    async def next(self) -> Sequence[LogEntry] | None:
        """The next messages, all of one chat, as entries at offset 0; perhaps none.
        None at the end. The same again until ``done``.
        """
        if self._given is None:
            self._given = await self._read()
        return self._given

    def done(self) -> None:
        """What ``next`` gave has its jobs."""
        self._given = None

    async def _read(self) -> Sequence[LogEntry] | None:
        if not self._chats:
            if self._is_last:
                return None
            page = await self._store.active_since(self._since, self._after)
            self._chats, self._after = list(page.chats), page.next
            self._is_last = page.next is None
            return ()
        tenant, chat_id = self._chats[0]
        if self._sequence is None:
            self._sequence = await self._before_the_first(chat_id)
        found = await self._store.read_after(
            chat_id, self._sequence, MESSAGES_PER_READ, BYTES_PER_READ
        )
        self._sequence = found.through
        if not found.has_more:
            self._chats.pop(0)
            self._sequence = None
        return [
            LogEntry(0, 0, tenant, chat_id, found.epoch, message)
            for message in found.messages
            if message.created_at >= self._since
        ]

    async def _before_the_first(self, chat_id: str) -> int:
        """The sequence before the chat's first message since the moment."""
        before = (await self._store.chat(chat_id)).head + 1
        while True:
            page = await self._store.read_before(chat_id, before, MESSAGES_PER_READ, BYTES_PER_READ)
            recent = [m.sequence for m in page.messages if m.created_at >= self._since]
            before = min(recent, default=before)
            if not page.has_more or len(recent) < len(page.messages):
                return before - 1
