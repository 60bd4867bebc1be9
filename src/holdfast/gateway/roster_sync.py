"""Keeps roster and sessions true: who is in which chat, and where each head is.

Membership events change both as they pass. Once per heartbeat interval the store is
asked as well, to correct what a skipped event left wrong. That concerns thousands of
chats and sessions, so it yields to the loop. A change reaches the roster and the
sessions in one step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from holdfast import telemetry
from holdfast.clock import Clock, Turns
from holdfast.errors import HoldfastError
from holdfast.fanout.contract import MessageRun
from holdfast.gateway.connection import Connection
from holdfast.history.history import ChatHistory
from holdfast.history.memberships import USERS_PER_READ
from holdfast.message import Cursor, Message, User
from holdfast.session.roster import Roster
from holdfast.store.commands import membership_event

T = TypeVar("T")

HEADS_PER_READ = 500
EPOCH_UNKNOWN = 0
"""Of a chat joined by an event; the first page brings the real epoch, 1 or more."""


class RosterSync:
    """Applies membership changes to the roster and the sessions of one gateway."""

    def __init__(
        self,
        roster: Roster[Connection],
        history: ChatHistory,
        clock: Clock,
        users_per_read: int = USERS_PER_READ,
    ) -> None:
        self._roster = roster
        self._history = history
        self._clock = clock
        self._users_per_read = users_per_read
        self._moved: set[User] | None = None
        """Users who joined or left a chat while memberships are read."""

    def add_missing(self, run: MessageRun) -> None:
        """Add members that the roster lacks: they connected before the chat existed."""
        first = run.messages[0]
        for user in self._roster.missing(first.chat_id, run.users):
            self._join(user, first.chat_id, first.sequence - 1)

    def apply(self, tenant: str, message: Message) -> None:
        """Apply a message that is a membership event; it counts for what follows it."""
        event = membership_event(message)
        if event is None or event.user_id is None:
            return
        user = User(tenant, event.user_id)
        if event.event == "member_added":
            self._join(user, message.chat_id, message.sequence)
        elif event.event == "member_removed":
            self._leave(user, message.chat_id, event_delivered=True)

    def _on_moved(self, user: User) -> None:
        if self._moved is not None:
            self._moved.add(user)

    def _join(self, user: User, chat_id: str, head: int) -> None:
        self._on_moved(user)
        self._roster.join(user, chat_id)
        for connection in self._roster.of_user(user):
            connection.do(connection.session.on_membership(chat_id, Cursor(EPOCH_UNKNOWN, head)))

    def _leave(self, user: User, chat_id: str, *, event_delivered: bool) -> None:
        """``event_delivered``: sessions live in the chat were sent the event."""
        self._on_moved(user)
        self._roster.leave(user, chat_id)
        for connection in self._roster.of_user(user):
            connection.do(
                connection.session.on_membership(chat_id, None, event_delivered=event_delivered)
            )

    async def ask_heads(self) -> None:
        """Compare every session with the heads in the store.

        The store knows them, whatever passed through this node. So a skipped delivery
        is always found, even if it was the last one of a quiet chat.
        """
        await _in_parts("heads", list(self._roster.chats), HEADS_PER_READ, self._ask_heads)

    async def _ask_heads(self, chat_ids: Sequence[str]) -> None:
        heads = await self._history.heads(chat_ids)
        turns = Turns(self._clock)
        for chat_id, head in heads.items():
            self.on_head(chat_id, head)
            await turns.give_way()

    async def ask_memberships(self) -> None:
        """Compare every user's chats with the memberships in the store.

        This finds a chat whose event of joining was skipped, which ``ask_heads``
        cannot: it asks only for chats on the roster. And it ends what a user still
        gets, such as typing, of a chat whose event of leaving was skipped.
        """
        await _in_parts(
            "memberships", list(self._roster.users), self._users_per_read, self._ask_memberships
        )

    async def _ask_memberships(self, users: Sequence[User]) -> None:
        """Users who join, leave or reconnect meanwhile are left to the next time.

        What was read may be older than their change.
        """
        asked = {user: self._roster.of_user(user) for user in users}
        asked = {
            user: here
            for user, here in asked.items()
            if all(connection.established for connection in here)
        }
        self._moved = set()
        try:
            found = await self._history.memberships_of(list(asked))
            turns = Turns(self._clock)
            for user, memberships in found.items():
                if user not in self._moved and self._roster.of_user(user) == asked[user]:
                    self._correct(user, asked[user], memberships)
                await turns.give_way()
        finally:
            self._moved = None

    def _correct(
        self, user: User, here: Sequence[Connection], memberships: Mapping[str, Cursor]
    ) -> None:
        if all(connection.chats == memberships.keys() for connection in here):
            return
        for chat_id, head in memberships.items():
            if any(
                chat_id not in connection.chats and connection.reads(chat_id) for connection in here
            ):
                self._join(user, chat_id, head.sequence)
        for chat_id in {
            chat_id for connection in here for chat_id in connection.chats
        } - memberships.keys():
            self._leave(user, chat_id, event_delivered=False)

    def on_head(self, chat_id: str, head: Cursor) -> None:
        """Compare the chat's sessions with its head in the store.

        Also called when an epoch is raised, so that no client waits for the heartbeat.
        """
        now = self._clock.monotonic()
        for connection in self._roster.in_chat(chat_id):
            if not connection.session.knows(chat_id, head):
                connection.do(connection.session.on_head(chat_id, head, now))


async def _in_parts(
    what: str, items: Sequence[T], size: int, ask: Callable[[Sequence[T]], Awaitable[None]]
) -> None:
    """Ask for all, part by part. A part that fails is reported and asked next time."""
    unread = 0
    last: HoldfastError | None = None
    for start in range(0, len(items), size):
        part = items[start : start + size]
        try:
            await ask(part)
        except HoldfastError as error:
            unread, last = unread + len(part), error
    if last is not None:
        telemetry.unread(what, unread, last)
