"""The checks that several commands share; each raises its refusal. (Pure.)"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.access.roles import Action, may
from holdfast.errors import Forbidden, HoldfastError, InvalidMessage
from holdfast.message import Chat, Role, check_id
from holdfast.store.commands import Command, CommandContext
from holdfast.store.plan import (
    AuditNote,
    ChatSettings,
    CommandInputs,
    halted_chat,
    invited_by,
    joining,
    muted,
    muted_in_tenant,
)


def record_of(act: CommandContext, action: str, target: str, **details: object) -> AuditNote | None:
    """An operator's act goes to the audit log; a member's is in the chat itself."""
    return AuditNote(action, target, details) if act.operator else None


def bad_id(ids: Mapping[str, str]) -> InvalidMessage | None:
    """The first of the named ids that cannot be one."""
    for name, value in ids.items():
        if problem := check_id(value, name):
            return InvalidMessage(problem, field=name)
    return None


def check(problem: HoldfastError | None) -> None:
    if problem is not None:
        raise problem


def check_name(name: str, limits: ChatSettings) -> None:
    if not 1 <= len(name) <= limits.name_characters_max or not name.isprintable():
        raise InvalidMessage(
            f"a name has 1 to {limits.name_characters_max} printable characters",
            field="name",
            limit=limits.name_characters_max,
        )


def check_group(chat: Chat, what: str) -> None:
    if chat.kind == "direct":
        raise Forbidden(
            f"a direct chat belongs to its two members and cannot be {what}; create a group instead"
        )


def check_role(
    act: CommandContext, seen: CommandInputs, action: Action, target: Role = "member"
) -> None:
    if act.operator:
        return
    if seen.actor is None or not may(seen.actor.role, action, target):
        raise Forbidden(
            f"your role in this chat does not allow that ({action.replace('_', ' ')}); ask an owner"
        )


def check_not_muted(act: CommandContext, seen: CommandInputs) -> None:
    """Forbidden if the actor is muted in the chat or the tenant: everybody reads a name
    or an id that the actor chose, like a message.
    """
    if act.operator:
        return
    if act.muted:
        raise muted_in_tenant(act.actor.tenant)
    if seen.chat is not None and seen.actor is not None and seen.actor.muted:
        raise muted(seen.chat.chat_id)


def check_operator(act: CommandContext) -> None:
    if not act.operator:
        raise Forbidden("only operators may do that")


def check_not_halted(chat: Chat) -> None:
    if chat.halted is not None:
        raise halted_chat(chat.chat_id)


def last_owner(user_id: str) -> Forbidden:
    return Forbidden(f"{user_id} is the last owner; make another member an owner first")


def check_room_for_a_chat(command: Command, seen: CommandInputs, limits: ChatSettings) -> None:
    """Invitations fill at most half of a user's chats; a backend has the rest."""
    most = limits.chats_per_user_max
    for user_id in joining(command):
        if seen.chats.get(user_id, 0) >= most:
            raise Forbidden(f"{user_id} is in {most} chats, which is the limit", limit=most)
    for user_id in invited_by(command):
        if seen.invited.get(user_id, 0) >= most // 2:
            raise Forbidden(
                f"{user_id} was put into {most // 2} chats by other users, which is the limit; a"
                " tenant key can add more",
                limit=most // 2,
            )
