"""The sequencing of the first design document: allocate a number, then persist.

This is a negative control; the product does not use it. A send has five steps: look up
the key; check the membership; increment the counter; write key and message; publish.
Each step is atomic, no two are. So a reader can see 43 before 42 is stored (a late
fill); a retry whose first try failed to publish is answered from the key and never
published; keys are not scoped to their sender; and a message is put without a
condition, so that a counter that was set back overwrites acknowledged messages.

Tests run the document's seven scenarios on it, and the simulation runs it in place of
the store to show that the checkers notice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from holdfast.errors import HoldfastError, NotAMember
from holdfast.message import Acked, Draft, Message

Step = Callable[[str, Draft], Awaitable[None]]
"""Awaited before each step, with the step's name.

The steps are ``key``, ``membership``, ``allocate``, ``persist`` and ``publish``.
Raising in it is a crash (or a failed dependency) at that point; waiting in it chooses
the interleaving.
"""


class CounterMissing(HoldfastError):
    """The chat has no counter: no send until it is reconstructed.

    SEV-2 in the document.
    """


async def _no_pause(_step: str, _draft: Draft) -> None:
    return None


@dataclass(slots=True)
class Tables:
    """The state of the two phases: one dict per table of the document."""

    counters: dict[str, int] = field(default_factory=dict)
    keys: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    messages: dict[tuple[str, int], Message] = field(default_factory=dict)
    members: set[tuple[str, str]] = field(default_factory=set)
    published: list[Message] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)


class TwoPhaseIngest:
    """``persist_message`` of that document, over its tables."""

    def __init__(self, tables: Tables, before: Step = _no_pause) -> None:
        self.tables = tables
        self._before = before

    async def persist(self, draft: Draft) -> Acked:
        tables = self.tables
        await self._before("key", draft)
        if (found := self._cached(draft)) is not None:
            return found
        await self._before("membership", draft)
        if (draft.chat_id, draft.sender.user_id) not in tables.members:
            raise NotAMember("not a member", chat_id=draft.chat_id)
        await self._before("allocate", draft)
        sequence = self._allocate(draft)
        await self._before("persist", draft)
        if (found := self._cached(draft)) is not None:
            return found  # another try won the race; the number allocated here becomes a gap
        message = self._write(draft, sequence)
        await self._before("publish", draft)
        tables.published.append(message)
        return Acked(message, False)

    def _cached(self, draft: Draft) -> Acked | None:
        found = self.tables.keys.get((draft.chat_id, draft.client_message_id))
        if found is None:
            return None
        return Acked(self.tables.messages[draft.chat_id, found[0]], True)

    def _allocate(self, draft: Draft) -> int:
        counters = self.tables.counters
        if draft.chat_id not in counters:
            self.tables.alerts.append(f"SEV-2: {draft.chat_id} has no counter")
            raise CounterMissing(
                "the chat's counter is missing; reconstruct it from the highest message"
            )
        counters[draft.chat_id] += 1
        return counters[draft.chat_id]

    def _write(self, draft: Draft, sequence: int) -> Message:
        message = Message(
            message_id=draft.message_id,
            chat_id=draft.chat_id,
            sequence=sequence,
            kind="text",
            sender_id=draft.sender.user_id,
            client_message_id=draft.client_message_id,
            content=draft.content,
            content_type=draft.content_type,
            created_at=draft.created_at,
        )
        self.tables.keys[draft.chat_id, draft.client_message_id] = (sequence, draft.message_id)
        self.tables.messages[draft.chat_id, sequence] = message
        return message

    def recover_counter(self, chat_id: str) -> int:
        """The document's repair: set the counter to the highest stored sequence,
        despite sends in flight.
        """
        highest = max((n for chat, n in self.tables.messages if chat == chat_id), default=0)
        self.tables.counters[chat_id] = highest
        return highest
