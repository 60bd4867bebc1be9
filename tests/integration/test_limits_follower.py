"""The follower of the log, on a real PostgreSQL: how often it looks, and how much it takes at a time."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from urllib.parse import urlsplit

import asyncpg
import pytest

from engines import Server
from holdfast.errors import Unavailable
from holdfast.limits.changes import Change
from holdfast.limits.rules import RuleName
from holdfast.limits.rulestore.postgres import LogFollower, PostgresRuleStore, PostgresSettings

BODY = {"algorithm": "fixed_window", "limit": 5, "window": "60s"}
CHANGES = 450
REPEATED = """
INSERT INTO holdfast_rule_changes
SELECT place, tenant, resource, version, replace(body, '"seq":1,', '"seq":' || place || ',')
FROM holdfast_rule_changes, generate_series(2, $1::int) place WHERE seq = 1
"""


class Channel:
    """A doorbell that can be away, and says when it rang."""

    def __init__(self) -> None:
        self.away = True
        self.rang: list[float] = []
        self.tried, self.all_rang = asyncio.Event(), asyncio.Event()

    async def publish(self, payload: str) -> None:
        self.tried.set()
        if self.away:
            raise Unavailable("the doorbell is away")
        self.rang.append(asyncio.get_running_loop().time())
        if len(self.rang) == CHANGES:
            self.all_rang.set()


async def a_database(server: Server, name: str) -> str:
    """A new database of this name; its URL."""
    connection = await asyncpg.connect(server.url)
    await connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    await connection.execute(f"CREATE DATABASE {name}")
    await connection.close()
    return urlsplit(server.url)._replace(path=f"/{name}").geturl()


@pytest.mark.seed("004 scenario 4: tick 100 ms, 100 rows")
def test_the_publisher_ticks_and_reads_as_the_document_says(postgres_server: Server) -> None:
    async def main() -> None:
        settings, channel = PostgresSettings(await a_database(postgres_server, "followed")), Channel()
        async with PostgresRuleStore(settings) as store:
            await store.prepare()
            await store.change(Change("create", RuleName("acme", "/"), "olga", "", BODY))
            async with LogFollower(settings, channel.publish):
                await asyncio.wait_for(channel.tried.wait(), 30)
                async with store.database.committing("be written") as db:
                    await db.execute(REPEATED, CHANGES)
                channel.away = False
                await asyncio.wait_for(channel.all_rang.wait(), 30)
        gaps = [later - earlier for earlier, later in pairwise(channel.rang)]
        ticks = [place for place, gap in enumerate(gaps, 1) if gap > 0.04]
        expected = {100, 200, 300, 400}
        assert expected <= set(ticks) and len(ticks) < 2 * len(expected), (
            "a hundred at a time, on a machine that may pause"
        )
        assert 0.09 < min(gaps[place - 1] for place in expected) < 0.18, "a tenth of a second apart"

    asyncio.run(main())
