"""Makes a job of each message that triggers an assistant.

``fanout.job_reader`` says how the position is kept: with the jobs, so that a crash
neither repeats nor skips a message. Members are read from the store and forgotten at
each membership event, so a message finds the members of its time or later ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from holdfast.clock import Clock, timestamp
from holdfast.errors import NotFound
from holdfast.eventlog.contract import EventLog, Position
from holdfast.fanout.job_reader import JobReader
from holdfast.fanout.members import Members
from holdfast.history.history import ChatHistory
from holdfast.message import ChatKind, LogEntry, Member, Message, User
from holdfast.store.contract import ChatStore
from holdfast.streaming.assistants.jobs import draft_of
from holdfast.streaming.assistants.triggers import Assistants, triggers
from holdfast.work.contract import WorkStore
from holdfast.work.job import JobDraft

MEMBERS_MAX = 100_000
KINDS_MAX = 100_000
"""Chats whose kind is remembered; it never changes."""
AGE_SECONDS_MAX = 7200.0
"""An older message triggers nothing: nobody waits for its reply any more. It is above
an hour, so that a clock set forward by as much costs no reply."""


class AssistantReader(JobReader):
    """Reads the log for the assistants of all tenants."""

    reader = "assistants"

    def __init__(
        self,
        log: EventLog,
        assistants: Assistants,
        jobs: WorkStore,
        chats: ChatStore,
        history: ChatHistory,
        clock: Clock,
    ) -> None:
        super().__init__(log, jobs, chats, clock)
        self._assistants, self._history = assistants, history
        self._members = Members(self._load, MEMBERS_MAX)
        self._kinds: OrderedDict[str, ChatKind] = OrderedDict()

    async def _load(self, chat_id: str) -> Sequence[Member]:
        return await self._history.ask(lambda store: store.members(chat_id))

    async def drafts(self, entries: Sequence[LogEntry], position: Position) -> list[JobDraft]:
        oldest = timestamp(self._clock.now() - AGE_SECONDS_MAX)
        found: list[JobDraft] = []
        for entry in entries:
            message = entry.what
            if not isinstance(message, Message):
                continue
            if message.kind == "event":
                self._members.forget(entry.chat_id)
            elif message.created_at >= oldest:
                found += await self._drafts(entry.tenant, message)
        return found

    async def _drafts(self, tenant: str, message: Message) -> list[JobDraft]:
        candidates = self._assistants.may_trigger(tenant, message)
        if not candidates:
            return []
        members = await self._members.of(tenant, message.chat_id)
        candidates = [each for each in candidates if User(tenant, each.user) in members]
        if not candidates or (kind := await self._kind(message.chat_id)) is None:
            return []
        return [
            draft_of(tenant, message, each.user)
            for each in candidates
            if triggers(each, message, kind)
        ]

    async def _kind(self, chat_id: str) -> ChatKind | None:
        """None if there is no such chat (any more)."""
        if (known := self._kinds.get(chat_id)) is None:
            try:
                chat = await self._history.ask(lambda store: store.chat(chat_id))
            except NotFound:
                return None
            known = self._kinds[chat_id] = chat.kind
            if len(self._kinds) > KINDS_MAX:
                self._kinds.popitem(last=False)
        return known
