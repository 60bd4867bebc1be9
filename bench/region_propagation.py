"""How long a change takes from the primary to the nodes of another region, which has a
Redis and a replica of its own.

Two regions, each with its Redis and its follower; ten nodes of the far one read from a
streaming replica and hear their Redis alone. A change is timed from the beginning of
its transaction on the primary, a little before its commit, until a node has the rule in
force. Everything is on one machine: between regions the network's way comes on top,
once from the primary to the follower.

Two figures beside it distinguish a slow machine from a missed notification: how long
the changes themselves took until their commit was answered, and the longest time in
which the event loop did not run.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from engines import postgres, redis
from harness import percentile
from holdfast.clock import SystemClock
from holdfast.limits.feed import FeedSettings, RuleFeed
from holdfast.limits.rule_changes import Change
from holdfast.limits.rules import RuleName, RuleSet
from holdfast.limits.rulestore.postgres import (
    LogFollower,
    PostgresRuleReader,
    PostgresRuleStore,
    PostgresSettings,
)
from holdfast.limits.rulestore.redis import RedisNotifications

NODES = 10
NO_SYNC = FeedSettings(sync_seconds=3600.0, stale_seconds=7200.0)
BETWEEN_CHANGES_SECONDS = 0.15
LOOP_WATCH_SECONDS = 0.005


async def measure(quick: bool, figures: dict[str, float]) -> None:
    """Add the three figures; raises ``engines.Missing`` without PostgreSQL or Redis."""
    started = []
    try:
        started.append(primary := postgres.start(shared_buffers="32MB"))
        started.append(replica := postgres.standby(primary, shared_buffers="32MB"))
        started += [near := redis.start(), far := redis.start()]
        times = await _propagation(
            primary.url, replica.url, (near.url, far.url), 40 if quick else 300
        )
        figures["region_propagation_p99_ms"] = percentile(times.arrivals, 99) * 1000
        figures["region_propagation_commit_p99_ms"] = percentile(times.commits, 99) * 1000
        figures["region_propagation_loop_stall_max_ms"] = times.stall * 1000
    finally:
        for server in reversed(started):
            server.stop()


class _Times:
    """In seconds."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        """From the beginning of each change, at each node."""
        self.commits: list[float] = []
        self.stall = 0.0

    async def watch_loop(self) -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(LOOP_WATCH_SECONDS)
            self.stall = max(self.stall, time.perf_counter() - start - LOOP_WATCH_SECONDS)


async def _propagation(
    primary: str, replica: str, redis_urls: tuple[str, str], changes: int
) -> _Times:
    settings, name, times = PostgresSettings(primary), RuleName("acme", "send"), _Times()
    begun: dict[int, float] = {}  # by the version that a change makes

    def applied(rules: RuleSet) -> None:
        rule = rules.get(name)
        if rule is not None and rule.version in begun:
            times.arrivals.append(time.perf_counter() - begun[rule.version])

    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(PostgresRuleStore(settings))
        await store.prepare()
        followers = []
        for region, url in zip(("near", "far"), redis_urls, strict=True):
            source = RedisNotifications(url)
            stack.push_async_callback(source.aclose)
            follower = LogFollower(settings, source.publish, region=region)
            followers.append(await stack.enter_async_context(follower))
        for _ in range(NODES):
            reader = await stack.enter_async_context(
                PostgresRuleReader(PostgresSettings(replica, connections_max=1))
            )
            source = RedisNotifications(redis_urls[1])
            stack.push_async_callback(source.aclose)
            await stack.enter_async_context(
                RuleFeed(reader, [source], applied, SystemClock(), settings=NO_SYNC)
            )
        async with asyncio.timeout(30):
            while not all(follower.follows for follower in followers):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        body = {"algorithm": "token_bucket", "limit": 1, "window": "60s"}
        await store.change(Change("create", name, "bench", "", body))
        await asyncio.sleep(1.0)
        watch = asyncio.create_task(times.watch_loop())
        for version in range(1, changes + 1):
            start = begun[version + 1] = time.perf_counter()
            await store.change(Change("update", name, "bench", "", {"limit": version + 1}, version))
            times.commits.append(time.perf_counter() - start)
            await asyncio.sleep(BETWEEN_CHANGES_SECONDS)  # longer than the figure is promised to be
        await asyncio.sleep(1.0)
        watch.cancel()
    arrived = len(times.arrivals)
    assert arrived == NODES * changes, f"{arrived} of {NODES * changes} arrived"
    return times
