"""What a decision about a command reads, and what an adapter must then write. (Pure.)

An adapter reads the ``CommandInputs``, calls ``command_rules.decide`` for a
``ChangePlan`` and applies it, all in one commit. If ``decide`` raises a Refused or a
ChatHalted, nothing changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.bounds import positive
from holdfast.clock import timestamp
from holdfast.errors import (
    ChatHalted,
    Forbidden,
    InvalidMessage,
    KeyReused,
    NotAMember,
    NotFound,
    ServerBusy,
)
from holdfast.message import (
    Ban,
    Chat,
    ChatCreated,
    EpochRaised,
    LogEvent,
    Member,
    Message,
    Mute,
)
from holdfast.store.commands import (
    AddMember,
    ChangeBan,
    ChangeMute,
    ChangeRole,
    Command,
    CommandContext,
    CommandResult,
    CreateChat,
    MembershipEvent,
    RemoveMember,
)


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How large chats may grow. A chat starts small so that its creation fits into one
    commit of every store.
    """

    members_max: int = 1_000
    """Members of a chat. The next: FORBIDDEN with the limit."""
    members_at_creation_max: int = 90
    """Members at a chat's creation, the creator included. Above: INVALID_MESSAGE."""
    chats_per_user_max: int = 5_000
    """Chats of one user. The next: FORBIDDEN with the limit. Invitations by other users
    fill at most half of it.
    """
    bans_max: int = 1_000
    """Users banned from a chat. The next: FORBIDDEN. Operators may ban as many more."""
    mutes_max: int = 1_000
    """Users muted in a chat, including those who have left. The next: FORBIDDEN with
    the limit. Operators may mute as many again.
    """
    name_characters_max: int = 200
    """Characters of a chat's name. Above: INVALID_MESSAGE."""
    devices_per_member_max: int = 20
    """Devices whose watermarks are kept per chat and member. Above: the one furthest
    behind is merged into the device without a name.
    """

    def __post_init__(self) -> None:
        if not 2 <= self.members_at_creation_max <= self.members_max:
            raise ValueError("members_at_creation_max must be between 2 and members_max")
        positive(
            self,
            "chats_per_user_max",
            "bans_max",
            "mutes_max",
            "name_characters_max",
            "devices_per_member_max",
        )


class CommandInputs(Struct, frozen=True):
    """The stored facts that the decision about one command depends on."""

    chat: Chat | None
    pair: Chat | None = None
    """The direct chat that the two users already have, if one is to be created."""
    actor: Member | None = None
    target: Member | None = None
    members: int = 0
    owners: int = 0
    banned: bool = False
    """Whether the target is banned from the chat."""
    banned_by_operator: bool = False
    bans: int = 0
    mute: Mute | None = None
    """The target's mute, whether a member or not."""
    mutes: int = 0
    chats: Mapping[str, int] = {}
    """The number of chats of each user who would join."""
    invited: Mapping[str, int] = {}
    """How many of those each user is in by invitation, see ``invited_by``."""
    message: Message | None = None
    """The message to redact."""
    counter: int | None = None
    highest: int = 0
    gaps: Sequence[tuple[int, int]] = ()


class AuditNote(Struct, frozen=True):
    """The part of an audit record that the decision determines."""

    action: str
    target: str
    details: Mapping[str, object]


class Erased(Struct, frozen=True):
    """Texts of a user whose content is deleted."""

    user_id: str
    sequences: Sequence[int]


class ChangePlan(Struct, frozen=True):
    """What to write; ``chat`` is as it will be, but its head moves with the event."""

    chat: Chat
    create: bool = False
    pair: str | None = None
    """For a direct chat to be created: see ``direct_pair``."""
    put: Sequence[Member] = ()
    invited: Collection[str] = ()
    """Those of ``put`` who join by invitation; members keep how they joined."""
    drop: Sequence[str] = ()
    ban: Ban | None = None
    unban: str | None = None
    mute: Mute | None = None
    unmute: str | None = None
    event: MembershipEvent | None = None
    counter: int | None = None
    raised: bool = False
    """The epoch rises by one. Sequences still mean the same messages, so watermarks
    stay valid, up to the head.
    """
    redact: int | None = None
    erase: Erased | None = None
    retain: bool = False
    """Delete the messages before the chat's ``first_sequence``."""
    gaps: Sequence[tuple[int, int]] = ()
    record: AuditNote | None = None

    @property
    def forgets(self) -> bool:
        """Whether stored messages lose their content."""
        return self.retain or self.redact is not None or self.erase is not None


def check_same(act: CommandContext, fingerprint: str) -> None:
    """Raise KeyReused if the key comes with another request than before."""
    if act.fingerprint != fingerprint:
        raise KeyReused("this idempotency key was used for another request; use a new one")


def end_of_run(act: CommandContext, seconds: float) -> str:
    """When a request has ended that begins now and takes at most ``seconds``."""
    return timestamp(datetime.fromisoformat(act.at).timestamp() + seconds)


def check_not_running(act: CommandContext, node: str, runs_on: str, until: str) -> None:
    """Raise ServerBusy while the first request under the key may run on another node.
    What ``node`` runs itself it knows.
    """
    if runs_on != node and act.at < until:
        raise still_running()


def still_running() -> ServerBusy:
    return ServerBusy("the first request under this key is still running", retry_after_seconds=1.0)


def same_request(act: CommandContext, fingerprint: str, earlier: CommandResult) -> CommandResult:
    """The earlier answer under this key. KeyReused if the request is another."""
    check_same(act, fingerprint)
    return replace(earlier, repeated=True)


def event_message(plan: ChangePlan, act: CommandContext, sequence: int) -> Message | None:
    """The message for the plan's event, at ``sequence``; None if there is none."""
    if plan.event is None:
        return None
    return Message(
        message_id=act.message_id,
        chat_id=plan.chat.chat_id,
        sequence=sequence,
        kind="event",
        sender_id=act.shown_actor,
        client_message_id=None,
        content=msgspec.json.encode(plan.event).decode(),
        content_type="application/json",
        created_at=act.at,
    )


def log_events(plan: ChangePlan) -> list[LogEvent]:
    """The entries without a sequence that the plan leaves in the log."""
    if plan.create:
        return [ChatCreated(tuple(member.user_id for member in plan.put))]
    return [EpochRaised(plan.chat.head)] if plan.raised else []


def check_text(field: str, text: str) -> None:
    """InvalidMessage for U+0000: PostgreSQL cannot store it, so no store does."""
    if "\0" in text:
        raise InvalidMessage(f"{field} must not contain U+0000", field=field)


def unknown_chat(chat_id: str) -> NotFound:
    return NotFound(f"there is no chat {chat_id}", chat_id=chat_id)


def outside_the_list() -> Forbidden:
    return Forbidden("that page ended at a chat outside this list; list from the beginning")


def left_where_page_ended() -> NotAMember:
    return NotAMember(
        "you are not a member of the chat where that page ended; list from the beginning"
    )


def not_a_member(chat_id: str) -> NotAMember:
    return NotAMember(f"only members of {chat_id} may do that", chat_id=chat_id)


def muted(chat_id: str) -> Forbidden:
    return Forbidden(
        f"you are muted in {chat_id}: you can read but not send", chat_id=chat_id, muted=True
    )


def muted_in_tenant(tenant: str) -> Forbidden:
    return Forbidden(f"you are muted in the tenant {tenant}: you can read but not send", muted=True)


def halted_chat(chat_id: str) -> ChatHalted:
    """Without the reason of the halt, which is for operators: ``inspect`` shows it."""
    return ChatHalted(
        f"{chat_id} takes no messages until an operator runs `holdfast chat recover {chat_id}`",
        chat_id=chat_id,
    )


def direct_pair(command: CreateChat) -> str | None:
    """What makes a direct chat unique in its tenant: its two users, sorted; None if it
    is not a direct chat.
    """
    users = sorted(joining(command))
    return " ".join(users) if command.kind == "direct" and len(users) == 2 else None


def joining(command: Command) -> list[str]:
    """The users whom the command would add to a chat."""
    match command:
        case CreateChat():
            return list(dict.fromkeys([command.act.actor.user_id, *command.members]))
        case AddMember():
            return [command.user_id]
        case _:
            return []


def invited_by(command: Command) -> list[str]:
    """The users whom the command would add through another user's own token.

    A tenant's backend and operators do not invite: they decide.
    """
    act = command.act
    if act.operator or act.backend:
        return []
    return [user_id for user_id in joining(command) if user_id != act.actor.user_id]


def target_of(command: Command) -> str | None:
    """The other user whom the command is about."""
    about_one = AddMember | RemoveMember | ChangeRole | ChangeBan | ChangeMute
    return command.user_id if isinstance(command, about_one) else None
