"""Placing messages: every chat in order, once, without holes. (Pure.)

A push n: n ≤ received, a duplicate, dropped; n = received + 1, taken; beyond, a gap, and the chat is behind: it is
pulled page by page. Pages are authoritative up to their ``through``. A page of another epoch means reset, and so does
one marked ``reset`` that ends below what we have: the application is told, and the chat starts at 0. A full buffer
takes nothing in; the chat is behind until there is room.

How far this device has one chat. (Pure.)

Four marks, each at most the one before: ``received`` (in the application's buffer; nothing is missing below),
``consumed`` (the application has moved past it), ``kept`` (that is on disk) and ``acked`` (the server knows).
So an ack never promises what a crash of this device could take back.

How far the user has read, and what of that the server may not have heard. (Pure.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import UNSET, UnsetType

from holdfast.client.events import ChatGone, ChatJoined, ChatReset, ClientEvent, Keep
from holdfast.client.inbox import Inbox
from holdfast.client.session import NEVER
from holdfast.message import Cursor, Message, Page
from holdfast.wire.frames import CursorClaim, ResumedChat, SyncBody

UNKNOWN_EPOCH = -1


class ChatCopy:
    """One chat as this device has it, within one epoch; a reset makes a new one.

    ``waiting`` counts its messages in the application's buffer; ``heard`` is the highest sequence we know exists.
    ``proof`` is the server's for ``received``, ``consumed_proof`` that for ``consumed``; None where none came.
    """

    __slots__ = ("acked", "consumed", "consumed_proof", "epoch", "heard", "kept", "proof", "received", "waiting")

    def __init__(self, epoch: int = UNKNOWN_EPOCH, sequence: int = 0, proof: str | None = None) -> None:
        self.epoch = epoch
        self.proof = self.consumed_proof = proof
        self.received = self.consumed = self.kept = self.acked = sequence
        self.heard = 0
        self.waiting = 0

    @property
    def known(self) -> bool:
        """Whether a page has told us the chat's epoch; before that a push cannot be placed."""
        return self.epoch != UNKNOWN_EPOCH

    @property
    def received_claim(self) -> CursorClaim:
        """What to ask the server with."""
        return CursorClaim(self.epoch, self.received, self.proof)

    @property
    def cursor(self) -> CursorClaim:
        """What may be kept on disk."""
        return CursorClaim(self.epoch, self.consumed, self.consumed_proof)

    def take(
        self, messages: Sequence[Message], through: int, room: int, proof: str | UnsetType = UNSET
    ) -> list[Message]:
        """Take in a stretch that starts at or below ``received + 1`` and is whole up to ``through``.

        What we have already is left out. Of the rest at most ``room`` are taken; the mark moves no further than
        what was taken, so that the remainder is pulled again. ``proof`` is that of ``through``.
        """
        fresh = [message for message in messages if message.sequence > self.received]
        taken = fresh[:room]
        if len(taken) == len(fresh):
            self._receive(through, proof or None)
        elif taken:
            self._receive(taken[-1].sequence, None)
        self.heard = max(self.heard, through)
        self.waiting += len(taken)
        if not self.waiting:
            self.consumed, self.consumed_proof = self.received, self.proof
        return taken

    def _receive(self, sequence: int, proof: str | None) -> None:
        if sequence > self.received or (sequence == self.received and proof):
            self.received, self.proof = sequence, proof

    def skip_to(self, sequence: int) -> None:
        """Pass over everything up to ``sequence`` unseen."""
        self._receive(sequence, None)
        self.consumed, self.consumed_proof = self.received, self.proof
        self.heard = max(self.heard, self.received)

    def move_past(self, sequence: int, proof: str | UnsetType = UNSET) -> None:
        """The application is done with ``sequence``; a hole behind it that a page settled is passed with it."""
        self.waiting -= 1
        if not self.waiting:
            self.consumed, self.consumed_proof = self.received, self.proof
        elif sequence > self.consumed:
            self.consumed, self.consumed_proof = sequence, proof or None


NO_PROGRESS_SECONDS = 1.0
"""How long a chat waits after a page that promised more and brought nothing."""
PASSED_OVER_SECONDS = 30.0
"""How long after a message that was passed over its chat is pulled, from behind it.

An ack would tell the sender that this device has it. The cursor of a pull tells the server's session alone that
nothing is missing here; without either it would wait for acks, and after a minute doubt this connection.
"""


class ChatCopies:
    """All chats of this device, which of them are behind, and which owe the server an ack.

    ``follow``: only these reach the application; the others are passed over to their heads, and never acked.
    """

    def __init__(self, saved: Mapping[str, Cursor | CursorClaim], inbox: Inbox, follow: Collection[str] | None) -> None:
        self._copies = {chat_id: ChatCopy(*cursor) for chat_id, cursor in saved.items()}
        self._inbox = inbox
        self._follow = follow
        self._behind: dict[str, float] = {}
        self._owed: dict[str, None] = {}
        self._acked_here: set[str] = set()

    # What the server tells

    def resume_frames(self, size: int) -> list[dict[str, CursorClaim]]:
        """What we have of every chat, in stretches of at most ``size`` chats; at least one stretch."""
        have = [(chat_id, copy.received_claim) for chat_id, copy in self._copies.items() if copy.known]
        return [dict(have[at : at + size]) for at in range(0, len(have), size)] or [{}]

    def pushed(self, message: Message, now: float) -> list[Keep]:
        copy = self._copies.get(message.chat_id)
        if copy is None or not copy.known or message.sequence > copy.received + 1:
            return self.heard_of(message.chat_id, None, message.sequence, now)
        self._take(message, copy, [message], message.sequence, now)
        return self._progress(message.chat_id, copy)

    def heard_of(self, chat_id: str, epoch: int | None, head: int, now: float, certain: bool = False) -> list[Keep]:
        """The chat reaches up to ``head``: pull what we lack; ``certain``: pull even if we seem to lack nothing."""
        copy = self._copies.get(chat_id) or self.joined(chat_id, now)
        same = copy.known and epoch in (None, copy.epoch)
        if same and not certain and head <= copy.received:
            return []
        self._behind.setdefault(chat_id, now)
        if not same:
            return []
        copy.heard = max(copy.heard, head)
        if self._follows(chat_id):
            return []
        copy.skip_to(head)
        return self._progress(chat_id, copy)

    def joined(self, chat_id: str, now: float) -> ChatCopy:
        """A chat the user is a member of, known to us or not."""
        copy = self._copies.get(chat_id)
        if copy is None:
            copy = self._copies[chat_id] = ChatCopy()
            self._behind.setdefault(chat_id, now)
            if self._follows(chat_id):
                self._inbox.put(ChatJoined(chat_id))
        return copy

    def gone(self, chat_id: str) -> list[Keep]:
        """The user is not a member any more."""
        if self._copies.pop(chat_id, None) is None:
            return []
        self._behind.pop(chat_id, None)
        self._owed.pop(chat_id, None)
        if not self._follows(chat_id):
            return [Keep(chat_id, None)]
        self._inbox.put(ChatGone(chat_id))
        return []

    def settle(self, page: Page | ResumedChat, now: float, heard: int) -> list[Keep]:
        """Take in a page read from our cursor; ``heard`` is what ``Copy.heard`` was when we asked for it."""
        chat_id = page.chat_id
        copy = self.joined(chat_id, now)
        self._behind.pop(chat_id, None)
        started_at_0 = copy.received == 0
        if not copy.known:
            copy.epoch = page.epoch
        elif page.epoch != copy.epoch or (page.reset and copy.received > page.head):
            copy = self._reset(chat_id, copy, page.epoch)
            if not started_at_0:
                self._behind[chat_id] = now  # the page continues a numbering that is gone: ask again, from 0
                return []
        whole = not page.has_more and page.through >= page.head
        if whole and copy.heard == heard:
            copy.heard = 0  # whatever we had heard of before we asked, the page settles it
        through = page.through if self._follows(chat_id) else page.head
        before = copy.received
        self._take(page, copy, page.messages, through, now)
        if not whole or copy.received < max(copy.heard, page.head):
            stuck = isinstance(page, Page) and copy.received == before
            self._behind[chat_id] = now + NO_PROGRESS_SECONDS if stuck else now
        return self._progress(chat_id, copy)

    # What the application does

    def moved_past(self, event: ClientEvent, copy: ChatCopy | None) -> list[Keep]:
        """The application is done with an event; ``copy`` is the one it was taken from the inbox with."""
        match event:
            case Message(chat_id=chat_id, sequence=sequence, proof=proof) if copy is not None:
                # Also of a copy that is gone: until the application has passed its end, the disk must know where it is.
                copy.move_past(sequence, proof)
                return self._progress(chat_id, copy)
            case ChatReset(chat_id=chat_id) if copy is not None:
                copy.move_past(0)
                return [Keep(chat_id, copy.cursor, copy)]
            case ChatGone(chat_id=chat_id):
                return [Keep(chat_id, None)]
            case _:
                return []

    def kept(self, keep: Keep) -> None:
        """The cursor is on disk: it may be acked, unless it is of a copy that is gone."""
        chat_id, cursor, copy = keep.chat_id, keep.cursor, keep.copy
        if cursor is not None and copy is not None and copy is self._copies.get(chat_id):
            copy.kept = max(copy.kept, cursor.sequence)
            if copy.kept > copy.acked and self._follows(chat_id):
                self._owed[chat_id] = None

    # What leaves

    def next_ack(self) -> tuple[str, Cursor]:
        """The ack that waited longest; there must be one."""
        chat_id = next(iter(self._owed))
        del self._owed[chat_id]
        copy = self._copies[chat_id]
        copy.acked = copy.kept
        self._acked_here.add(chat_id)
        return chat_id, Cursor(copy.epoch, copy.kept)

    @property
    def owes_acks(self) -> bool:
        return bool(self._owed)

    def next_sync_at(self) -> float:
        return min(self._behind.values(), default=NEVER)

    def behind(self, now: float) -> int:
        """How many chats are to be pulled."""
        return sum(at <= now for at in self._behind.values())

    def caught_up(self, pulled: str | None) -> bool:
        """Whether no chat that the application follows is being ``pulled``, or is to be, now or later."""
        return not any(chat_id is not None and self._follows(chat_id) for chat_id in (pulled, *self._behind))

    def next_sync(self, now: float, limit: int) -> tuple[SyncBody, int] | None:
        """The next chat to pull, and what we had heard of it when we asked."""
        due = [chat_id for chat_id, at in self._behind.items() if at <= now]
        if not due:
            return None
        chat_id = next((chat_id for chat_id in due if self._follows(chat_id)), due[0])
        del self._behind[chat_id]
        copy = self._copies[chat_id]
        return SyncBody(chat_id, max(copy.epoch, 0), copy.received, limit, copy.proof), copy.heard

    def sync_later(self, chat_id: str, at: float) -> None:
        if chat_id in self._copies:
            self._behind[chat_id] = at

    def doubt(self, chat_id: str, now: float) -> None:
        """The user may not be a member any more: a pull tells."""
        if chat_id in self._copies:
            self._behind.setdefault(chat_id, now)

    def pull_all(self, now: float) -> None:
        """Whatever there may be: a resume would have told, and there is none."""
        for chat_id in self._copies:
            self._behind.setdefault(chat_id, now)

    def disconnected(self) -> None:
        """The resume of the next connection finds what is behind; acks of a broken connection may be lost."""
        self._behind.clear()
        for copy in self._copies.values():
            copy.heard = 0
        self.owe_again()

    def owe_again(self) -> None:
        """An ack has no answer, so those of this connection may have been lost: say them again."""
        for chat_id in self._acked_here & self._copies.keys():
            if self._copies[chat_id].kept > 0:
                self._owed[chat_id] = None
        self._acked_here.clear()

    def _reset(self, chat_id: str, old: ChatCopy, epoch: int) -> ChatCopy:
        copy = self._copies[chat_id] = ChatCopy(epoch)
        self._owed.pop(chat_id, None)
        if old.received > 0 and self._follows(chat_id):
            copy.waiting += 1  # until the application knows, nothing of the new copy is kept
            self._inbox.put(ChatReset(chat_id, epoch), copy)
        return copy

    def _take(
        self,
        told: Message | Page | ResumedChat,
        copy: ChatCopy,
        messages: Collection[Message],
        through: int,
        now: float,
    ) -> None:
        """Take in the messages that a push or a page brought, whole up to ``through``, with its proof."""
        chat_id = told.chat_id
        if not self._follows(chat_id):
            if through > copy.received:
                copy.skip_to(through)
                self._behind.setdefault(chat_id, now + PASSED_OVER_SECONDS)
            return
        for message in copy.take(list(messages), through, self._inbox.room, told.proof):
            self._inbox.put(message, copy)
        if copy.received < through:
            self._behind.setdefault(chat_id, now)

    def _progress(self, chat_id: str, copy: ChatCopy) -> list[Keep]:
        return [Keep(chat_id, copy.cursor, copy)] if copy.consumed > copy.kept else []

    def _follows(self, chat_id: str) -> bool:
        return self._follow is None or chat_id in self._follow


class Reads:
    """The highest sequence per chat. A read has no answer, so what a connection said is owed again when it ends."""

    def __init__(self) -> None:
        self._owed: dict[str, int] = {}
        self._said: dict[str, int] = {}

    def __bool__(self) -> bool:
        """Whether there is one to say."""
        return bool(self._owed)

    def read(self, chat_id: str, sequence: int) -> None:
        self._owed[chat_id] = max(sequence, self._owed.get(chat_id, 0))

    def say(self) -> tuple[str, int]:
        """The next to say, which is being said."""
        chat_id = next(iter(self._owed))
        sequence = self._owed.pop(chat_id)
        self._said[chat_id] = max(sequence, self._said.get(chat_id, 0))
        return chat_id, sequence

    def refused(self, chat_id: str) -> None:
        """The server wants to hear nothing of this chat."""
        self._said.pop(chat_id, None)

    def reset(self, chat_id: str) -> None:
        """What was read is numbered otherwise now."""
        self._owed.pop(chat_id, None)
        self._said.pop(chat_id, None)

    def owe_again(self) -> None:
        """What was said may have been lost."""
        for chat_id, sequence in self._said.items():
            self.read(chat_id, sequence)
        self._said.clear()
