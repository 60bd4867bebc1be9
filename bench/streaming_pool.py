"""What an operation of the pool costs Redis: 10,000 leases and 10,000 waiting requests.

CPU of Redis's main thread, by INFO, over all that a call needs: parsing, the script,
the wake-up of a granted node, the answer. Each kind is measured with one operation a
call, as on quiet nodes, and with 16, as on busy ones:

- admit: requests that wait, of 1,000 users in 20 tenants
- release: of requests that wait
- grant: a lease is released and the next request granted, with its wake-up

``pool_us_per_op`` is the mean of the three with 16 operations a call.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

import redis.asyncio
import uvloop

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from engines import redis as redis_engine  # noqa: E402
from holdfast.streaming.pool.contract import (  # noqa: E402
    Admit,
    Confirm,
    NodeBeat,
    PoolRequest,
    PoolSizes,
    QueueBounds,
    Release,
)
from holdfast.streaming.pool.redis import RedisPool  # noqa: E402

LEASES = WAITING = 10_000
NODES = ("a", "b", "c")
CHUNK = 480
"""Operations between two heartbeats of all nodes, so that they get grants."""


class Load:
    """A full pool, and the ids of what runs and waits there."""

    def __init__(self, url: str) -> None:
        self._client = redis.asyncio.Redis.from_url(url)
        self._pool = RedisPool(
            url, PoolSizes(LEASES), QueueBounds(10 * WAITING, 10 * WAITING, 10 * WAITING)
        )
        self._numbers = itertools.count()
        self._turns = itertools.cycle(NODES)
        self.leases: dict[str, list[str]] = {node: [] for node in NODES}
        self.waiting: dict[str, list[str]] = {node: [] for node in NODES}

    async def fill(self) -> None:
        await self.settle()
        await asyncio.sleep(3.0)  # a new pool waits for its nodes
        await self.settle()
        for _ in range((LEASES + WAITING) // 100):
            await self.admit(100)

    async def admit(self, count: int) -> None:
        node = self._node()
        requests = [self._request() for _ in range(count)]
        answers = await self._pool.call(node, [Admit(request) for request in requests])
        for request, answer in zip(requests, answers, strict=True):
            lists = self.leases if getattr(answer, "leased", False) else self.waiting
            lists[node].append(request.reply_id)

    async def release_waiting(self, count: int) -> None:
        node = self._node()
        ids = [self.waiting[node].pop(0) for _ in range(count)]
        await self._pool.call(node, [Release(each) for each in ids])

    async def release_leases(self, count: int) -> None:
        """Each is the turn of another request."""
        node = self._node()
        ids = [self.leases[node].pop(0) for _ in range(count)]
        await self._pool.call(node, [Release(each) for each in ids])

    async def settle(self) -> None:
        """Heartbeats of all nodes; they confirm their grants."""
        for node in NODES:
            granted = list((await self._pool.beat(node, NodeBeat(0, 0, 0, 0))).granted)
            for at in range(0, len(granted), 100):
                await self._pool.call(node, [Confirm(each) for each in granted[at : at + 100]])
            self.leases[node].extend(granted)
            gone = set(granted)
            self.waiting[node] = [each for each in self.waiting[node] if each not in gone]

    async def cpu_us(self) -> float:
        info = await self._client.info("cpu")
        return 1e6 * float(info["used_cpu_user_main_thread"] + info["used_cpu_sys_main_thread"])

    async def close(self) -> None:
        await self._pool.close()
        await self._client.aclose()

    def _node(self) -> str:
        return next(self._turns)

    def _request(self) -> PoolRequest:
        number = next(self._numbers)
        user = number % 1_000
        return PoolRequest(f"rpl_{number:026}", f"tenant{user % 20}", f"user{user}", 0)


async def us_per_op(
    load: Load, work: Callable[[int], Awaitable[None]], operations: int, batch: int
) -> float:
    """The median of chunks: other processes spoil the caches of some."""
    spent_us = []
    for _ in range(operations // CHUNK):
        before = await load.cpu_us()
        for _ in range(CHUNK // batch):
            await work(batch)
        spent_us.append((await load.cpu_us() - before) / CHUNK)
        await load.settle()
    return median(spent_us)


async def measure(url: str, operations: int = 3_360) -> dict[str, float]:
    """Figures of an empty Redis at ``url``."""
    load = Load(url)
    await load.fill()
    kinds = {"admit": load.admit, "release": load.release_waiting, "grant": load.release_leases}
    figures = {
        f"{kind}_{batch}": await us_per_op(load, work, operations, batch)
        for batch in (1, 16)
        for kind, work in kinds.items()
    }
    figures["pool_us_per_op"] = sum(figures[f"{kind}_16"] for kind in kinds) / len(kinds)
    await load.close()
    return figures


def main() -> None:
    server = redis_engine.start()
    try:
        for name, us in uvloop.run(measure(server.url)).items():
            print(f"{name:20} {us:6.1f} µs")
    finally:
        server.stop()


if __name__ == "__main__":
    main()
