"""The commands that change a chat, as values. (Pure.)

Every change of a chat except a send is one of these commands, committed by
``Store.change``. Joining, leaving, renaming, bans, mutes and role changes leave a
message of kind ``event`` in the same commit, so that the set of members is exact at
each position of the log. Creation leaves none, so that a chat's first message has
sequence 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from holdfast.message import Chat, ChatKind, Message, Role, User

OPERATOR = "an operator"
"""Stands for every operator where members read who did something. It contains a space,
so it is no user's id. The audit log has the admin key that was used.
"""


class CommandContext(Struct, frozen=True):
    """Who acts, when and why.

    - ``operator``: the actor used an admin key; the role table does not apply, and the
      act is audited;
    - ``message_id``, ``at``: made by ingest for the event that the command may leave;
    - ``key``, ``fingerprint``: the caller's Idempotency-Key and a hash of the request;
      a repeated command gets the first answer;
    - ``backend``: the tenant's own backend acts for the user; nobody it adds counts as
      invited;
    - ``muted``: the actor is muted in the whole tenant;
    - ``node``: which node carries it out; its records are one chain.
    """

    actor: User
    at: str
    message_id: str
    operator: bool = False
    reason: str = ""
    key: str | None = None
    fingerprint: str = ""
    backend: bool = False
    muted: bool = False
    node: str = ""

    @property
    def shown_actor(self) -> str:
        """The actor as members of the chat see it."""
        return OPERATOR if self.operator else self.actor.user_id


class CreateChat(Struct, frozen=True, tag=True):
    """Create a chat with its counter at 0, the creator as owner and the first members.

    A direct chat is unique per pair: creating it again returns the existing one,
    ``repeated``. Its two members are equal: neither is an owner, and it cannot be
    joined, left or renamed.
    """

    act: CommandContext
    chat_id: str
    kind: ChatKind
    name: str
    members: Sequence[str]


class RenameChat(Struct, frozen=True, tag=True):
    act: CommandContext
    chat_id: str
    name: str


class AddMember(Struct, frozen=True, tag=True):
    act: CommandContext
    chat_id: str
    user_id: str
    role: Role = "member"


class RemoveMember(Struct, frozen=True, tag=True):
    """Removing oneself is leaving."""

    act: CommandContext
    chat_id: str
    user_id: str


class ChangeRole(Struct, frozen=True, tag=True):
    act: CommandContext
    chat_id: str
    user_id: str
    role: Role


class ChangeBan(Struct, frozen=True, tag=True):
    """Ban a user from a group and remove them; ``banned`` False lifts the ban."""

    act: CommandContext
    chat_id: str
    user_id: str
    banned: bool


class ChangeMute(Struct, frozen=True, tag=True):
    """Mute or unmute a member. A muted member can read, but not send, rename or add.

    In a direct chat each of the two may mute the other. A mute outlasts the membership:
    a user who leaves and comes back is still muted. Making the user an owner lifts the
    mute.
    """

    act: CommandContext
    chat_id: str
    user_id: str
    muted: bool


class Redact(Struct, frozen=True, tag=True):
    """Delete a message's content; its sequence and key stay. Allowed to its sender, an
    admin of the chat and an operator.
    """

    act: CommandContext
    chat_id: str
    sequence: int


ERASE_AT_ONCE = 500


class Erase(Struct, frozen=True, tag=True):
    """Delete the content of these texts of one user, as ``Redact`` does. Operators
    only; at most ``ERASE_AT_ONCE``.

    Messages of other senders, messages that are gone already, and events are left
    alone.
    """

    act: CommandContext
    chat_id: str
    user_id: str
    sequences: Sequence[int]


RETAIN_AT_ONCE = 5_000


class Retain(Struct, frozen=True, tag=True):
    """Delete the messages before ``first_sequence``. Operators only.

    One commit deletes at most ``RETAIN_AT_ONCE``, so that sends never wait long behind
    it. The answer's ``chat.first_sequence`` shows how far it came; repeat until it is
    reached.
    """

    act: CommandContext
    chat_id: str
    first_sequence: int


class HaltChat(Struct, frozen=True, tag=True):
    """Refuse sends until the chat is recovered. Operators only."""

    act: CommandContext
    chat_id: str


class RecoverChat(Struct, frozen=True, tag=True):
    """Set a missing or lagging counter to the highest stored sequence, record holes,
    raise the epoch, and accept sends again.

    Watermarks stay valid in the new epoch, see ``RaiseEpoch``.
    """

    act: CommandContext
    chat_id: str


class RaiseEpoch(Struct, frozen=True, tag=True):
    """Raise the epoch after a cursor beyond the head proved a rollback: every copy of
    the chat is dropped.

    Does nothing if the chat's epoch is no longer ``epoch``, so that many proofs raise
    it once. Stored messages keep their sequences, so watermarks stay valid in the new
    epoch, up to the head: what was read stays read.
    """

    act: CommandContext
    chat_id: str
    epoch: int


Command = (
    CreateChat
    | RenameChat
    | AddMember
    | RemoveMember
    | ChangeRole
    | ChangeBan
    | ChangeMute
    | Redact
    | Erase
    | Retain
    | HaltChat
    | RecoverChat
    | RaiseEpoch
)


class CommandResult(Struct, frozen=True):
    """The chat after the command, and the event it left, if any. ``repeated``: this is
    an earlier answer to the same key.
    """

    chat: Chat
    event: Message | None = None
    repeated: bool = False


class MembershipEvent(Struct, frozen=True, omit_defaults=True):
    """The content (JSON) of an event message. ``event`` says which fields are set."""

    event: str
    """member_added, member_removed, user_banned (if not a member), user_unbanned,
    member_muted, member_unmuted, role_changed or chat_renamed.
    """
    user_id: str | None = None
    role: Role | None = None
    name: str | None = None
    banned: bool = False
    """Of member_removed: removed by a ban."""
    muted: bool = False
    """Of member_added: still muted from an earlier membership."""


_event = msgspec.json.Decoder(MembershipEvent)


def membership_event(message: Message) -> MembershipEvent | None:
    """The content of an event message; None for a text or an undecodable event."""
    if message.kind != "event":
        return None
    try:
        return _event.decode(message.content)
    except msgspec.DecodeError:
        return None
