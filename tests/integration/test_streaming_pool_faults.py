"""Three nodes and a real Redis that is flushed, stopped, killed or paused: replies go
on, waiting requests keep waiting, and within five seconds all is as before.

The four faults have a Redis and three nodes each, and happen at the same time. They
take their time in seconds, not in work.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from long_tier import times
from result_counts import tally

from engines import Server
from engines import redis as redis_engine
from engines.fixtures import had
from holdfast.clock import SystemClock
from holdfast.streaming.pool.contract import PoolRequest, PoolSizes, QueueBounds
from holdfast.streaming.pool.leases import NodeLeases
from holdfast.streaming.pool.memory import MemoryPool
from holdfast.streaming.pool.redis import RedisPool
from proof.results import Row

SIZES, BOUNDS = PoolSizes(12), QueueBounds(1_000, 1_000, 1_000)
PER_USER, USERS = 3, 9
ROUNDS = times(40) // 4
OUTAGE_SECONDS = 2.5
"""Longer than a node waits before it goes on alone."""
HEALED_SECONDS = 5.0


class Load:
    """More replies than can run, on three nodes; what really runs."""

    def __init__(self, nodes: dict[str, NodeLeases]) -> None:
        self.nodes = nodes
        self.running: dict[str, str] = {}
        self.most_active = 0
        self.finished = 0
        self._asked = 0
        self._rng = random.Random(1)
        self._replies: set[asyncio.Task[None]] = set()

    async def arrive(self) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(25))
            if len(self._replies) < 40:
                reply = asyncio.create_task(self._reply(self._rng.choice(list(self.nodes))))
                self._replies.add(reply)
                reply.add_done_callback(self._replies.discard)

    async def drain(self) -> None:
        while self._replies:
            await asyncio.wait(self._replies)

    async def _reply(self, node: str) -> None:
        self._asked += 1
        user = f"u{self._asked % USERS}"
        request = PoolRequest(f"r{self._asked}", "t", user, PER_USER)
        await self.nodes[node].ask(request).granted()
        self.running[request.reply_id] = node
        self.most_active = max(self.most_active, len(self.running))
        await asyncio.sleep(self._rng.uniform(0.1, 0.6))
        del self.running[request.reply_id]
        self.nodes[node].release(request.reply_id)
        self.finished += 1

    async def is_normal(self) -> bool:
        """Every node uses the shared pool, which knows what runs, and it is full."""
        if not all(node.shared_up for node in self.nodes.values()):
            return False
        running = dict(self.running)
        places = [await self.nodes["a"].locate(each) for each in running]
        still = [
            node == place
            for (each, node), place in zip(running.items(), places, strict=True)
            if each in self.running
        ]
        return all(still) and len(self.running) >= SIZES.total - 3

    async def is_normal_soon(self) -> None:
        async with asyncio.timeout(HEALED_SECONDS):
            while not await self.is_normal():  # noqa: ASYNC110 - Redis decides
                await asyncio.sleep(0.05)


@asynccontextmanager
async def nodes_of(url: str) -> AsyncIterator[dict[str, NodeLeases]]:
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        nodes = {}
        for name in "abc":
            pool = RedisPool(url, SIZES, BOUNDS)
            stack.push_async_callback(pool.close)
            nodes[name] = NodeLeases(
                name,
                pool,
                SIZES,
                clock,
                fallback=lambda n: MemoryPool(SIZES.share(n), BOUNDS.share(n), clock),
            )
            await stack.enter_async_context(nodes[name].running())
        yield nodes


async def flush(server: Server) -> None:
    redis_engine.say(server, "FLUSHALL")


async def pause(server: Server) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    await asyncio.sleep(OUTAGE_SECONDS)
    os.kill(server.pid, signal.SIGCONT)


async def stop(server: Server) -> None:
    await _end(server, signal.SIGTERM)


async def kill(server: Server) -> None:
    await _end(server, signal.SIGKILL)


async def _end(server: Server, how: signal.Signals) -> None:
    server.process.send_signal(how)
    await asyncio.to_thread(server.process.wait)
    await asyncio.sleep(OUTAGE_SECONDS)
    server.process = (await asyncio.to_thread(redis_engine.start, server.port)).process


async def suffer(fault: Callable[[Server], Awaitable[None]]) -> int:
    """The most that were active at once."""
    server = had("redis", redis_engine.start)
    try:
        async with nodes_of(server.url) as nodes:
            load = Load(nodes)
            arrivals = asyncio.create_task(load.arrive())
            await load.is_normal_soon()
            for _ in range(ROUNDS):
                finished = load.finished
                await fault(server)
                assert fault is flush or load.finished > finished, "replies go on meanwhile"
                await load.is_normal_soon()
            arrivals.cancel()
            async with asyncio.timeout(HEALED_SECONDS):
                await load.drain()
        return load.most_active
    finally:
        server.stop()


@pytest.mark.torture
@pytest.mark.long
async def test_faults_of_redis_pass_and_replies_go_on() -> None:
    began = time.monotonic()
    faults = (flush, stop, kill, pause)
    ended = await asyncio.gather(*map(suffer, faults), return_exceptions=True)
    most = {fault.__name__: end for fault, end in zip(faults, ended, strict=True)}
    print(most)
    failures = [
        name
        for name, end in most.items()
        if isinstance(end, BaseException) or end > SIZES.total * (1 if name == "flush" else 2)
    ]
    tally(
        Row(
            name="redis of replies",
            how="three nodes, and a real Redis that is flushed, stopped, killed or paused",
            runs=ROUNDS * len(faults),
            failures=len(failures),
            requirement=(
                "replies go on, waiting requests keep waiting, active ≤ 2 × total (flushed: ≤"
                " total), all as before within 5 s"
            ),
            seconds=time.monotonic() - began,
            figures={"most active of 12": str(most)},
        )
    )
