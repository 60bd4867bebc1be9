"""Two releases on one database: what this one runs on while nodes are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from next_release import next_schema
from store_rigs import acked, act, create, draft, send

from engines import Server
from holdfast.errors import BadSetting
from holdfast.eventlog.contract import START
from holdfast.eventlog.postgres import PostgresEventLog
from holdfast.message import Message
from holdfast.store.commands import AddMember
from holdfast.store.postgres import PostgresStore, PostgresStoreSettings
from holdfast.store.postgres.append import arguments, sorted_group
from holdfast.store.postgres.identity import ServerIdentity
from holdfast.store.postgres.schema import SCHEMA, SchemaScripts, migrate
from holdfast.telemetry import REGISTRY

ELSEWHERE = ServerIdentity("of a new schema only", 1)
APPEND_2 = "SELECT (a).* FROM holdfast_chats.append_2($1,$2,$3,$4,$5,$6,$7,$8,$9,$10,$11) AS a"


@asynccontextmanager
async def own_database(server: Server) -> AsyncIterator[PostgresStoreSettings]:
    """A database whose schema may be of any release."""
    admin = await asyncpg.connect(server.url)
    try:
        await admin.execute("DROP DATABASE IF EXISTS upgraded WITH (FORCE)")
        await admin.execute("CREATE DATABASE upgraded")
        yield PostgresStoreSettings(server.url.removesuffix("postgres") + "upgraded")
        await admin.execute("DROP DATABASE upgraded WITH (FORCE)")
    finally:
        await admin.close()


async def upgrade(settings: PostgresStoreSettings, schema: SchemaScripts) -> None:
    """As a node of that release does when it starts."""
    connection = await asyncpg.connect(settings.url)
    try:
        await migrate(connection, 16, ELSEWHERE, schema)
    finally:
        await connection.close()


async def send_by_next_release(connection: Any, key: str) -> int:
    row = await connection.fetchrow(APPEND_2, *arguments(sorted_group([draft(key)])))
    return int(row["sequences"][0])


async def test_release_goes_on_and_starts_on_the_schema_of_the_next_one(
    postgres_server: Server,
) -> None:
    async with own_database(postgres_server) as settings, PostgresStore(settings) as running:
        await create(running, "bob")
        acked(await send(running, "before"))
        await upgrade(settings, next_schema())
        newer = await asyncpg.connect(settings.url)
        try:
            async with PostgresStore(settings) as restarted:
                sequences = [
                    await send_by_next_release(newer, "by the next"),
                    acked(await send(running, "by the running one")).sequence,
                    acked(await send(restarted, "by a restarted one")).sequence,
                    await send_by_next_release(newer, "by the next again"),
                ]
                assert sequences == [2, 3, 4, 5]
                again = await restarted.append([draft("by the next")])
                assert again[0].deduplicated, "a key of either release is known to both"
                await running.change(AddMember(act(), "chat_a", "carl"))
                entries, _ = await PostgresEventLog(running).read(START, 100)
                found = [e.what.sequence for e in entries if isinstance(e.what, Message)]
                assert found == list(range(1, 7))
            written = "SELECT array_agg(release ORDER BY sequence) FROM holdfast_chats.message"
            assert await newer.fetchval(written) == [1, 2, 1, 1, 2, 1]
        finally:
            await newer.close()


async def test_nodes_of_two_releases_write_one_chat_at_once(postgres_server: Server) -> None:
    async with own_database(postgres_server) as settings, PostgresStore(settings) as older:
        await create(older)
        await upgrade(settings, next_schema())
        newer = await asyncpg.connect(settings.url)

        async def by_next() -> list[int]:
            return [await send_by_next_release(newer, f"next {n}") for n in range(50)]

        async def by_this() -> list[int]:
            return [acked(await send(older, f"this {n}")).sequence for n in range(50)]

        theirs, ours = await asyncio.gather(by_next(), by_this())
        await newer.close()
        assert sorted(theirs + ours) == list(range(1, 101))


async def test_no_release_migrates_past_the_next_one_of_a_connected_node(
    postgres_server: Server,
) -> None:
    after_next = SchemaScripts([*next_schema().migrations, "SELECT 1"], next_schema().functions)
    async with own_database(postgres_server) as settings:
        async with PostgresStore(settings) as old:
            await upgrade(settings, next_schema())
            with pytest.raises(BadSetting, match=f"up to version {SCHEMA.version} .*stop them"):
                await upgrade(settings, after_next)
            await create(old)
            acked(await send(old, "it goes on"))
        await upgrade(settings, after_next)


async def test_new_kind_of_entry_is_left_out_and_counted(postgres_server: Server) -> None:
    async with own_database(postgres_server) as settings, PostgresStore(settings) as store:
        await create(store)
        log = PostgresEventLog(store)
        before, counted = await log.end(), unknown_entries()
        newer = await asyncpg.connect(settings.url)
        await newer.execute(
            "INSERT INTO holdfast_chats.log_event (shard, position, kind, chat, epoch, at)"
            " SELECT s.shard, nextval(s.positions), 'OfTomorrow', c.chat, 0, now()"
            " FROM holdfast_chats.chat AS c JOIN holdfast_chats.shard AS s USING (shard)"
        )
        await newer.close()
        acked(await send(store, "after it"))
        entries, reached = await log.read(before, 10)
        assert [e.what.content for e in entries if isinstance(e.what, Message)] == ["hello"]
        assert len(entries) == 1 and reached == await log.end()
        assert unknown_entries() == counted + 1


def unknown_entries() -> float:
    return REGISTRY.get_sample_value("holdfast_log_entries_unknown_total") or 0.0
