"""How long a change takes from the primary to the nodes of another region, which has a Redis and a replica of its own.

Two regions, each with its Redis and its follower; ten nodes of the far one read from a streaming replica and hear their
Redis alone. A change is timed from the beginning of its transaction on the primary, a little before its commit, until
a node has the rule in force. Everything is on one machine: between regions the network's way comes on top, once from
the primary to the follower.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from engines import postgres, redis
from harness import percentile
from holdfast.clock import SystemClock
from holdfast.limits.changes import Change
from holdfast.limits.feed import Feed, FeedSettings
from holdfast.limits.rules import RuleName, RuleSet
from holdfast.limits.rulestore.postgres import LogFollower, PostgresRuleReader, PostgresRuleStore, PostgresSettings
from holdfast.limits.rulestore.redis import RedisBell

NODES = 10
NO_SYNC = FeedSettings(sync_seconds=3600.0, stale_seconds=7200.0)
BETWEEN_CHANGES_SECONDS = 0.15


async def measure(quick: bool, figures: dict[str, float]) -> None:
    """Adds ``region_propagation_p99_ms``. Raises ``engines.Missing`` without PostgreSQL or Redis."""
    started = []
    try:
        started.append(primary := postgres.start(shared_buffers="32MB"))
        started.append(replica := postgres.standby(primary, shared_buffers="32MB"))
        started += [near := redis.start(), far := redis.start()]
        spent = await _propagation(primary.url, replica.url, (near.url, far.url), 40 if quick else 300)
        figures["region_propagation_p99_ms"] = percentile(spent, 99) * 1000
    finally:
        for server in reversed(started):
            server.stop()


async def _propagation(primary: str, replica: str, redis_urls: tuple[str, str], changes: int) -> list[float]:
    settings, name, spent, begun = PostgresSettings(primary), RuleName("acme", "send"), list[float](), 0.0

    def applied(_: RuleSet) -> None:
        spent.append(time.perf_counter() - begun)

    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(PostgresRuleStore(settings))
        await store.prepare()
        followers = []
        for region, url in zip(("near", "far"), redis_urls, strict=True):
            bell = RedisBell(url)
            stack.push_async_callback(bell.aclose)
            follower = LogFollower(settings, bell.publish, region=region)
            followers.append(await stack.enter_async_context(follower))
        for _ in range(NODES):
            reader = await stack.enter_async_context(PostgresRuleReader(PostgresSettings(replica, connections_max=1)))
            bell = RedisBell(redis_urls[1])
            stack.push_async_callback(bell.aclose)
            await stack.enter_async_context(Feed(reader, [bell], applied, SystemClock(), settings=NO_SYNC))
        async with asyncio.timeout(30):
            while not all(follower.follows for follower in followers):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        body = {"algorithm": "token_bucket", "limit": 1, "window": "60s"}
        await store.change(Change("create", name, "bench", "", body))
        await asyncio.sleep(1.0)
        spent.clear()
        for version in range(1, changes + 1):
            begun = time.perf_counter()
            await store.change(Change("update", name, "bench", "", {"limit": version + 1}, version))
            await asyncio.sleep(BETWEEN_CHANGES_SECONDS)  # longer than the figure is promised to be
        await asyncio.sleep(1.0)
    assert len(spent) == NODES * changes, f"{len(spent)} of {NODES * changes} arrived"
    return spent
