"""A command: read its inputs, decide, and write the plan in one CALL.

The CALL is conditioned on the chat's version, which every command moves and no send
does. If another command came between, the inputs are read again, at most
``ROUNDS_MAX`` times.
"""

from __future__ import annotations

from typing import Any

import asyncpg
import msgspec
from msgspec.json import Decoder, encode
from msgspec.structs import replace

from holdfast import telemetry
from holdfast.errors import InternalError, ServerBusy
from holdfast.message import Chat, Member, Message, Mute
from holdfast.store.audit_chain import audit_id
from holdfast.store.command_rules import decide
from holdfast.store.commands import (
    Command,
    CommandContext,
    CommandResult,
    CreateChat,
    RecoverChat,
    Redact,
)
from holdfast.store.plan import (
    ChangePlan,
    ChatSettings,
    CommandInputs,
    direct_pair,
    event_message,
    halted_chat,
    joining,
    same_request,
    target_of,
)
from holdfast.store.postgres.errors import FOREIGN, translate
from holdfast.store.postgres.server import ServerConnection

ROUNDS_MAX = 5

_chat = Decoder(Chat)
_member = Decoder(Member)
_message = Decoder(Message)
_changed = Decoder(CommandResult)
_counts = Decoder(dict[str, tuple[int, int]])
_pairs = Decoder(list[tuple[int, int]])


async def change(
    connection: ServerConnection, command: Command, shard: int, limits: ChatSettings
) -> CommandResult:
    """Commit the command. ``shard``: of its chat, if it is created."""
    for _ in range(ROUNDS_MAX):
        try:
            changed = await _change(connection, command, shard, limits)
        except asyncpg.UniqueViolationError:
            continue  # somebody used the key, or created the chat, meanwhile
        except asyncpg.IntegrityConstraintViolationError as error:
            raise InternalError(f"the change could not be stored: {error}") from error
        if changed is not None:
            return changed
    raise ServerBusy("too many changes of this chat at once; try again", retry_after_seconds=1.0)


async def _change(
    connection: ServerConnection, command: Command, shard: int, limits: ChatSettings
) -> CommandResult | None:
    """One round; None if the chat moved meanwhile."""
    act = command.act
    try:
        row = await connection.fetchrow("inputs", *_asked(command))
    except FOREIGN as error:  # nothing was written yet
        raise translate(error, write=False) from error
    if row["answer"] is not None:
        return same_request(act, row["fingerprint"], _changed.decode(row["answer"]))
    plan = decide(command, _inputs(command, row), limits)
    result = CommandResult(
        plan.chat,
        event_message(plan, act, 0),
        repeated=isinstance(command, CreateChat) and not plan.create,
    )
    if not _writes(plan) and act.key is None:
        return result
    text = encode(_plan_json(plan, act, result, shard)).decode()
    done = await connection.call("change", text, row["version"], row["base"])
    outcome = done["outcome"]
    if outcome == "moved":
        return None
    if outcome != "done":
        is_lost = outcome == "no_counter"
        report = telemetry.counter_corruption if is_lost else telemetry.duplicate_sequence
        report(plan.chat.chat_id)
        raise halted_chat(plan.chat.chat_id)
    chat = replace(plan.chat, head=done["head"], epoch=done["epoch"])
    event = result.event and replace(
        result.event, sequence=done["head"], created_at=done["created_at"]
    )
    return replace(result, chat=chat, event=event)


def _asked(command: Command) -> tuple[Any, ...]:
    """The arguments of the statement ``inputs``."""
    act = command.act
    return (
        command.chat_id,
        act.actor.tenant,
        act.actor.user_id,
        target_of(command),
        joining(command),
        direct_pair(command) if isinstance(command, CreateChat) else None,
        act.key,
        command.sequence if isinstance(command, Redact) else None,
        isinstance(command, RecoverChat),
    )


def _inputs(command: Command, row: Any) -> CommandInputs:
    counts = _counts.decode(row["counts"]) if row["counts"] else {}
    chats = {user_id: count for user_id, (count, _) in counts.items()}
    invited = {user_id: count for user_id, (_, count) in counts.items()}
    chat = _chat.decode(row["chat"]) if row["chat"] else None
    if isinstance(command, CreateChat):
        pair = _chat.decode(row["pair"]) if row["pair"] else None
        return CommandInputs(chat, pair=pair, chats=chats, invited=invited)
    if chat is None:
        return CommandInputs(None)
    muted_by_operator = row["muted_by_operator"]
    return CommandInputs(
        chat,
        actor=_member.decode(row["actor"]) if row["actor"] else None,
        target=_member.decode(row["target"]) if row["target"] else None,
        members=row["members"],
        owners=row["owners"],
        banned=row["banned_by_operator"] is not None,
        banned_by_operator=bool(row["banned_by_operator"]),
        bans=row["bans"],
        mute=None
        if muted_by_operator is None
        else Mute(target_of(command) or "", muted_by_operator),
        mutes=row["mutes"],
        chats=chats,
        invited=invited,
        message=_message.decode(row["message"]) if row["message"] else None,
        counter=row["counter"],
        highest=row["highest"] or 0,
        gaps=_pairs.decode(row["gaps"]) if row["gaps"] else (),
    )


def _writes(plan: ChangePlan) -> bool:
    """Whether the plan changes its chat, rather than find it as wanted."""
    return plan.create or plan.raised or plan.record is not None or plan.event is not None


def _plan_json(
    plan: ChangePlan, act: CommandContext, result: CommandResult, shard: int
) -> dict[str, object]:
    """The plan as ``change_1`` reads it. What is absent is left out."""
    chat = plan.chat
    made: dict[str, object | None] = {
        "chat_id": chat.chat_id,
        "tenant": chat.tenant,
        "kind": chat.kind,
        "name": chat.name,
        "halted": chat.halted,
        "first_sequence": chat.first_sequence,
        "created_by": chat.created_by,
        "created_at": chat.created_at,
        "shard": shard,
        "create": plan.create,
        "update": _writes(plan),
        "raised": plan.raised,
        "retain": plan.retain,
        "pair": plan.pair,
        "counter": plan.counter,
        "put": [(m.user_id, m.role, m.joined_at, m.user_id in plan.invited) for m in plan.put],
        "drop": plan.drop,
        "ban": plan.ban,
        "unban": plan.unban,
        "mute": plan.mute,
        "unmute": plan.unmute,
        "redact": plan.redact,
        "erase": plan.erase,
        "gaps": plan.gaps,
        "event": result.event,
        "audit": plan.record
        and audit_json(
            act,
            plan.record.action,
            plan.record.target,
            msgspec.json.encode(plan.record.details).decode(),
        ),
    }
    if act.key is not None:
        made["key"] = {
            "tenant": act.actor.tenant,
            "user_id": act.actor.user_id,
            "key": act.key,
            "fingerprint": act.fingerprint,
            "at": act.at,
        }
        made["answer"] = result
    return {name: value for name, value in made.items() if value is not None}


def audit_json(act: CommandContext, action: str, target: str, details: str) -> dict[str, str]:
    """An audit record as ``record_1`` reads it."""
    return {
        "at": act.at,
        "actor": act.actor.user_id,
        "action": action,
        "target": target,
        "reason": act.reason,
        "details": details,
        "record_id": audit_id(act),
        "node": act.node,
    }
