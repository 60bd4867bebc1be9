"""All chats of this device: each delivered in order, once, without holes. (Pure.)

``ChatCopies`` decides what happens to a pushed message n: n ≤ received is a duplicate
and dropped; n = received + 1 is taken; anything beyond is a gap, so the chat is
*behind* and is pulled page by page. A page is authoritative up to its ``through``. A
page of another epoch is a reset, and so is a page marked ``reset`` that ends below
``received``: the application gets ``ChatReset``, and the chat starts at 0. A full
buffer takes no message; the chat is behind until there is room.

``ChatCopies`` also decides which acks are due, ``Reads`` which read marks are. Neither
frame has a reply, so both are repeated after a connection that may have lost them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast.client.chat_copy import ChatCopy
from holdfast.client.events import ChatGone, ChatJoined, ChatReset, ClientEvent, Keep
from holdfast.client.inbox import Inbox
from holdfast.client.session import NEVER
from holdfast.message import Cursor, Message, Page
from holdfast.wire.frames import CursorClaim, ResumedChat, SyncBody

NO_PROGRESS_SECONDS = 1.0
"""The delay before the next pull after a page with ``has_more`` and no progress."""
PASSED_OVER_SECONDS = 30.0
"""The delay after a skipped message before its chat is pulled, from behind it.

An ack would show the sender that this device has the message. The cursor of a pull
shows only the server's session that nothing is missing here; with neither, the session
would wait for acks and close the connection after a minute.
"""


class ChatCopies:
    """All chats of this device: which are behind, and which have an ack to send.

    ``follow``: only these reach the application; the others are skipped to their heads,
    and never acked.
    """

    def __init__(
        self,
        saved: Mapping[str, Cursor | CursorClaim],
        inbox: Inbox,
        follow: Collection[str] | None,
    ) -> None:
        self._copies = {chat_id: ChatCopy(*cursor) for chat_id, cursor in saved.items()}
        self._inbox = inbox
        self._follow = follow
        self._behind: dict[str, float] = {}
        self._pending_acks: dict[str, None] = {}
        self._acked_here: set[str] = set()

    # From the server

    def resume_frames(self, size: int) -> list[dict[str, CursorClaim]]:
        """The cursors of all chats, at most ``size`` to a frame; at least one frame."""
        have = [
            (chat_id, copy.received_claim) for chat_id, copy in self._copies.items() if copy.known
        ]
        return [dict(have[at : at + size]) for at in range(0, len(have), size)] or [{}]

    def on_push(self, message: Message, now: float) -> list[Keep]:
        copy = self._copies.get(message.chat_id)
        if copy is None or not copy.known or message.sequence > copy.received + 1:
            return self.on_head(message.chat_id, None, message.sequence, now)
        self._take(message, copy, [message], message.sequence, now)
        return self._progress(message.chat_id, copy)

    def on_head(
        self, chat_id: str, epoch: int | None, head: int, now: float, certain: bool = False
    ) -> list[Keep]:
        """The chat reaches ``head``: pull missing messages; ``certain``: always."""
        copy = self._copies.get(chat_id) or self.on_joined(chat_id, now)
        same = copy.known and epoch in (None, copy.epoch)
        if same and not certain and head <= copy.received:
            return []
        self._behind.setdefault(chat_id, now)
        if not same:
            return []
        copy.known_head = max(copy.known_head, head)
        if self.follows(chat_id):
            return []
        copy.skip_to(head)
        return self._progress(chat_id, copy)

    def on_joined(self, chat_id: str, now: float) -> ChatCopy:
        """The user is a member of this chat; it may be known already."""
        copy = self._copies.get(chat_id)
        if copy is None:
            copy = self._copies[chat_id] = ChatCopy()
            self._behind.setdefault(chat_id, now)
            if self.follows(chat_id):
                self._inbox.put(ChatJoined(chat_id))
        return copy

    def on_gone(self, chat_id: str) -> list[Keep]:
        """The user is not a member any more."""
        if self._copies.pop(chat_id, None) is None:
            return []
        self._behind.pop(chat_id, None)
        self._pending_acks.pop(chat_id, None)
        if not self.follows(chat_id):
            return [Keep(chat_id, None)]
        self._inbox.put(ChatGone(chat_id))
        return []

    def on_page(self, page: Page | ResumedChat, now: float, known_head: int) -> list[Keep]:
        """Take a page from our cursor; ``known_head``: the copy's at the request."""
        chat_id = page.chat_id
        copy = self.on_joined(chat_id, now)
        self._behind.pop(chat_id, None)
        started_at_0 = copy.received == 0
        if not copy.known:
            copy.epoch = page.epoch
        elif page.epoch != copy.epoch or (page.reset and copy.received > page.head):
            copy = self._reset(chat_id, copy, page.epoch)
            if not started_at_0:
                # the page continues the old numbering: pull again, from 0
                self._behind[chat_id] = now
                return []
        whole = not page.has_more and page.through >= page.head
        if whole and copy.known_head == known_head:
            copy.known_head = 0  # the page settles all that was known at the request
        through = page.through if self.follows(chat_id) else page.head
        before = copy.received
        self._take(page, copy, page.messages, through, now)
        if not whole or copy.received < max(copy.known_head, page.head):
            stuck = isinstance(page, Page) and copy.received == before
            self._behind[chat_id] = now + NO_PROGRESS_SECONDS if stuck else now
        return self._progress(chat_id, copy)

    # From the application

    def on_consumed(self, event: ClientEvent, copy: ChatCopy | None) -> list[Keep]:
        """The application is done with an event, which the inbox had with ``copy``."""
        match event:
            case Message(chat_id=chat_id, sequence=sequence, proof=proof) if copy is not None:
                # Also for a replaced copy: until the application takes its ChatReset or
                # ChatGone, the file must follow the application's progress in it.
                copy.move_past(sequence, proof)
                return self._progress(chat_id, copy)
            case ChatReset(chat_id=chat_id) if copy is not None:
                copy.move_past(0)
                return [Keep(chat_id, copy.cursor, copy)]
            case ChatGone(chat_id=chat_id):
                return [Keep(chat_id, None)]
            case _:
                return []

    def on_kept(self, keep: Keep) -> None:
        """The cursor is on disk: it may be acked, unless its copy has been replaced."""
        chat_id, cursor, copy = keep.chat_id, keep.cursor, keep.copy
        if cursor is not None and copy is not None and copy is self._copies.get(chat_id):
            copy.kept = max(copy.kept, cursor.sequence)
            if copy.kept > copy.acked and self.follows(chat_id):
                self._pending_acks[chat_id] = None

    # To the server

    def next_ack(self) -> tuple[str, Cursor]:
        """The ack that has waited longest; there must be one."""
        chat_id = next(iter(self._pending_acks))
        del self._pending_acks[chat_id]
        copy = self._copies[chat_id]
        copy.acked = copy.kept
        self._acked_here.add(chat_id)
        return chat_id, Cursor(copy.epoch, copy.kept)

    @property
    def has_acks(self) -> bool:
        return bool(self._pending_acks)

    def next_sync_at(self) -> float:
        return min(self._behind.values(), default=NEVER)

    def behind(self, now: float) -> int:
        """How many chats are due to be pulled."""
        return sum(at <= now for at in self._behind.values())

    def caught_up(self, pulled: str | None) -> bool:
        """Whether no followed chat is being ``pulled`` or waits to be."""
        return not any(
            chat_id is not None and self.follows(chat_id) for chat_id in (pulled, *self._behind)
        )

    def next_sync(self, now: float, limit: int) -> tuple[SyncBody, int] | None:
        """The next chat to pull, and its ``known_head`` at the time of the request."""
        due = [chat_id for chat_id, at in self._behind.items() if at <= now]
        if not due:
            return None
        chat_id = next((chat_id for chat_id in due if self.follows(chat_id)), due[0])
        del self._behind[chat_id]
        copy = self._copies[chat_id]
        body = SyncBody(chat_id, max(copy.epoch, 0), copy.received, limit, copy.proof)
        return body, copy.known_head

    def sync_later(self, chat_id: str, at: float) -> None:
        if chat_id in self._copies:
            self._behind[chat_id] = at

    def check_membership(self, chat_id: str, now: float) -> None:
        """The user may no longer be a member: a pull shows whether that is so."""
        if chat_id in self._copies:
            self._behind.setdefault(chat_id, now)

    def pull_all(self, now: float) -> None:
        """Pull every chat: there is no resume that would say which are behind."""
        for chat_id in self._copies:
            self._behind.setdefault(chat_id, now)

    def on_disconnected(self) -> None:
        """Repeat this connection's acks; the next resume finds the chats behind."""
        self._behind.clear()
        for copy in self._copies.values():
            copy.known_head = 0
        self.repeat_acks()

    def repeat_acks(self) -> None:
        """Acks have no reply and may be lost: send this connection's again."""
        for chat_id in self._acked_here & self._copies.keys():
            if self._copies[chat_id].kept > 0:
                self._pending_acks[chat_id] = None
        self._acked_here.clear()

    def _reset(self, chat_id: str, old: ChatCopy, epoch: int) -> ChatCopy:
        copy = self._copies[chat_id] = ChatCopy(epoch)
        self._pending_acks.pop(chat_id, None)
        if old.received > 0 and self.follows(chat_id):
            copy.waiting += 1  # keep no cursor of the new copy before ChatReset is taken
            self._inbox.put(ChatReset(chat_id, epoch), copy)
        return copy

    def _take(
        self,
        source: Message | Page | ResumedChat,
        copy: ChatCopy,
        messages: Collection[Message],
        through: int,
        now: float,
    ) -> None:
        """Take the messages of a push or page, complete up to ``through``."""
        chat_id = source.chat_id
        if not self.follows(chat_id):
            if through > copy.received:
                copy.skip_to(through)
                self._behind.setdefault(chat_id, now + PASSED_OVER_SECONDS)
            return
        for message in copy.take(list(messages), through, self._inbox.room, source.proof):
            self._inbox.put(message, copy)
        if copy.received < through:
            self._behind.setdefault(chat_id, now)

    def _progress(self, chat_id: str, copy: ChatCopy) -> list[Keep]:
        return [Keep(chat_id, copy.cursor, copy)] if copy.consumed > copy.kept else []

    def follows(self, chat_id: str) -> bool:
        """Whether the application gets this chat."""
        return self._follow is None or chat_id in self._follow


class Reads:
    """The highest read sequence per chat, sent again if its connection ends."""

    def __init__(self) -> None:
        self._pending: dict[str, int] = {}
        self._sent: dict[str, int] = {}

    def __bool__(self) -> bool:
        """Whether there is one to send."""
        return bool(self._pending)

    def read(self, chat_id: str, sequence: int) -> None:
        self._pending[chat_id] = max(sequence, self._pending.get(chat_id, 0))

    def next_read(self) -> tuple[str, int]:
        """The next to send, from now on counted as sent."""
        chat_id = next(iter(self._pending))
        sequence = self._pending.pop(chat_id)
        self._sent[chat_id] = max(sequence, self._sent.get(chat_id, 0))
        return chat_id, sequence

    def on_refused(self, chat_id: str) -> None:
        """The server refused it: do not repeat it."""
        self._sent.pop(chat_id, None)

    def on_reset(self, chat_id: str) -> None:
        """The chat has a new numbering: its old read marks mean nothing."""
        self._pending.pop(chat_id, None)
        self._sent.pop(chat_id, None)

    def repeat(self) -> None:
        """The reads of this connection may be lost: send them again."""
        for chat_id, sequence in self._sent.items():
            self.read(chat_id, sequence)
        self._sent.clear()
