"""What a send costs the server while another program keeps a transaction open: the dead
versions of a busy chat cannot be removed until it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

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


@pytest.fixture
def server() -> Iterator[Server]:
    """A server of its own, so that what it works is ours."""
    started = had("postgres", postgres.start)
    yield started
    started.stop()


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


@pytest.mark.torture
@pytest.mark.alone
async def test_open_transaction_does_not_make_sends_of_a_busy_chat_dear(server: Server) -> None:
    async with PostgresStore(PostgresStoreSettings(server.url)) as store:
        await create(store)

        async def cost(name: str) -> float:
            before = server.cpu_seconds()
            for n in range(MEASURED_GROUPS):
                group = [draft(f"{name}-{n}-{i}") for i in range(SENDS)]
                acked((await store.append(group))[-1])
            return server.cpu_seconds() - before

        await cost("warm")
        free = await cost("free")
        other = await asyncpg.connect(server.url)
        await other.execute("CREATE TABLE something (n integer)")
        async with other.transaction():
            await other.execute("INSERT INTO something VALUES (1)")
            began, sends = time.monotonic(), int(GROUPS_PER_SECOND * OPEN_SECONDS)
            await change_often(server, max(COMMITS - sends, 0))
            for n in range(sends):
                acked((await store.append([draft(f"meanwhile-{n}")]))[0])
                await asyncio.sleep(began + (n + 1) / GROUPS_PER_SECOND - time.monotonic())
            held = await cost("held")
        await other.close()
    assert held < RATIO_MAX * free, f"{held:.2f} s of the server's CPU, {free:.2f} s before"
    tally(
        Row(
            "transaction of another program open",
            f"for {OPEN_SECONDS:.0f} s and {COMMITS:,} commits of a chat; sends in groups of 16",
            MEASURED_GROUPS,
            0,
            f"the server's CPU per message below {RATIO_MAX} x",
            figures={"CPU": f"{held / free:.2f} x"},
        )
    )
