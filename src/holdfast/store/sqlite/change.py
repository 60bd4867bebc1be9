"""A command in one commit: read its inputs, decide, write. And other small writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import apsw
import msgspec
from msgspec.json import Decoder, encode
from msgspec.structs import asdict, replace

from holdfast import telemetry
from holdfast.errors import InternalError
from holdfast.message import Chat, LogEntry, LogEvent, Member, Message, Mute, User, Watermark
from holdfast.store.command_rules import decide
from holdfast.store.commands import (
    AddMember,
    ChangeBan,
    ChangeMute,
    ChangeRole,
    Command,
    CommandContext,
    CommandResult,
    CreateChat,
    RecoverChat,
    Redact,
)
from holdfast.store.numbering import NO_COUNTER, TAKEN
from holdfast.store.plan import (
    ChangePlan,
    ChatSettings,
    CommandInputs,
    check_not_running,
    check_same,
    check_text,
    direct_pair,
    end_of_run,
    event_message,
    halted_chat,
    joining,
    log_events,
    same_request,
    target_of,
)
from holdfast.store.sqlite.append import WriteResult, message_row, put_messages
from holdfast.store.sqlite.database import SQL, Handle, put_audit

_chat = Decoder(Chat)
_member = Decoder(Member)
_message = Decoder(Message)
_changed = Decoder(CommandResult)
_counts = Decoder(dict[str, tuple[int, int]])
_pairs = Decoder(list[tuple[int, int]])


class _Damaged(Exception):
    """The chat's numbering does not allow the event: the chat must be halted."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def change(handle: Handle, command: Command, limits: ChatSettings) -> WriteResult[CommandResult]:
    """Commit the command. A chat whose numbering is damaged is halted."""
    try:
        with handle.transaction() as connection:
            return _change(connection, command, limits)
    except apsw.ConstraintError as error:
        raise InternalError(f"the change could not be stored: {error}") from error
    except _Damaged as damage:
        with handle.transaction() as connection:
            connection.execute(SQL["halt"], {"chat_id": command.chat_id, "why": damage.why})
        raise halted_chat(command.chat_id) from None


def mark(
    handle: Handle, watermarks: Sequence[Watermark], limits: ChatSettings
) -> WriteResult[None]:
    """Merge watermarks."""
    rows = [
        (w.user.tenant, w.user.user_id, w.device_id, w.chat_id, w.epoch, w.delivered, w.read)
        for w in watermarks
    ]
    marks = encode(rows).decode()
    with handle.transaction() as connection:
        connection.execute(SQL["mark"], {"watermarks": marks})
        devices_max = {"watermarks": marks, "devices_max": limits.devices_per_member_max}
        if forgotten := connection.execute(SQL["forget_devices"], devices_max).fetchall():
            connection.execute(SQL["mark"], {"watermarks": encode(forgotten).decode()})
    return WriteResult(None)


def record(
    handle: Handle, act: CommandContext, action: str, target: str, details: str
) -> WriteResult[None]:
    """Add to the audit log."""
    check_text("reason", act.reason + details)
    with handle.transaction() as connection:
        put_audit(connection, act, action, target, details)
    return WriteResult(None)


def touch(handle: Handle) -> WriteResult[None]:
    """A real commit that leaves everything as it was. It adds and subtracts, because
    SQLite writes nothing for a change without effect.
    """
    with handle.transaction() as connection:
        for step in (1, -1):
            connection.execute(SQL["touch"], {"step": step})
    return WriteResult(None)


def begin(
    handle: Handle, act: CommandContext, node: str, seconds: float
) -> WriteResult[str | None]:
    """Take the key of a request that is not a command, or return what it holds."""
    key = _key(act.actor, act.key or "")
    with handle.transaction() as connection:
        earlier = connection.execute(SQL["taken_key"], key).get
        if earlier is not None:
            fingerprint, answer, runs_on, until = earlier
            check_same(act, fingerprint)
            if not answer:
                check_not_running(act, node, runs_on, until)
            return WriteResult(answer)
        taken = {"fingerprint": act.fingerprint, "at": act.at, "node": node}
        connection.execute(SQL["take_key"], {**key, **taken, "until": end_of_run(act, seconds)})
    return WriteResult(None)


def keep(handle: Handle, act: CommandContext, answer: str | None) -> WriteResult[None]:
    """Store the answer of a request whose key is taken, or release the key."""
    key = _key(act.actor, act.key or "")
    check_text("answer", answer or "")
    with handle.transaction() as connection:
        if answer is None:
            connection.execute(SQL["drop_answer"], key)
        else:
            connection.execute(SQL["keep_answer"], {**key, "answer": answer})
    return WriteResult(None)


def forget_answers(handle: Handle, before: str, limit: int) -> WriteResult[int]:
    """Forget at most ``limit`` old answers."""
    with handle.transaction() as connection:
        connection.execute(SQL["forget_answers"], {"before": before, "limit": limit})
        return WriteResult(connection.changes())


def forget_answers_of(handle: Handle, user: User) -> WriteResult[None]:
    """Forget the answers kept under a user's keys."""
    with handle.transaction() as connection:
        connection.execute(SQL["forget_answers_of"], user._asdict())
    return WriteResult(None, forgets=True)


def forget_send_keys(handle: Handle, before: str, limit: int) -> WriteResult[int]:
    """Forget the keys of at most ``limit`` old messages."""
    with handle.transaction() as connection:
        through = connection.execute(SQL["old_keys"], {"before": before, "limit": limit}).get
        if through is None:
            return WriteResult(0)
        connection.execute(SQL["forget_keys"], {"through": through})
        forgotten = connection.changes()
        connection.execute(SQL["keys_forgotten"], {"through": through})
    return WriteResult(forgotten)


def halt_damaged(handle: Handle, chat_ids: Sequence[str]) -> WriteResult[None]:
    """Halt those of these chats whose counter is missing or behind."""
    with handle.transaction() as connection:
        for chat_id in chat_ids:
            found = connection.execute(SQL["counter_of"], {"chat_id": chat_id}).fetchone()
            if found is None:
                continue
            counter, is_behind = found
            if counter is None:
                telemetry.counter_corruption(chat_id)
            elif is_behind:
                telemetry.duplicate_sequence(chat_id)
            else:
                continue
            why = NO_COUNTER if counter is None else TAKEN
            connection.execute(SQL["halt"], {"chat_id": chat_id, "why": why})
    return WriteResult(None)


def forget_devices(handle: Handle, user: User) -> WriteResult[None]:
    """Forget the watermarks of a user's devices."""
    with handle.transaction() as connection:
        connection.execute(SQL["forget_devices_of"], user._asdict())
    return WriteResult(None, forgets=True)


def _change(
    connection: apsw.Connection, command: Command, limits: ChatSettings
) -> WriteResult[CommandResult]:
    act = command.act
    if act.key is not None:
        earlier = connection.execute(SQL["answer"], _key(act.actor, act.key)).get
        if earlier is not None:
            return WriteResult(same_request(act, earlier[0], _changed.decode(earlier[1])))
    chat, seen = _inputs(connection, command)
    plan = decide(command, seen, limits)
    chat = _apply(connection, chat, plan, act)
    entries = [_put_log_event(connection, chat, plan, event) for event in log_events(plan)]
    event, in_log = _put_event(connection, chat, seen.counter, plan, act)
    after = plan.chat if event is None else replace(plan.chat, head=event.sequence)
    existing = isinstance(command, CreateChat) and not plan.create
    changed = CommandResult(after, event, repeated=existing)
    if act.key is not None:
        answer = {"fingerprint": act.fingerprint, "answer": encode(changed).decode(), "at": act.at}
        connection.execute(SQL["put_answer"], {**_key(act.actor, act.key), **answer})
    return WriteResult(changed, entries + in_log, plan.forgets)


def _inputs(connection: apsw.Connection, command: Command) -> tuple[int, CommandInputs]:
    """The chat's row number (0 for none), and the inputs of the decision."""
    act = command.act
    row = connection.execute(SQL["chat_state"], {"chat_id": command.chat_id}).get
    users = {"tenant": act.actor.tenant, "users": encode(joining(command)).decode()}
    counts = _counts.decode(connection.execute(SQL["chat_counts"], users).get)
    chats = {user_id: count for user_id, (count, _) in counts.items()}
    invited = {user_id: count for user_id, (_, count) in counts.items()}
    if isinstance(command, CreateChat):
        pair = connection.execute(
            SQL["chat_of_pair"], {"tenant": act.actor.tenant, "pair": direct_pair(command)}
        ).get
        return 0, CommandInputs(
            _chat.decode(row[1]) if row else None,
            pair=_chat.decode(pair) if pair else None,
            chats=chats,
            invited=invited,
        )
    if row is None:
        return 0, CommandInputs(None)
    chat, value, counter, members = row
    seen = CommandInputs(
        _chat.decode(value),
        actor=_find_member(connection, chat, act.actor.user_id),
        target=_find_member(connection, chat, target_of(command)),
        members=members,
        owners=connection.execute(SQL["owners"], {"chat": chat}).get,
        chats=chats,
        invited=invited,
        counter=counter,
    )
    if isinstance(command, AddMember | ChangeRole | ChangeBan | ChangeMute):
        return chat, _with_restrictions(connection, chat, command.user_id, seen)
    if isinstance(command, Redact):
        found = connection.execute(
            SQL["message_at"], {"chat": chat, "sequence": command.sequence}
        ).get
        return chat, replace(seen, message=_message.decode(found) if found else None)
    if isinstance(command, RecoverChat) and seen.chat is not None:
        highest, _, gaps = numbering(connection, chat, seen.chat, counter)
        return chat, replace(seen, highest=highest, gaps=gaps)
    return chat, seen


def _with_restrictions(
    connection: apsw.Connection, chat: int, user_id: str, seen: CommandInputs
) -> CommandInputs:
    """Add the ban and the mute of the target to the inputs."""
    asked = {"chat": chat, "user_id": user_id}
    banned, banned_by_operator, bans = connection.execute(SQL["ban_state"], asked).get
    muted_by_operator, mutes = connection.execute(SQL["mute_state"], asked).get
    return replace(
        seen,
        banned=bool(banned),
        banned_by_operator=bool(banned_by_operator),
        bans=bans,
        mute=None if muted_by_operator is None else Mute(user_id, bool(muted_by_operator)),
        mutes=mutes,
    )


def numbering(
    connection: apsw.Connection, chat: int, value: Chat, counter: int | None
) -> tuple[int, int, list[tuple[int, int]]]:
    """The highest stored sequence of a chat, how many are stored, and the holes."""
    asked = {"chat": chat, "first": value.first_sequence}
    highest, count, from_first = connection.execute(SQL["numbering"], asked).get
    last = max(highest, counter or 0, value.first_sequence - 1)
    return highest, count, _holes(connection, chat, (value.first_sequence, last, from_first))


def _holes(
    connection: apsw.Connection, chat: int, whole: tuple[int, int, int]
) -> list[tuple[int, int]]:
    """The ranges without stored messages, found by bisection: a range that is full or
    empty is not divided further.

    ``whole`` and each part are (first sequence, last sequence, number of stored
    messages).
    """
    found: list[tuple[int, int]] = []
    parts = [whole]
    while parts:
        first, last, count = parts.pop()
        if count == last - first + 1:
            continue
        if count:
            middle = (first + last) // 2
            below = connection.execute(
                SQL["count_between"], {"chat": chat, "first": first, "last": middle}
            ).get
            parts += [(middle + 1, last, count - below), (first, middle, below)]
        elif found and found[-1][1] == first - 1:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return found


def _apply(connection: apsw.Connection, chat: int, plan: ChangePlan, act: CommandContext) -> int:
    """Write everything of the plan except its event. Returns the chat's row number."""
    if plan.create:
        chat = connection.execute(SQL["create_chat"], {**asdict(plan.chat), "pair": plan.pair}).get
    elif plan.record is not None or plan.event is not None:
        connection.execute(SQL["update_chat"], {**asdict(plan.chat), "chat": chat})
    if plan.counter is not None:
        connection.execute(SQL["create_counter"], {"chat": chat, "counter": plan.counter})
    if plan.raised:
        connection.execute(
            SQL["take_watermarks_along"], {"chat": chat, "epoch_before": plan.chat.epoch - 1}
        )
    if plan.put:
        rows = [(m.user_id, m.role, m.joined_at, int(m.user_id in plan.invited)) for m in plan.put]
        members = encode(rows).decode()
        connection.execute(
            SQL["put_members"], {"chat": chat, "tenant": plan.chat.tenant, "members": members}
        )
    for user_id in plan.drop:
        connection.execute(SQL["drop_member"], {"chat": chat, "user_id": user_id})
        connection.execute(SQL["drop_watermarks"], {"chat": chat, "user_id": user_id})
    if plan.put or plan.drop:
        connection.execute(SQL["count_members"], {"chat": chat})
    if plan.ban is not None:
        connection.execute(SQL["put_ban"], {"chat": chat, **asdict(plan.ban)})
    if plan.unban is not None:
        connection.execute(SQL["drop_ban"], {"chat": chat, "user_id": plan.unban})
    if plan.mute is not None:
        connection.execute(SQL["put_mute"], {"chat": chat, **asdict(plan.mute)})
    if plan.unmute is not None:
        connection.execute(SQL["drop_mute"], {"chat": chat, "user_id": plan.unmute})
    if plan.redact is not None:
        connection.execute(SQL["redact"], {"chat": chat, "sequence": plan.redact})
    if plan.erase is not None:
        erased = {"user_id": plan.erase.user_id, "sequences": encode(plan.erase.sequences).decode()}
        connection.execute(SQL["erase"], {"chat": chat, **erased})
    if plan.retain:
        connection.execute(
            SQL["retain"], {"chat": chat, "first_sequence": plan.chat.first_sequence}
        )
    if plan.gaps:
        connection.execute(SQL["put_gaps"], {"chat": chat, "gaps": encode(plan.gaps).decode()})
    if plan.record is not None:
        details = msgspec.json.encode(plan.record.details).decode()
        put_audit(connection, act, plan.record.action, plan.record.target, details)
    return chat


def _put_event(
    connection: apsw.Connection,
    chat: int,
    counter: int | None,
    plan: ChangePlan,
    act: CommandContext,
) -> tuple[Message | None, list[LogEntry]]:
    message = event_message(plan, act, (counter or 0) + 1)
    if message is None:
        return None, []
    chat_id = plan.chat.chat_id
    if counter is None:
        telemetry.counter_corruption(chat_id)
        raise _Damaged(NO_COUNTER)
    if connection.execute(SQL["taken"], {"chat_id": chat_id}).get is not None:
        telemetry.duplicate_sequence(chat_id)
        raise _Damaged(TAKEN)
    position = connection.execute(SQL["log_end"]).get + 1
    row = message_row(position, chat, message, None)
    put_messages(connection, [row], [(chat, message.sequence, position)])
    return message, [LogEntry(0, position, plan.chat.tenant, chat_id, plan.chat.epoch, message)]


def _put_log_event(
    connection: apsw.Connection, chat: int, plan: ChangePlan, event: LogEvent
) -> LogEntry:
    """Append an entry without a sequence to the log. It takes a position of the
    messages: there is one order of both.
    """
    position = connection.execute(SQL["log_end"]).get + 1
    connection.execute(
        SQL["put_log_event"],
        {
            "position": position,
            "chat": chat,
            "epoch": plan.chat.epoch,
            "kind": type(event).__name__,
            "content": encode(event).decode(),
        },
    )
    connection.execute(SQL["move_log_end"], {"position": position})
    return LogEntry(0, position, plan.chat.tenant, plan.chat.chat_id, plan.chat.epoch, event)


def _find_member(connection: apsw.Connection, chat: int, user_id: str | None) -> Member | None:
    found = (
        connection.execute(SQL["member"], {"chat": chat, "user_id": user_id}).get
        if user_id
        else None
    )
    return _member.decode(found) if found else None


def _key(actor: User, key: str) -> Mapping[str, str]:
    return {"tenant": actor.tenant, "user_id": actor.user_id, "key": key}
