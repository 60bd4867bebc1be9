"""A group of sends in one commit.

One statement reads everything ``numbering.number`` needs, one writes the messages, one
moves the counters. Only if that fails is each send written by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Generic, TypeVar

import apsw
from msgspec import Struct
from msgspec.json import Decoder, encode

from holdfast import telemetry
from holdfast.errors import HoldfastError, InternalError, InvalidMessage
from holdfast.message import Draft, LogEntry, Message, Outcome
from holdfast.store.numbering import (
    NO_COUNTER,
    TAKEN,
    ChatState,
    GroupState,
    NumberedGroup,
    StoredSend,
    number,
)
from holdfast.store.plan import halted_chat
from holdfast.store.sqlite.database import SQL, Handle

T = TypeVar("T")

KEYS_REMEMBERED = 1_024
"""More than a group has: each commit needs the hash of a key twice."""

_known = Decoder(list[tuple[str, str, int, str, str | None, int | None, int, int, int]])
_keys = Decoder(list[tuple[str, Message]])


class WriteResult(Struct, Generic[T], frozen=True):
    """A commit's answer, its log entries, and whether it deleted content."""

    answer: T
    entries: Sequence[LogEntry] = ()
    forgets: bool = False


def append(handle: Handle, group: Sequence[Draft]) -> WriteResult[list[Outcome]]:
    """Commit the group; if that fails, each send by itself in a second commit."""
    try:
        with handle.transaction() as connection:
            return _write(connection, group)
    except (apsw.ConstraintError, UnicodeEncodeError):
        with handle.transaction() as connection:
            return _write_one_by_one(connection, group)


def _write(connection: apsw.Connection, group: Sequence[Draft]) -> WriteResult[list[Outcome]]:
    known, numbers, end = _read(connection, group)
    numbered = number(group, known)
    entries = _put(connection, numbered, known, numbers, end)
    for chat_id in numbered.without_counter:
        telemetry.counter_corruption(chat_id)
        connection.execute(SQL["halt"], {"chat_id": chat_id, "why": NO_COUNTER})
    return WriteResult(numbered.outcomes, entries)


def _read(
    connection: apsw.Connection, group: Sequence[Draft]
) -> tuple[GroupState, dict[str, int], int]:
    """What is known of the group, its chats' row numbers, and the end of the log."""
    senders = encode(list({(d.chat_id, d.sender.user_id) for d in group})).decode()
    keys = encode([_key_of(d) for d in group]).decode()
    rows, found, end = connection.execute(SQL["known"], {"senders": senders, "keys": keys}).get
    chats: dict[str, ChatState] = {}
    numbers: dict[str, int] = {}
    members: set[tuple[str, str]] = set()
    muted: set[tuple[str, str]] = set()
    for (
        chat_id,
        user_id,
        chat,
        tenant,
        halted,
        counter,
        epoch,
        is_member,
        is_muted,
    ) in _known.decode(rows):
        if chat_id not in chats:
            chats[chat_id] = ChatState(tenant, halted, counter, epoch)
            numbers[chat_id] = chat
        if is_member:
            members.add((chat_id, user_id))
        if is_muted:
            muted.add((chat_id, user_id))
    stored = {
        (message.chat_id, message.sender_id, message.client_message_id or ""): StoredSend(
            message, bytes.fromhex(digest) or None
        )
        for digest, message in _keys.decode(found)
    }
    return GroupState(chats, members, muted, stored), numbers, end


def _put(
    connection: apsw.Connection,
    numbered: NumberedGroup,
    known: GroupState,
    numbers: dict[str, int],
    end: int,
) -> list[LogEntry]:
    if not numbered.fresh:
        return []
    entries: list[LogEntry] = []
    rows = []
    last: dict[str, int] = {}
    for position, stored in enumerate(numbered.fresh, end + 1):
        message = stored.message
        chat = known.chats[message.chat_id]
        entries.append(LogEntry(0, position, chat.tenant, message.chat_id, chat.epoch, message))
        rows.append(message_row(position, numbers[message.chat_id], message, stored.content_hash))
        last[message.chat_id] = position
    put_messages(connection, rows, [(numbers[c], n, last[c]) for c, n in numbered.counters.items()])
    return entries


def _key_of(draft: Draft) -> tuple[str, int, str, str]:
    chat_id, sender_id, client_message_id = draft.key
    return chat_id, send_key(sender_id, client_message_id), sender_id, client_message_id


@lru_cache(KEYS_REMEMBERED)
def send_key(sender_id: str, client_message_id: str) -> int:
    """The hash of a key for the index, as a signed integer of SQLite."""
    digest = hashlib.blake2b(f"{sender_id}\0{client_message_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def message_row(
    position: int, chat: int, message: Message, content_hash: bytes | None
) -> tuple[object, ...]:
    """A message as a row for the statement ``put_messages``."""
    return (
        position,
        chat,
        message.sequence,
        message.kind,
        message.sender_id,
        message.client_message_id,
        send_key(message.sender_id, message.client_message_id)
        if message.client_message_id is not None
        else None,
        content_hash.hex() if content_hash is not None else None,
        message.message_id,
        message.content,
        message.content_type,
        message.created_at,
    )


def put_messages(
    connection: apsw.Connection,
    rows: Sequence[tuple[object, ...]],
    counters: Sequence[tuple[int, int, int]],
) -> None:
    """Write messages; move ``counters``, which are (chat, sequence, last position)."""
    connection.execute(SQL["put_messages"], {"messages": encode(rows).decode()})
    connection.execute(SQL["advance_counters"], {"counters": encode(counters).decode()})


def _write_one_by_one(
    connection: apsw.Connection, group: Sequence[Draft]
) -> WriteResult[list[Outcome]]:
    """Write each send behind its own savepoint, all in one commit: a send that cannot
    be written fails alone.
    """
    outcomes: list[Outcome] = []
    entries: list[LogEntry] = []
    for draft in group:
        connection.execute("SAVEPOINT send")
        try:
            written = _write(connection, [draft])
            outcomes += written.answer
            entries += written.entries
        except (apsw.ConstraintError, UnicodeEncodeError) as error:
            connection.execute("ROLLBACK TO send")
            outcomes.append(_why(connection, draft, error))
        connection.execute("RELEASE send")
    return WriteResult(outcomes, entries)


def _why(connection: apsw.Connection, draft: Draft, error: Exception) -> HoldfastError:
    """Why a send could not be written. A taken sequence halts its chat."""
    if isinstance(error, UnicodeEncodeError):
        return InvalidMessage("a field is not valid Unicode text")
    if connection.execute(SQL["taken"], {"chat_id": draft.chat_id}).get is None:
        telemetry.log.error("store.send_failed", chat_id=draft.chat_id, error=str(error))
        return InternalError(f"the message could not be stored: {error}")
    telemetry.duplicate_sequence(draft.chat_id)
    connection.execute(SQL["halt"], {"chat_id": draft.chat_id, "why": TAKEN})
    return halted_chat(draft.chat_id)
