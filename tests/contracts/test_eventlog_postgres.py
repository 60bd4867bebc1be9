"""What reading the log of many nodes costs: every node reads all of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from store_rigs import PostgresRig, create, draft, fill

from engines import Server
from holdfast.eventlog.contract import START
from holdfast.eventlog.postgres import PostgresEventLog
from holdfast.message import LogEntry, Message

BACKLOG = 2_000
LIMIT = 20


@pytest.fixture
def rig(postgres_server: Server) -> PostgresRig:
    return PostgresRig(postgres_server.url)


async def two_shards(store: Any) -> tuple[str, str]:
    """A chat with a backlog, and one of another shard."""
    await create(store, chat_id="chat_0")
    others = (f"chat_{n}" for n in range(1, 100))
    other = next(c for c in others if store.lane(c) != store.lane("chat_0"))
    await create(store, chat_id=other)
    for n in range(0, BACKLOG, 500):
        await store.append([draft(f"{n}-{k}", chat_id="chat_0") for k in range(500)])
    return "chat_0", other


def messages(entries: list[LogEntry], chat_id: str) -> list[int]:
    found = [e.what for e in entries if e.chat_id == chat_id]
    return [m.sequence for m in found if isinstance(m, Message)]


async def test_shard_with_a_backlog_leaves_the_others_their_share(rig: PostgresRig) -> None:
    async with rig.open() as store:
        busy, quiet = await two_shards(store)
        await fill(store, 3, quiet)
        log = PostgresEventLog(store)
        entries, reached = await log.read(START, LIMIT)
        assert messages(entries, quiet) == [1, 2, 3]
        read = messages(entries, busy)
        assert len(entries) == LIMIT and read == list(range(1, len(read) + 1)), "a full page"
        entries, _ = await log.read(reached, LIMIT)
        assert messages(entries, busy)[0] == len(read) + 1 and len(entries) == LIMIT


class CountedSource:
    """A store whose calls are counted."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.poll_seconds = 100.0
        self.reads = self.looks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def read_log(self, *values: Any) -> Any:
        self.reads += 1
        return await self._store.read_log(*values)

    async def log_ends(self) -> Any:
        self.looks += 1
        return await self._store.log_ends()


async def test_entry_that_arrives_costs_its_reader_one_statement(rig: PostgresRig) -> None:
    async with rig.open() as store:
        await create(store)
        source = CountedSource(store)
        log = PostgresEventLog(source)
        position = await log.end()
        source.looks = 0
        for n in range(5):
            waiting = asyncio.ensure_future(log.wait(position))
            await store.append([draft(f"k{n}")])
            await waiting
            entries, position = await log.read(position, 10)
            assert messages(list(entries), "chat_a") == [n + 1]
        assert source.reads == 5
        assert source.looks <= 1, "when the subscription began"
