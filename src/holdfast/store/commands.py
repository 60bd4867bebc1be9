"""The commands that change a chat, as values. (Pure.)

Every change of a chat but a send is one of these commands, committed by ``Store.change``. Joining, leaving,
renaming, bans, mutes and role changes leave a message of kind ``event`` in the same commit, so that the member
set is exact at each place of the log; creation leaves none, so that a chat's first message is 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from holdfast.message import Chat, ChatKind, Message, Role, User

OPERATOR = "an operator"
"""Stands for every operator where members read who did something; no user's id, for it has a space. Which admin key
it was is in the audit log.
"""


class CommandContext(Struct, frozen=True):
    """Who does it, when and why; ``operator`` acts (by an admin key) skip the role table and are audited.

    ``message_id`` and ``at`` are minted by ingest for the event the command may leave. ``key`` (a caller's
    Idempotency-Key) with ``fingerprint`` (a hash of the request) makes a repeated command answer as the first.
    ``backend``: a tenant's own backend acts for the user, so that what it does counts as nobody's invitation.
    ``muted``: the actor is muted in the whole tenant.
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

    @property
    def shown_actor(self) -> str:
        """The actor as members of the chat see it."""
        return OPERATOR if self.operator else self.actor.user_id


class CreateChat(Struct, frozen=True, tag=True):
    """Chat, counter at 0, creator as owner and the first members.

    A direct chat is unique per pair: creating it again answers with the one there is, ``repeated``. Its two
    members are equal: neither is an owner, and it cannot be joined, left or renamed.
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
    """Keep somebody out of a group, removed if a member, or let them be added again (``banned`` False)."""

    act: CommandContext
    chat_id: str
    user_id: str
    banned: bool


class ChangeMute(Struct, frozen=True, tag=True):
    """A muted member reads, and sends, names and adds nothing. In a direct chat each of the two may mute the other.

    A mute outlives the membership: whoever leaves and comes back is still muted. Making the user an owner lifts it.
    """

    act: CommandContext
    chat_id: str
    user_id: str
    muted: bool


class Redact(Struct, frozen=True, tag=True):
    """The content goes; sequence and key stay. By its sender, an admin of the chat or an operator."""

    act: CommandContext
    chat_id: str
    sequence: int


ERASE_AT_ONCE = 500


class Erase(Struct, frozen=True, tag=True):
    """The content of these texts of one user goes, as in ``Redact``. Operators only; at most ``ERASE_AT_ONCE``.

    What the user did not send, what is gone already, and events are left alone.
    """

    act: CommandContext
    chat_id: str
    user_id: str
    sequences: Sequence[int]


RETAIN_AT_ONCE = 5_000


class Retain(Struct, frozen=True, tag=True):
    """Delete the messages before ``first_sequence``. Operators only.

    At most ``RETAIN_AT_ONCE`` go in one commit, so that sends never wait long behind it: the answer's
    ``chat.first_sequence`` tells how far it came; repeat until it is there.
    """

    act: CommandContext
    chat_id: str
    first_sequence: int


class HaltChat(Struct, frozen=True, tag=True):
    """Refuse sends until the chat is recovered. Operators only."""

    act: CommandContext
    chat_id: str


class RecoverChat(Struct, frozen=True, tag=True):
    """Set a missing or lagging counter to the highest stored sequence, record holes, raise the epoch, resume.

    Watermarks go on in the new epoch, see ``RaiseEpoch``.
    """

    act: CommandContext
    chat_id: str


class RaiseEpoch(Struct, frozen=True, tag=True):
    """A cursor beyond the head proved a rollback: every copy of the chat is to be dropped.

    Does nothing if the chat's epoch is no longer ``epoch``, so that many proofs raise it once. What is stored keeps
    its numbers, so watermarks go on in the new epoch, at most up to the head: what was read stays read.
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
    """The chat after the command, and the event it left, if any. ``repeated``: an earlier answer to the same key."""

    chat: Chat
    event: Message | None = None
    repeated: bool = False


class MembershipEvent(Struct, frozen=True, omit_defaults=True):
    """The content (JSON) of an event message. ``event`` tells which fields are set."""

    event: str
    """member_added, member_removed, user_banned (who is no member), user_unbanned, member_muted, member_unmuted,
    role_changed or chat_renamed.
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
    """What an event message says; None for a text, and for an event that cannot be read (any more)."""
    if message.kind != "event":
        return None
    try:
        return _event.decode(message.content)
    except msgspec.DecodeError:
        return None
