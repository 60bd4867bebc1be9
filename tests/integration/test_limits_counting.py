"""Limits that count in a real Redis: what slips through on the way there, and what is known after it forgot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import redis.asyncio

from engines import Server
from holdfast.clock import SystemClock
from holdfast.limits.batch import BatchSettings
from holdfast.limits.counters.redis import RedisCounters, RedisSettings
from holdfast.limits.entrances import Entrances
from holdfast.limits.limiter import Limiter, LimiterSettings, Place
from holdfast.limits.rules import Check, Rule, RuleSet
from holdfast.message import User

QUICK = LimiterSettings(heartbeat_seconds=0.1, node_ttl_seconds=60.0)
PATIENT = LimiterSettings(batch=BatchSettings(deadline_seconds=30.0))
"""Redis may take its time, as on a busy machine."""


def test_sends_of_many_connections_slip_through_once(redis_server: Server) -> None:
    async def main() -> None:
        counters = RedisCounters(RedisSettings(redis_server.url, prefix="slip"))
        rules = RuleSet.of([Rule("*", "send:user", "token_bucket", 60, 3600.0, burst_size=10)])
        limiter = Limiter(counters, SystemClock(), PATIENT, rules)
        doors, sent = Entrances(limiter), 0
        for _ in range(15):  # five connections, ten sends of each in a turn
            sent += sum(doors.admit_at_once("send", User("acme", "ann"), 10)[0] for _ in range(5))
            await _until(lambda: limiter._batcher.idle)
        await counters.aclose()
        assert sent == 50, "one round trip's worth, and then it is paid back"

    asyncio.run(main())


def test_a_redis_that_was_emptied_does_not_make_nodes_think_that_they_are_alone(redis_server: Server) -> None:
    async def main() -> None:
        client = redis.asyncio.Redis.from_url(redis_server.url)
        async with AsyncExitStack() as stack:
            nodes = []
            for n in range(5):
                counters = RedisCounters(RedisSettings(redis_server.url, prefix="emptied"))
                stack.push_async_callback(counters.aclose)
                limiter = Limiter(counters, SystemClock(), QUICK, place=Place(f"n{n}"))
                nodes.append(await stack.enter_async_context(limiter))
            await _until(lambda: all(node.nodes == 5 for node in nodes))
            for _ in range(5):
                await client.delete("emptied:nodes")
                async with asyncio.timeout(30):
                    while await client.zcard("emptied:nodes") < 5:  # noqa: ASYNC110 - until each has seen fewer
                        await asyncio.sleep(0.001)
                assert [node.nodes for node in nodes] == [5] * 5
        await client.aclose()

    asyncio.run(main())


def test_a_hold_is_released_once_and_only_if_it_is_one(redis_server: Server) -> None:
    async def main() -> None:
        counters, ann = RedisCounters(RedisSettings(redis_server.url, prefix="hold")), Check("acme", "x", "ann")
        rules = RuleSet.of([Rule("acme", "x", "concurrency", 1, 60.0)])
        limits = Limiter(counters, SystemClock(), PATIENT, rules)
        held = await limits.check(*ann)
        assert not await limits.release(ann, "nonsense")
        assert [await limits.release(ann, held.hold) for _ in range(2)] == [True, False]
        await counters.aclose()

    asyncio.run(main())


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - there is no event for what another process does
            await asyncio.sleep(0.01)
