"""How a page is cut and where the next one begins, alike in every adapter. (Pure.)"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.json import encode

from holdfast.errors import InvalidMessage
from holdfast.message import SEQUENCE_MAX, Chat, Message, Page, PageToken

ENVELOPE_BYTES = 512
"""An upper bound for the rest of a frame that carries a page or chats."""


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


def chat_token(chat: Chat) -> PageToken:
    """A page of a list of chats ended at this chat, as it was then."""
    return PageToken(f"{chat.head}.{chat.chat_id}")


def chat_of(token: PageToken) -> tuple[str, int]:
    """The chat where a page ended, and its head there."""
    head, dot, chat_id = token.partition(".")
    if not dot or not _is_number(head):
        raise unknown_token()
    return chat_id, int(head)


def number_token(listed: str, number: int) -> PageToken:
    """A page of a numbered list, called ``listed``, ended at this number."""
    return PageToken(f"{listed}.{number}")


def number_of(listed: str, token: PageToken | None) -> int:
    """The number after which a page begins. A bare number is understood too."""
    if token is None:
        return 0
    number = token.removeprefix(f"{listed}.")
    if not _is_number(number):
        raise unknown_token()
    return int(number)


def check_end(token: PageToken | None, end: int) -> None:
    """Refuse a token of an empty page beyond the end: no page of this list ended there.
    A bare number may be anything.
    """
    if token is not None and not token.isdecimal() and int(token.rpartition(".")[2]) > end:
        raise unknown_token()


def unknown_token() -> InvalidMessage:
    return InvalidMessage(
        "after is not the `next` of a page of this list: start again without `after`; nothing was"
        " changed",
        field="after",
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) <= SEQUENCE_MAX
