"""What a store of durable chats promises. Adapters: memory (the reference), sqlite.

Every verb takes the batch. What is said to be done is on stable storage when the call returns. Errors are
those of ``holdfast.errors``; an adapter lets no foreign error through:

- ``Unavailable``: nothing happened;
- ``OutcomeUnknown``: the commit may or may not have happened (an I/O error or a deadline at commit).

Order: commit order is sequence order. No reader can see sequence n+1 of a chat while n may still appear.
Cancel-safety: a cancelled write may have happened; the caller must treat it as unknown.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from holdfast.message import Ban, Chat, Cursor, Draft, LogEntry, Member, Message, Mute, Outcome, Page, User, Watermark
from holdfast.store.commands import Command, CommandContext, CommandResult

MEMBERSHIPS_MAX = 20_000
"""So many chats one read of ``memberships`` answers with: four users with as many as a user may have."""
LOOKED_AT_ONCE = 5_000
"""So many entries of the log ``sent_by`` looks at."""
UNREAD_LOOKED_AT = 100
"""So many of a chat's newest messages are looked at when unread ones are counted; most of the cost of a list."""


class ChatSummary(Struct, frozen=True):
    """A chat as its member sees it in a list. ``title`` is its name, or the others' ids in a direct chat.

    ``unread`` counts what is there to read past ``read``: texts of others, neither redacted nor erased, and no events.
    ``unread_capped``: older ones than the ``UNREAD_LOOKED_AT`` newest messages may be unread too; show it as "40+".
    """

    chat: Chat
    role: str
    title: str
    members: int
    unread: int
    unread_capped: bool
    read: int
    last_message: Message | None


class Inspection(Struct, frozen=True):
    """A chat's numbering, for operators. ``counter`` None: the counter is missing."""

    chat: Chat
    counter: int | None
    highest: int
    count: int
    gaps: Sequence[tuple[int, int]]
    recorded_gaps: Sequence[tuple[int, int]]


class AuditRecord(Struct, frozen=True):
    """One recorded act: who did what to what, when and why."""

    number: int
    at: str
    actor: str
    action: str
    target: str
    reason: str
    details: str


class SentBy(Struct, frozen=True):
    """Where a user's messages are, (chat_id, sequence) each, among some entries of the log.

    ``through`` is the last entry that was looked at; ``ended``: there is none after it.
    """

    places: Sequence[tuple[str, int]]
    through: int
    ended: bool


class Store(Protocol):
    """The durable chats of all tenants."""

    def append(self, group: Sequence[Draft]) -> Awaitable[list[Outcome]]:
        """Number and commit a group of sends, in order, in one commit; one outcome each.

        For each send: an existing key of the same sender is answered first (same content, or that is redacted: the
        first answer, ``deduplicated``; other content: KeyReused), also for one who has left and in a halted chat; then
        membership (NotAMember; NotFound for an unknown chat or one of another tenant), mute (Forbidden), halt
        (ChatHalted), counter.
        Equal keys within the group are merged. One bad send fails alone. A missing counter halts its chat
        (ChatHalted) and is never created here; a sequence that is already taken halts its chat alone.
        """
        ...

    async def change(self, command: Command) -> CommandResult:
        """Commit one command; see ``holdfast.store.commands``. Refused leaves everything as it was."""
        ...

    async def mark(self, watermarks: Sequence[Watermark]) -> None:
        """Merge watermarks; those of unknown chats, non-members and other epochs than the chat's are ignored.

        The device "" stands for all of a user's devices without a name. Of the named ones the ``ChatLimits`` that are
        furthest are kept per chat; one that is forgotten merges into "", so the user's maxima stay.
        """
        ...

    async def read_after(
        self, chat_id: str, after: int, limit: int, bytes_max: int, reader: User | None = None
    ) -> Page:
        """The messages with sequence > ``after``, ascending; at least one if there is one, however large.

        A frame with the page has at most ``bytes_max``, everything counted as it is sent. A page that meets the
        reader's deadline ends there, with ``has_more``; Unavailable if it has nothing yet.
        With a ``reader``: NotAMember unless a member at this moment, NotFound for another tenant's chat.
        ``through`` is the last sequence the page settles: the last message's, or the head if nothing is left.
        """
        ...

    async def read_before(
        self, chat_id: str, before: int, limit: int, bytes_max: int, reader: User | None = None
    ) -> Page:
        """The last messages with sequence < ``before``, ascending; ``has_more`` tells of older ones."""
        ...

    async def heads(self, chat_ids: Iterable[str]) -> Mapping[str, Cursor]:
        """The present (epoch, head) of each chat; unknown chats are left out."""
        ...

    async def memberships(
        self, users: Sequence[User], chats_max: int = MEMBERSHIPS_MAX
    ) -> Mapping[User, Mapping[str, Cursor]]:
        """For each user the (epoch, head) of every chat they are a member of now, read in one snapshot.

        From the first on as many users as have ``chats_max`` chats together, and at least the first; ask again for
        the others.
        """
        ...

    async def chats_of(
        self, user: User, limit: int, after: tuple[str, int] | None = None, only: Collection[str] | None = None
    ) -> Sequence[ChatSummary]:
        """The user's chats, newest activity first; ``after`` is the last of the page before: its id and head there.

        A message that came to that chat since does not move the place where the list goes on. NotFound if the user's
        tenant has no such chat. ``only``: of these chats alone.

        ``read`` is the furthest of the user's read watermarks. The cost grows with no chat's length.
        """
        ...

    async def chat(self, chat_id: str, reader: User | None = None) -> Chat:
        """One chat; NotFound, or NotAMember for a reader who is none."""
        ...

    async def members(self, chat_id: str) -> Sequence[Member]:
        """Everybody in the chat now; empty for an unknown chat."""
        ...

    async def bans(self, chat_id: str) -> Sequence[Ban]:
        """Everybody who is banned from the chat now; empty for an unknown chat."""
        ...

    async def mutes(self, chat_id: str) -> Sequence[Mute]:
        """Everybody who is muted in the chat now, members or not; empty for an unknown chat."""
        ...

    async def watermarks(self, chat_id: str) -> Sequence[Watermark]:
        """Every device's watermark in the chat's present epoch."""
        ...

    async def inspect(self, chat_id: str) -> Inspection:
        """The chat's counter, head, count and gaps, read in one snapshot."""
        ...

    async def record(self, act: CommandContext, action: str, target: str, details: str = "") -> None:
        """Add an act that changed no chat (a key issued, a backup taken) to the audit log."""
        ...

    async def begin(self, act: CommandContext) -> str | None:
        """Take the key of ``act`` for a request that is no command: None, once and for one caller only.

        After that what ``keep`` stored, "" as long as that is nothing; KeyReused for another request.
        """
        ...

    async def keep(self, act: CommandContext, answer: str | None) -> None:
        """Store the answer of a request whose key ``begin`` took. None: it did nothing, and the key is new again."""
        ...

    async def forget_keys(self, answers_before: str, sends_before: str, limit: int) -> int:
        """Forget the idempotency keys of answers and of messages from before a moment ("": none).

        Returns how many answers and messages were too old.

        At most ``limit`` of each go in one commit, the oldest first: repeat until 0. A message's key goes in the order
        of the log, up to the first that is not older. A request that comes again after that is a new one.
        """
        ...

    async def sent_by(self, user: User, after: int) -> SentBy:
        """Which of the next ``LOOKED_AT_ONCE`` entries of the log after a position are this user's texts, not redacted.

        Looks at every entry: for erasure, not for people who wait.
        """
        ...

    async def forget_user(self, user: User) -> None:
        """Forget the watermarks of a user's devices and the answers kept for the user's keys."""
        ...

    async def touch(self) -> None:
        """Commit something that changes nothing; it fails where any other write would."""
        ...

    async def audit(self, after: int, limit: int) -> Sequence[AuditRecord]:
        """Recorded acts with number > ``after``, oldest first."""
        ...


class CommitListener(Protocol):
    """Called by a store after each commit, on the event loop, with what the commit added to the log.

    Called with nothing when copies may be out of date: stored messages lost their content (redaction, retention), or
    nobody knows whether a write was stored. That is said when it ends and again with the next one that is known.
    """

    def __call__(self, entries: Sequence[LogEntry]) -> None: ...
