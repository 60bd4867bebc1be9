"""Whether the log is dense: between two neighbours of a chat no sequence may be missing. (Pure.)

Sequences are dense by construction, so a gap is an operator's repair or a defect; either way somebody should know.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.message import LogEntry

MAX_CHATS = 100_000
"""Chats watched at once; at the bound all are forgotten and watching starts anew."""


class Gaps:
    """Remembers each chat's newest sequence."""

    def __init__(self, max_chats: int = MAX_CHATS) -> None:
        self._max_chats = max_chats
        self._newest: dict[str, int] = {}

    def missing(self, entries: Iterable[LogEntry]) -> int:
        """How many sequences are missing before these entries. Repeated entries are no gap."""
        missing = 0
        newest = self._newest
        for entry in entries:
            message = entry.message
            last = newest.get(message.chat_id)
            if last is None:
                if len(newest) >= self._max_chats:
                    newest.clear()
            elif message.sequence > last + 1:
                missing += message.sequence - last - 1
            if last is None or message.sequence > last:
                newest[message.chat_id] = message.sequence
        return missing
