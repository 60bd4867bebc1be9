"""How a page of a chat is cut, alike in every adapter. (Pure.)"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.message import Chat, Message, Page

ENVELOPE_BYTES = 256
"""What a message counts for in a page besides its content, and a page or a chat that is only named: ids, numbers,
time and punctuation."""


def within(messages: Sequence[Message], bytes_max: int) -> list[Message]:
    """The first of ``messages`` that fit into ``bytes_max``; one at least, if there is one."""
    kept: list[Message] = []
    total = 0
    for message in messages:
        total += len(message.content.encode()) + ENVELOPE_BYTES
        if kept and total > bytes_max:
            break
        kept.append(message)
    return kept


def page_after(chat: Chat, messages: Sequence[Message], has_more: bool) -> Page:
    """A page that settles everything up to its last message, or up to the head if nothing is left."""
    last = messages[-1].sequence if messages else 0
    head = max(chat.head, last)
    return Page(chat.chat_id, chat.epoch, messages, last if has_more else head, has_more, head)


def page_before(chat: Chat, before: int, messages: Sequence[Message], has_more: bool) -> Page:
    """The stretch that ends just before ``before``."""
    return Page(chat.chat_id, chat.epoch, messages, min(before - 1, chat.head), has_more, chat.head)


def size_of(page: Page) -> int:
    """What a page takes of a budget of bytes; one without messages takes its envelope."""
    return ENVELOPE_BYTES + sum(len(message.content.encode()) + ENVELOPE_BYTES for message in page.messages)
