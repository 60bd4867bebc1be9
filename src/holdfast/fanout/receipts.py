"""Receipts: which senders learn that their messages were delivered or read. (Pure.)

Senders are remembered from the log, for the last messages of each chat, and so is how
far each reader's receipts went. Both are bounded and forget the least recently used: a
missing receipt does no harm, because the store has the watermark.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

from holdfast.message import LogEntry, Message, User, Watermark
from holdfast.wire.frames import Receipt

MAX_CHATS = 10_000
MESSAGES_PER_CHAT = 100
MAX_READERS = 100_000


class Receipts:
    """Turns watermarks into receipts for senders."""

    def __init__(self, max_chats: int = MAX_CHATS, max_readers: int = MAX_READERS) -> None:
        self._max_chats = max_chats
        self._max_readers = max_readers
        self._senders: OrderedDict[str, deque[tuple[int, str, str]]] = OrderedDict()
        self._furthest: OrderedDict[tuple[User, str], tuple[int, int, int]] = OrderedDict()

    def on_entries(self, entries: Iterable[LogEntry]) -> None:
        """Remember who sent these messages."""
        senders = self._senders
        for entry in entries:
            message = entry.what
            if not isinstance(message, Message) or message.kind != "text":
                continue
            chat_id = entry.chat_id
            recent = senders.get(chat_id)
            if recent is None:
                recent = senders[chat_id] = deque(maxlen=MESSAGES_PER_CHAT)
                if len(senders) > self._max_chats:
                    senders.popitem(last=False)
            else:
                senders.move_to_end(chat_id)
            recent.append((message.sequence, entry.tenant, message.sender_id))

    def of(self, watermarks: Iterable[Watermark]) -> Iterator[tuple[User, User, Receipt]]:
        """The receipts to send, as (sender, reader, receipt). Of a reader's several
        devices the furthest counts.
        """
        moved: dict[tuple[User, str], tuple[tuple[int, int], tuple[int, int]]] = {}
        for mark in watermarks:
            key = (mark.user, mark.chat_id)
            before = self._furthest.get(key, (0, 0, 0))
            was = before[1:] if before[0] == mark.epoch else (0, 0)
            now = (max(was[0], mark.delivered), max(was[1], mark.read))
            if mark.epoch >= before[0] and now != was:
                self._remember(key, (mark.epoch, *now))
                moved[key] = (moved[key][0] if key in moved else was, now)
        for (reader, chat_id), (was, now) in moved.items():
            for sender in self._concerned(chat_id, was, now) - {reader}:
                yield (
                    sender,
                    reader,
                    Receipt(chat_id, reader.user_id, delivered=now[0], read=now[1]),
                )

    def _concerned(self, chat_id: str, was: tuple[int, int], now: tuple[int, int]) -> set[User]:
        """The senders of messages that this reader has newly received or read."""
        return {
            User(tenant, sender_id)
            for sequence, tenant, sender_id in self._senders.get(chat_id, ())
            if was[0] < sequence <= now[0] or was[1] < sequence <= now[1]
        }

    def _remember(self, key: tuple[User, str], level: tuple[int, int, int]) -> None:
        self._furthest[key] = level
        self._furthest.move_to_end(key)
        if len(self._furthest) > self._max_readers:
            self._furthest.popitem(last=False)
