"""Keeps roster and sessions true: who is in which chat, and where each head is.

The log says *that* a membership changed; the store says what it is, and as of which
(epoch, sequence) of the chat. The rules, for each session and chat:

- an event up to where the membership was read is reflected in it, and skipped; only the
  raise of a higher epoch, which starts the numbering again, moves that mark;
- a removal applies at once;
- a join, or the creation of a chat, only starts a read of that membership. An entry may
  be repeated or old, so nobody joins by an entry;
- an event that comes while a membership is being read counts after the read, if it is
  newer. So it is for a user who is connecting: the session goes on the roster, the
  memberships are read, then they are corrected by the events in between.

If log entries are lost, every session is behind until its memberships were read again.
Once per heartbeat interval all heads and memberships are compared with the store, to
correct whatever was missed. That concerns thousands of chats and sessions, so it yields
to the loop. A change reaches the roster and the session in one step.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from holdfast import telemetry
from holdfast.clock import Clock, Turns
from holdfast.errors import HoldfastError
from holdfast.fanout.settings import RetrySettings
from holdfast.gateway.connection import Connection
from holdfast.history.history import ChatHistory
from holdfast.history.memberships import USERS_PER_READ
from holdfast.message import ChatCreated, Cursor, EpochRaised, LogEntry, Message, User
from holdfast.session.roster import Roster
from holdfast.store.commands import membership_event

T = TypeVar("T")

HEADS_PER_READ = 500
JOINS_PER_READ = 500
JOINS_WAITING_MAX = 10_000
"""Joined chats that wait to be read. Further ones are found by the next heartbeat."""
RECHECK_SECONDS = 1.0
"""How long to wait before users are read again whose memberships could not be read."""

_Membership = tuple[User, str]


class _Event(NamedTuple):
    """The newest membership event of a user in a chat, during a read."""

    at: Cursor
    joined: bool

    def is_newer(self, read: Cursor | None) -> bool:
        """Whether what was read does not reflect it. A chat that the user was not in
        says nothing about when that was.
        """
        if read is None:
            return self.joined
        return self.at.epoch >= read.epoch and self.at.sequence > read.sequence


class RosterSync:
    """Applies membership changes to the roster and the sessions of one gateway."""

    def __init__(
        self,
        roster: Roster[Connection],
        history: ChatHistory,
        clock: Clock,
        rng: random.Random,
        retry: RetrySettings | None = None,
        users_per_read: int = USERS_PER_READ,
    ) -> None:
        self._roster = roster
        self._history = history
        self._clock = clock
        self._rng = rng
        self._retry = retry or RetrySettings()
        self._users_per_read = users_per_read
        self._connecting: dict[Connection, dict[str, _Event]] = {}
        """Sessions whose memberships are being read, with the events in between."""
        self._joined: dict[_Membership, None] = {}
        """Memberships to read, because the log says that they began."""
        self._reading: dict[_Membership, _Event | None] = {}
        """Those that are being read, with the newest event in between."""
        self._raised: dict[str, Cursor] = {}
        """The epochs that were raised while anything is being read."""
        self._doubtful: dict[User, None] = {}
        """Users whose memberships must be read again."""
        self._doubtful_chats: dict[str, None] = {}
        """Chats whose sessions must be compared with the store."""
        self._losses = 0
        self._moved: list[set[User]] = []
        """For each comparison under way: users who joined or left a chat meanwhile."""
        self._has_joined, self._has_doubts = asyncio.Event(), asyncio.Event()

    # --- entries of the log -----------------------------------------------------------

    def apply(self, entry: LogEntry) -> bool:
        """Apply an entry that is no text; it counts for what follows it. False if it is
        an event that does not say what it changes.
        """
        match entry.what:
            case Message():
                return self._apply_event(entry, entry.what)
            case ChatCreated():
                for user_id in entry.what.members:
                    event = _Event(Cursor(entry.epoch, 0), joined=True)
                    self._on_joined(User(entry.tenant, user_id), entry.chat_id, event)
            case EpochRaised():
                self._on_epoch_raised(entry.chat_id, Cursor(entry.epoch, entry.what.head))
        return True

    def _apply_event(self, entry: LogEntry, message: Message) -> bool:
        event = membership_event(message)
        if event is None:
            self._doubt(connection.user for connection in self._roster.in_chat(entry.chat_id))
            return False
        if event.user_id is None:
            return True
        user, at = User(entry.tenant, event.user_id), Cursor(entry.epoch, message.sequence)
        if event.event == "member_added":
            self._on_joined(user, entry.chat_id, _Event(at, joined=True))
        elif event.event == "member_removed":
            self._on_left(user, entry.chat_id, _Event(at, joined=False))
        return True

    def _on_joined(self, user: User, chat_id: str, event: _Event) -> None:
        for connection in self._roster.of_user(user):
            if connection.established:
                progress = connection.session.chats.get(chat_id)
                if connection.reads(chat_id) and not (progress and progress.reflects(event.at)):
                    self._read_soon(user, chat_id, event)
            elif connection in self._connecting:
                self._connecting[connection][chat_id] = event

    def _on_left(self, user: User, chat_id: str, event: _Event) -> None:
        if (user, chat_id) in self._reading:
            self._reading[user, chat_id] = event
        for connection in self._roster.of_user(user):
            if connection.established:
                progress = connection.session.chats.get(chat_id)
                if progress is not None and not progress.reflects(event.at):
                    self._leave(connection, chat_id, event_delivered=True)
            elif connection in self._connecting:
                self._connecting[connection][chat_id] = event

    def _on_epoch_raised(self, chat_id: str, raised: Cursor) -> None:
        """No client waits for the heartbeat that would name the new epoch."""
        if self._connecting or self._reading:
            self._raised[chat_id] = raised
        for connection in self._roster.in_chat(chat_id):
            if (progress := connection.session.chats.get(chat_id)) is not None:
                progress.on_epoch_raised(raised)
        self._on_head(chat_id, raised)

    def compare_chats(self, chat_ids: Sequence[str]) -> None:
        """Compare the sessions of these chats, or of all, with the store: an event was
        put aside. As after a loss of log entries, but of these chats alone.
        """
        self._doubtful_chats.update(dict.fromkeys(chat_ids or self._roster.chats))
        self._has_doubts.set()

    async def on_log_lost(self) -> None:
        """Put every session behind; they are live again after a read."""
        self._losses += 1
        turns = Turns(self._clock)
        for user in list(self._roster.users):
            for connection in self._roster.of_user(user):
                if connection.established:
                    for progress in connection.session.chats.values():
                        progress.on_log_lost()
            self._doubt((user,))
            await turns.give_way()

    # --- a user who connects ----------------------------------------------------------

    async def read_memberships(self, connection: Connection) -> Mapping[str, Cursor]:
        """The chats of a connecting user, with every event that the log had until this
        returns. Raises what the read raises.
        """
        events = self._connecting[connection] = {}
        try:
            losses = -1
            while losses != self._losses:  # entries were lost during the read
                losses = self._losses
                found = dict(await self._history.memberships(connection.user))
            for chat_id, read in found.items():
                found[chat_id] = self._as_raised(chat_id, read)
            for chat_id, event in events.items():
                if not event.is_newer(found.get(chat_id)):
                    continue
                if event.joined:
                    self._read_soon(connection.user, chat_id, event)
                else:
                    del found[chat_id]
            return found
        finally:
            del self._connecting[connection]
            self._forget_raised()

    def _as_raised(self, chat_id: str, read: Cursor) -> Cursor:
        """What was read, corrected by a raise of the epoch during the read."""
        raised = self._raised.get(chat_id)
        return raised if raised is not None and raised.epoch > read.epoch else read

    def _forget_raised(self) -> None:
        if not self._connecting and not self._reading:
            self._raised.clear()

    # --- a user who joins -------------------------------------------------------------

    def _read_soon(self, user: User, chat_id: str, event: _Event) -> None:
        if (user, chat_id) in self._reading:
            self._reading[user, chat_id] = event
        elif len(self._joined) < JOINS_WAITING_MAX:
            self._joined[user, chat_id] = None
            self._has_joined.set()
        else:
            telemetry.delivery_skipped("members_unknown", 1)

    async def read_joined(self) -> None:
        """Wait for joined chats, and read some of them."""
        await self._has_joined.wait()
        asked = list(islice(self._joined, JOINS_PER_READ))
        for membership in asked:
            del self._joined[membership]
        if not self._joined:
            self._has_joined.clear()
        losses = self._losses
        self._reading = dict.fromkeys(asked)
        try:
            found = await self._try_to_read(asked)
        finally:
            reading, self._reading = self._reading, {}
        for (user, chat_id), event in reading.items():
            read = found.get((user, chat_id))
            if losses != self._losses or (event is not None and event.is_newer(read)):
                if event is None or event.joined:
                    self._read_soon(user, chat_id, event or _Event(Cursor(0, 0), joined=True))
            elif read is not None:
                for connection in self._roster.of_user(user):
                    if connection.established and connection.reads(chat_id):
                        self._join(connection, chat_id, self._as_raised(chat_id, read))
        self._forget_raised()

    async def _try_to_read(self, asked: Sequence[_Membership]) -> Mapping[_Membership, Cursor]:
        """Read these memberships; nothing, if all attempts fail."""
        for attempt in range(1, self._retry.max_attempts + 1):
            try:
                return await self._history.memberships_in(asked)
            except HoldfastError as error:
                if attempt < self._retry.max_attempts:
                    telemetry.delivery_retried()
                    await asyncio.sleep(self._retry.backoff.delay(attempt, self._rng))
                else:
                    telemetry.unread("memberships", len(asked), error)
        telemetry.delivery_skipped("members_unknown", len(asked))
        return {}

    def _join(self, connection: Connection, chat_id: str, read: Cursor) -> None:
        self._on_moved(connection.user)
        self._roster.join(connection, chat_id)
        connection.do(connection.session.on_membership(chat_id, read))

    def _leave(self, connection: Connection, chat_id: str, *, event_delivered: bool) -> None:
        """``event_delivered``: sessions live in the chat were sent the event."""
        self._on_moved(connection.user)
        self._roster.leave(connection, chat_id)
        connection.do(
            connection.session.on_membership(chat_id, None, event_delivered=event_delivered)
        )

    def _on_moved(self, user: User) -> None:
        for moved in self._moved:
            moved.add(user)

    # --- comparisons with the store ---------------------------------------------------

    async def compare_heads(self) -> None:
        """Compare every session with the heads in the store.

        The store knows them, whatever passed through this node. So a skipped delivery
        is always found, even if it was the last one of a quiet chat.
        """
        await _in_parts("heads", list(self._roster.chats), HEADS_PER_READ, self._compare_heads)

    async def _compare_heads(self, chat_ids: Sequence[str]) -> None:
        heads = await self._history.heads(chat_ids)
        turns = Turns(self._clock)
        for chat_id, head in heads.items():
            self._on_head(chat_id, head)
            await turns.give_way()

    def _on_head(self, chat_id: str, head: Cursor) -> None:
        now = self._clock.monotonic()
        for connection in self._roster.in_chat(chat_id):
            if not connection.session.knows(chat_id, head):
                connection.do(connection.session.on_head(chat_id, head, now))

    async def compare_memberships(self) -> None:
        """Compare every user's chats with the memberships in the store.

        This finds a chat whose event of joining was skipped, which ``compare_heads``
        cannot: it asks only for chats on the roster. And it ends what a user still
        gets, such as typing, of a chat whose event of leaving was skipped.
        """
        users = list(self._roster.users)
        await _in_parts("memberships", users, self._users_per_read, self._compare_memberships)

    def _doubt(self, users: Iterable[User]) -> None:
        self._doubtful.update(dict.fromkeys(users))
        if self._doubtful:
            self._has_doubts.set()

    async def _doubt_chats(self) -> None:
        """All users are read: a member may be missing on the roster."""
        chat_ids, self._doubtful_chats = list(self._doubtful_chats), {}
        turns = Turns(self._clock)
        for chat_id in chat_ids:
            for connection in self._roster.in_chat(chat_id):
                if (progress := connection.session.chats.get(chat_id)) is not None:
                    progress.on_log_lost()
            await turns.give_way()
        if chat_ids:
            self._doubt(self._roster.users)

    async def settle_doubts(self) -> None:
        """Wait for users whose memberships are in doubt, and read some of them."""
        await self._has_doubts.wait()
        await self._doubt_chats()
        users = list(islice(self._doubtful, self._users_per_read))
        await _in_parts("memberships", users, self._users_per_read, self._compare_memberships)
        left = [user for user in users if user in self._doubtful]
        for user in left:
            del self._doubtful[user]
        self._doubt(user for user in left if self._roster.of_user(user))
        if not self._doubtful:
            self._has_doubts.clear()
        elif len(left) == len(users):
            await asyncio.sleep(RECHECK_SECONDS)

    async def _compare_memberships(self, users: Sequence[User]) -> None:
        """Users who join, leave or reconnect meanwhile are left to the next time.

        What was read may be older than their change.
        """
        asked = {user: self._roster.of_user(user) for user in users}
        asked = {
            user: here
            for user, here in asked.items()
            if here and all(connection.established for connection in here)
        }
        moved, losses = set[User](), self._losses
        self._moved.append(moved)
        try:
            found = await self._history.memberships_of(list(asked))
            turns = Turns(self._clock)
            for user, memberships in found.items():
                if losses != self._losses:
                    return
                if user not in moved and self._roster.of_user(user) == asked[user]:
                    self._correct(user, asked[user], memberships)
                await turns.give_way()
        finally:
            self._moved = [other for other in self._moved if other is not moved]

    def _correct(
        self, user: User, here: Sequence[Connection], memberships: Mapping[str, Cursor]
    ) -> None:
        in_doubt = user in self._doubtful
        self._doubtful.pop(user, None)
        if not in_doubt and all(here_too.chats == memberships.keys() for here_too in here):
            return
        for connection in here:
            chats = connection.session.chats
            for chat_id in chats.keys() - memberships.keys():
                self._leave(connection, chat_id, event_delivered=False)
            for chat_id, read in memberships.items():
                progress = chats.get(chat_id)
                if (progress is None or progress.known is None) and connection.reads(chat_id):
                    self._join(connection, chat_id, read)


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
