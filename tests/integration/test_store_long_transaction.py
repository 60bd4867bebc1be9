"""What a send costs the server while another program keeps a transaction open: the dead
versions of a busy chat cannot be removed until it ends. Beside it a server without that
transaction gets the same sends: a machine may be twice as fast a minute later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack

import asyncpg
import pytest
from long_tier import IS_LONG
from result_counts import tally
from store_rigs import acked, create, draft

from engines import Server, postgres
from engines.fixtures import had
from holdfast.store.postgres import PostgresStore, PostgresStoreSettings
from proof.results import Row

OPEN_SECONDS = 60.0 if IS_LONG else 10.0
GROUPS_PER_SECOND = 170
COMMITS = 10_000
"""Of the chat meanwhile: those of a minute. What the time is too short for comes first."""
RATIO_MAX = 1.5
MEASURED_GROUPS = 400
SENDS = 16
TURNS = 10


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """Two servers of their own, so that what they work is ours."""
    started = [had("postgres", postgres.start) for _ in range(2)]
    yield started
    for server in started:
        server.stop()


async def change_often(server: Server, times: int) -> None:
    """Leave as many versions of the chat's row as so many groups would."""
    connection = await asyncpg.connect(server.url)
    await connection.execute("SET synchronous_commit = off")
    await connection.execute(
        f"DO $$ BEGIN FOR n IN 1..{times} LOOP"
        " UPDATE holdfast_chats.chat SET active_at = clock_timestamp(); COMMIT;"
        " END LOOP; END $$"
    )
    await connection.close()


async def cost(server: Server, store: PostgresStore, name: str) -> float:
    """Of a turn's groups, in seconds of the server."""
    before = server.cpu_seconds()
    for n in range(MEASURED_GROUPS // TURNS):
        group = [draft(f"{name}-{n}-{i}") for i in range(SENDS)]
        acked((await store.append(group))[-1])
    return server.cpu_seconds() - before


@pytest.mark.torture
@pytest.mark.alone
async def test_open_transaction_does_not_make_sends_of_a_busy_chat_dear(
    servers: list[Server],
) -> None:
    async with AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(PostgresStore(PostgresStoreSettings(server.url)))
            for server in servers
        ]
        for server, store in zip(servers, stores, strict=True):
            await create(store)
            for turn in range(TURNS):
                await cost(server, store, f"warm-{turn}")
        other = await asyncpg.connect(servers[0].url)
        await other.execute("CREATE TABLE something (n integer)")
        async with other.transaction():
            await other.execute("INSERT INTO something VALUES (1)")
            began, sends = time.monotonic(), int(GROUPS_PER_SECOND * OPEN_SECONDS)
            for server in servers:
                await change_often(server, max(COMMITS - sends, 0))
            for n in range(sends):
                both = [store.append([draft(f"meanwhile-{n}")]) for store in stores]
                for outcomes in await asyncio.gather(*both):
                    acked(outcomes[0])
                await asyncio.sleep(began + (n + 1) / GROUPS_PER_SECOND - time.monotonic())
            held, free = 0.0, 0.0
            for turn in range(TURNS):
                held += await cost(servers[0], stores[0], f"held-{turn}")
                free += await cost(servers[1], stores[1], f"free-{turn}")
        await other.close()
    assert held < RATIO_MAX * free, f"{held:.2f} s of the server's CPU, {free:.2f} s of another's"
    tally(
        Row(
            "transaction of another program open",
            f"for {OPEN_SECONDS:.0f} s and {COMMITS:,} commits of a chat; sends in groups of 16",
            MEASURED_GROUPS,
            0,
            f"the server's CPU per message below {RATIO_MAX} x that of a server without it",
            figures={"CPU": f"{held / free:.2f} x"},
        )
    )
