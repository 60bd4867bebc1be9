"""The chat of a reply: what the model is shown, and whether the reply is wanted.

A reply is wanted while its trigger has its text and both its sender and the assistant
are members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.errors import HoldfastError, NotAMember, NotFound
from holdfast.history.history import ChatHistory
from holdfast.message import ChatKind, Message, User
from holdfast.streaming.assistants.jobs import AssistantNotice
from holdfast.streaming.assistants.prompt import MESSAGES_MAX

PAGE_BYTES_MAX = 1 << 20
SENT_LOOKED_AT = 500
"""Messages behind the trigger among which a job that runs again looks for its own."""


class Unwanted(Exception):
    """Nobody wants this reply any more."""


class Scene(NamedTuple):
    """The chat when the reply starts; the last of ``messages`` is the trigger."""

    kind: ChatKind
    members: int
    messages: Sequence[Message]


async def read_scene(history: ChatHistory, notice: AssistantNotice) -> Scene:
    """Raises Unwanted, or what the store raises."""
    chat_id, before = notice.chat_id, notice.sequence + 1
    try:
        chat = await history.ask(lambda store: store.chat(chat_id))
        members = await history.ask(lambda store: store.members(chat_id))
        page = await history.ask(
            lambda store: store.read_before(chat_id, before, MESSAGES_MAX, PAGE_BYTES_MAX)
        )
    except NotFound:
        raise Unwanted("the chat is gone") from None
    if not {notice.sender_id, notice.assistant} <= {member.user_id for member in members}:
        raise Unwanted("the sender or the assistant has left")
    _require_trigger(notice, page.messages)
    return Scene(chat.kind, len(members), page.messages)


async def check_wanted(history: ChatHistory, notice: AssistantNotice) -> None:
    """Raise Unwanted if the trigger was redacted or somebody has left.

    A store that cannot be read says nothing; the send will.
    """
    chat_id = notice.chat_id
    sender, assistant = (User(notice.tenant, u) for u in (notice.sender_id, notice.assistant))
    try:
        await history.ask(lambda store: store.chat(chat_id, sender))
        await history.ask(lambda store: store.chat(chat_id, assistant))
        page = await history.ask(
            lambda store: store.read_after(chat_id, notice.sequence - 1, 1, PAGE_BYTES_MAX)
        )
    except (NotAMember, NotFound):
        raise Unwanted("the sender or the assistant has left") from None
    except HoldfastError:
        return
    _require_trigger(notice, page.messages)


async def is_sent(history: ChatHistory, notice: AssistantNotice) -> bool:
    """Whether an earlier run of the job has sent the message."""
    page = await history.ask(
        lambda store: store.read_after(
            notice.chat_id, notice.sequence, SENT_LOOKED_AT, PAGE_BYTES_MAX
        )
    )
    key = (notice.assistant, notice.reply_id)
    return any((m.sender_id, m.client_message_id) == key for m in page.messages)


def _require_trigger(notice: AssistantNotice, found: Sequence[Message]) -> None:
    if not found or found[-1].message_id != notice.message_id or not found[-1].content:
        raise Unwanted("the trigger was redacted or removed")
