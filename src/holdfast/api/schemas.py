"""Bodies, queries and answers that are not values of ``holdfast.message``. (Pure.)

Requests are strict: an unknown field or a wrong type is refused. A bound that is a
setting is not repeated here; the part that carries the request out checks it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from holdfast.access.contract import KeyKind
from holdfast.access.principal import KeyScope, UserScope
from holdfast.access.tokens import CHATS_MAX
from holdfast.message import (
    ID_BYTES_MAX,
    SEQUENCE_MAX,
    Ban,
    Chat,
    ChatKind,
    Member,
    Message,
    Mute,
    PageToken,
    Role,
)
from holdfast.wire.frames import Error

Id = Annotated[str, Meta(min_length=1, max_length=ID_BYTES_MAX, pattern="^[!-~]+$")]
Name = Annotated[str, Meta(description="At most durability.chats.name_characters_max characters.")]
_Reason = Annotated[
    str, Meta(min_length=1, max_length=500, description="Why; it goes into the audit log.")
]
SequenceNumber = Annotated[int, Meta(ge=1, le=SEQUENCE_MAX)]
_After = Annotated[int, Meta(ge=0, le=SEQUENCE_MAX)]
_Token = Annotated[str, Meta(max_length=ID_BYTES_MAX + 17)]


class RequestBody(Struct, frozen=True, forbid_unknown_fields=True):
    """What a request carries: its JSON body, or its query."""


class NewChat(RequestBody, frozen=True):
    """A direct chat has exactly one other member and no name; there is one per pair."""

    kind: ChatKind = "group"
    name: Name = ""
    members: Annotated[
        list[Id],
        Meta(description="With the creator at most durability.chats.members_at_creation_max."),
    ] = []


class Renamed(RequestBody, frozen=True):
    name: Name


class NewMember(RequestBody, frozen=True):
    user_id: Id
    role: Role = "member"


class OneUser(RequestBody, frozen=True):
    user_id: Id


class RestrictOne(RequestBody, frozen=True):
    user_id: Id
    reason: _Reason


class NewRole(RequestBody, frozen=True):
    role: Role


class NewMessage(RequestBody, frozen=True):
    """``content`` is 1 to 4096 bytes of UTF-8."""

    content: Annotated[str, Meta(min_length=1)]
    content_type: str = "text/plain"


class NewToken(RequestBody, frozen=True):
    """Without ``scopes``: tokens.default_scopes. Without ``chats``: all chats."""

    user_id: Id
    ttl_seconds: Annotated[
        int, Meta(ge=1, description="At most access.tokens.ttl_seconds_max.")
    ] = 3600
    scopes: Annotated[list[UserScope], Meta(max_length=20)] | None = None
    chats: Annotated[list[Id], Meta(max_length=CHATS_MAX)] | None = None


class NewKey(RequestBody, frozen=True):
    """Without ``scopes``: all of its kind; for an admin key, all of yours."""

    kind: KeyKind
    label: Annotated[str, Meta(min_length=1, max_length=100)]
    reason: _Reason
    tenant: Annotated[str, Meta(max_length=ID_BYTES_MAX)] = ""
    scopes: Annotated[list[KeyScope], Meta(max_length=20)] | None = None


class Why(RequestBody, frozen=True):
    reason: _Reason


class EpochsRaised(Struct, frozen=True):
    """``epoch_base``: every chat's epoch is above it now."""

    epoch_base: int


class RevokeKey(Why, frozen=True):
    """``force``: also the last key that can make keys."""

    force: bool = False


class RedactOne(RequestBody, frozen=True):
    sequence: SequenceNumber
    reason: _Reason


class RetainFrom(RequestBody, frozen=True):
    """Messages before ``first_sequence`` are deleted."""

    first_sequence: SequenceNumber
    reason: _Reason


class ErasePerson(RequestBody, frozen=True):
    """Ask again with ``after`` set to the answer's ``next`` until it is ``done``;
    without it does no harm.
    """

    user_id: Id
    reason: _Reason
    tenant: Id = "default"
    after: _Token | _After | None = 0
    """0, not None: the default is part of the fingerprints stored with keys."""


def token_of(after: str | int | None) -> PageToken | None:
    """Where a list continues; None, or the number 0: at its beginning."""
    return None if after is None or after == 0 else PageToken(str(after))


class ChatsQuery(RequestBody, frozen=True):
    """``after`` is the ``next`` of the page before."""

    limit: Annotated[int, Meta(ge=1, le=200)] = 50
    after: _Token | None = None


class MessagesQuery(RequestBody, frozen=True):
    """At most one of ``before``, ``after`` and ``around``; none of them: the newest
    messages.

    ``limit``: left out, ``gateway.pages.default_messages``; a page has at most
    ``gateway.pages.max_messages``.
    """

    before: SequenceNumber | None = None
    after: _After | None = None
    around: SequenceNumber | None = None
    limit: Annotated[int, Meta(ge=1)] | None = None


class AuditQuery(RequestBody, frozen=True):
    """``after`` is the ``next`` of the page before, or a record's number."""

    after: _Token | None = None
    limit: Annotated[int, Meta(ge=1, le=500)] = 100


class HaltedQuery(RequestBody, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=500)] = 100


class ChatDetail(Struct, frozen=True):
    """A chat with everybody in it; ``role`` is the caller's."""

    chat: Chat
    role: Role
    members: Sequence[Member]


class ChangeAnswer(Struct, frozen=True):
    """The chat after the change, and the event its members get, if there is one."""

    chat: Chat
    event: Message | None


class MemberList(Struct, frozen=True):
    members: Sequence[Member]


class BanList(Struct, frozen=True):
    """``mutes``: of members, and of those who have left."""

    bans: Sequence[Ban]
    mutes: Sequence[Mute]


class MessagePage(Struct, frozen=True):
    """Messages in ascending order. A copy of the chat with another ``epoch`` must be
    dropped and read again.
    """

    chat_id: str
    epoch: int
    head: int
    messages: Sequence[Message]
    has_older: bool
    has_newer: bool


class DeliveryStatus(Struct, frozen=True):
    """Which other members have the message on a device, and which have read it."""

    chat_id: str
    epoch: int
    sequence: int
    delivered: Sequence[str]
    read: Sequence[str]


class TokenAnswer(Struct, frozen=True):
    """``jti`` is what the token can be revoked by."""

    token: str
    expires_at: str
    jti: str


class KeyView(Struct, frozen=True):
    """A key without its secret, of which only the last four characters are known."""

    key_id: str
    kind: KeyKind
    tenant: str
    label: str
    scopes: Sequence[KeyScope]
    created_at: str
    last_four: str


class KeyList(Struct, frozen=True):
    keys: Sequence[KeyView]


class IssuedKey(Struct, frozen=True):
    """``secret`` is shown this once."""

    key: KeyView
    secret: str


class Health(Struct, frozen=True, omit_defaults=True):
    """``dependencies`` is for an admin key with the scope status:read only."""

    status: Literal["live", "ready", "not_ready"]
    dependencies: Mapping[str, str] | None = None


class Problem(Struct, frozen=True):
    """The error, and the same as a problem (RFC 9457)."""

    error: Error
    type: str
    title: str
    status: int
    detail: str


class TooManyRequests(Struct, frozen=True, omit_defaults=True):
    """429: the error, and the same as a problem (RFC 9457, with the type of the IETF's
    draft on RateLimit headers).

    ``violated-policies`` are the rules that refused, as ``RateLimit-Policy`` names
    them; none where no rule did.
    """

    error: Error
    type: str
    title: str
    status: int
    detail: str
    violated_policies: Sequence[str] = field(name="violated-policies", default=())
