"""What outlives every node: the store and its log, and how a failover loses their end.

A failover promotes a copy of the store that may be behind. What counts is the survivor:
one commit raises all epochs above every one that was given, and the log says so under
another base. A chat's epoch is its own part, below ``EPOCHS_PER_BASE``, and the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import asdict, replace

from holdfast.message import LogEntry, Message
from holdfast.store.memory import MemoryStore
from holdfast.store.memory.chat import MemoryChat
from holdfast.verify.history import KeySeen
from proof.simulation.log import SavedLog, ShardedLog

EPOCHS_PER_BASE = 1_000


class SavedDisk(NamedTuple):
    """A copy, as a standby has it."""

    chats: dict[str, MemoryChat]
    directs: dict[Any, str]
    answers: dict[Any, Any]
    records: int
    entries: int
    log: SavedLog


class SimulatedDisk:
    """The store and the log of its commits."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.log = ShardedLog(store.grouping.at_once)
        self.base = 0
        self.lost_redactions: list[tuple[str, int]] = []
        store.on_commit(self.publish)

    def publish(self, entries: Sequence[LogEntry]) -> None:
        """One commit, whose chats are of one shard; none: contents are gone."""
        if entries:
            self.log.append(self.store.lane(entries[0].chat_id), entries)
        else:
            self.log.remove(self._is_deleted)

    def _is_deleted(self, entry: LogEntry) -> bool:
        held = self.store._chats.get(entry.chat_id)
        if held is None or not isinstance(entry.what, Message):
            return False
        return entry.what.sequence < held.chat.first_sequence

    def sequences(self, chat_id: str) -> list[int]:
        return sorted(self.store._chats[chat_id].messages)

    def keys(self) -> dict[str, list[KeySeen]]:
        """Every idempotency key, which no contract shows."""
        return {
            chat_id: [
                KeySeen(sender, key, stored.message.sequence, stored.message.message_id)
                for (_, sender, key), stored in held.keys.items()
            ]
            for chat_id, held in self.store._chats.items()
        }

    # --- failover ---------------------------------------------------------------------

    def saved(self) -> SavedDisk:
        store = self.store
        return SavedDisk(
            {chat_id: _copy(held) for chat_id, held in store._chats.items()},
            dict(store._directs),
            dict(store._answers),
            len(store._audit),
            len(store._log),
            self.log.saved(),
        )

    def promote(self, saved: SavedDisk) -> list[Message]:
        """Go on with a copy; returns the messages that are lost."""
        store = self.store
        for record in store._audit[saved.records :]:
            if record.action == "message.redact":
                chat_id, _, sequence = record.target.rpartition("/")
                self.lost_redactions.append((chat_id, int(sequence)))
        store._chats, store._directs, store._answers = saved.chats, saved.directs, saved.answers
        lost = [e.what for e in store._log[saved.entries :] if isinstance(e.what, Message)]
        del store._audit[saved.records :]
        del store._log[saved.entries :]
        self.log.put_back(saved.log)
        self.raise_all(moves_base=True)
        return lost

    def raise_all(self, *, moves_base: bool) -> None:
        """Raise the epoch of every chat."""
        self.base += EPOCHS_PER_BASE
        for held in self.store._chats.values():
            old = held.chat.epoch
            held.chat = replace(held.chat, epoch=old % EPOCHS_PER_BASE + self.base)
            for key, mark in held.marks.items():
                if mark.epoch == old:
                    head, epoch = held.head, held.chat.epoch
                    delivered, read = min(mark.delivered, head), min(mark.read, head)
                    held.marks[key] = replace(mark, epoch=epoch, delivered=delivered, read=read)
        self.log.raise_all(self.base, moves_base=moves_base)


def _copy(held: MemoryChat) -> MemoryChat:
    """Its values are frozen; its collections are not."""
    fields: dict[str, Any] = {
        name: value.copy() if isinstance(value, dict | list | set) else value
        for name, value in asdict(held).items()
    }
    return MemoryChat(**fields)
