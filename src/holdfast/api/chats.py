"""Endpoints of chats and their members, presence, and tokens for users."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.access.principal import require_scope
from holdfast.access.roles import may
from holdfast.api.deps import ApiDeps, PresenceView
from holdfast.api.endpoint import Answer, Call
from holdfast.api.schemas import (
    BanList,
    ChangeAnswer,
    ChatDetail,
    ChatsQuery,
    MemberList,
    NewChat,
    NewMember,
    NewRole,
    NewToken,
    OneUser,
    Renamed,
    TokenAnswer,
    token_of,
)
from holdfast.clock import timestamp
from holdfast.errors import Forbidden, InvalidMessage, NotAMember, Unavailable
from holdfast.message import Chat, User, check_id
from holdfast.store.commands import (
    AddMember,
    ChangeBan,
    ChangeMute,
    ChangeRole,
    Command,
    CommandContext,
    CreateChat,
    RemoveMember,
    RenameChat,
)

HALTED = "ask the operator"


def act_of(deps: ApiDeps, call: Call) -> CommandContext:
    """The context of a command: who, when, and the key that recognises a retry."""
    user = call.principal.user
    return CommandContext(
        actor=user,
        at=timestamp(deps.clock.now()),
        message_id=deps.ids.new("msg_"),
        backend=call.principal.kind == "tenant_key",
        key=call.key,
        fingerprint=call.fingerprint,
        muted=deps.revocations.is_muted(user),
    )


async def commit(deps: ApiDeps, call: Call, command: Command) -> Answer:
    """Commit a command and answer with the changed chat."""
    changed = await deps.durability.change(command, call.deadline)
    headers = {"Idempotency-Replayed": "true"} if changed.repeated and command.act.key else {}
    chat = changed.chat if command.act.operator else _for_members(changed.chat)
    exists = isinstance(command, CreateChat) and changed.chat.chat_id != command.chat_id
    return Answer(ChangeAnswer(chat, changed.event), 200 if exists else None, headers)


def _for_members(chat: Chat) -> Chat:
    """The chat without the operator's reason for halting it."""
    return chat if chat.halted is None else replace(chat, halted=HALTED)


def _usable(user_id: str) -> str:
    if problem := check_id(user_id, "user_id"):
        raise InvalidMessage(problem, field="user_id")
    return user_id


async def create_chat(deps: ApiDeps, call: Call) -> Answer:
    body: NewChat = call.body
    if call.principal.chats is not None:
        raise Forbidden(
            "this token is good for the chats in its claim chats only, and so creates none",
            claim="chats",
        )
    members = [_usable(user_id) for user_id in body.members]
    return await commit(
        deps,
        call,
        CreateChat(act_of(deps, call), deps.ids.new("chat_"), body.kind, body.name, members),
    )


async def list_chats(deps: ApiDeps, call: Call) -> Answer:
    query: ChatsQuery = call.query
    user, after = call.principal.user, token_of(query.after)
    page = await deps.history.ask(
        lambda store: store.chats_of(user, query.limit, after, call.principal.chats),
        call.deadline,
        user,
    )
    shown = [replace(entry, chat=_for_members(entry.chat)) for entry in page.chats]
    return Answer(replace(page, chats=shown))


async def get_chat(deps: ApiDeps, call: Call) -> Answer:
    chat_id, user = call.path["chat_id"], call.principal.user
    chat = await deps.history.ask(lambda store: store.chat(chat_id, user), call.deadline, user)
    members = await deps.history.ask(lambda store: store.members(chat_id), call.deadline, user)
    role = next((m.role for m in members if m.user_id == user.user_id), None)
    if role is None:
        raise NotAMember("you are no longer a member of this chat")
    return Answer(ChatDetail(_for_members(chat), role, members))


async def rename_chat(deps: ApiDeps, call: Call) -> Answer:
    body: Renamed = call.body
    return await commit(deps, call, RenameChat(act_of(deps, call), call.path["chat_id"], body.name))


async def list_members(deps: ApiDeps, call: Call) -> Answer:
    detail = await get_chat(deps, call)
    assert isinstance(detail.body, ChatDetail)
    return Answer(MemberList(detail.body.members))


async def add_member(deps: ApiDeps, call: Call) -> Answer:
    body: NewMember = call.body
    user_id = _usable(body.user_id)
    return await commit(
        deps, call, AddMember(act_of(deps, call), call.path["chat_id"], user_id, body.role)
    )


async def change_role(deps: ApiDeps, call: Call) -> Answer:
    body: NewRole = call.body
    command = ChangeRole(act_of(deps, call), call.path["chat_id"], call.path["user_id"], body.role)
    return await commit(deps, call, command)


async def remove_member(deps: ApiDeps, call: Call) -> Answer:
    """The scope for sending also allows leaving: no token keeps its user in a chat."""
    if call.path["user_id"] != call.principal.user_id:
        require_scope(call.principal, "chats:members")
    return await commit(
        deps, call, RemoveMember(act_of(deps, call), call.path["chat_id"], call.path["user_id"])
    )


async def ban_user(deps: ApiDeps, call: Call) -> Answer:
    body: OneUser = call.body
    return await commit(
        deps, call, ChangeBan(act_of(deps, call), call.path["chat_id"], body.user_id, True)
    )


async def unban_user(deps: ApiDeps, call: Call) -> Answer:
    return await commit(
        deps, call, ChangeBan(act_of(deps, call), call.path["chat_id"], call.path["user_id"], False)
    )


async def list_bans(deps: ApiDeps, call: Call) -> Answer:
    detail = await get_chat(deps, call)
    assert isinstance(detail.body, ChatDetail)
    if not may(detail.body.role, "restrict_member"):
        raise Forbidden("your role in this chat does not allow that (list bans); ask an owner")
    return await bans_of(deps, call)


async def bans_of(deps: ApiDeps, call: Call) -> Answer:
    """The bans and mutes of a chat, if the caller may see them."""
    chat_id, user = call.path["chat_id"], call.principal.user
    bans = await deps.history.ask(lambda store: store.bans(chat_id), call.deadline, user)
    return Answer(
        BanList(
            bans, await deps.history.ask(lambda store: store.mutes(chat_id), call.deadline, user)
        )
    )


async def mute_member(deps: ApiDeps, call: Call) -> Answer:
    body: OneUser = call.body
    return await commit(
        deps, call, ChangeMute(act_of(deps, call), call.path["chat_id"], body.user_id, True)
    )


async def unmute_member(deps: ApiDeps, call: Call) -> Answer:
    return await commit(
        deps,
        call,
        ChangeMute(act_of(deps, call), call.path["chat_id"], call.path["user_id"], False),
    )


async def get_presence(deps: ApiDeps, call: Call) -> Answer:
    """Presence of users who share a chat with the caller.

    If the registry does not answer, the answer is stale, not an error.
    """
    detail = await get_chat(deps, call)
    assert isinstance(detail.body, ChatDetail)
    users = [User(call.principal.tenant, member.user_id) for member in detail.body.members]
    try:
        return Answer(await call.in_time(deps.presence(users)))
    except Unavailable:
        return Answer(PresenceView([], stale=True))


async def mint_token(deps: ApiDeps, call: Call) -> Answer:
    body: NewToken = call.body
    user = User(call.principal.tenant, _usable(body.user_id))
    token = deps.tokens.mint(user, body.ttl_seconds, body.scopes, body.chats)
    expires_at = timestamp(int(deps.clock.now()) + body.ttl_seconds)
    return Answer(TokenAnswer(token, expires_at, deps.tokens.read(token).token_id))
