"""Limits beside ``limits`` and ``throttled-py``: same Redis, same transport (redis-py on hiredis and uvloop), same run.

exact        256 tasks ask for 10,000 keys, every check decided in Redis
leased       the same with leases of 1 % of capacity on a zipf load
latency      p99 at half of the exact rate
admission    what 1 and 4 nodes admit with any lease, over what they may
memory       the embedded counters; lookup among 10,000 rules; bytes per idle subject
propagation  how long a change takes to 20 nodes by the doorbell of PostgreSQL
"""

from __future__ import annotations

import asyncio
import importlib
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
import uvloop

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from engines import Missing, postgres, redis  # noqa: E402
from harness import arguments, finish, median, percentile, say  # noqa: E402
from holdfast.clock import SystemClock  # noqa: E402
from holdfast.limits.changes import Change  # noqa: E402
from holdfast.limits.counters.memory import MemoryCounters  # noqa: E402
from holdfast.limits.counters.redis import RedisCounters, RedisSettings  # noqa: E402
from holdfast.limits.feed import Feed  # noqa: E402
from holdfast.limits.limiter import Limiter, LimiterSettings, Place  # noqa: E402
from holdfast.limits.rules import Rule, RuleName, RuleSet  # noqa: E402
from holdfast.limits.rulestore.postgres import (  # noqa: E402
    PostgresBell,
    PostgresRuleReader,
    PostgresRuleStore,
    PostgresSettings,
)

PARTS = ["exact", "leased", "latency", "admission", "memory", "propagation"]
TASKS = 256
KEYS = 10_000
HUGE = 1_000_000
Check = Callable[[str], Awaitable[bool]]


def rule(limit: int = HUGE, window: float = 60.0, **fields: Any) -> Rule:
    return Rule("*", "*", "token_bucket", limit, window, **fields)


def limiter(url: str, *rules: Rule, node: str = "bench", lease: float = 1.0) -> Limiter:
    settings = LimiterSettings(lease_percent=lease)
    return Limiter(RedisCounters(RedisSettings(url)), SystemClock(), settings, RuleSet.of(rules), Place(node))


def uniform(seed: int) -> Iterator[str]:
    names, rng = [f"user-{n}" for n in range(KEYS)], random.Random(seed)
    return iter(rng.choices(names, k=50_000))


def zipf(seed: int) -> Iterator[str]:
    names = [f"user-{n}" for n in range(KEYS)]
    weights = [1 / (n + 1) ** 1.1 for n in range(KEYS)]
    return iter(random.Random(seed).choices(names, weights, k=200_000))


async def throughput(check: Check, seconds: float, keys: Iterator[str]) -> float:
    """Checks per second of 256 tasks that ask one after the other."""
    keys = cycle(keys)
    done = 0
    stop = time.perf_counter() + seconds

    async def ask() -> None:
        nonlocal done
        for key in keys:
            await check(key)
            done += 1
            if time.perf_counter() >= stop:
                return

    start = time.perf_counter()
    await asyncio.gather(*[ask() for _ in range(TASKS)])
    return done / (time.perf_counter() - start)


@contextmanager
def without_this_folder() -> Iterator[None]:
    """This file is called like one of its peers."""
    kept, sys.path[:] = sys.path[:], [p for p in sys.path if Path(p or ".").resolve() != ROOT / "bench"]
    try:
        yield
    finally:
        sys.path[:] = kept


def peers(url: str) -> dict[str, Check]:
    """Each peer with its cheapest algorithm; one that is not installed is said and left out."""
    found: dict[str, Check] = {}
    for name, make in (("limits", _limits), ("throttled-py", _throttled)):
        try:
            with without_this_folder():
                found[name] = make(url)
        except ImportError as error:
            say(f"{name} is not installed ({error}): left out")
    return found


def _limits(url: str) -> Check:
    aio = importlib.import_module("limits.aio")
    item = importlib.import_module("limits").RateLimitItemPerMinute(HUGE)
    storage = aio.storage.RedisStorage(f"async+{url}", implementation="redispy", max_connections=TASKS)
    strategy = aio.strategies.FixedWindowRateLimiter(storage)

    async def check(key: str) -> bool:
        return bool(await strategy.hit(item, key))

    return check


def _throttled(url: str) -> Check:
    throttled = importlib.import_module("throttled.asyncio")
    throttle = throttled.Throttled(
        using="fixed_window",
        quota=throttled.per_min(HUGE),
        store=throttled.RedisStore(server=url, options={"CONNECTION_POOL_KWARGS": {"max_connections": TASKS}}),
    )

    async def check(key: str) -> bool:
        return not (await throttle.limit(key)).limited

    return check


def own(limits: Limiter) -> Check:
    async def check(key: str) -> bool:
        return (await limits.check("acme", "send", key)).allowed

    return check


async def compare(url: str, quick: bool, figures: dict[str, float], ratios: dict[str, float], only: set[str]) -> None:
    """Everything against the peers, in short turns; a ratio is the median of its rounds: noise hits both."""
    seconds, rounds = (0.4, 5) if quick else (2.0, 9)
    contenders = {**peers(url), "exact": own(limiter(url, rule()))}
    if "leased" in only:
        contenders["leased"] = own(limiter(url, rule(precision="leased")))
    results: dict[str, list[float]] = {name: [] for name in contenders}
    for check in contenders.values():
        await throughput(check, seconds / 2, uniform(0))  # connections, scripts, caches
    for turn in range(rounds):
        for name, check in contenders.items():
            if name == "leased":  # twice as long: leases that ended between turns are taken anew first
                results[name].append(await throughput(check, 2 * seconds, zipf(turn)))
            else:
                results[name].append(await throughput(check, seconds, uniform(turn)))
    for name, values in results.items():
        figures[f"{name}_checks_per_s"] = median(values)
    peer_results = [values for name, values in results.items() if name not in ("exact", "leased")]
    best = [max(turn) for turn in zip(*peer_results, strict=True)]
    for name in ("exact", "leased"):
        if best and name in results:
            ratios[f"{name}_vs_best_peer"] = median([a / b for a, b in zip(results[name], best, strict=True)])


async def latency(url: str, rate: float, seconds: float) -> float:
    """p99 in milliseconds of single checks that arrive evenly, whatever happens to those before."""
    check, keys = own(limiter(url, rule())), list(uniform(1))
    await check("warm")
    spent: list[float] = []

    async def ask(key: str) -> None:
        start = time.perf_counter()
        await check(key)
        spent.append(time.perf_counter() - start)

    start, asked, tasks = time.perf_counter(), 0, set()
    while (elapsed := time.perf_counter() - start) < seconds:
        for _ in range(int(elapsed * rate) - asked):
            task = asyncio.create_task(ask(keys[asked % len(keys)]))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            asked += 1
        await asyncio.sleep(0.001)
    await asyncio.gather(*tasks)
    return percentile(spent, 99) * 1000


async def admission(url: str, seconds: float) -> float:
    """The largest of admitted ÷ (capacity + rate × t + nodes × lease) over 1 and 4 nodes and several leases."""
    worst = 0.0
    for number, (nodes, lease) in enumerate([(1, 0.0), (1, 10.0), (4, 0.0), (4, 1.0), (4, 10.0)]):
        limits = rule(2_000, 2.0, precision="leased" if lease else "strict")
        crowd = [limiter(url, limits, node=f"n{n}", lease=lease) for n in range(nodes)]
        admitted, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            asked = [node.check("acme", "send", f"hot-{number}") for node in crowd for _ in range(16)]
            admitted += sum(decision.allowed for decision in await asyncio.gather(*asked))
        elapsed = time.perf_counter() - start
        bound = 2_000 + 1_000 * elapsed + nodes * 2_000 * lease / 100
        say(f"  {nodes} nodes, lease {lease:g} %: admitted {admitted} of at most {bound:.0f}")
        worst = max(worst, admitted / bound)
    return worst


async def embedded(quick: bool, figures: dict[str, float]) -> None:
    limits = Limiter(MemoryCounters(SystemClock()), SystemClock(), rules=RuleSet.of([rule()]))
    names = [f"user-{n}" for n in range(KEYS)]
    for name in names:
        await limits.check("acme", "send", name)
    best = 0.0
    for _ in range(3 if quick else 10):
        start = time.perf_counter()
        for name in names:
            await limits.check("acme", "send", name)
        best = max(best, KEYS / (time.perf_counter() - start))
    figures["memory_checks_per_s"] = best
    for count in (10, 10_000):
        rules = RuleSet.of([Rule(f"t{n % 100}", f"/r{n}", "token_bucket", 10, 60.0) for n in range(count)])
        start = time.perf_counter()
        for n in range(100_000):
            rules.lookup("t1", f"/r{n % count}")
        figures[f"lookup_ns_among_{count}_rules"] = (time.perf_counter() - start) * 10_000
    figures["bytes_per_idle_subject"] = await _bytes_per_subject(50_000 if quick else 1_000_000)


async def _bytes_per_subject(subjects: int) -> float:
    limits = Limiter(MemoryCounters(SystemClock()), SystemClock(), rules=RuleSet.of([rule(10, 86_400.0)]))
    before = psutil.Process().memory_info().rss
    for n in range(subjects):
        await limits.check("acme", "send", f"subject-{n}")
    return (psutil.Process().memory_info().rss - before) / subjects


async def propagation(url: str, changes: int) -> float:
    """p99 in milliseconds from the beginning of an admin call to the rule in force, over 20 nodes."""
    settings = PostgresSettings(url)
    name, spent = RuleName("acme", "send"), []
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(PostgresRuleStore(settings))
        await store.prepare()
        begun = 0.0

        def applied(_: RuleSet) -> None:
            spent.append(time.perf_counter() - begun)

        for _ in range(20):
            reader = await stack.enter_async_context(PostgresRuleReader(PostgresSettings(url, connections_max=1)))
            await stack.enter_async_context(Feed(reader, [PostgresBell(settings)], applied, SystemClock()))
        body = {"algorithm": "token_bucket", "limit": 1, "window": "60s"}
        await store.change(Change("create", name, "bench", "", body))
        await asyncio.sleep(0.5)
        spent.clear()
        for version in range(1, changes + 1):
            begun = time.perf_counter()
            await store.change(Change("update", name, "bench", "", {"limit": version + 1}, version))
            await asyncio.sleep(0.03)
        assert len(spent) == 20 * changes, f"{len(spent)} of {20 * changes} arrived by the doorbell"
    return percentile(spent, 99) * 1000


async def run(only: set[str], quick: bool) -> tuple[dict[str, float], dict[str, float]]:
    figures: dict[str, float] = {}
    ratios: dict[str, float] = {}
    if "memory" in only:
        await embedded(quick, figures)
    if only & {"exact", "leased", "latency", "admission"}:
        server = redis.start()
        try:
            if only & {"exact", "leased", "latency"}:
                await compare(server.url, quick, figures, ratios, only)
            if "latency" in only:
                half = figures["exact_checks_per_s"] / 2
                figures["exact_p99_ms"] = await latency(server.url, half, 2.0 if quick else 10.0)
            if "admission" in only:
                figures["over_admission"] = await admission(server.url, 0.6 if quick else 4.0)
        finally:
            server.stop()
    if "propagation" in only:
        try:
            database = postgres.start(shared_buffers="32MB")
        except Missing as error:
            say(f"propagation is left out: {error}")
            return figures, ratios
        try:
            figures["propagation_p99_ms"] = await propagation(database.url, 20 if quick else 200)
        finally:
            database.stop()
    return figures, ratios


def main() -> None:
    options = arguments(__doc__ or "", PARTS)
    figures, ratios = uvloop.run(run(set(options.only.split(",")), options.quick))
    finish("limits", figures, ratios, as_json=options.json)


if __name__ == "__main__":
    main()
