"""Negative controls on a real PostgreSQL: ``append_1`` without one of its two cares.

Each patches the routine in a database of its own and chooses the interleaving that the
care is for. ``test_store_postgres.py`` has the same stories with the whole routine;
``proof.controls.cluster`` has the same defects in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from cluster_database import new_database
from store_rigs import BOB, PostgresRig, acked, create, draft, send
from work_rigs import until

from engines import Server
from holdfast.errors import NotAMember
from holdfast.eventlog.postgres import PostgresEventLog
from holdfast.message import Acked
from holdfast.store.postgres.append import arguments, sorted_group
from holdfast.store.postgres.schema import SCHEMA

APPEND = "SELECT * FROM holdfast_chats.append_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"
WAITS = (
    "SELECT count(*) > 0 FROM pg_stat_activity"
    " WHERE wait_event_type = 'Lock' AND datname = current_database()"
)
WITHOUT_THE_LOCK = {
    "    PERFORM FROM holdfast_chats.shard AS s WHERE s.shard = ANY (shards) ORDER BY s.shard"
    " FOR NO KEY UPDATE;\n": "",
}
IN_THE_LOCKING_STATEMENT = {
    "    moment   timestamptz;\n": "    moment   timestamptz;\n    present  text[];\n",
    "FOR one IN SELECT g.place, l.* FROM": "FOR one IN SELECT g.place, l.*, ARRAY(SELECT o.user_id"
    " FROM holdfast_chats.member AS o WHERE o.chat = (l.c).chat) AS present FROM",
    "        rows[one.place] := one.row;\n": "        rows[one.place] := one.row;\n"
    "        present := one.present;\n",
    "(SELECT o.chat FROM holdfast_chats.member AS o\n"
    "                              WHERE o.chat = c.chat AND o.user_id = g.sender OFFSET 0) AS m":
    "(SELECT c.chat WHERE g.sender = ANY (present)) AS m",
}  # fmt: skip


async def patch_append(url: str, changes: dict[str, str]) -> None:
    script = next(each for each in SCHEMA.functions if "FUNCTION holdfast_chats.append_1(" in each)
    for old, new in changes.items():
        assert script.count(old) == 1, f"append.sql has changed: {old}"
        script = script.replace(old, new)
    connection = await asyncpg.connect(url)
    await connection.execute(script)
    await connection.close()


@asynccontextmanager
async def patched(server: Server, changes: dict[str, str]) -> AsyncIterator[tuple[Any, Any, Any]]:
    """A store whose database has the patched routine, and two connections to it: one
    for a transaction, one that looks on.
    """
    url = await new_database(server, "append_controls")
    async with PostgresRig(url).open() as store:
        await patch_append(url, changes)
        other, onlooker = await asyncpg.connect(url), await asyncpg.connect(url)
        try:
            yield store, other, onlooker
        finally:
            await other.close()
            await onlooker.close()


@pytest.mark.parametrize("is_broken", [True, False])
async def test_positions_without_the_shards_lock_hide_a_late_commit_from_readers(
    postgres_server: Server, is_broken: bool
) -> None:
    changes = WITHOUT_THE_LOCK if is_broken else {}
    async with patched(postgres_server, changes) as (store, other, onlooker):
        chats = [f"chat_{n}" for n in range(40)]
        late, early = [c for c in chats if store.lane(c) == store.lane(chats[0])][:2]
        for chat_id in (late, early):
            await create(store, chat_id=chat_id)
        log = PostgresEventLog(store)
        position, seen = await log.end(), list[str | None]()

        async def read_on() -> None:
            nonlocal position
            entries, position = await log.read(position, 10)
            seen.extend(entry.what.client_message_id for entry in entries)  # type: ignore[union-attr]

        async with other.transaction():
            await other.fetchrow(APPEND, *arguments(sorted_group([draft("late", chat_id=late)])))
            sending = asyncio.ensure_future(send(store, "early", chat_id=early))
            if is_broken:
                acked(await sending)
            else:
                await until(lambda: onlooker.fetchval(WAITS))
            await read_on()
        acked(await sending)
        await read_on()
        assert seen == (["early"] if is_broken else ["late", "early"])


@pytest.mark.parametrize("is_broken", [True, False])
async def test_members_read_in_the_locking_statement_let_a_removed_member_post(
    postgres_server: Server, is_broken: bool
) -> None:
    changes = IN_THE_LOCKING_STATEMENT if is_broken else {}
    async with patched(postgres_server, changes) as (store, other, onlooker):
        await create(store, "bob")
        async with other.transaction():
            await other.execute("SELECT FROM holdfast_chats.chat FOR NO KEY UPDATE")
            sending = asyncio.ensure_future(send(store, "k", sender=BOB))
            await until(lambda: onlooker.fetchval(WAITS))
            await other.execute("DELETE FROM holdfast_chats.member WHERE user_id = 'bob'")
        assert isinstance(await sending, Acked if is_broken else NotAMember)
