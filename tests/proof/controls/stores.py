"""Stores that break a promise."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from holdfast.message import Acked, Draft, LogEntry, Message, Outcome, Page, User
from holdfast.store.contract import ChatStore
from holdfast.store.memory import MemoryStore
from holdfast.store.numbering import GroupState, StoredSend, number
from proof.simulation.disk import SimulatedDisk


class TwoPhaseStore(MemoryStore):
    """Allocates numbers first and stores each message later: 43 is readable before 42.

    Red: 4, the late fill. 9 follows and cannot be kept green: a page is authoritative,
    so a client that was served up to 43 never asks for 42 and rests without it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rng = random.Random(1)

    async def append(self, group: Sequence[Draft]) -> list[Outcome]:
        numbered = number(group, self._group_state(group))
        for chat_id, counter in numbered.counters.items():
            self._chats[chat_id].counter = counter
        await asyncio.gather(*(self._persist(stored) for stored in numbered.fresh))
        return numbered.outcomes

    async def _persist(self, stored: StoredSend) -> None:
        await asyncio.sleep(self._rng.random())
        self._commit([self._put(stored.message, stored)])

    def _put(self, message: Message, stored: StoredSend | None) -> LogEntry:
        held = self._chats[message.chat_id]
        allocated = held.counter or 0
        entry = super()._put(message, stored)
        held.counter = max(allocated, message.sequence)
        return entry


class OverwritingStore(MemoryStore):
    """Puts without a condition, and sometimes a repair sets a counter one too low.

    Red: 1, an acknowledged message is overwritten. 3 and 9 follow and cannot be kept
    green: the number now stands for two messages, and a client that got the first one
    rests with a chat that is not the stored one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._appends = 0

    async def append(self, group: Sequence[Draft]) -> list[Outcome]:
        self._appends += 1
        if self._appends % 5 == 0:
            for chat_id in {draft.chat_id for draft in group}:
                held = self._chats[chat_id]
                held.counter = max((held.counter or 0) - 1, 0)
        numbered = number(group, self._group_state(group))
        self._commit([self._put(stored.message, stored) for stored in numbered.fresh])
        return numbered.outcomes


class UnscopedStore(MemoryStore):
    """Looks a key up by chat and client id alone, and does not compare contents."""

    async def append(self, group: Sequence[Draft]) -> list[Outcome]:
        rest = [draft for draft in group if self._found(draft) is None]
        answers = iter(await super().append(rest))
        return [
            found if (found := self._found(draft)) and draft not in rest else next(answers)
            for draft in group
        ]

    def _found(self, draft: Draft) -> Acked | None:
        held = self._chats.get(draft.chat_id)
        for (_, _, key), stored in (held.keys if held else {}).items():
            if key == draft.client_message_id:
                return Acked(stored.message, True)
        return None


class DeafStore(MemoryStore):
    """Accepts the sends of muted members."""

    def _group_state(self, group: Sequence[Draft]) -> GroupState:
        known = super()._group_state(group)
        known.muted = ()
        return known


class ForgetfulStore(MemoryStore):
    """Forgets its keys, as after a time to live: a retry is a new message."""

    async def append(self, group: Sequence[Draft]) -> list[Outcome]:
        for held in self._chats.values():
            held.keys.clear()
        return await super().append(group)


class UnpublishedDisk(SimulatedDisk):
    """Not all commits reach the log, as if a retry were answered unpublished."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self._commits = 0

    def publish(self, entries: Sequence[LogEntry]) -> None:
        self._commits += 1
        if self._commits % 4:
            super().publish(entries)


class Around:
    """A store with one broken verb; the others pass through."""

    def __init__(self, store: ChatStore) -> None:
        self._store: Any = store

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._store, verb)


class EarlyAcks(Around):
    """Acks a predicted commit, commits later: a kill in between loses messages.

    Red: 1. 3 and 5 follow and cannot be kept green: the lost message's number is given
    to the next one (two messages under one number), and a read after the restart shows
    less than was acknowledged before it.
    """

    def __init__(self, store: ChatStore) -> None:
        super().__init__(store)
        self._writing: asyncio.Task[None] | None = None

    async def append(self, group: Sequence[Draft]) -> list[Outcome]:
        if self._writing is not None:
            await asyncio.wait([self._writing])
        forecast = number(group, self._store.peek(group)).outcomes
        self._writing = asyncio.create_task(self._write(group))
        return forecast

    async def _write(self, group: Sequence[Draft]) -> None:
        await asyncio.sleep(0.7)
        await self._store.append(group)


class LaggingReads(Around):
    """Every other page is one message stale, but never behind its reader's cursor."""

    def __init__(self, store: ChatStore) -> None:
        super().__init__(store)
        self._reads = 0

    async def read_after(
        self, chat_id: str, after: int, limit: int, bytes_max: int, reader: User | None = None
    ) -> Page:
        page: Page = await self._store.read_after(chat_id, after, limit, bytes_max, reader)
        self._reads += 1
        if self._reads % 2 or page.has_more or page.head <= after:
            return page
        return replace(
            page, messages=page.messages[:-1], through=page.through - 1, head=page.head - 1
        )


class OpenReads(Around):
    """Serves every user, member or not."""

    async def read_after(
        self, chat_id: str, after: int, limit: int, bytes_max: int, reader: User | None = None
    ) -> Page:
        page: Page = await self._store.read_after(chat_id, after, limit, bytes_max)
        return page
