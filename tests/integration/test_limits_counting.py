"""Limits that count in a real Redis: what slips through on the way there, and what is
known after it forgot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import redis.asyncio

from engines import Server
from holdfast.clock import SystemClock
from holdfast.limits.counters.redis import RedisCounters, RedisSettings
from holdfast.limits.entry_points import EntryPoints
from holdfast.limits.limiter.batch import BatchSettings
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.limiter.settings import LimiterSettings, NodeIdentity
from holdfast.limits.rules import Check, Rule, RuleSet
from holdfast.message import User

QUICK = LimiterSettings(heartbeat_seconds=0.1, node_ttl_seconds=60.0)
PATIENT = LimiterSettings(batch=BatchSettings(deadline_seconds=30.0))
"""Redis may take its time, as on a busy machine."""


async def test_uncounted_sends_of_many_connections_pass_only_once(redis_server: Server) -> None:
    counters = RedisCounters(RedisSettings(redis_server.url, prefix="slip"))
    rules = RuleSet.of([Rule("*", "send:user", "token_bucket", 60, 3600.0, burst_size=10)])
    limiter = Limiter(counters, SystemClock(), PATIENT, rules)
    points, sent = EntryPoints(limiter), 0
    for _ in range(15):  # five connections, ten sends of each in a turn
        sent += sum(points.admit_at_once("send", User("acme", "ann"), 10)[0] for _ in range(5))
        await _until(lambda: limiter._remote.batcher.idle)
    await counters.aclose()
    assert sent == 50, "one round trip's worth, and then it is paid back"


async def test_emptied_redis_does_not_lower_the_node_count(
    redis_server: Server,
) -> None:
    client = redis.asyncio.Redis.from_url(redis_server.url)
    async with AsyncExitStack() as stack:
        nodes = []
        for n in range(5):
            counters = RedisCounters(RedisSettings(redis_server.url, prefix="emptied"))
            stack.push_async_callback(counters.aclose)
            limiter = Limiter(counters, SystemClock(), QUICK, node=NodeIdentity(f"n{n}"))
            nodes.append(await stack.enter_async_context(limiter))
        await _until(lambda: all(node.nodes == 5 for node in nodes))
        for _ in range(5):
            await client.delete("emptied:nodes")
            async with asyncio.timeout(30):
                while await client.zcard("emptied:nodes") < 5:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)  # until each has seen fewer
            assert [node.nodes for node in nodes] == [5] * 5
    await client.aclose()


async def test_each_loss_of_counters_grants_one_more_limit_at_most(
    redis_server: Server,
) -> None:
    """FLUSHALL, a restart without persistence, a failover to an empty replica: the
    bound that the guide names.
    """
    client = redis.asyncio.Redis.from_url(redis_server.url)
    counters, limit = RedisCounters(RedisSettings(redis_server.url, prefix="flushed")), 50
    rules = RuleSet.of(
        [Rule("acme", name, "fixed_window", limit, 366 * 86_400.0) for name in ("x", "kept")]
    )
    remembers, admitted = Limiter(counters, SystemClock(), PATIENT, rules), 0
    await asyncio.gather(*(remembers.check("acme", "kept", "ann") for _ in range(limit + 1)))
    for losses in range(4):
        # these remember no refusal
        fresh = [Limiter(counters, SystemClock(), PATIENT, rules) for _ in range(2)]
        asked = [node.check("acme", "x", "ann") for node in fresh for _ in range(2 * limit)]
        admitted += sum(decision.allowed for decision in await asyncio.gather(*asked))
        assert admitted == limit * (1 + losses)
        await client.flushall()
        assert not (await remembers.check("acme", "kept", "ann")).allowed, (
            "who remembers a refusal keeps to it"
        )
    await counters.aclose()
    await client.aclose()


async def test_reset_subject_is_admitted_by_every_node_within_a_heartbeat(
    redis_server: Server,
) -> None:
    rules, ann = (
        RuleSet.of([Rule("acme", "x", "fixed_window", 5, 366 * 86_400.0)]),
        Check("acme", "x", "ann"),
    )
    settings = LimiterSettings(heartbeat_seconds=0.1, batch=PATIENT.batch)
    async with AsyncExitStack() as stack:
        nodes = []
        for name in ("a", "b"):
            counters = RedisCounters(RedisSettings(redis_server.url, prefix="reset"))
            stack.push_async_callback(counters.aclose)
            limiter = Limiter(counters, SystemClock(), settings, rules, NodeIdentity(name))
            nodes.append(await stack.enter_async_context(limiter))
        for node in nodes:
            while (await node.check(*ann)).allowed:
                pass
        await nodes[0].reset(ann)
        standing = await nodes[1].peek(ann)
        assert standing is not None and standing.used == 0
        async with asyncio.timeout(30):
            while not (await nodes[1].check(*ann)).allowed:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # until it has heard of it
        assert (await nodes[0].check(*ann)).remaining == 3


async def test_hold_is_released_once_and_only_if_it_exists(redis_server: Server) -> None:
    counters, ann = (
        RedisCounters(RedisSettings(redis_server.url, prefix="hold")),
        Check("acme", "x", "ann"),
    )
    rules = RuleSet.of([Rule("acme", "x", "concurrency", 1, 60.0)])
    limits = Limiter(counters, SystemClock(), PATIENT, rules)
    held = await limits.check(*ann)
    assert not await limits.release(ann, "nonsense")
    assert [await limits.release(ann, held.hold) for _ in range(2)] == [True, False]
    await counters.aclose()


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - there is no event for what another process does
            await asyncio.sleep(0.01)
