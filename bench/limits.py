"""Limits beside ``limits`` and ``throttled-py``: same Redis, same transport, same run.

The transport is redis-py on hiredis and uvloop.

- exact: 256 tasks ask for 10,000 keys, and Redis decides every check; a check that was
  decided without it ends the run
- leased: the same with leases of 1 % of capacity on a zipf load; checks that a local
  share decided do not count
- latency: p99 at half of the exact rate, which is measured right before: checks come
  every millisecond, whatever became of those before, and each is timed from when it was
  due; the median of five turns
- admission: what 1 and 4 nodes admit with any lease, over what they may
- memory: the embedded counters; lookup among 10,000 rules; bytes of a subject among a
  million; checks of the same 1,000 of them, which the cache has, and of any of them
- propagation: how long a change takes to 20 nodes by notifications of PostgreSQL
- regions: how long a change takes to 10 nodes of another region, with its own Redis and
  replica
- http: one check per HTTP request to a node, beside a bare ASGI application on the same
  uvicorn

Redis has one core and whoever asks it the other, as if it ran elsewhere: otherwise the
scheduler puts both on one core for a while, and the result says when. Every figure is a
median of its turns.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import random
import signal
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
import uvloop

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import region_propagation  # noqa: E402
import single_checks  # noqa: E402
from engines import Missing, postgres, redis  # noqa: E402
from harness import CORES, arguments, cores_awake, finish, median, percentile, say  # noqa: E402
from holdfast.clock import SystemClock  # noqa: E402
from holdfast.limits.counters.memory import MemoryCounters  # noqa: E402
from holdfast.limits.counters.redis import RedisCounters, RedisSettings  # noqa: E402
from holdfast.limits.feed import RuleFeed  # noqa: E402
from holdfast.limits.limiter.limiter import Limiter  # noqa: E402
from holdfast.limits.limiter.settings import LimiterSettings, NodeIdentity  # noqa: E402
from holdfast.limits.rule_changes import Change  # noqa: E402
from holdfast.limits.rules import Decision, Rule, RuleName, RuleSet  # noqa: E402
from holdfast.limits.rulestore.postgres import (  # noqa: E402
    PostgresNotifications,
    PostgresRuleReader,
    PostgresRuleStore,
    PostgresSettings,
)
from holdfast.node.lifecycle import settle_heap  # noqa: E402

PARTS = ["exact", "leased", "latency", "admission", "memory", "propagation", "regions", "http"]
TASKS = 256
KEYS = 10_000
HUGE = 1_000_000
DEGRADED_MAX = 0.01
"""A moment in which the machine stalls, not counted; with more it would be the local
share that is measured.
"""
Check = Callable[[str], Awaitable[bool]]


def rule(limit: int = HUGE, window: float = 60.0, **fields: Any) -> Rule:
    return Rule("*", "*", "token_bucket", limit, window, **fields)


def limiter(url: str, *rules: Rule, node: str = "bench", lease: float = 1.0) -> Limiter:
    settings = LimiterSettings(lease_percent=lease)
    return Limiter(
        RedisCounters(RedisSettings(url)),
        SystemClock(),
        settings,
        RuleSet.of(rules),
        NodeIdentity(node),
    )


def uniform(seed: int) -> Iterator[str]:
    names, rng = [f"user-{n}" for n in range(KEYS)], random.Random(seed)
    return iter(rng.choices(names, k=50_000))


def zipf(seed: int) -> Iterator[str]:
    names = [f"user-{n}" for n in range(KEYS)]
    weights = [1 / (n + 1) ** 1.1 for n in range(KEYS)]
    return iter(random.Random(seed).choices(names, weights, k=200_000))


async def throughput(check: Check, seconds: float, keys: Iterator[str]) -> float:
    """Checks per second of 256 tasks that ask one after the other; only what was
    admitted by Redis is one.
    """
    keys = cycle(keys)
    done = 0
    stop = time.perf_counter() + seconds

    async def ask() -> None:
        nonlocal done
        for key in keys:
            counts = await check(key)
            done += counts
            if time.perf_counter() >= stop:
                return

    start = time.perf_counter()
    await asyncio.gather(*[ask() for _ in range(TASKS)])
    return done / (time.perf_counter() - start)


@contextmanager
def cores_apart(pid: int) -> Iterator[None]:
    """The server on one core, this process on the others, where there are several."""
    if len(CORES) > 1:
        for thread in psutil.Process(pid).threads():
            os.sched_setaffinity(thread.id, CORES[-1:])
        os.sched_setaffinity(0, CORES[:-1])
    try:
        yield
    finally:
        if len(CORES) > 1:
            os.sched_setaffinity(0, CORES)


@contextmanager
def without_this_folder() -> Iterator[None]:
    """This file is called like one of its peers."""
    kept, sys.path[:] = (
        sys.path[:],
        [p for p in sys.path if Path(p or ".").resolve() != ROOT / "bench"],
    )
    try:
        yield
    finally:
        sys.path[:] = kept


def peers(url: str) -> dict[str, Check]:
    """Each installed peer with its cheapest algorithm."""
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
    storage = aio.storage.RedisStorage(
        f"async+{url}", implementation="redispy", max_connections=TASKS
    )
    strategy = aio.strategies.FixedWindowRateLimiter(storage)

    async def check(key: str) -> bool:
        return bool(await strategy.hit(item, key))

    return check


def _throttled(url: str) -> Check:
    throttled = importlib.import_module("throttled.asyncio")
    throttle = throttled.Throttled(
        using="fixed_window",
        quota=throttled.per_min(HUGE),
        store=throttled.RedisStore(
            server=url, options={"CONNECTION_POOL_KWARGS": {"max_connections": TASKS}}
        ),
    )

    async def check(key: str) -> bool:
        return not (await throttle.limit(key)).limited

    return check


class Own:
    """Our check; counts all checks and those decided without Redis."""

    def __init__(self, limits: Limiter) -> None:
        self._check = limits.check
        self.made = self.degraded = 0

    async def __call__(self, key: str) -> bool:
        decision = await self._check("acme", "send", key)
        self.made += 1
        self.degraded += decision.degraded
        return decision.allowed and not decision.degraded


def require_redis(name: str, check: Check) -> None:
    """End the run if the local share answered, which is cheaper than Redis."""
    if not isinstance(check, Own) or not check.degraded:
        return
    problem = (
        f"{name}: {check.degraded:,} of {check.made:,} checks were decided without Redis, which was"
        " too slow"
    )
    if check.degraded > check.made * DEGRADED_MAX:
        raise SystemExit(
            f"{problem}: this is no measurement of it; run it again on a machine that is not busy"
        )
    say(f"{problem}; they are not counted")


async def compare(
    url: str, quick: bool, figures: dict[str, float], ratios: dict[str, float], only: set[str]
) -> None:
    """Everything against the peers, in short turns; a ratio is the median of its
    rounds: noise hits both.
    """
    seconds, rounds = (0.3, 9) if quick else (2.0, 9)
    contenders = {**peers(url), "exact": Own(limiter(url, rule()))}
    if "leased" in only:
        contenders["leased"] = Own(limiter(url, rule(precision="leased")))
    results: dict[str, list[float]] = {name: [] for name in contenders}
    for check in contenders.values():
        await throughput(check, seconds / 2, uniform(0))  # connections, scripts, caches
        if isinstance(check, Own):
            check.made = check.degraded = 0
    for turn in range(rounds):
        for name, check in contenders.items():
            # twice as long: leases that ended between turns are taken again first
            if name == "leased":
                results[name].append(await throughput(check, 2 * seconds, zipf(turn)))
            else:
                results[name].append(await throughput(check, seconds, uniform(turn)))
    for name, check in contenders.items():
        require_redis(name, check)
    for name, values in results.items():
        figures[f"{name}_checks_per_s"] = median(values)
    peer_results = [values for name, values in results.items() if name not in ("exact", "leased")]
    best = [max(turn) for turn in zip(*peer_results, strict=True)]
    for name in ("exact", "leased"):
        if best and name in results:
            ratios[f"{name}_vs_best_peer"] = median(
                [a / b for a, b in zip(results[name], best, strict=True)]
            )


async def latency(url: str, seconds: float, figures: dict[str, float]) -> None:
    """Fifteen turns: the exact rate of this moment, then p99 at half of it. A machine
    that slows down slows both.

    Before the peers, of whom hundreds of connections and thousands of keys are left.
    The median counts, because a machine that stands still for 4 ms spoils the turn in
    which it does; and p99 of all turns together, which has that.
    """
    limits = limiter(url, rule())
    check = Own(limits)
    await throughput(Own(limits), 0.5, uniform(0))  # as warm as when the ratios are found
    settle_heap()  # as a node does once it is built
    turns, rates, together = [], [], array("d")
    for turn in range(15):
        half = await throughput(check, 0.15, uniform(turn)) / 2
        spent, exact = await open_loop(limits, half, seconds / 15)
        turns.append(percentile(spent, 99) * 1000)
        say(
            f"  {half:,.0f} checks/s, half of the exact rate: p99 {turns[-1]:.1f} ms; {exact:.2%}"
            " by the counters"
        )
        rates.append(half)
        together.extend(spent)
    gc.unfreeze()
    require_redis("latency", check)
    figures["exact_p99_ms"] = median(turns)
    figures["exact_p99_together_ms"] = percentile(together, 99) * 1000
    figures["exact_p99_at_checks_per_s"] = median(rates)


async def open_loop(limits: Limiter, rate: float, seconds: float) -> tuple[array[float], float]:
    """How long checks took that came at this rate whatever the answers did, and the
    part that the counters decided.

    Each millisecond those are asked that have come due. Each is counted from when it
    was due to when the last of those asked with it was answered.
    """
    keys, total = cycle(uniform(1)), int(rate * seconds)
    spent, asked, exact, done = array("d"), 0, 0, asyncio.Event()
    start = time.perf_counter()

    def ask() -> None:
        nonlocal asked
        first, asked = asked, min(int((time.perf_counter() - start) * rate), total)
        answered(
            first, [limits.begin_check("acme", "send", next(keys)) for _ in range(first, asked)]
        )

    def answered(
        first: int, decided: list[Decision | asyncio.Future[Decision]], _: object = None
    ) -> None:
        nonlocal exact
        for each in reversed(decided):
            if isinstance(each, asyncio.Future) and not each.done():
                each.add_done_callback(partial(answered, first, decided))
                return
        now = time.perf_counter() - start
        for number, each in enumerate(decided, first):
            spent.append(now - number / rate)
            exact += not (each.result() if isinstance(each, asyncio.Future) else each).degraded
        if len(spent) == total:
            done.set()

    with every_millisecond(ask):
        await done.wait()
    return spent, exact / total


@contextmanager
def every_millisecond(ask: Callable[[], None]) -> Iterator[None]:
    """Called when the system says so; the loop's own timers come up to one late."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGALRM, ask)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        loop.remove_signal_handler(signal.SIGALRM)


async def admission(url: str, seconds: float) -> float:
    """The largest of admitted ÷ (capacity + rate × t + nodes × lease) over 1 and 4
    nodes and several leases.
    """
    worst = 0.0
    for number, (nodes, lease) in enumerate([(1, 0.0), (1, 10.0), (4, 0.0), (4, 1.0), (4, 10.0)]):
        limits = rule(2_000, 2.0, precision="leased" if lease else "strict")
        crowd = [limiter(url, limits, node=f"n{n}", lease=lease) for n in range(nodes)]
        admitted, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            asked = [
                node.check("acme", "send", f"hot-{number}") for node in crowd for _ in range(16)
            ]
            admitted += sum(decision.allowed for decision in await asyncio.gather(*asked))
        elapsed = time.perf_counter() - start
        bound = 2_000 + 1_000 * elapsed + nodes * 2_000 * lease / 100
        say(
            f"  {nodes} node{'s' * (nodes > 1)}, lease {lease:g} %: admitted {admitted} of at most"
            f" {bound:.0f}"
        )
        worst = max(worst, admitted / bound)
    return worst


async def embedded(quick: bool, figures: dict[str, float]) -> None:
    limits = Limiter(MemoryCounters(SystemClock()), SystemClock(), rules=RuleSet.of([rule()]))
    names = [f"user-{n}" for n in range(KEYS)]
    for name in names:
        await limits.check("acme", "send", name)
    rates = []
    for _ in range(11 if quick else 31):
        start = time.perf_counter()
        for name in names:
            await limits.check("acme", "send", name)
        rates.append(KEYS / (time.perf_counter() - start))
    figures["memory_checks_per_s"] = median(rates)
    figures[f"check_ns_among_{KEYS}_subjects"] = 1e9 / median(rates)
    for count in (10, 10_000):
        rules = RuleSet.of(
            [Rule(f"t{n % 100}", f"/r{n}", "token_bucket", 10, 60.0) for n in range(count)]
        )
        spent = []
        for _ in range(5):
            start = time.perf_counter()
            for n in range(20_000):
                rules.lookup("t1", f"/r{n % count}")
            spent.append((time.perf_counter() - start) / 20_000)
        figures[f"lookup_ns_among_{count}_rules"] = median(spent) * 1e9
    await _many_subjects(50_000 if quick else 1_000_000, figures)


async def _many_subjects(subjects: int, figures: dict[str, float]) -> None:
    """The cost of an idle subject in memory, and of a check among many."""
    limits = Limiter(
        MemoryCounters(SystemClock()), SystemClock(), rules=RuleSet.of([rule(10, 86_400.0)])
    )
    before = psutil.Process().memory_info().rss
    for n in range(subjects):
        await limits.check("acme", "send", f"subject-{n}")
    figures["bytes_per_idle_subject"] = (psutil.Process().memory_info().rss - before) / subjects
    few, any_of_them = (
        random.sample(range(subjects), 1_000),
        random.choices(range(subjects), k=20_000),
    )
    for label, numbers in (("check_ns_of_1000", few), ("check_ns", any_of_them)):
        names, spent = [f"subject-{n}" for n in numbers], []
        for _ in range(5):
            start = time.perf_counter()
            for name in names:
                await limits.check("acme", "send", name)
            spent.append((time.perf_counter() - start) / len(names))
        figures[f"{label}_among_{subjects}_subjects"] = median(spent) * 1e9


async def propagation(url: str, changes: int) -> float:
    """p99 in milliseconds from an admin call to the rule in force, over 20 nodes."""
    settings = PostgresSettings(url)
    name, spent = RuleName("acme", "send"), []
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(PostgresRuleStore(settings))
        await store.prepare()
        begun = 0.0

        def applied(_: RuleSet) -> None:
            spent.append(time.perf_counter() - begun)

        for _ in range(20):
            reader = await stack.enter_async_context(
                PostgresRuleReader(PostgresSettings(url, connections_max=1))
            )
            await stack.enter_async_context(
                RuleFeed(reader, [PostgresNotifications(settings)], applied, SystemClock())
            )
        body = {"algorithm": "token_bucket", "limit": 1, "window": "60s"}
        await store.change(Change("create", name, "bench", "", body))
        await asyncio.sleep(0.5)
        spent.clear()
        for version in range(1, changes + 1):
            begun = time.perf_counter()
            await store.change(Change("update", name, "bench", "", {"limit": version + 1}, version))
            await asyncio.sleep(0.03)
        assert len(spent) == 20 * changes, f"{len(spent)} of {20 * changes} arrived by notification"
    return percentile(spent, 99) * 1000


async def beside_redis(
    url: str, only: set[str], quick: bool, figures: dict[str, float], ratios: dict[str, float]
) -> None:
    if "latency" in only:
        with cores_awake():
            await latency(url, 3.6 if quick else 18.0, figures)
    if only & {"exact", "leased"}:
        await compare(url, quick, figures, ratios, only)
    if "admission" in only:
        figures["over_admission"] = await admission(url, 0.6 if quick else 4.0)


async def run(only: set[str], quick: bool) -> tuple[dict[str, float], dict[str, float]]:
    figures: dict[str, float] = {}
    ratios: dict[str, float] = {}
    if "http" in only:
        await single_checks.compare(quick, figures, ratios)
    if "memory" in only:
        await embedded(quick, figures)
    if only & {"exact", "leased", "latency", "admission"}:
        server = redis.start()
        try:
            with cores_apart(server.pid):
                await beside_redis(server.url, only, quick, figures, ratios)
        finally:
            server.stop()
    try:
        await _with_postgres(only, quick, figures)
    except Missing as error:
        say(f"propagation and regions are left out: {error}")
    return figures, ratios


async def _with_postgres(only: set[str], quick: bool, figures: dict[str, float]) -> None:
    if "propagation" in only:
        database = postgres.start(shared_buffers="32MB")
        try:
            figures["propagation_p99_ms"] = await propagation(database.url, 20 if quick else 200)
        finally:
            database.stop()
    if "regions" in only:
        await region_propagation.measure(quick, figures)


def main() -> None:
    options = arguments(__doc__ or "", PARTS)
    figures, ratios = uvloop.run(run(set(options.only.split(",")), options.quick))
    finish("limits", figures, ratios, as_json=options.json)


if __name__ == "__main__":
    main()
