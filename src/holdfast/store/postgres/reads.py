"""The reads: each is one statement, hence one snapshot."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec.json import Decoder

from holdfast.errors import NotAMember, NotFound
from holdfast.message import (
    Ban,
    Chat,
    Cursor,
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
from holdfast.store.postgres.server import ServerConnection

_chat = Decoder(Chat)
_message = Decoder(Message)
_messages = Decoder(list[Message])
_members = Decoder(list[Member])
_bans = Decoder(list[Ban])
_mutes = Decoder(list[Mute])
_pairs = Decoder(list[tuple[int, int]])
_texts = Decoder(list[tuple[str, int]])
_active = Decoder(list[tuple[str, str]])
_chat_ids = Decoder(list[str])
_halted = Decoder(list[HaltedChat])


async def read_after(
    connection: ServerConnection,
    chat_id: str,
    after: int,
    bounds: tuple[int, int],
    reader: User | None,
) -> Page:
    """``bounds``: messages and bytes."""
    chat, found, has_more = await _page(connection, "page_after", chat_id, after, bounds, reader)
    kept, _ = within(found, bounds[1] - ENVELOPE_BYTES)
    return page_after(chat, kept, has_more or len(kept) < len(found))


async def read_before(
    connection: ServerConnection,
    chat_id: str,
    before: int,
    bounds: tuple[int, int],
    reader: User | None,
) -> Page:
    """``bounds``: messages and bytes."""
    chat, found, has_more = await _page(connection, "page_before", chat_id, before, bounds, reader)
    kept, _ = within(found[::-1], bounds[1] - ENVELOPE_BYTES)
    return page_before(chat, before, kept[::-1], has_more or len(kept) < len(found))


async def _page(
    connection: ServerConnection,
    name: str,
    chat_id: str,
    edge: int,
    bounds: tuple[int, int],
    reader: User | None,
) -> tuple[Chat, list[Message], bool]:
    user_id = reader.user_id if reader else None
    limit, bytes_max = max(bounds[0], 1), bounds[1] - ENVELOPE_BYTES
    row = await connection.fetchrow(name, chat_id, user_id, edge, limit, bytes_max)
    chat = _readable(row, chat_id, reader)
    return chat, _listed(_messages, row["messages"]), row["has_more"]


def _readable(row: Any, chat_id: str, reader: User | None) -> Chat:
    """The chat of a row. NotFound; NotAMember for a non-member."""
    chat = _chat.decode(row["chat"]) if row is not None else None
    if chat is None or (reader is not None and reader.tenant != chat.tenant):
        raise unknown_chat(chat_id)
    if reader is not None and not row["is_member"]:
        raise not_a_member(chat_id)
    return chat


async def chat(connection: ServerConnection, chat_id: str, reader: User | None) -> Chat:
    row = await connection.fetchrow("readable", chat_id, reader.user_id if reader else None)
    return _readable(row, chat_id, reader)


async def heads(connection: ServerConnection, chat_ids: Sequence[str]) -> dict[str, Cursor]:
    rows = await connection.fetch("heads", chat_ids)
    return {row["chat_id"]: Cursor(row["epoch"], row["head"]) for row in rows}


async def memberships(
    connection: ServerConnection, users: Sequence[User], chats_max: int
) -> Mapping[User, dict[str, Cursor]]:
    tenants, user_ids = [u.tenant for u in users], [u.user_id for u in users]
    rows = await connection.fetch("memberships", tenants, user_ids, chats_max)
    found: dict[User, dict[str, Cursor]] = {
        users[place - 1]: {} for place in sorted({row["place"] for row in rows})
    }
    for row in rows:
        if row["chat_id"] is not None:
            found[users[row["place"] - 1]][row["chat_id"]] = Cursor(row["epoch"], row["head"])
    return found


async def memberships_in(
    connection: ServerConnection, asked: Sequence[tuple[User, str]]
) -> dict[tuple[User, str], Cursor]:
    columns = [u.tenant for u, _ in asked], [u.user_id for u, _ in asked], [c for _, c in asked]
    rows = await connection.fetch("memberships_in", *columns)
    return {asked[place - 1]: Cursor(epoch, head) for place, epoch, head in rows}


async def chats_of(
    connection: ServerConnection,
    user: User,
    limit: int,
    after: PageToken | None,
    only: Collection[str] | None,
) -> ChatPage:
    edge = (None, None) if after is None else await _edge(connection, user, after, only)
    named = None if only is None else sorted(only)
    rows = await connection.fetch("chats_of", *user, limit + 1, *edge, named, UNREAD_LOOKED_AT)
    chats = [_summary(row) for row in rows[:limit]]
    return ChatPage(chats, chat_token(chats[-1].chat) if len(rows) > limit else None)


def _summary(row: Any) -> ChatSummary:
    chat, read = _chat.decode(row["chat"]), row["read"]
    return ChatSummary(
        chat=chat,
        role=row["role"],
        title=row["title"],
        members=row["members"],
        unread=row["unread"],
        unread_capped=max(read, chat.first_sequence - 1) < chat.head - UNREAD_LOOKED_AT,
        read=read,
        last_message=_message.decode(row["last"]) if row["last"] else None,
    )


async def _edge(
    connection: ServerConnection, user: User, after: PageToken, only: Collection[str] | None
) -> tuple[Any, int]:
    """The activity and the number of the chat where a page ended."""
    chat_id, head = chat_of(after)
    if only is not None and chat_id not in only:
        raise outside_the_list()
    row = await connection.fetchrow("readable", chat_id, user.user_id)
    try:
        _readable(row, chat_id, user)
    except NotFound:
        raise unknown_token() from None
    except NotAMember:
        raise left_where_page_ended() from None
    return (await connection.fetchrow("list_edge", row["number"], head))[0], row["number"]


async def members(connection: ServerConnection, chat_id: str) -> list[Member]:
    return _listed(_members, (await connection.fetchrow("members_of", chat_id))[0])


async def bans(connection: ServerConnection, chat_id: str) -> list[Ban]:
    return _listed(_bans, (await connection.fetchrow("bans_of", chat_id))[0])


async def mutes(connection: ServerConnection, chat_id: str) -> list[Mute]:
    return _listed(_mutes, (await connection.fetchrow("mutes_of", chat_id))[0])


async def watermarks(connection: ServerConnection, chat_id: str) -> list[Watermark]:
    return [
        Watermark(User(tenant, user_id), device_id, chat_id, epoch, delivered, read)
        for tenant, user_id, device_id, epoch, delivered, read in await connection.fetch(
            "watermarks_of", chat_id
        )
    ]


async def inspect(connection: ServerConnection, chat_id: str) -> Inspection:
    row = await connection.fetchrow("inspect", chat_id)
    value = _readable(row, chat_id, None)
    gaps, recorded = _listed(_pairs, row["gaps"]), _listed(_pairs, row["recorded"])
    return Inspection(value, row["counter"], row["highest"], row["stored"], gaps, recorded)


async def halted(connection: ServerConnection, limit: int) -> HaltedChats:
    row = await connection.fetchrow("halted", limit)
    return HaltedChats(row["count"], _listed(_halted, row["chats"]))


async def audit(connection: ServerConnection, after: PageToken | None, limit: int) -> AuditPage:
    found = [
        AuditRecord(*row)
        for row in await connection.fetch("audit_after", number_of("audit", after), limit + 1)
    ]
    if not found:
        check_end(after, (await connection.fetchrow("audit_end"))[0])
    records = found[:limit]
    return AuditPage(
        records, number_token("audit", records[-1].number) if len(found) > limit else None
    )


async def active_since(
    connection: ServerConnection, at: str, after: PageToken | None
) -> ActivePage:
    number = number_of("active", after)
    row = await connection.fetchrow("active_since", at, number, LOOKED_AT_ONCE)
    if row["through"] is None:
        check_end(after, (await connection.fetchrow("chats_end"))[0])
        return ActivePage([], None)
    return ActivePage(_listed(_active, row["chats"]), number_token("active", row["through"]))


async def damaged(connection: ServerConnection, after: PageToken | None) -> DamagedPage:
    number = number_of("damaged", after)
    row = await connection.fetchrow("damaged", number, COUNTERS_LOOKED_AT)
    if row["through"] is None:
        check_end(after, (await connection.fetchrow("chats_end"))[0])
        return DamagedPage([], None)
    return DamagedPage(_listed(_chat_ids, row["chats"]), number_token("damaged", row["through"]))


async def texts_of(
    connection: ServerConnection, user: User, after: PageToken | None, shards: int
) -> TextPage:
    """Looks through the shards one after another."""
    shard, position = _text_place(after)
    left, texts = LOOKED_AT_ONCE, list[tuple[str, int]]()
    if shard >= shards:
        raise unknown_token()
    while True:
        row = await connection.fetchrow("texts_of", *user, shard, position, left)
        texts += _listed(_texts, row["texts"])
        left -= row["looked"]
        position = position if row["through"] is None else row["through"]
        if left <= 0:
            return TextPage(texts, PageToken(f"texts.{shard}.{position}"))
        if shard == shards - 1:
            is_end = left == LOOKED_AT_ONCE
            if is_end and position > (await connection.fetchrow("log_ends"))["ends"][shard]:
                raise unknown_token()
            return TextPage(texts, None if is_end else PageToken(f"texts.{shard}.{position}"))
        shard, position = shard + 1, 0


def _text_place(token: PageToken | None) -> tuple[int, int]:
    """The shard and position where a page of ``texts_of`` ended."""
    if token is None:
        return 0, 0
    listed, _, place = token.partition(".")
    shard, _, position = place.partition(".")
    if listed != "texts" or not all(n.isascii() and n.isdecimal() for n in (shard, position)):
        raise unknown_token()
    return int(shard), int(position)


def _listed(decoder: Decoder[list[Any]], text: str | None) -> list[Any]:
    return decoder.decode(text) if text is not None else []
