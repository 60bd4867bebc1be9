"""What a send costs the server while another program keeps a transaction open: the dead
versions of a busy chat cannot be removed until it ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
from store_rigs import acked, create, draft

from engines import Server, postgres
from engines.fixtures import had
from holdfast.store.postgres import PostgresStore, PostgresStoreSettings

COMMITS = 10_000
"""Of a minute with 170 groups a second."""
MEASURED_GROUPS = 250
SENDS = 16


@pytest.fixture
def server() -> Iterator[Server]:
    """A server of its own, so that what it works is ours."""
    started = had("postgres", postgres.start)
    yield started
    started.stop()


def cpu_seconds(server: Server) -> float:
    """What the processes of a server have used."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if server.pid in (int(fields[1]), int(stat.parent.name)):
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def change_often(server: Server) -> None:
    """Leave as many versions of the chat's row as so many groups would."""
    connection = await asyncpg.connect(server.url)
    await connection.execute("SET synchronous_commit = off")
    await connection.execute(
        f"DO $$ BEGIN FOR n IN 1..{COMMITS} LOOP"
        " UPDATE holdfast_chats.chat SET active_at = clock_timestamp(); COMMIT;"
        " END LOOP; END $$"
    )
    await connection.close()


@pytest.mark.alone
async def test_open_transaction_does_not_make_sends_of_a_busy_chat_dear(server: Server) -> None:
    async with PostgresStore(PostgresStoreSettings(server.url)) as store:
        await create(store)

        async def cost(name: str) -> float:
            before = cpu_seconds(server)
            for n in range(MEASURED_GROUPS):
                group = [draft(f"{name}-{n}-{i}") for i in range(SENDS)]
                acked((await store.append(group))[-1])
            return cpu_seconds(server) - before

        await cost("warm")
        free = await cost("free")
        other = await asyncpg.connect(server.url)
        await other.execute("CREATE TABLE something (n integer)")
        async with other.transaction():
            await other.execute("INSERT INTO something VALUES (1)")
            await change_often(server)
            held = await cost("held")
        await other.close()
        assert held < 1.5 * free, f"{held:.2f} s of the server's CPU, {free:.2f} s before"
