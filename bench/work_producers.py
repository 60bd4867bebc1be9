"""The producers of ``bench/work.py``: transactions per second that store jobs, beside
one that is held open.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack
from typing import Any

import asyncpg

from harness import median
from holdfast.work.job import JobDraft
from holdfast.work.outbox import enqueue
from holdfast.work.postgres import PostgresWork

PRODUCERS = 16
STREAMS = 10_000
STREAMS_PER_TRANSACTION = (1, 5)


async def held_transaction_ratio(url: str, rounds: int, seconds: float) -> float:
    """Commits per second of 16 producers while another transaction, which has enqueued
    one job of a stream of its own, stays open, to those without; the smaller of 1 and 5
    streams per transaction.
    """
    store = await PostgresWork.open(url)
    try:
        async with AsyncExitStack() as stack:
            connections = [await asyncpg.connect(url) for _ in range(PRODUCERS + 1)]
            for connection in connections:
                stack.push_async_callback(connection.close)
            return min(
                [await _ratio(connections, n, rounds, seconds) for n in STREAMS_PER_TRANSACTION]
            )
    finally:
        await store.close()


async def _ratio(connections: list[Any], streams: int, rounds: int, seconds: float) -> float:
    """The median of the rounds' ratios; the order within a round changes."""
    holder, *producers = connections
    await _commits(producers, streams, seconds)  # plans and caches are warm
    ratios = []
    for number in range(rounds):
        rates = {}
        for held in (number % 2 == 0, number % 2 == 1):
            if not held:
                rates[held] = await _commits(producers, streams, seconds)
                continue
            transaction = holder.transaction()
            await transaction.start()
            await enqueue(holder, JobDraft("Piece", b"{}", "held"))
            rates[held] = await _commits(producers, streams, seconds)
            await transaction.rollback()
        ratios.append(rates[True] / rates[False])
    return median(ratios)


async def _commits(producers: list[Any], streams: int, seconds: float) -> float:
    end, started = time.perf_counter() + seconds, time.perf_counter()

    async def produce(number: int, connection: Any) -> int:
        rng, commits = random.Random(number), 0
        while time.perf_counter() < end:
            drafts = [
                JobDraft("Piece", b"{}", f"p{stream}")
                for stream in rng.sample(range(STREAMS), streams)
            ]
            async with connection.transaction():
                await enqueue(connection, *drafts)
            commits += 1
        return commits

    commits = await asyncio.gather(
        *(produce(number, each) for number, each in enumerate(producers))
    )
    return sum(commits) / (time.perf_counter() - started)
