"""The reads, each in one snapshot with a deadline, at which a page ends early."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import apsw
from msgspec import MsgspecError, Raw, ValidationError
from msgspec.json import Decoder, encode

from holdfast.errors import NotAMember, NotFound, Unavailable, UnreadableEvent
from holdfast.message import (
    Ban,
    Chat,
    ChatCreated,
    Cursor,
    EpochRaised,
    LogEntry,
    LogEvent,
    Member,
    Message,
    Mute,
    Page,
    PageToken,
    User,
    Watermark,
)
from holdfast.store.contract import (
    COUNTERS_LOOKED_AT,
    LOOKED_AT_ONCE,
    UNREAD_LOOKED_AT,
    ActivePage,
    AuditPage,
    AuditRecord,
    ChatPage,
    ChatSummary,
    DamagedPage,
    HaltedChat,
    HaltedChats,
    Inspection,
    TextPage,
)
from holdfast.store.pages import (
    ENVELOPE_BYTES,
    chat_of,
    chat_token,
    check_end,
    number_of,
    number_token,
    page_after,
    page_before,
    unknown_token,
    within,
)
from holdfast.store.plan import left_where_page_ended, not_a_member, outside_the_list, unknown_chat
from holdfast.store.sqlite.change import numbering
from holdfast.store.sqlite.database import SQL, Handle

if TYPE_CHECKING:
    from collections.abc import Iterator

SLICE_MESSAGES = 64
"""Messages read at a time for a page. A deadline discards at most one slice."""

_chat = Decoder(Chat)
_messages = Decoder(list[Message])
_cursors = Decoder(dict[str, Cursor])
_cursors_of_each = Decoder(list[dict[str, Cursor]])
_members = Decoder(list[Member])
_bans = Decoder(list[Ban])
_mutes = Decoder(list[Mute])
_watermarks = Decoder(list[tuple[User, str, str, int, int, int]])
_summaries = Decoder(list[tuple[Chat, str, str, int, int, int, Message | None]])
_pairs = Decoder(list[tuple[int, int]])
_places = Decoder(list[tuple[int, int, int]])
_audit = Decoder(list[AuditRecord])
_LogRow = tuple[int, str, str, int, str | None, Raw]
_log_row = Decoder(_LogRow)
_log_rows = Decoder(list[_LogRow])
_whose_row = Decoder(tuple[int, str, str, Raw, Raw, Raw])
_message = Decoder(Message)
_log_events: Mapping[str, Decoder[LogEvent]] = {
    kind.__name__: Decoder(kind) for kind in (ChatCreated, EpochRaised)
}
_texts = Decoder(list[tuple[str, int]])
_active = Decoder(list[tuple[str, str]])
_chat_ids = Decoder(list[str])
_halted = Decoder(list[HaltedChat])
UNREADABLE = (UnicodeDecodeError, MsgspecError)


class Deadline:
    """Ends a read: SQLite calls ``is_over`` while it works."""

    def __init__(self, monotonic: Callable[[], float], seconds: float, operations: int) -> None:
        """``operations``: how many SQLite carries out between two calls."""
        self._monotonic = monotonic
        self._at = monotonic() + seconds
        self._operations = operations

    def is_over(self) -> bool:
        return self._monotonic() >= self._at

    @contextmanager
    def over(self, handle: Handle) -> Iterator[apsw.Connection]:
        """One snapshot of the file, until the deadline. Unavailable if it has passed.

        The deadline stays set on the connection until its next read sets another.
        """
        if self.is_over():
            raise Unavailable("too many reads are waiting; try again", retry_after_seconds=1.0)
        handle.connection().set_progress_handler(self.is_over, self._operations)
        with handle.snapshot() as connection:
            yield connection


def read_after(
    handle: Handle,
    deadline: Deadline,
    chat_id: str,
    after: int,
    bounds: tuple[int, int],
    reader: User | None,
) -> Page:
    """``bounds``: messages and bytes."""
    with deadline.over(handle) as connection:
        chat, value = readable(connection, chat_id, reader)
        messages, is_whole = _slices(connection, chat, "messages_after", after, bounds)
        last = messages[-1].sequence if messages else after
        has_more = not is_whole or _any(connection, "any_after", chat, last)
        return page_after(value, messages, has_more)


def read_before(
    handle: Handle,
    deadline: Deadline,
    chat_id: str,
    before: int,
    bounds: tuple[int, int],
    reader: User | None,
) -> Page:
    """``bounds``: messages and bytes."""
    with deadline.over(handle) as connection:
        chat, value = readable(connection, chat_id, reader)
        messages, is_whole = _slices(connection, chat, "messages_before", before, bounds)
        first = messages[0].sequence if messages else before
        has_more = not is_whole or _any(connection, "any_before", chat, first)
        return page_before(value, before, messages, has_more)


def _slices(
    connection: apsw.Connection, chat: int, name: str, edge: int, bounds: tuple[int, int]
) -> tuple[list[Message], bool]:
    """Messages from ``edge`` on; and False if the deadline came between two slices."""
    upward = name == "messages_after"
    limit, bytes_left = max(bounds[0], 1), bounds[1] - ENVELOPE_BYTES
    messages: list[Message] = []
    while len(messages) < limit:
        wanted = min(SLICE_MESSAGES, limit - len(messages))
        fields = {
            "chat": chat,
            "after": edge,
            "before": edge,
            "limit": wanted,
            "one": 0 if messages else 1,
        }
        try:
            text = connection.execute(SQL[name], {**fields, "bytes_max": bytes_left}).get
        except apsw.InterruptError:
            if not messages:
                raise
            return messages if upward else messages[::-1], False
        found = _messages.decode(text)
        kept, bytes_left = within(
            found if upward else found[::-1], bytes_left, none_yet=not messages
        )
        messages += kept
        if len(kept) < wanted:
            break
        edge = kept[-1].sequence
    return messages if upward else messages[::-1], True


def _any(connection: apsw.Connection, name: str, chat: int, sequence: int) -> bool:
    return bool(connection.execute(SQL[name], {"chat": chat, "sequence": sequence}).get)


def readable(connection: apsw.Connection, chat_id: str, reader: User | None) -> tuple[int, Chat]:
    """A chat's row number and the chat. NotFound; NotAMember for a non-member."""
    user_id = reader.user_id if reader else None
    row = connection.execute(SQL["readable"], {"chat_id": chat_id, "user_id": user_id}).get
    value = _chat.decode(row[1]) if row else None
    if value is None or (reader is not None and reader.tenant != value.tenant):
        raise unknown_chat(chat_id)
    if reader is not None and not row[2]:
        raise not_a_member(chat_id)
    return row[0], value


def chat(handle: Handle, deadline: Deadline, chat_id: str, reader: User | None) -> Chat:
    with deadline.over(handle) as connection:
        return readable(connection, chat_id, reader)[1]


def heads(handle: Handle, deadline: Deadline, chat_ids: Sequence[str]) -> dict[str, Cursor]:
    with deadline.over(handle) as connection:
        return _cursors.decode(
            connection.execute(SQL["heads"], {"chat_ids": encode(chat_ids).decode()}).get
        )


def memberships(
    handle: Handle, deadline: Deadline, users: Sequence[User], chats_max: int
) -> dict[User, dict[str, Cursor]]:
    asked = {"users": encode(users).decode(), "chats_max": chats_max}
    with deadline.over(handle) as connection:
        text = connection.execute(SQL["memberships"], asked).get
    return dict(zip(users, _cursors_of_each.decode(text), strict=False))


def memberships_in(
    handle: Handle, deadline: Deadline, asked: Sequence[tuple[User, str]]
) -> dict[tuple[User, str], Cursor]:
    pairs = {"asked": encode(asked).decode()}
    with deadline.over(handle) as connection:
        found = _places.decode(connection.execute(SQL["memberships_in"], pairs).get)
    return {asked[place]: Cursor(epoch, head) for place, epoch, head in found}


def chats_of(
    handle: Handle,
    deadline: Deadline,
    user: User,
    limit: int,
    after: PageToken | None,
    only: Collection[str] | None,
) -> ChatPage:
    with deadline.over(handle) as connection:
        edge: tuple[int | None, int | None] = (None, None)
        if after is not None:
            edge = _edge(connection, user, after, only)
        page = {
            "limit": limit + 1,
            "edge_position": edge[0],
            "edge_chat": edge[1],
            "looked_at": UNREAD_LOOKED_AT,
        }
        named = {"only": None if only is None else encode(sorted(only)).decode()}
        rows = _summaries.decode(
            connection.execute(SQL["chats_of"], {**user._asdict(), **page, **named}).get
        )
    chats = [
        ChatSummary(
            chat=chat,
            role=role,
            title=title,
            members=members,
            unread=unread,
            unread_capped=max(read, chat.first_sequence - 1) < chat.head - UNREAD_LOOKED_AT,
            read=read,
            last_message=last,
        )
        for chat, role, title, members, read, unread, last in rows[:limit]
    ]
    return ChatPage(chats, chat_token(chats[-1].chat) if len(rows) > limit else None)


def _edge(
    connection: apsw.Connection, user: User, after: PageToken, only: Collection[str] | None
) -> tuple[int, int]:
    """The activity and the row number of the chat where a page ended."""
    chat_id, head = chat_of(after)
    if only is not None and chat_id not in only:
        raise outside_the_list()
    try:
        readable(connection, chat_id, user)
    except NotFound:
        raise unknown_token() from None
    except NotAMember:
        raise left_where_page_ended() from None
    asked = {"tenant": user.tenant, "chat_id": chat_id, "head": head}
    edge: tuple[int, int] = connection.execute(SQL["list_edge"], asked).get
    return edge


def members(handle: Handle, deadline: Deadline, chat_id: str) -> list[Member]:
    with deadline.over(handle) as connection:
        return _members.decode(connection.execute(SQL["members_of"], {"chat_id": chat_id}).get)


def bans(handle: Handle, deadline: Deadline, chat_id: str) -> list[Ban]:
    with deadline.over(handle) as connection:
        return _bans.decode(connection.execute(SQL["bans_of"], {"chat_id": chat_id}).get)


def mutes(handle: Handle, deadline: Deadline, chat_id: str) -> list[Mute]:
    with deadline.over(handle) as connection:
        return _mutes.decode(connection.execute(SQL["mutes_of"], {"chat_id": chat_id}).get)


def watermarks(handle: Handle, deadline: Deadline, chat_id: str) -> list[Watermark]:
    with deadline.over(handle) as connection:
        rows = _watermarks.decode(
            connection.execute(SQL["watermarks_of"], {"chat_id": chat_id}).get
        )
    return [Watermark(*row) for row in rows]


def inspect(handle: Handle, deadline: Deadline, chat_id: str) -> Inspection:
    with deadline.over(handle) as connection:
        chat, value = readable(connection, chat_id, None)
        counter = connection.execute(SQL["chat_state"], {"chat_id": chat_id}).get[2]
        highest, count, holes = numbering(connection, chat, value, counter)
        recorded = _pairs.decode(connection.execute(SQL["recorded_gaps"], {"chat": chat}).get)
    return Inspection(value, counter, highest, count, holes, recorded)


def halted(handle: Handle, deadline: Deadline, limit: int) -> HaltedChats:
    with deadline.over(handle) as connection:
        count, chats = connection.execute(SQL["halted"], {"limit": limit}).get
    return HaltedChats(count, _halted.decode(chats))


def audit(handle: Handle, deadline: Deadline, after: PageToken | None, limit: int) -> AuditPage:
    asked = {"after": number_of("audit", after), "limit": limit + 1}
    with deadline.over(handle) as connection:
        found = _audit.decode(connection.execute(SQL["audit_after"], asked).get)
        if not found:
            check_end(after, connection.execute(SQL["audit_end"]).get)
    records = found[:limit]
    return AuditPage(
        records, number_token("audit", records[-1].number) if len(found) > limit else None
    )


def texts_of(handle: Handle, deadline: Deadline, user: User, after: PageToken | None) -> TextPage:
    asked = {**user._asdict(), "after": number_of("texts", after), "look": LOOKED_AT_ONCE}
    with deadline.over(handle) as connection:
        texts, through = connection.execute(SQL["sent_by"], asked).get
        if through is None:
            check_end(after, connection.execute(SQL["log_end"]).get)
    return TextPage(
        _texts.decode(texts), None if through is None else number_token("texts", through)
    )


def active_since(
    handle: Handle, deadline: Deadline, at: str, after: PageToken | None
) -> ActivePage:
    asked = {"at": at, "after": number_of("active", after), "look": LOOKED_AT_ONCE}
    with deadline.over(handle) as connection:
        chats, through = connection.execute(SQL["active_since"], asked).get
        if through is None:
            check_end(after, connection.execute(SQL["chats_end"]).get)
    found = _active.decode(chats)
    return ActivePage(found, None if through is None else number_token("active", through))


def damaged(handle: Handle, deadline: Deadline, after: PageToken | None) -> DamagedPage:
    asked = {"after": number_of("damaged", after), "look": COUNTERS_LOOKED_AT}
    with deadline.over(handle) as connection:
        chats, through = connection.execute(SQL["damaged"], asked).get
        if through is None:
            check_end(after, connection.execute(SQL["chats_end"]).get)
    found = _chat_ids.decode(chats)
    return DamagedPage(found, None if through is None else number_token("damaged", through))


def log_end(handle: Handle, deadline: Deadline) -> int:
    with deadline.over(handle) as connection:
        return int(connection.execute(SQL["log_end"]).get)


def log_after(handle: Handle, deadline: Deadline, after: int, limit: int) -> list[LogEntry]:
    with deadline.over(handle) as connection:
        try:
            rows = connection.execute(SQL["log_after"], {"after": after, "limit": limit}).get
            return [_entry(row) for row in _log_rows.decode(rows)]
        except UNREADABLE:
            return _up_to_the_damage(connection, after, limit)


def _entry(row: _LogRow) -> LogEntry:
    position, tenant, chat_id, epoch, kind, value = row
    what: Message | LogEvent
    if kind is None:
        what = _message.decode(value)
    elif kind in _log_events:
        what = _log_events[kind].decode(value)
    else:
        raise ValidationError(f"there is no log event {kind!r}")
    return LogEntry(0, position, tenant, chat_id, epoch, what)


def _whose(data: bytes) -> tuple[str, str]:
    """The tenant and the chat of an entry that cannot be decoded as a whole."""
    try:
        _, tenant, chat_id, *_ = _whose_row.decode(data)
    except UNREADABLE:
        return "", ""
    return tenant, chat_id


def _up_to_the_damage(connection: apsw.Connection, after: int, limit: int) -> list[LogEntry]:
    """Read up to the damaged entry. UnreadableEvent if that is the first."""
    entries: list[LogEntry] = []
    while len(entries) < limit and (
        row := connection.execute(SQL["log_next"], {"after": after}).fetchone()
    ):
        after, data = row
        try:
            entries.append(_entry(_log_row.decode(data)))
        except UNREADABLE as error:
            if not entries:
                raise UnreadableEvent(str(error), 0, after, data, *_whose(data)) from error
            break
    return entries
