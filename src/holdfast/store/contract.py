"""What a store of durable chats promises. Adapters: memory (the reference), sqlite.

``ChatStore`` holds the chats, ``Records`` the audit log and the answers to repeated
requests.

Every verb takes a batch. When a write returns, its result is on stable storage. Errors
are those of ``holdfast.errors``; an adapter translates every foreign error:

- ``Unavailable``: nothing happened;
- ``OutcomeUnknown``: the commit may or may not have happened (an I/O error or a
  deadline at commit).

Order: commit order is sequence order. No reader can see sequence n+1 of a chat while n
may still appear. Cancel-safety: a cancelled write may have happened; the caller must
treat it as unknown.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from typing import Literal, Protocol
from zlib import crc32

from msgspec import Struct

from holdfast.bounds import KIB
from holdfast.message import (
    Ban,
    Chat,
    Cursor,
    Draft,
    Member,
    Message,
    Mute,
    Outcome,
    Page,
    PageToken,
    User,
    Watermark,
)
from holdfast.store.commands import Command, CommandContext, CommandResult

MEMBERSHIPS_MAX = 20_000
"""Chats in one answer of ``memberships``: four users with the most chats allowed."""
LOOKED_AT_ONCE = 5_000
"""Log entries that one call of ``texts_of`` examines."""
COUNTERS_LOOKED_AT = 1_000
"""Chats that one call of ``damaged`` examines."""
UNREAD_LOOKED_AT = 100
"""Newest messages examined to count unread ones; most of the cost of a list."""


class Grouping(Struct, frozen=True):
    """How a store takes sends, and how much it does at once.

    ``by`` says which chats may be in one group: any, those of one shard, or one chat. A
    *lane* is what ``by`` names, and has at most one group in flight: a group that hangs
    stops its lane, and no other. ``at_once`` is the number of groups in flight, at most
    one in each lane; ``reads_at_once`` is how many reads keep the store busy.
    """

    by: Literal["any", "shard", "chat"]
    sends_max: int
    bytes_max: int
    at_once: int
    reads_at_once: int

    @property
    def is_shared(self) -> bool:
        """Many nodes use the store, and others restart it."""
        return self.by != "any"

    @property
    def retry_seconds_max(self) -> float:
        """How long a caller waits before it tries again, although a breaker rests: a
        shared store is asked all the time whether it is back.
        """
        return 1.0 if self.is_shared else math.inf


ONE_LANE = Grouping("any", sends_max=512, bytes_max=512 * KIB, at_once=1, reads_at_once=8)
"""A store with one writer: any chats together, one group after the other."""


def shard_of(chat_id: str, shards: int) -> int:
    """The shard of a chat, the same on every node and in every release."""
    return crc32(chat_id.encode()) % shards


class ChatSummary(Struct, frozen=True):
    """A chat as its member sees it in a list. ``title`` is its name, or the others' ids
    in a direct chat.

    ``unread`` counts the messages past ``read``: texts of others, neither redacted nor
    erased, and no events. ``unread_capped``: messages older than the
    ``UNREAD_LOOKED_AT`` newest may be unread too; show it as "40+".
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
    """One recorded act: who did what to what, when and why.

    ``number`` is its place in the list; numbers rise. ``record_id`` is unique among all
    nodes, and empty where no node acted. ``hash``: see ``store.audit_chain``. Records
    of older versions have neither.
    """

    number: int
    at: str
    actor: str
    action: str
    target: str
    reason: str
    details: str
    record_id: str
    node: str
    hash: str


class ChatPage(Struct, frozen=True):
    """``next`` is null on the last page."""

    chats: Sequence[ChatSummary]
    next: PageToken | None


class AuditPage(Struct, frozen=True):
    """Records, oldest first. ``next`` is null on the last page; ask for later records
    with ``after`` set to the last record's number.
    """

    records: Sequence[AuditRecord]
    next: PageToken | None


class TextPage(Struct, frozen=True):
    """The texts of one user, as (chat_id, sequence), found in a section of the log.
    ``next`` is None if the section is behind the log's end.
    """

    texts: Sequence[tuple[str, int]]
    next: PageToken | None


class ActivePage(Struct, frozen=True):
    """Chats, as (tenant, chat_id), found in a section of all chats. ``next`` is None if
    the section is the last.
    """

    chats: Sequence[tuple[str, str]]
    next: PageToken | None


class DamagedPage(Struct, frozen=True):
    """Chats whose counter is damaged, by id, found in a section of all chats. ``next``
    is None if the section is behind the last chat.
    """

    chats: Sequence[str]
    next: PageToken | None


class HaltedChat(Struct, frozen=True):
    """A chat that takes no messages until it is recovered, and why."""

    chat_id: str
    tenant: str
    why: str


class HaltedChats(Struct, frozen=True):
    """``count``: of all halted chats. ``chats``: the first of them, by id."""

    count: int
    chats: Sequence[HaltedChat]


class ChatStore(Protocol):
    """The durable chats of all tenants."""

    @property
    def grouping(self) -> Grouping:
        """The groups that ``append`` takes, and what may run at once; never changes."""
        ...

    def lane(self, chat_id: str) -> int:
        """The lane of a chat, known or not, without asking the store; never changes."""
        ...

    def append(self, group: Sequence[Draft]) -> Awaitable[list[Outcome]]:
        """Number a group of sends, in order, in one commit; one outcome each.

        Each send is checked in this order. First its key: if this sender has used it
        before, the send gets the first answer (``deduplicated``) if the content is the
        same or has been redacted, and KeyReused otherwise; also after the sender left,
        and in a halted chat. Then membership (NotAMember; NotFound for an unknown chat
        or one of another tenant), mute (Forbidden), halt (ChatHalted), counter.

        Equal keys within the group are merged. One bad send fails alone. A missing
        counter halts its chat (ChatHalted) and is never created here; a sequence that
        is already taken halts only its own chat.
        """
        ...

    async def change(self, command: Command) -> CommandResult:
        """Commit one command. A refused command changes nothing."""
        ...

    async def mark(self, watermarks: Sequence[Watermark]) -> None:
        """Merge watermarks; ignore unknown chats, non-members and other epochs.

        The device "" stands for all of a user's devices without a name. Of the named
        devices the furthest ``ChatSettings.devices_per_member_max`` are kept per chat;
        the others are merged into "", so that the user's maxima stay.
        """
        ...

    async def read_after(
        self, chat_id: str, after: int, limit: int, bytes_max: int, reader: User | None = None
    ) -> Page:
        """The messages with sequence > ``after``, ascending; at least one if there is
        one, however large.

        A frame with the page has at most ``bytes_max``, counted as it is sent. A page
        that reaches its read deadline ends there, with ``has_more``; Unavailable if it
        is still empty. With a ``reader``: NotAMember unless the user is a member at
        this moment, NotFound for another tenant's chat. ``through`` is the last
        sequence the page settles: that of its last message, or the head if nothing is
        left.
        """
        ...

    async def read_before(
        self, chat_id: str, before: int, limit: int, bytes_max: int, reader: User | None = None
    ) -> Page:
        """The last messages with sequence < ``before``, ascending.

        ``has_more``: older ones exist. Otherwise as ``read_after``.
        """
        ...

    async def heads(self, chat_ids: Iterable[str]) -> Mapping[str, Cursor]:
        """The present (epoch, head) of each chat; unknown chats are left out."""
        ...

    async def memberships(
        self, users: Sequence[User], chats_max: int = MEMBERSHIPS_MAX
    ) -> Mapping[User, Mapping[str, Cursor]]:
        """For each user the (epoch, head) of every chat of theirs, in one snapshot.

        The answer covers the first users, as many as together have at most
        ``chats_max`` chats, but at least one; ask again for the others.
        """
        ...

    async def memberships_in(
        self, asked: Sequence[tuple[User, str]]
    ) -> Mapping[tuple[User, str], Cursor]:
        """The (epoch, head) of the chat for each (user, chat_id) that is a membership,
        in one snapshot.
        """
        ...

    async def chats_of(
        self,
        user: User,
        limit: int,
        after: PageToken | None = None,
        only: Collection[str] | None = None,
    ) -> ChatPage:
        """The user's chats, newest activity first.

        A message that has come to the last chat of the previous page does not change
        where the list continues. ``only`` restricts the list to these chats.
        InvalidMessage if ``after`` is of no page of this list, Forbidden if that page
        ended at a chat outside ``only``. NotAMember if the user has left the chat where
        it ended: a page after another user's chat would reveal when that was last used.

        ``read`` is the furthest of the user's read watermarks. The cost does not depend
        on the length of any chat.
        """
        ...

    async def chat(self, chat_id: str, reader: User | None = None) -> Chat:
        """One chat. NotFound; NotAMember if the reader is not a member."""
        ...

    async def members(self, chat_id: str) -> Sequence[Member]:
        """Everybody in the chat now; empty for an unknown chat."""
        ...

    async def bans(self, chat_id: str) -> Sequence[Ban]:
        """Everybody banned from the chat now; empty for an unknown chat."""
        ...

    async def mutes(self, chat_id: str) -> Sequence[Mute]:
        """Everybody muted in the chat, members or not; empty for an unknown chat."""
        ...

    async def watermarks(self, chat_id: str) -> Sequence[Watermark]:
        """Every device's watermark in the chat's present epoch."""
        ...

    async def inspect(self, chat_id: str) -> Inspection:
        """The chat's counter, head, count and gaps, read in one snapshot."""
        ...

    async def halted(self, limit: int) -> HaltedChats:
        """The halted chats of all tenants, at most ``limit`` by name. The cost depends
        on how many are halted, not on how many chats there are.
        """
        ...

    async def damaged(self, after: PageToken | None = None) -> DamagedPage:
        """The chats, not halted, whose counter is missing or behind their messages,
        among the next ``COUNTERS_LOOKED_AT`` chats. InvalidMessage if ``after`` is of
        no such page.

        A send would find it, too; nobody may send for long.
        """
        ...

    async def halt_damaged(self, chat_ids: Sequence[str]) -> None:
        """Halt those of these chats that are damaged at this moment, as a send does
        that finds it: SEV-1 for each.
        """
        ...

    async def texts_of(self, user: User, after: PageToken | None = None) -> TextPage:
        """This user's texts, not redacted, among the next ``LOOKED_AT_ONCE`` log
        entries. InvalidMessage if ``after`` is of no such page.

        Examines every entry: for erasure, not for interactive requests.
        """
        ...

    async def active_since(self, at: str, after: PageToken | None = None) -> ActivePage:
        """The chats whose newest message is not older than a moment, among the next
        ``LOOKED_AT_ONCE`` chats. InvalidMessage if ``after`` is of no such page.

        Examines every chat: for a reader that lost the log, not for interactive
        requests.
        """
        ...

    async def forget_send_keys(self, before: str, limit: int) -> int:
        """Forget the idempotency keys of messages older than a moment; returns how many
        messages were too old.

        One commit forgets at most ``limit``: repeat until 0. Keys go in log order, up
        to the first message that is not older. The same send after that is a new one.
        """
        ...

    async def forget_devices(self, user: User) -> None:
        """Forget the watermarks of all the user's devices."""
        ...

    async def touch(self) -> None:
        """Make a commit that changes nothing; it fails where any other write would."""
        ...


class Records(Protocol):
    """The audit log, and the answers kept under idempotency keys.

    The same adapter implements ``ChatStore``: a command's record and its answer are in
    the commit that changes the chat.
    """

    async def record(
        self, act: CommandContext, action: str, target: str, details: str = ""
    ) -> None:
        """Record an act that changed no chat: a key issued, a backup taken."""
        ...

    async def audit(self, after: PageToken | None, limit: int) -> AuditPage:
        """Audit records, oldest first. ``after`` may also be the number of a record, as
        text. InvalidMessage if it is neither that nor of a page of this log.
        """
        ...

    async def begin(self, act: CommandContext, node: str, seconds: float) -> str | None:
        """Take the key of ``act`` for a request that is not a command and runs on
        ``node``, for at most ``seconds``. Returns None exactly once, to one caller.

        Every later call returns what ``keep`` stored; KeyReused for another request.
        While nothing is stored: ServerBusy on other nodes for these seconds, and ""
        after them and on the node itself, which knows what it runs: nobody knows how
        far the request came.
        """
        ...

    async def keep(self, act: CommandContext, answer: str | None) -> None:
        """Store the answer of a request whose key ``begin`` took. None: the request did
        nothing, and its key can be used again.
        """
        ...

    async def forget_answers(self, before: str, limit: int) -> int:
        """Forget the answers older than a moment; returns how many were.

        One commit forgets at most ``limit``, the oldest first: repeat until 0. The same
        request after that is a new one.
        """
        ...

    async def forget_answers_of(self, user: User) -> None:
        """Forget the answers under the user's keys."""
        ...
