"""Records the stored chats and the event log at the end of a run, for any adapter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from holdfast.eventlog.contract import START, EventLog
from holdfast.message import Message, PageToken
from holdfast.store.commands import membership_event
from holdfast.store.contract import ChatStore, Records
from holdfast.verify.history import (
    ChatAtEnd,
    KeySeen,
    LogAtEnd,
    Logged,
    MembershipSpan,
    Recorder,
    Sighting,
)

_BATCH = 500
_BYTES = 2**22


async def note_store(
    record: Recorder,
    chats: ChatStore,
    records: Records,
    founders: Mapping[str, Iterable[str]],
    keys: Mapping[str, Iterable[KeySeen]] | None = None,
    lost_redactions: Iterable[tuple[str, int]] = (),
) -> None:
    """Record every chat of ``founders``: its first members, who are in no event.

    ``lost_redactions`` were recorded too, by a server whose end was lost.
    """
    redacted = await _redactions(records)
    for chat_id, sequence in lost_redactions:
        redacted[chat_id].append(sequence)
    for chat_id, users in founders.items():
        messages = await read_all(chats, chat_id)
        inspected = await chats.inspect(chat_id)
        record.note(
            ChatAtEnd(
                chat_id=chat_id,
                tenant=inspected.chat.tenant,
                epoch=inspected.chat.epoch,
                counter=inspected.counter,
                messages=[Sighting.of(message) for message in messages],
                keys=list(keys[chat_id]) if keys is not None else None,
                memberships=[MembershipSpan(0, user, True) for user in users] + _changes(messages),
                first_sequence=inspected.chat.first_sequence,
                redacted=redacted.get(chat_id, []),
                holes=list(inspected.recorded_gaps),
            )
        )


async def note_log(record: Recorder, log: EventLog) -> None:
    """Record the whole event log."""
    start = msgspec.structs.replace(START, base=(await log.end()).base)
    entries, after = await log.read(start, _BATCH)
    while entries:
        for entry in entries:
            if isinstance(entry.what, Message):
                sequence = entry.what.sequence
                record.note(Logged(position=entry.offset, chat_id=entry.chat_id, sequence=sequence))
        entries, after = await log.read(after, _BATCH)
    record.note(LogAtEnd(position=after.offset(0)))


async def read_all(chats: ChatStore, chat_id: str) -> list[Message]:
    """Every message of a chat, page by page."""
    messages: list[Message] = []
    page = await chats.read_after(chat_id, 0, _BATCH, _BYTES)
    messages += page.messages
    while page.has_more:
        page = await chats.read_after(chat_id, page.through, _BATCH, _BYTES)
        messages += page.messages
    return messages


def _changes(messages: Iterable[Message]) -> list[MembershipSpan]:
    """The memberships by a chat's events.

    An owner is never muted: the role lifts it.
    """
    changes, gone = [], set[str]()
    for message in messages:
        event = membership_event(message) if message.kind == "event" else None
        if event is None or event.user_id is None:
            continue
        user_id = event.user_id
        match event.event:
            case "member_removed":
                gone.add(user_id)
                changes.append(MembershipSpan(message.sequence, user_id, False))
            case "member_added":
                gone.discard(user_id)
                changes.append(MembershipSpan(message.sequence, user_id, True, event.muted))
            case "member_muted":
                changes.append(MembershipSpan(message.sequence, user_id, True, True))
            case "member_unmuted" if user_id not in gone:
                changes.append(MembershipSpan(message.sequence, user_id, True))
            case "role_changed" if event.role == "owner":
                changes.append(MembershipSpan(message.sequence, user_id, True))
    return changes


async def _redactions(records: Records) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    after: PageToken | None = None
    while True:
        page = await records.audit(after, _BATCH)
        for entry in page.records:
            if entry.action == "message.redact":
                chat_id, _, sequence = entry.target.rpartition("/")
                found[chat_id].append(int(sequence))
            elif entry.action == "user.erase" and entry.details:
                found[entry.target] += msgspec.json.decode(entry.details)["sequences"]
        if (after := page.next) is None:
            return found
