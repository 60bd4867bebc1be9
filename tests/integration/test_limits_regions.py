"""Two regions, each with a Redis of its own and a replica to read from: one follower
per region publishes every change.

Nothing comes by a sync here: the interval is an hour. So what arrives was published by
the follower of the region.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from msgspec import Raw

from engines import Server, postgres
from engines import redis as redis_engine
from engines.fixtures import had
from holdfast.limits.admin import ImportRequest
from holdfast.limits.composition import LimitsParts, LimitsSettings, LimitsTuning, open_limits
from holdfast.limits.feed import FeedSettings
from holdfast.limits.rulestore.notifications import LISTENING
from holdfast.limits.rulestore.postgres import notifications
from holdfast.limits.rulestore.postgres.connection import HEARTBEAT_LOCK

RULE: dict[str, Any] = {"algorithm": "fixed_window", "limit": 1, "window": "60s"}
NAME = {"tenantID": "acme", "resource": "search"}
NO_SYNC = FeedSettings(sync_seconds=3600.0, stale_seconds=7200.0)
PATIENCE_SECONDS = 30.0
REGIONS = ("east", "west")


class Engines:
    """One primary; for each region a streaming replica and a Redis."""

    def __init__(self, started: list[Server]) -> None:
        def kept(server: Server) -> Server:
            started.append(server)
            return server

        self.primary = kept(
            postgres.start(shared_buffers="32MB", wal_receiver_status_interval="1s")
        )
        self.replica = kept(postgres.standby(self.primary, shared_buffers="32MB"))
        self.redis = {region: kept(redis_engine.start()) for region in REGIONS}

    def settings(
        self, region: str, *, redis: bool = True, replica: bool = True, one_redis: bool = False
    ) -> LimitsSettings:
        counters = self.redis["east" if one_redis else region].url if redis else "memory:"
        reads = self.replica.url if replica else ""
        return LimitsSettings(counters, self.primary.url, reads, region, feed=NO_SYNC)


@pytest.fixture(scope="module")
def engines_() -> Iterator[Engines]:
    started = list[Server]()
    try:
        yield had("postgres and redis", lambda: Engines(started))
    finally:
        for server in reversed(started):
            server.stop()


class World:
    """Nodes by name, each of a region. The first to start makes the tables."""

    def __init__(
        self, engines: Engines, folder: Path, stack: AsyncExitStack, tuning: LimitsTuning | None
    ) -> None:
        self.engines = engines
        self._tuning = tuning
        self._folder = folder
        self._stack = stack
        self._own: dict[str, AsyncExitStack] = {}
        self.nodes: dict[str, LimitsParts] = {}
        self.db: Any = None
        self._version = 0

    async def node(self, name: str, region: str, **how: bool) -> LimitsParts:
        stack = self._own[name] = await self._stack.enter_async_context(AsyncExitStack())
        chosen = self.engines.settings(region, **how)
        self.nodes[name] = await stack.enter_async_context(
            open_limits(chosen, self._folder / name, name, tuning=self._tuning)
        )
        return self.nodes[name]

    async def stop(self, name: str) -> None:
        del self.nodes[name]
        await self._own[name].aclose()

    async def change(self, limit: int) -> None:
        """By whichever node was started first: a change goes to the primary."""
        control = next(iter(self.nodes.values())).control
        if self._version == 0:
            await control.create({**NAME, **RULE, "limit": limit}, "olga")
        else:
            await control.update({**NAME, "limit": limit, "expectedVersion": self._version}, "olga")
        self._version += 1

    async def arrived(self, limit: int, *names: str) -> None:
        for name in names:
            await until(lambda name=name: limit_of(self.nodes[name]) == limit, f"{limit} at {name}")

    async def holders(self, lock: int) -> int:
        """How many sessions hold an advisory lock."""
        key = lock & 0xFFFF_FFFF_FFFF_FFFF
        return int(
            await self.db.fetchval(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid"
                " = 1 AND classid = $1::bigint::oid AND objid = $2::bigint::oid",
                key >> 32,
                key & 0xFFFF_FFFF,
            )
        )

    async def followed(self, *regions: str) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            for region in regions:
                while not await self.holders(notifications.region_lock(region)):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


def limit_of(parts: LimitsParts) -> int | None:
    rule = parts.limiter.rules.lookup("acme", "search")
    return rule.limit if rule is not None else None


async def until(condition: Callable[[], bool], what: str) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < PATIENCE_SECONDS, f"waited in vain for: {what}"
        await asyncio.sleep(0.002)


@asynccontextmanager
async def world(
    engines: Engines, folder: Path, tuning: LimitsTuning | None = None
) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        made = World(engines, folder, stack, tuning)
        made.db = await asyncpg.connect(engines.primary.url)
        stack.push_async_callback(made.db.close)
        names = ("rules", "rule_changes", "rule_keys", "rules_head", "limits_schema")
        await made.db.execute(
            "DROP TABLE IF EXISTS " + ", ".join(f"holdfast_{name}" for name in names)
        )
        async with asyncio.timeout(4 * PATIENCE_SECONDS):
            yield made


@pytest.mark.parametrize("by", ["notification", "tick"])
async def test_change_reaches_every_region_by_notification_or_by_tick(
    engines_: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    tuning = LimitsTuning()
    if by == "notification":
        tuning = LimitsTuning(follower_tick_seconds=3600.0)
    else:
        monkeypatch.setattr(notifications, "decode_notification", lambda _: LISTENING)

    async with world(engines_, tmp_path, tuning) as w:
        for region in REGIONS:
            for number in (1, 2):
                await w.node(f"{region}-{number}", region)
        await w.followed(*REGIONS)
        for limit in (10, 20, 30):
            await w.change(limit)
            await w.arrived(limit, *w.nodes)
        for region in REGIONS:
            assert await w.holders(notifications.region_lock(region)) == 1, (
                "one follower for each region"
            )
        assert await w.holders(HEARTBEAT_LOCK) == 1, "one heartbeat for all"


@pytest.mark.covers("004 each region grants the whole limit")
@pytest.mark.parametrize("one_redis", [False, True])
async def test_each_region_grants_the_whole_limit(
    engines_: Engines, tmp_path: Path, one_redis: bool
) -> None:
    async with world(engines_, tmp_path) as w:
        for region in REGIONS:
            for number in (1, 2):
                await w.node(f"{region}-{number}", region, one_redis=one_redis)
        await w.followed(*REGIONS)
        await w.change(10)
        await w.arrived(10, *w.nodes)
        subject, granted = f"ann-{one_redis}", dict.fromkeys(REGIONS, 0)
        for _ in range(10):
            for node in w.nodes.values():
                decision = await node.limiter.check("acme", "search", subject)
                granted[decision.region] += decision.allowed
        assert granted == {"east": 10, "west": 10}
        await until(lambda: all(n.limiter.nodes == 2 for n in w.nodes.values()), "its own nodes")


async def test_import_reaches_every_region_whole(engines_: Engines, tmp_path: Path) -> None:
    """Its one notification carries no rule, and the replica may not have them yet: the
    follower reads the log.
    """

    async with world(engines_, tmp_path) as w:
        for region in REGIONS:
            await w.node(region, region)
        await w.followed(*REGIONS)
        names = [f"/r{n}" for n in range(150)]
        rules = [{"tenantID": "acme", "resource": name, **RULE} for name in names]
        await w.nodes["east"].control.import_rules(
            Raw(msgspec.json.encode(rules)), "olga", ImportRequest()
        )
        for node in w.nodes.values():
            await until(
                lambda node=node: all(node.limiter.rules.lookup("acme", name) for name in names),
                "all rules",
            )


async def test_region_whose_follower_dies_gets_another_and_misses_nothing(
    engines_: Engines, tmp_path: Path
) -> None:
    async with world(engines_, tmp_path) as w:
        await w.node("east", "east")
        await w.node("west-1", "west")
        await w.followed(*REGIONS)
        await w.node("west-2", "west")
        await w.change(10)
        await w.arrived(10, *w.nodes)
        await w.stop("west-1")
        await w.change(20)  # nobody follows for the region now
        await w.arrived(20, "east", "west-2")


async def test_node_without_redis_never_follows_and_keeps_the_heartbeat(
    engines_: Engines, tmp_path: Path
) -> None:
    async with world(engines_, tmp_path) as w:
        await w.node("without", "east", redis=False)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await w.holders(HEARTBEAT_LOCK):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await w.holders(notifications.region_lock("east")) == 0
        await w.node("with", "east")
        await w.followed("east")
        await w.change(10)
        await w.arrived(10, "with")
        await w.stop("with")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await w.holders(notifications.region_lock("east")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        asked = await w.db.fetchval("SELECT now()")
        beat_at = "SELECT beat_at FROM holdfast_rules_head"
        while await w.db.fetchval(beat_at) <= asked:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # it has asked for locks twice meanwhile
        assert await w.holders(notifications.region_lock("east")) == 0
