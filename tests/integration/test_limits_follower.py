"""The follower of the log, on a real PostgreSQL: how often it looks, and how much it
takes at a time.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from engines import Server
from holdfast.errors import Unavailable
from holdfast.limits.rule_changes import Change
from holdfast.limits.rules import RuleName
from holdfast.limits.rulestore.postgres import (
    LogFollower,
    PostgresRuleStore,
    PostgresSettings,
    notifications,
)

BODY = {"algorithm": "fixed_window", "limit": 5, "window": "60s"}
CHANGES = 450
REPEATED = """
INSERT INTO holdfast_rule_changes
SELECT place, tenant, resource, version, replace(body, '"seq":1,', '"seq":' || place || ',')
FROM holdfast_rule_changes, generate_series(2, $1::int) place WHERE seq = 1
"""


class Channel:
    """Publishing fails until ``may_recover``; records publications and pauses."""

    def __init__(self) -> None:
        self.unavailable, self.may_recover = True, False
        self.heard: list[int | float] = []
        """A 1 for each publication, and the seconds of each pause."""
        self.tried, self.all_published = asyncio.Event(), asyncio.Event()

    async def publish(self, payload: str) -> None:
        self.tried.set()
        if self.unavailable:
            self.unavailable = not self.may_recover
            raise Unavailable("cannot publish")
        self.heard.append(1)
        if self.heard.count(1) == CHANGES:
            self.all_published.set()

    async def sleep(self, seconds: float) -> None:
        if not self.unavailable:
            self.heard.append(seconds)
        await asyncio.sleep(seconds)

    def __getattr__(self, name: str) -> Any:
        """All else that ``asyncio`` has."""
        return getattr(asyncio, name)


async def a_database(server: Server, name: str) -> str:
    """A new database of this name; its URL."""
    connection = await asyncpg.connect(server.url)
    await connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    await connection.execute(f"CREATE DATABASE {name}")
    await connection.close()
    return urlsplit(server.url)._replace(path=f"/{name}").geturl()


@pytest.mark.covers("004 tick 100 ms, 100 rows")
async def test_publisher_reads_in_the_rhythm_of_the_design_document(
    postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, channel = (
        PostgresSettings(await a_database(postgres_server, "followed"), timeout_seconds=30),
        Channel(),
    )
    monkeypatch.setattr(notifications, "asyncio", channel)
    async with PostgresRuleStore(settings) as store:
        await store.prepare()
        await store.change(Change("create", RuleName("acme", "/"), "olga", "", BODY))
        async with LogFollower(settings, channel.publish):
            await asyncio.wait_for(channel.tried.wait(), 30)
            async with store.database.committing("be written") as db:
                await db.execute(REPEATED, CHANGES)
            channel.may_recover = True
            await asyncio.wait_for(channel.all_published.wait(), 30)
    heard = [*[0.1, *[1] * 100] * 4, 0.1, *[1] * 50]
    assert channel.heard[: len(heard)] == heard, "a hundred at a time, a tenth of a second apart"
