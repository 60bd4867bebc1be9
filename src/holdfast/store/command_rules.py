"""What each command does to a chat: the rules. (Pure.)

Roles are those of ``holdfast.access.roles``. An operator's act skips them and is
recorded. A change that would break a chat (no owner left, a third member of a direct
chat) is refused to operators too.
"""

from __future__ import annotations

from typing import NoReturn, assert_never

from msgspec.structs import replace

from holdfast.errors import Forbidden, InvalidMessage, NotFound
from holdfast.message import Ban, Chat, Member, Mute, Role
from holdfast.store.command_checks import (
    bad_id,
    check,
    check_group,
    check_name,
    check_not_halted,
    check_not_muted,
    check_operator,
    check_role,
    check_room_for_a_chat,
    last_owner,
    record_of,
)
from holdfast.store.commands import (
    ERASE_AT_ONCE,
    RETAIN_AT_ONCE,
    AddMember,
    ChangeBan,
    ChangeMute,
    ChangeRole,
    Command,
    CommandContext,
    CreateChat,
    Erase,
    HaltChat,
    MembershipEvent,
    RaiseEpoch,
    RecoverChat,
    Redact,
    RemoveMember,
    RenameChat,
    Retain,
)
from holdfast.store.plan import (
    AuditNote,
    ChangePlan,
    ChatSettings,
    CommandInputs,
    Erased,
    check_text,
    direct_pair,
    invited_by,
    joining,
    not_a_member,
    unknown_chat,
)


def decide(command: Command, seen: CommandInputs, limits: ChatSettings) -> ChangePlan:
    """The plan of ``command``. Raises Refused or ChatHalted."""
    check_text("reason", command.act.reason)
    if isinstance(command, CreateChat):
        return _create(command, seen, limits)
    chat = seen.chat
    if chat is None or chat.tenant != command.act.actor.tenant:
        raise unknown_chat(command.chat_id)
    if seen.actor is None and not command.act.operator:
        raise not_a_member(command.chat_id)
    match command:
        case RenameChat():
            return _rename(command, chat, seen, limits)
        case AddMember():
            return _add(command, chat, seen, limits)
        case RemoveMember():
            return _remove(command, chat, seen)
        case ChangeRole():
            return _change_role(command, chat, seen)
        case ChangeBan():
            return _change_ban(command, chat, seen, limits)
        case ChangeMute():
            return _change_mute(command, chat, seen, limits)
        case Redact():
            return _redact(command, chat, seen)
        case Erase():
            return _erase(command, chat)
        case Retain():
            return _retain(command, chat)
        case HaltChat():
            return _halt(command, chat)
        case RecoverChat():
            return _recover(command, chat, seen)
        case RaiseEpoch():
            return _raise_epoch(command, chat)
        case _:
            assert_never(command)


def _create(command: CreateChat, seen: CommandInputs, limits: ChatSettings) -> ChangePlan:
    act = command.act
    users = joining(command)
    for user_id in users:
        check(bad_id({"user_id": user_id}))
    check(bad_id({"chat_id": command.chat_id, "tenant": act.actor.tenant}))
    if command.kind == "direct":
        if len(users) != 2:
            raise InvalidMessage("a direct chat has exactly two different members", field="members")
        if command.name:
            raise InvalidMessage("a direct chat has no name", field="name")
        if seen.pair is not None:
            return ChangePlan(seen.pair)
    else:
        check_name(command.name, limits)
    check_not_muted(act, seen)
    if seen.chat is not None:
        raise InvalidMessage(f"the chat id {command.chat_id} is taken", field="chat_id")
    if len(users) > limits.members_at_creation_max:
        raise InvalidMessage(
            f"a chat starts with at most {limits.members_at_creation_max} members; add the others"
            " afterwards",
            field="members",
            limit=limits.members_at_creation_max,
        )
    check_room_for_a_chat(command, seen, limits)
    chat = Chat(
        chat_id=command.chat_id,
        tenant=act.actor.tenant,
        kind=command.kind,
        name=command.name,
        epoch=1,
        head=0,
        first_sequence=1,
        halted=None,
        created_by=act.actor.user_id,
        created_at=act.at,
    )
    creator_role: Role = "member" if command.kind == "direct" else "owner"
    roles: list[Role] = [creator_role] + ["member"] * (len(users) - 1)
    put = [Member(user_id, role, act.at) for user_id, role in zip(users, roles, strict=True)]
    record = record_of(act, "chat.create", chat.chat_id, members=users)
    return ChangePlan(
        chat,
        create=True,
        pair=direct_pair(command),
        put=put,
        invited=invited_by(command),
        counter=0,
        record=record,
    )


def _rename(
    command: RenameChat, chat: Chat, seen: CommandInputs, limits: ChatSettings
) -> ChangePlan:
    check_group(chat, "renamed")
    check_role(command.act, seen, "rename")
    check_not_muted(command.act, seen)
    check_name(command.name, limits)
    if command.name == chat.name:
        return ChangePlan(chat)
    check_not_halted(chat)
    return ChangePlan(
        replace(chat, name=command.name),
        event=MembershipEvent("chat_renamed", name=command.name),
        record=record_of(command.act, "chat.rename", chat.chat_id, name=command.name),
    )


def _add(command: AddMember, chat: Chat, seen: CommandInputs, limits: ChatSettings) -> ChangePlan:
    check(bad_id({"user_id": command.user_id}))
    check_group(chat, "joined")
    check_role(command.act, seen, "add_member", command.role)
    if seen.target is not None:
        if seen.target.role == command.role:
            return ChangePlan(chat)
        raise InvalidMessage(
            f"{command.user_id} is already a member; change the role instead", field="role"
        )
    check_not_muted(command.act, seen)
    if seen.banned:
        raise Forbidden(
            f"{command.user_id} is banned from this chat; lift the ban first",
            user_id=command.user_id,
        )
    if seen.members >= limits.members_max:
        raise Forbidden(
            f"a chat has at most {limits.members_max} members", limit=limits.members_max
        )
    if not seen.members and command.role != "owner":
        raise Forbidden("nobody is in this chat: whom an operator adds first must be an owner")
    check_room_for_a_chat(command, seen, limits)
    unmute = _lifted_by_role(command, chat, seen)
    check_not_halted(chat)
    still_muted = seen.mute is not None and unmute is None
    return ChangePlan(
        chat,
        put=[Member(command.user_id, command.role, command.act.at)],
        invited=invited_by(command),
        unmute=unmute,
        event=MembershipEvent(
            "member_added", user_id=command.user_id, role=command.role, muted=still_muted
        ),
        record=record_of(
            command.act, "member.add", chat.chat_id, user_id=command.user_id, role=command.role
        ),
    )


def _remove(command: RemoveMember, chat: Chat, seen: CommandInputs) -> ChangePlan:
    check_group(chat, "left")
    leaving = command.user_id == command.act.actor.user_id
    if seen.target is None:
        raise NotFound(
            f"{command.user_id} is not a member of {chat.chat_id}", user_id=command.user_id
        )
    if not leaving:
        check_role(command.act, seen, "remove_member", seen.target.role)
    if seen.target.role == "owner" and seen.owners == 1 and seen.members > 1:
        raise last_owner(command.user_id)
    check_not_halted(chat)
    return ChangePlan(
        chat,
        drop=[command.user_id],
        event=MembershipEvent("member_removed", user_id=command.user_id),
        record=record_of(command.act, "member.remove", chat.chat_id, user_id=command.user_id),
    )


def _change_role(command: ChangeRole, chat: Chat, seen: CommandInputs) -> ChangePlan:
    check_group(chat, "given roles")
    check_role(command.act, seen, "change_role")
    if seen.target is None:
        raise NotFound(
            f"{command.user_id} is not a member of {chat.chat_id}", user_id=command.user_id
        )
    if seen.target.role == command.role:
        return ChangePlan(chat)
    if seen.target.role == "owner" and seen.owners == 1:
        raise last_owner(command.user_id)
    unmute = _lifted_by_role(command, chat, seen)
    check_not_halted(chat)
    return ChangePlan(
        chat,
        put=[replace(seen.target, role=command.role)],
        unmute=unmute,
        event=MembershipEvent("role_changed", user_id=command.user_id, role=command.role),
        record=record_of(
            command.act, "member.role", chat.chat_id, user_id=command.user_id, role=command.role
        ),
    )


def _change_ban(
    command: ChangeBan, chat: Chat, seen: CommandInputs, limits: ChatSettings
) -> ChangePlan:
    act, user_id = command.act, command.user_id
    check(bad_id({"user_id": user_id}))
    if chat.kind == "direct":
        raise Forbidden(
            "nobody is banned from a direct chat, which belongs to its two members; mute the"
            " other one"
        )
    _check_restricts(act, seen, user_id)
    takes_over = command.banned and seen.banned and act.operator and not seen.banned_by_operator
    if command.banned == seen.banned and not takes_over:
        return ChangePlan(chat) if command.banned else _not_restricted(user_id, "banned from", chat)
    if not command.banned:
        _check_lifts(act, "ban", seen.banned_by_operator, chat, user_id)
    elif seen.target is None:
        check_not_muted(act, seen)
    if command.banned and not takes_over:
        _check_room_to_restrict(act, seen.bans, limits.bans_max, "bans")
    check_not_halted(chat)
    record = record_of(
        act, "member.ban" if command.banned else "member.unban", chat.chat_id, user_id=user_id
    )
    if not command.banned:
        return ChangePlan(
            chat,
            unban=user_id,
            event=MembershipEvent("user_unbanned", user_id=user_id),
            record=record,
        )
    ban = Ban(user_id, act.shown_actor, act.at, by_operator=act.operator)
    if takes_over:
        return ChangePlan(chat, ban=ban, record=record)
    if seen.target is None:
        return ChangePlan(
            chat, ban=ban, event=MembershipEvent("user_banned", user_id=user_id), record=record
        )
    removed = MembershipEvent("member_removed", user_id=user_id, banned=True)
    return ChangePlan(chat, drop=[user_id], ban=ban, event=removed, record=record)


def _change_mute(
    command: ChangeMute, chat: Chat, seen: CommandInputs, limits: ChatSettings
) -> ChangePlan:
    act, user_id, mute = command.act, command.user_id, seen.mute
    if seen.target is None and mute is None:
        raise NotFound(f"{user_id} is not a member of {chat.chat_id}", user_id=user_id)
    _check_restricts(act, seen, user_id, by_anybody=chat.kind == "direct")
    takes_over = command.muted and mute is not None and act.operator and not mute.by_operator
    if command.muted == (mute is not None) and not takes_over:
        return ChangePlan(chat) if command.muted else _not_restricted(user_id, "muted in", chat)
    if mute is None:
        _check_room_to_restrict(act, seen.mutes, limits.mutes_max, "mutes")
    if mute is not None and not command.muted:
        _check_lifts(act, "mute", mute.by_operator, chat, user_id)
    check_not_halted(chat)
    record = record_of(
        act, "member.mute" if command.muted else "member.unmute", chat.chat_id, user_id=user_id
    )
    if not command.muted:
        return ChangePlan(
            chat,
            unmute=user_id,
            event=MembershipEvent("member_unmuted", user_id=user_id),
            record=record,
        )
    event = None if takes_over else MembershipEvent("member_muted", user_id=user_id)
    return ChangePlan(
        chat, mute=Mute(user_id, by_operator=act.operator), event=event, record=record
    )


def _lifted_by_role(command: AddMember | ChangeRole, chat: Chat, seen: CommandInputs) -> str | None:
    """The user whose mute ends with the new role: an owner is never muted."""
    if command.role != "owner" or seen.mute is None:
        return None
    _check_lifts(command.act, "mute", seen.mute.by_operator, chat, command.user_id)
    return command.user_id


def _check_restricts(
    act: CommandContext, seen: CommandInputs, user_id: str, *, by_anybody: bool = False
) -> None:
    """Forbidden unless the actor may ban or mute this user, or lift that; nobody does
    it to themselves or an owner.
    """
    if user_id == act.actor.user_id and not act.operator:
        raise Forbidden("you cannot ban or mute yourself, nor lift it")
    role = seen.target.role if seen.target is not None else "member"
    if role == "owner":
        raise Forbidden(
            f"{user_id} is an owner of this chat, who cannot be banned or muted; change the role"
            " first"
        )
    if not by_anybody:
        check_role(act, seen, "restrict_member", role)


def _check_room_to_restrict(act: CommandContext, made: int, most: int, what: str) -> None:
    """Forbidden if the list is full. Operators have as many entries again, so that no
    owner can keep an operator out by filling the list.
    """
    most *= 2 if act.operator else 1
    if made >= most:
        raise Forbidden(f"a chat has at most {most} {what}; lift some first", limit=most)


def _check_lifts(
    act: CommandContext, what: str, by_operator: bool, chat: Chat, user_id: str
) -> None:
    """Forbidden unless the actor may lift it; an operator's only operators lift."""
    if by_operator and not act.operator:
        raise Forbidden(
            f"an operator made this {what} of {user_id}, and only an operator lifts it "
            f"(`holdfast un{what} {user_id} --chat {chat.chat_id}`)",
            user_id=user_id,
            by_operator=True,
        )


def _not_restricted(user_id: str, what: str, chat: Chat) -> NoReturn:
    raise NotFound(f"{user_id} is not {what} {chat.chat_id}: nothing was changed", user_id=user_id)


def _redact(command: Redact, chat: Chat, seen: CommandInputs) -> ChangePlan:
    message = seen.message
    if message is None:
        raise NotFound(
            f"{chat.chat_id} has no message {command.sequence}", sequence=command.sequence
        )
    if message.kind == "event":
        raise Forbidden("the record of a membership cannot be redacted")
    if message.sender_id != command.act.actor.user_id:
        check_role(command.act, seen, "redact_any")
    if not message.content:
        return ChangePlan(chat)
    target = f"{chat.chat_id}/{command.sequence}"
    record = AuditNote(
        "message.redact", target, {"message_id": message.message_id, "sender_id": message.sender_id}
    )
    return ChangePlan(chat, redact=command.sequence, record=record)


def _erase(command: Erase, chat: Chat) -> ChangePlan:
    check_operator(command.act)
    if len(command.sequences) > ERASE_AT_ONCE:
        raise InvalidMessage(
            f"at most {ERASE_AT_ONCE} messages at once", field="sequences", limit=ERASE_AT_ONCE
        )
    details = {"user_id": command.user_id, "sequences": command.sequences}
    record = AuditNote("user.erase", chat.chat_id, details)
    return ChangePlan(chat, erase=Erased(command.user_id, command.sequences), record=record)


def _retain(command: Retain, chat: Chat) -> ChangePlan:
    check_operator(command.act)
    first = command.first_sequence
    if not 1 <= first <= chat.head + 1:
        raise InvalidMessage(
            f"first_sequence must be between 1 and {chat.head + 1}", field="first_sequence"
        )
    first = min(first, chat.first_sequence + RETAIN_AT_ONCE)
    if first <= chat.first_sequence:
        return ChangePlan(chat)
    record = AuditNote("chat.retain", chat.chat_id, {"from": chat.first_sequence, "to": first})
    return ChangePlan(replace(chat, first_sequence=first), retain=True, record=record)


def _halt(command: HaltChat, chat: Chat) -> ChangePlan:
    check_operator(command.act)
    if chat.halted is not None:
        return ChangePlan(chat)
    halted = command.act.reason or "halted by an operator"
    return ChangePlan(replace(chat, halted=halted), record=AuditNote("chat.halt", chat.chat_id, {}))


def _recover(command: RecoverChat, chat: Chat, seen: CommandInputs) -> ChangePlan:
    check_operator(command.act)
    counter = max(seen.counter or 0, seen.highest, chat.first_sequence - 1)
    details = {
        "halted": chat.halted,
        "counter": [seen.counter, counter],
        "epoch": [chat.epoch, chat.epoch + 1],
        "gaps": seen.gaps,
    }
    return ChangePlan(
        replace(chat, halted=None, epoch=chat.epoch + 1, head=counter),
        counter=counter,
        raised=True,
        gaps=seen.gaps,
        record=AuditNote("chat.recover", chat.chat_id, details),
    )


def _raise_epoch(command: RaiseEpoch, chat: Chat) -> ChangePlan:
    if chat.epoch != command.epoch:
        return ChangePlan(chat)
    record = AuditNote("chat.raise_epoch", chat.chat_id, {"epoch": [chat.epoch, chat.epoch + 1]})
    return ChangePlan(replace(chat, epoch=chat.epoch + 1), raised=True, record=record)
