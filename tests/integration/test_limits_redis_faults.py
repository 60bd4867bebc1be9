"""A Redis that is flushed, stopped, killed or put back as it was earlier: what limits
admit, counted over many runs.

Redis holds nothing that cannot be rebuilt. Losing it costs at most one more limit, its
absence at most another (the shares of all nodes), nobody waits for it, and nobody is
stopped by it.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from redis_faults import FaultyRedis, RedisFault
from result_counts import tally

from holdfast.clock import SystemClock
from holdfast.limits.counters.redis import RedisCounters, RedisSettings
from holdfast.limits.limiter.batch import BatchSettings
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.limiter.settings import LimiterSettings, NodeIdentity
from holdfast.limits.rules import Rule, RuleSet
from holdfast.resilience import BreakerSettings
from proof.results import Row

RUNS = int(os.environ.get("HOLDFAST_REDIS_FAULTS", "100"))
LIMIT = 50
RULES = RuleSet.of([Rule("acme", "search", "fixed_window", LIMIT, 366 * 86_400.0)])
SETTINGS = LimiterSettings(
    heartbeat_seconds=0.05,
    node_ttl_seconds=5.0,
    batch=BatchSettings(
        breaker=BreakerSettings(3, failure_window_seconds=1.0, open_duration_seconds=0.1)
    ),
)
ANSWER_SECONDS_MAX = 5.5
PATIENCE_SECONDS = 30.0
OUTAGE_SECONDS = 0.1
LOST = {"flush", "kill", "old RDB"}
"""After these, what was counted since some moment is forgotten."""
OUTAGES = {"stop", "kill", "old RDB"}
FAULTS: tuple[RedisFault, ...] = ("flush", "stop", "kill", "old RDB")


class Nodes:
    """Two that share the counters; what they answered, and the slowest answer."""

    def __init__(self, limiters: list[Limiter]) -> None:
        self._limiters = limiters
        self.answers = 0
        self.alone = 0
        """Answers without Redis: on a busy machine one may be slower than the deadline
        also while all is well.
        """
        self.slowest = 0.0

    async def admitted(self, count: int, subject: str) -> int:
        """Ask so often, in turn on each node, all at once."""
        chosen = [self._limiters[turn % len(self._limiters)] for turn in range(count)]
        return sum(await asyncio.gather(*[self._ask(limiter, subject) for limiter in chosen]))

    async def counted(self, count: int, subject: str) -> int:
        """The same by Redis alone; if it was too slow, again for another subject."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                before, subject = self.alone, f"{subject}'"
                admitted = await self.admitted(count, subject)
                if self.alone == before:
                    return admitted

    async def _ask(self, limiter: Limiter, subject: str) -> bool:
        began = time.monotonic()
        decision = await limiter.check("acme", "search", subject)
        self.answers += 1
        self.alone += decision.degraded
        self.slowest = max(self.slowest, time.monotonic() - began)
        return decision.allowed

    async def shared(self, subject: str) -> None:
        """Until every node knows of the other and is answered by the counters."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            for limiter in self._limiters:
                while (  # noqa: ASYNC110
                    limiter.nodes < 2 or (await limiter.check("acme", "search", subject)).degraded
                ):
                    await asyncio.sleep(0.01)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FaultyRedis]:
    server = FaultyRedis(tmp_path)
    yield server
    server.server.stop()


@asynccontextmanager
async def two_nodes(server: FaultyRedis) -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as stack:
        limiters = []
        for name in ("a", "b"):
            counters = RedisCounters(RedisSettings(server.server.url))
            stack.push_async_callback(counters.aclose)
            limiter = Limiter(counters, SystemClock(), SETTINGS, RULES, NodeIdentity(name))
            limiters.append(await stack.enter_async_context(limiter))
        yield Nodes(limiters)


async def _run(server: FaultyRedis, nodes: Nodes, seed: int) -> list[str]:
    """One fault from beginning to end; what was wrong."""
    rng, fault, wrong = random.Random(seed), FAULTS[seed % len(FAULTS)], []
    await nodes.shared(f"before {seed}")
    old, new, alone = f"old {seed}", f"new {seed}", nodes.alone
    admitted = saved = await nodes.admitted(rng.randint(0, LIMIT), old)
    if fault == "old RDB":
        await server.save()
        admitted += await nodes.admitted(rng.randint(1, LIMIT), old)
    await server.begin(fault)
    admitted += await nodes.admitted(rng.randint(0, 2 * LIMIT), old)
    meanwhile = await nodes.admitted(2 * LIMIT, new)
    await asyncio.sleep(rng.random() * OUTAGE_SECONDS)
    await server.end(fault)
    await nodes.shared(f"after {seed}")
    admitted += await nodes.admitted(5 * LIMIT, old)
    noticed = nodes.alone > alone
    most = LIMIT * (1 + (fault in LOST) + noticed) - (saved if fault == "old RDB" else 0)
    if not admitted <= most:
        wrong.append(f"{fault}: {admitted} admitted, at most {most}")
    if not 0 < meanwhile <= LIMIT * (1 + (noticed and fault not in OUTAGES)):
        wrong.append(f"{fault}: {meanwhile} of a new subject admitted meanwhile")
    if (exact := await nodes.counted(2 * LIMIT, f"later {seed}")) != LIMIT:
        wrong.append(f"{fault}: {exact} admitted once it was over, not {LIMIT}")
    if fault in OUTAGES and not noticed:
        wrong.append(f"{fault}: nobody noticed")
    return [f"seed {seed}: {each}" for each in wrong]


@pytest.mark.long
async def test_limits_stay_bounded_under_any_redis_fault(server: FaultyRedis) -> None:
    began, wrong = time.monotonic(), list[str]()
    async with two_nodes(server) as nodes:
        for seed in range(RUNS):
            wrong.extend(await _run(server, nodes, seed))
    print("\n".join(wrong))
    if nodes.slowest > ANSWER_SECONDS_MAX:
        wrong.append("a check waited")
    tally(
        Row(
            name="redis faults",
            how=(
                "two limiters on a real Redis that is flushed, stopped, killed and empty, or killed"
                " and put back from an old RDB"
            ),
            runs=RUNS,
            failures=len(wrong),
            requirement=(
                "at most one more limit for what Redis lost and one for its absence; somebody is"
                " admitted meanwhile; exact again afterwards; no check waits 5.5 s"
            ),
            seed=f"0..{RUNS - 1}",
            seconds=time.monotonic() - began,
            figures={
                "checks": f"{nodes.answers:,}",
                "slowest answer ms": round(nodes.slowest * 1000),
            },
        )
    )
