"""The frozen values everything speaks, from the store to the wire; there is no copy of
them per layer. (Pure.)

A *chat* is an ordered, durable list of messages with members. A *message* is immutable
and numbered: its ``sequence`` is dense within its chat, starts at 1 and stays below
2^53. An *epoch* counts the repairs of a chat's numbering; a *cursor* (epoch, sequence)
says how far a client has the chat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, NewType

from msgspec import UNSET, Struct, UnsetType

from holdfast.errors import HoldfastError

Role = Literal["owner", "admin", "member"]
ChatKind = Literal["group", "direct"]
MessageKind = Literal["text", "event"]

ID_BYTES_MAX = 64
SEQUENCE_MAX = 2**53 - 1


PageToken = NewType("PageToken", str)
"""Where a page of a list ended. Only the store that made it looks inside."""


class User(NamedTuple):
    """A person: user ids are unique within a tenant."""

    tenant: str
    user_id: str


class Cursor(NamedTuple):
    """How far somebody has a chat."""

    epoch: int
    sequence: int


class Message(Struct, frozen=True):
    """One stored message, exactly as it is sent. ``content`` of a redacted message is
    empty.

    ``proof``, only in a push: shown with the cursor ``[epoch, sequence]``, it proves
    that the server had sent so much.
    """

    message_id: str
    chat_id: str
    sequence: int
    kind: MessageKind
    sender_id: str
    client_message_id: str | None
    content: str
    content_type: str
    created_at: str
    proof: str | UnsetType = UNSET


class Draft(Struct, frozen=True, gc=False):
    """A send on its way to the store: admitted and stamped, not yet numbered."""

    sender: User
    chat_id: str
    client_message_id: str
    content: str
    content_type: str
    message_id: str
    created_at: str
    muted: bool = False
    """The sender is muted in the whole tenant."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Identifies the send permanently: a retry has the same key."""
        return (self.chat_id, self.sender.user_id, self.client_message_id)

    @property
    def content_hash(self) -> bytes:
        """Distinguishes a retry from another message under the same key. It goes when
        the content is redacted.
        """
        return hashlib.blake2b(
            f"{self.content_type}\0{self.content}".encode(), digest_size=16
        ).digest()


class Acked(Struct, frozen=True, gc=False):
    """The send is stored as ``message``; ``deduplicated``: by an earlier attempt."""

    message: Message
    deduplicated: bool


Outcome = Acked | HoldfastError
"""What became of a send: Acked, Refused or Deferred (not stored), OutcomeUnknown."""


class ChatCreated(Struct, frozen=True, gc=False):
    """A chat was created with these users."""

    members: tuple[str, ...]


class EpochRaised(Struct, frozen=True, gc=False):
    """A chat's numbering was repaired: its entry has the new epoch, ``head`` is the
    last sequence that the new epoch keeps.
    """

    head: int


class AllEpochsRaised(Struct, frozen=True, gc=False):
    """Every epoch was raised to at least ``base``, because commits may be lost. Its
    entry is of no chat, and every shard has one.
    """

    base: int


LogEvent = ChatCreated | EpochRaised | AllEpochsRaised
"""What an entry of the log without a sequence says; a chat's first message is 1."""


class LogEntry(Struct, frozen=True, gc=False):
    """One commit's entry in the event log; ``offset`` rises within its ``shard``.

    ``epoch`` is the chat's when the entry was committed or read from the store: an
    entry that is read late may have a later epoch than it was committed in.
    """

    shard: int
    offset: int
    tenant: str
    chat_id: str
    epoch: int
    what: Message | LogEvent


class Page(Struct, frozen=True):
    """A part of a chat; authoritative: what it does not hold up to ``through`` does
    not exist.

    ``reset`` tells a client whose cursor has another epoch, or is beyond the head, to
    drop its copy and start at 0. ``proof``, where a client reads it: of the cursor
    ``[epoch, through]``.
    """

    chat_id: str
    epoch: int
    messages: Sequence[Message]
    through: int
    has_more: bool
    head: int
    reset: bool = False
    proof: str | UnsetType = UNSET


class ResumeRead(Struct, frozen=True):
    """What the store says to a resume, read after it was asked.

    ``pages``: the first page of chats that moved past their cursor, or whose epoch
    differs (``reset``, from 0), as many as fit one budget of bytes. ``joined``: chats
    the user is in without having sent a cursor. ``gone``: cursors of chats the user is
    not in. ``heads``: the (epoch, head) of every other chat the user is in, moved or
    not.
    """

    pages: Sequence[Page]
    joined: Sequence[str]
    gone: Sequence[str]
    heads: Mapping[str, Cursor]


class Member(Struct, frozen=True):
    """One membership."""

    user_id: str
    role: Role
    joined_at: str
    muted: bool = False
    """Reads, and cannot send; an owner is never muted."""
    muted_by_operator: bool = False
    """Then only an operator lifts it."""


class Ban(Struct, frozen=True):
    """Somebody who is kept out of a chat until the ban is lifted."""

    user_id: str
    banned_by: str
    banned_at: str
    by_operator: bool = False
    """Then only an operator lifts it."""


class Mute(Struct, frozen=True):
    """Somebody who may not send in a chat, also after rejoining, until it is lifted."""

    user_id: str
    by_operator: bool = False
    """Then only an operator lifts it."""


class Chat(Struct, frozen=True):
    """A chat without its messages."""

    chat_id: str
    tenant: str
    kind: ChatKind
    name: str
    epoch: int
    head: int
    first_sequence: int
    halted: str | None
    created_by: str
    created_at: str


class Watermark(Struct, frozen=True):
    """How far one device has stored (``delivered``) and its user has read (``read``) a
    chat.

    Two of the same epoch merge to their maxima; of a newer epoch the newer wins.
    """

    user: User
    device_id: str
    chat_id: str
    epoch: int
    delivered: int
    read: int


def check_tenant(value: str, name: str = "tenant") -> str | None:
    """Why no credential can be of tenant ``value``, or None. ``*`` is reserved."""
    return check_id(value, name) or (
        f"{name} must not be *, which means every tenant" if value == "*" else None
    )


def check_id(value: str, name: str) -> str | None:
    """Why ``value`` cannot be an id (1..64 printable ASCII, no spaces), or None."""
    if not value:
        return f"{name} must not be empty"
    if len(value) > ID_BYTES_MAX:
        return f"{name} is {len(value)} characters long; at most {ID_BYTES_MAX} are allowed"
    if not value.isascii() or not value.isprintable() or " " in value:
        return f"{name} must be printable ASCII without spaces"
    return None
