"""A node that is cut off in the middle of a send, after it asked for the commit and
before it ended its request: it holds no lock, and others write to the same chat at
once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Self

import asyncpg
import pytest
from store_rigs import PostgresRig, acked, create, send
from work_rigs import until

from engines import Server
from holdfast.errors import OutcomeUnknown
from holdfast.store.postgres import PostgresStore, PostgresStoreSettings

LAST_WORD = "the last word"
AT_ONCE_SECONDS = 1.0
LOCKS = """
SELECT count(*) FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation
 WHERE c.relnamespace = 'holdfast_chats'::regnamespace AND l.pid <> pg_backend_pid()
"""
STORED = "SELECT count(*) = 1 FROM holdfast_chats.message WHERE content = $1"


class CutBeforeSync:
    """Passes PostgreSQL's protocol on, until a Bind carries the last word: of that
    request it passes Bind and Execute, and of that connection nothing more.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self.is_cut, self.give_up = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        self.url = f"postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable"
        try:
            yield self
        finally:
            server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        answers = asyncio.create_task(self._answers(far_reader, writer))
        with suppress(OSError, asyncio.IncompleteReadError):
            await self._requests(reader, far_writer)
        answers.cancel()
        for each in (writer, far_writer):
            each.transport.abort()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readexactly(4)  # the first message has no type
        writer.write(head + await reader.readexactly(int.from_bytes(head, "big") - 4))
        is_last = False
        while True:
            kind, length = await reader.readexactly(1), await reader.readexactly(4)
            body = await reader.readexactly(int.from_bytes(length, "big") - 4)
            is_last = is_last or (kind == b"B" and LAST_WORD.encode() in body)
            writer.write(kind + length + body)
            if is_last and kind == b"E":
                self.is_cut.set()
                await self.give_up.wait()
                return


async def test_node_that_is_cut_off_between_execute_and_sync_holds_no_lock(
    postgres_server: Server,
) -> None:
    rig = PostgresRig(postgres_server.url)
    async with (
        CutBeforeSync(postgres_server.port).serving() as wire,
        rig.open() as free,
        PostgresStore(PostgresStoreSettings(wire.url)) as cut,
    ):
        await create(free)
        acked(await send(cut, "before"))
        sending = asyncio.ensure_future(send(cut, "last", LAST_WORD))
        await wire.is_cut.wait()
        other = await asyncpg.connect(postgres_server.url)
        await until(lambda: other.fetchval(STORED, LAST_WORD))
        began = time.monotonic()
        assert acked(await send(free, "after")).sequence == 3
        assert time.monotonic() - began < AT_ONCE_SECONDS
        assert await other.fetchval(LOCKS) == 0
        await other.close()
        again = await send(free, "last", LAST_WORD)
        assert again.deduplicated and acked(again).sequence == 2
        assert not sending.done()
        wire.give_up.set()
        with pytest.raises(OutcomeUnknown):
            await sending
