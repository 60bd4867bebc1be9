"""How a page of a chat is cut, alike in every adapter. (Pure.)"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.json import encode

from holdfast.message import Chat, Message, Page

ENVELOPE_BYTES = 512
"""An upper bound for the rest of a frame that carries a page or chats: type,
request_id, ids, numbers.
"""


def within(
    messages: Sequence[Message], bytes_max: int, *, none_yet: bool = True
) -> tuple[list[Message], int]:
    """The first of ``messages`` that fit into ``bytes_max``, and the bytes left.

    ``none_yet``: the page is still empty, so at least one message is taken, however
    large.
    """
    kept: list[Message] = []
    for message in messages:
        size = len(encode(message)) + 1
        if size > bytes_max and (kept or not none_yet):
            break
        kept.append(message)
        bytes_max -= size
    return kept, bytes_max


def page_after(chat: Chat, messages: Sequence[Message], has_more: bool) -> Page:
    """A page that settles all up to its last message, or to the head."""
    last = messages[-1].sequence if messages else 0
    head = max(chat.head, last)
    return Page(chat.chat_id, chat.epoch, messages, last if has_more else head, has_more, head)


def page_before(chat: Chat, before: int, messages: Sequence[Message], has_more: bool) -> Page:
    """The page that ends just before ``before``."""
    return Page(chat.chat_id, chat.epoch, messages, min(before - 1, chat.head), has_more, chat.head)


def size_of(page: Page) -> int:
    """The bytes of a page in a frame with others, and of its chat's id once more, as
    ``joined`` may repeat it.
    """
    return len(encode(page)) + len(encode(page.chat_id)) + 2
