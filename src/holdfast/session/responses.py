"""The frames that open a session, answer a send or a resume, and close. (Pure.)

``resumed`` is the only one with rules of its own. It names the chats that moved past
the client's cursors, those it joined and those it left, within the size of a page. A
chat without a page is named without messages, and one whose name does not fit gets a
resync. ``brought_up_to_date`` corrects a read by the joins and leaves that happened
during it.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.json import encode

from holdfast.message import Acked, Cursor, Page, ResumeRead
from holdfast.session.progress import ChatProgress
from holdfast.session.settings import SessionSettings
from holdfast.store.pages import ENVELOPE_BYTES, size_of
from holdfast.wire.close_codes import CloseReason
from holdfast.wire.frames import (
    PROTOCOL_VERSION,
    ConnectionClosing,
    ConnectionEstablished,
    MessageAck,
    Resumed,
    ResumedChat,
)


def established_frame(
    settings: SessionSettings, connection_id: str, user_id: str, device_id: str, at: str
) -> ConnectionEstablished:
    return ConnectionEstablished(
        connection_id=connection_id,
        user_id=user_id,
        device_id=device_id,
        server_time=at,
        heartbeat_interval_ms=int(settings.timeouts.heartbeat_interval_seconds * 1000),
        protocol_version=PROTOCOL_VERSION,
        limits=settings.announced(),
    )


def acknowledgement(client_message_id: str, acked: Acked) -> MessageAck:
    # By position, in the struct's order: one per send, and names cost 14 ns of 200.
    message = acked.message
    return MessageAck(
        client_message_id,
        message.message_id,
        message.chat_id,
        message.sequence,
        message.created_at,
        acked.deduplicated,
    )


def closing_frame(
    closing: CloseReason, message: str | None, reconnect_delay_ms: int, sync_from: Mapping[str, int]
) -> ConnectionClosing:
    return ConnectionClosing(
        reason=closing.reason,
        message=message or closing.message,
        reconnect_allowed=closing.reconnect_allowed,
        reconnect_delay_ms=reconnect_delay_ms,
        sync_from_sequence=sync_from,
    )


def resumed(
    chats: Mapping[str, ChatProgress],
    cursors: Mapping[str, Cursor],
    read: ResumeRead,
    bytes_max: int,
) -> tuple[Resumed, dict[str, ChatProgress]]:
    """The response, of at most ``bytes_max``, and the chats it has no room to name.

    The latter need a resync. Settling a chat here may make it live. A chat that moved
    but has no page is named without messages.
    """
    names = _Names(bytes_max - ENVELOPE_BYTES - sum(size_of(page) for page in read.pages))
    gone = [
        chat_id
        for chat_id in read.gone
        if names.fits(chat_id, ChatProgress(Cursor(0, 0)), len(encode(chat_id)) + 1)
    ]
    joined = dict.fromkeys(read.joined)
    named = []
    paged = {page.chat_id for page in read.pages}
    unread = (
        _unread(chat_id, cursors.get(chat_id), head)
        for chat_id, head in read.heads.items()
        if chat_id not in paged
    )
    for page in (*read.pages, *unread):
        progress = chats.get(page.chat_id) or ChatProgress(Cursor(0, 0))
        settled = progress.settle(page)
        moved = (
            settled.messages
            or settled.has_more
            or settled.reset
            or settled.through > _had(cursors, page)
        )
        if not moved and page.chat_id not in joined:
            continue
        if page.chat_id in paged or names.fits(page.chat_id, progress, size_of(settled)):
            if moved:
                named.append(_chat(settled))
        else:
            joined.pop(page.chat_id, None)
    return Resumed(chats=named, joined=list(joined), gone=gone), names.late


class _Names:
    """The bytes left to name chats; a chat without room falls behind, ``late``."""

    __slots__ = ("_room", "late")

    def __init__(self, room: int) -> None:
        self._room = room
        self.late: dict[str, ChatProgress] = {}

    def fits(self, chat_id: str, progress: ChatProgress, size: int) -> bool:
        if size <= self._room:
            self._room -= size
            return True
        progress.fall_behind()
        self.late[chat_id] = progress
        return False


def brought_up_to_date(
    read: ResumeRead, cursors: Mapping[str, Cursor], moved: Mapping[str, bool]
) -> ResumeRead:
    """The read corrected by ``moved``: chats joined (True) or left (False) during it.

    A chat joined again stays; its resync is queued already.
    """
    left = {chat_id for chat_id, joined in moved.items() if not joined}
    gone = [chat_id for chat_id in read.gone if not moved.get(chat_id)]
    return ResumeRead(
        pages=[page for page in read.pages if page.chat_id not in left],
        joined=[chat_id for chat_id in read.joined if chat_id not in left],
        gone=gone + [chat_id for chat_id in left if chat_id in cursors and chat_id not in gone],
        heads={chat_id: head for chat_id, head in read.heads.items() if chat_id not in left},
    )


def _had(cursors: Mapping[str, Cursor], page: Page) -> int:
    cursor = cursors.get(page.chat_id)
    return 0 if cursor is None else cursor.sequence


def _unread(chat_id: str, cursor: Cursor | None, head: Cursor) -> Page:
    """A page without messages: how far the client is and whether there is more."""
    lost = cursor is not None and (cursor.epoch != head.epoch or cursor.sequence > head.sequence)
    had = 0 if cursor is None or lost else cursor.sequence
    return Page(
        chat_id=chat_id,
        epoch=head.epoch,
        messages=(),
        through=had,
        has_more=head.sequence > had,
        head=head.sequence,
        reset=lost,
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
        proof=page.proof,
    )
