"""Coming back: many cursors in, the chats that moved out. (Pure.)"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast.message import Cursor, Page, ResumeRead
from holdfast.session.places import Place
from holdfast.wire.frames import Resumed, ResumedChat


def resumed(places: Mapping[str, Place], cursors: Mapping[str, Cursor], read: ResumeRead) -> Resumed:
    """The answer; the chats it settles become live. A chat without a page that has moved is listed without messages."""
    pages = list(read.pages)
    paged = {page.chat_id for page in pages}
    pages += [
        _unread(chat_id, cursors.get(chat_id), head) for chat_id, head in read.heads.items() if chat_id not in paged
    ]
    chats = []
    for page in pages:
        place = places.get(page.chat_id)
        settled = page if place is None else place.settle(page)
        if settled.messages or settled.has_more or settled.reset or settled.through > _had(cursors, page):
            chats.append(_chat(settled))
    return Resumed(chats=chats, joined=read.joined, gone=read.gone)


def without(left: Collection[str], cursors: Mapping[str, Cursor], read: ResumeRead) -> ResumeRead:
    """The same without the chats that the user left while it was read."""
    if not left:
        return read
    return ResumeRead(
        pages=[page for page in read.pages if page.chat_id not in left],
        joined=[chat_id for chat_id in read.joined if chat_id not in left],
        gone=[*read.gone, *(chat_id for chat_id in left if chat_id in cursors and chat_id not in read.gone)],
        heads={chat_id: head for chat_id, head in read.heads.items() if chat_id not in left},
    )


def _had(cursors: Mapping[str, Cursor], page: Page) -> int:
    cursor = cursors.get(page.chat_id)
    return 0 if cursor is None else cursor.sequence


def _unread(chat_id: str, cursor: Cursor | None, head: Cursor) -> Page:
    """A page without messages that says how far its reader is, and whether there is more."""
    had = 0 if cursor is None or cursor.epoch != head.epoch else cursor.sequence
    return Page(
        chat_id=chat_id,
        epoch=head.epoch,
        messages=(),
        through=had,
        has_more=head.sequence > had,
        head=head.sequence,
        reset=cursor is not None and cursor.epoch != head.epoch,
    )


def _chat(page: Page) -> ResumedChat:
    return ResumedChat(
        chat_id=page.chat_id,
        epoch=page.epoch,
        head=page.head,
        messages=page.messages,
        through=page.through,
        has_more=page.has_more,
        reset=page.reset,
    )
