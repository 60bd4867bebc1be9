"""What becomes of each send of a group, alike in every adapter. (Pure.)

An adapter reads what is known of the group's chats, members and keys (``GroupState``),
calls ``number`` and writes the result, all in one commit.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from msgspec import Struct

from holdfast.errors import InvalidMessage, KeyReused
from holdfast.message import SEQUENCE_MAX, Acked, Draft, Message, Outcome
from holdfast.store.plan import halted_chat, muted, muted_in_tenant, not_a_member, unknown_chat

NO_COUNTER = "its counter is missing"
TAKEN = "its counter is behind its messages"


class ChatState(Struct, frozen=True):
    """A chat as the numbering sees it. ``counter``: the last allocated sequence; None
    if it is missing.
    """

    tenant: str
    halted: str | None
    counter: int | None
    epoch: int


class StoredSend(Struct, frozen=True, gc=False):
    """What a key stands for. ``content_hash`` is None once it is redacted."""

    message: Message
    content_hash: bytes | None


class GroupState(Struct):
    """What the store holds about a group's sends, read in their own commit."""

    chats: Mapping[str, ChatState]
    members: Container[tuple[str, str]]
    """(chat_id, user_id) of those senders who are members."""
    muted: Container[tuple[str, str]]
    """(chat_id, user_id) of those who are muted there."""
    keys: dict[tuple[str, str, str], StoredSend]


class NumberedGroup(Struct):
    """One outcome per send; what to store; the new counters; the chats to halt."""

    outcomes: list[Outcome]
    fresh: list[StoredSend]
    counters: dict[str, int]
    without_counter: set[str]


def number(group: Sequence[Draft], known: GroupState) -> NumberedGroup:
    """Decide every send of the group in order. Equal keys are merged: the later is a
    retry of the earlier.
    """
    result = NumberedGroup([], [], {}, set())
    for draft in group:
        result.outcomes.append(_number_one(draft, known, result))
    return result


def _number_one(draft: Draft, known: GroupState, result: NumberedGroup) -> Outcome:
    chat_id = draft.chat_id
    chat = known.chats.get(chat_id)
    if chat is None or chat.tenant != draft.sender.tenant:
        return unknown_chat(chat_id)
    key = draft.key
    content_hash = content_hash_of(draft)
    if isinstance(content_hash, InvalidMessage):
        return content_hash
    first = known.keys.get(key)
    if first is not None:
        if first.content_hash in (content_hash, None):
            return Acked(first.message, True)
        return key_reused(key[2])
    if (chat_id, draft.sender.user_id) not in known.members:
        return not_a_member(chat_id)
    if draft.muted:
        return muted_in_tenant(draft.sender.tenant)
    if (chat_id, draft.sender.user_id) in known.muted:
        return muted(chat_id)
    if chat.halted is not None:
        return halted_chat(chat_id)
    if chat.counter is None:
        result.without_counter.add(chat_id)
        return halted_chat(chat_id)
    sequence = result.counters.get(chat_id, chat.counter) + 1
    if sequence > SEQUENCE_MAX:
        return halted_chat(chat_id)
    result.counters[chat_id] = sequence
    message = Message(
        draft.message_id,
        chat_id,
        sequence,
        "text",
        draft.sender.user_id,
        draft.client_message_id,
        draft.content,
        draft.content_type,
        draft.created_at,
    )
    stored = known.keys[key] = StoredSend(message, content_hash)
    result.fresh.append(stored)
    return Acked(message, False)


def content_hash_of(draft: Draft) -> bytes | InvalidMessage:
    """The hash of a send's content, or why no store can hold the send."""
    if not draft.client_message_id.isascii():
        return InvalidMessage(
            "client_message_id must be printable ASCII without spaces", field="client_message_id"
        )
    if "\0" in draft.content:
        return InvalidMessage("content must not contain U+0000", field="content")
    try:
        return draft.content_hash
    except UnicodeEncodeError:
        return InvalidMessage("content is not valid Unicode text", field="content")


def key_reused(client_message_id: str) -> KeyReused:
    return KeyReused(
        "this client_message_id was used for another message; use a new one",
        client_message_id=client_message_id,
    )
