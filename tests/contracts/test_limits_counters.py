"""One suite for all counters: their answers equal those of the pure algorithms."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import math
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import redis.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engines import Server
from holdfast.clock import ManualClock, SystemClock
from holdfast.drivers.redis_scripts import Script
from holdfast.errors import OutcomeUnknown, Unavailable
from holdfast.limits.algorithms import (
    CODES,
    COUNTERS,
    Concurrency,
    Counter,
    CounterReading,
    LimitParams,
    carried_over,
    hold,
    params_of,
    peek,
    reading,
    take,
)
from holdfast.limits.counters.contract import (
    KEYS_PER_CALL_MAX,
    Adjustment,
    CounterKey,
    CounterRequest,
    Counters,
    NodesAnnounced,
    key_prefix,
)
from holdfast.limits.counters.memory import MemoryCounters
from holdfast.limits.counters.redis import RedisCounters, RedisSettings
from holdfast.limits.counters.table import CounterTable
from holdfast.limits.rules import Algorithm, Rule, RuleVersion

AMOUNTS: list[Algorithm] = ["token_bucket", "fixed_window", "sliding_window"]
OpenCounters = Callable[[], AbstractAsyncContextManager[Counters]]


@pytest.fixture(params=["memory", "redis"])
def counting(request: pytest.FixtureRequest) -> OpenCounters:
    """Opens fresh counters of one kind."""
    url = request.getfixturevalue("redis_server").url if request.param == "redis" else ""

    @asynccontextmanager
    async def fresh() -> AsyncIterator[Counters]:
        if not url:
            yield MemoryCounters(SystemClock())
            return
        client = redis.asyncio.Redis.from_url(url)
        await client.flushall()
        await client.aclose()
        counters = RedisCounters(RedisSettings(url))
        yield counters
        await counters.aclose()

    return fresh


YEAR_MS = 366 * 86_400_000.0


def params(
    algorithm: Algorithm,
    limit: int = 10,
    version: int = 1,
    window_ms: float = YEAR_MS,
    burst: int = 0,
) -> LimitParams:
    """By default nothing drains and no window ends while a test runs."""
    return LimitParams(algorithm, RuleVersion(1, version), limit, window_ms, burst or limit)


def at(name: str) -> CounterKey:
    return ("{acme}:rule:", name)


async def one(counters: Counters, request: CounterRequest) -> CounterReading:
    return (await counters.take([[request]])).readings[0][0]


class Judge:
    """The same history on the pure algorithms. A counter is forgotten so long after
    nothing of it is used any more.
    """

    def __init__(self, forgets_ms: float = math.inf) -> None:
        self.counters: dict[CounterKey, Counter] = {}
        self._forgets_ms = forgets_ms
        self._until: dict[CounterKey, float] = {}

    def entry(self, entry: list[CounterRequest], now: float) -> tuple[CounterReading, ...]:
        for request in entry:
            if math.floor(now) > self._until.get(request.key, math.inf):
                del self.counters[request.key], self._until[request.key]
        answers = self._decide(entry, now)
        # in whole milliseconds, as Redis counts them
        for request, answer in zip(entry, answers, strict=True):
            self._until[request.key] = (
                math.floor(now) + math.ceil(answer.reset_ms) + self._forgets_ms
            )
        return answers

    def _decide(self, entry: list[CounterRequest], now: float) -> tuple[CounterReading, ...]:
        opened = [(request, self.counter(request.key, request.params, now)) for request in entry]
        if len(entry) == 1:
            return tuple(self.take(request, counter, now) for request, counter in opened)
        fits = [
            peek(c, request.params, now, request.cost) or self.held(request, c)
            for request, c in opened
        ]
        if all(fits):
            return tuple(self.take(request, counter, now) for request, counter in opened)
        return tuple(
            reading(c, now, 0, 0 if fit else request.cost)
            for (request, c), fit in zip(opened, fits, strict=True)
        )

    def counter(self, key: CounterKey, rule: LimitParams, now: float) -> Counter:
        there = self.counters.get(key)
        self.counters[key] = (
            COUNTERS[rule.algorithm](rule) if there is None else carried_over(there, rule, now)
        )
        return self.counters[key]

    def held(self, request: CounterRequest, counter: Counter) -> bool:
        return isinstance(counter, Concurrency) and request.hold in counter.holders

    def take(self, request: CounterRequest, counter: Counter, now: float) -> CounterReading:
        if isinstance(counter, Concurrency) and request.hold:
            return hold(counter, request.params, now, request.hold, request.spent)
        return take(
            counter, request.params, now, request.cost, request.times, request.want, request.spent
        )


def random_request(rng: random.Random, key: int) -> CounterRequest:
    """Of half of the keys a new version has another algorithm."""
    version = rng.choice([1, 1, 1, 2, 3])
    algorithms: list[Algorithm] = [*AMOUNTS, "concurrency"]
    algorithm = algorithms[(key + (key % 2) * version) % 4]
    window = (40.0, 30.0, 70.0)[version - 1]
    rule = params(
        algorithm, (2 if algorithm == "concurrency" else 5) * version, version, window_ms=window
    )
    rule = structs.replace(rule, store=rng.choice([0, 7, 7, 7, 4_000_000_000]))
    if algorithm == "concurrency":
        return CounterRequest(
            at(str(key)), rule, hold=f"h{rng.randint(0, 12)}", spent=rng.choice([0, 0, 0, 1])
        )
    times = rng.randint(0, 3)
    if rng.random() < 0.2:  # a charge: beyond the room, or given back
        return CounterRequest(at(str(key)), rule, rng.choice([-9, -2, 7, 40]), times, spent=times)
    spent = rng.choice([0, 0, 0, times])
    return CounterRequest(
        at(str(key)), rule, rng.randint(1, 3), times, rng.choice([0, 0, 1, 2]), spent=spent
    )


def in_a_group(request: CounterRequest) -> CounterRequest:
    return structs.replace(request, cost=abs(request.cost), times=1, want=0, spent=0)


@pytest.mark.parametrize("seed", range(4))
async def test_every_reading_equals_the_oracle(counting: OpenCounters, seed: int) -> None:
    async with counting() as counters:
        rng, judge = (
            random.Random(seed),
            Judge(math.inf if isinstance(counters, MemoryCounters) else 1000),
        )
        verdicts: set[bool] = set()
        for step in range(150):
            groups = [
                rng.sample(range(12), rng.choice([1, 1, 1, 2, 3])) for _ in range(rng.randint(1, 6))
            ]
            # all there from the beginning: who comes later makes memory forget the idle
            if step == 0:
                groups = [list(range(12))]
            entries = [[random_request(rng, key) for key in group] for group in groups]
            entries = [
                [in_a_group(request) for request in entry] if len(entry) > 1 else entry
                for entry in entries
            ]
            taken = await counters.take(entries)
            for entry, answers in zip(entries, taken.readings, strict=True):
                expected = judge.entry(entry, taken.now)
                assert answers == expected
                verdicts |= {r.admitted > 0 for r in answers}
        assert verdicts == {True, False}


class AtAnyTime(RedisCounters):
    """Redis, asked as if it were the time that a test says. Counters are kept long
    enough for the test.
    """

    now = 1_700_000_000_000.0
    script = Script("holdfast.limits.counters", "head", *CODES, "tail")
    for written, meant in {
        "local time = call('TIME')\nlocal now = time[1] * 1000 + time[2] / 1000": (
            "local now = tonumber(ARGV[2])"
        ),
        "'PX', min(ceil(reset), KEPT_MS_MAX) + 1000": "'PX', 600000",
    }.items():
        assert written in script.source
        script.source = script.source.replace(written, meant)
    script.sha = hashlib.sha1(script.source.encode(), usedforsecurity=False).hexdigest()

    def _run(
        self, script: Script, keys: list[bytes], arguments: tuple[Any, ...], read: Any
    ) -> Awaitable[Any]:
        return super()._run(self.script, keys, (*arguments, repr(self.now)), read)


def random_adjustment(rng: random.Random, key: int, now: float) -> Adjustment:
    request = random_request(rng, key)
    if request.hold:
        held = Adjustment(
            request.key, request.params, held=request.hold, held_ms=rng.choice([1.0, 30.0])
        )
        return rng.choice([held, Adjustment(request.key, request.params, released=request.hold)])
    taken_at = now - rng.choice([0, 1, 20, 40, 70, 1000])
    given = Adjustment(request.key, request.params, given=rng.randint(1, 4), taken_at=taken_at)
    charged = rng.choice([rng.randint(1, 20), -rng.randint(1, 9)])
    return rng.choice([given, Adjustment(request.key, request.params, charged=charged)])


async def test_any_text_can_be_a_subject(counting: OpenCounters) -> None:
    """Half of a surrogate pair once failed the whole call, with everybody in it."""

    async with counting() as counters:
        for subject in ("\ud800", "\udfff", "\0", "\u2028", "ß" * 1024):
            requests = [CounterRequest(at(subject), params("token_bucket", 2)) for _ in range(3)]
            assert [(await one(counters, request)).admitted for request in requests] == [1, 1, 0], (
                ascii(subject)
            )


@pytest.mark.parametrize("seed", range(4))
async def test_redis_and_memory_agree_under_any_clock(redis_server: Server, seed: int) -> None:
    """Takes, groups, gifts, charges and holds, changed rules, two stores, hours that
    pass and hours that come back.
    """
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    rng, table, counters = (
        random.Random(seed),
        CounterTable(),
        AtAnyTime(RedisSettings(redis_server.url)),
    )
    found: set[bool] = set()
    for _ in range(400):
        counters.now = now = counters.now + rng.choice(
            [0, 0, 0.25, 7, 33, 41, 70, 3_600_000, -1, -35, -3_600_000]
        )
        if rng.random() < 0.3:
            adjustment = random_adjustment(rng, rng.randrange(12), now)
            expected = table.adjust(adjustment, now)
            assert await counters.adjust([adjustment]) == expected, adjustment
            found.add(expected)
            continue
        entry = [
            random_request(rng, key) for key in rng.sample(range(12), rng.choice([1, 1, 1, 2, 3]))
        ]
        if len(entry) > 1:
            entry = [in_a_group(request) for request in entry]
        taken = await counters.take([entry])
        assert taken.readings == [table.decide(entry, now)], entry
    assert found == {True, False}
    await counters.aclose()


@pytest.mark.parametrize("algorithm", [*AMOUNTS, "concurrency"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_immediate_take_equals_the_oracle(algorithm: Algorithm, data: st.DataObject) -> None:
    clock, judge = ManualClock(), Judge()
    counters = MemoryCounters(clock)
    steps = st.tuples(st.floats(0, 0.08), st.integers(1, 4), st.sampled_from([1, 1, 2, 3]))
    for pause, cost, version in data.draw(st.lists(steps, max_size=40)):
        clock.advance(pause)
        rule = params(
            algorithm,
            5 * version,
            version,
            window_ms=(40.0, 30.0, 70.0)[version - 1],
            burst=4 * version,
        )
        hold = f"h{cost}" if algorithm == "concurrency" else ""
        request = CounterRequest(at("k"), rule, 1 if hold else cost, hold=hold)
        assert (counters.take_now(request.key, rule, request.cost, hold),) == judge.entry(
            [request], clock.monotonic() * 1000
        )


@pytest.mark.parametrize("algorithm", AMOUNTS)
async def test_used_amount_carries_over_and_the_newer_rule_decides(
    counting: OpenCounters, algorithm: Algorithm
) -> None:
    async with counting() as counters:
        await one(counters, CounterRequest(at("k"), params(algorithm, 100), cost=80))
        raised = await one(counters, CounterRequest(at("k"), params(algorithm, 500, version=2)))
        assert raised.remaining == 419
        behind = await one(
            counters, CounterRequest(at("k"), params(algorithm, 100, version=1), cost=50)
        )
        assert (behind.admitted, behind.limit, behind.stamp) == (1, 500, RuleVersion(1, 2))


@pytest.mark.parametrize("before", AMOUNTS)
@pytest.mark.parametrize("after", AMOUNTS)
async def test_used_amount_carries_over_to_another_algorithm_and_back(
    counting: OpenCounters, before: Algorithm, after: Algorithm
) -> None:
    """Changing the algorithm back and forth granted the limit each time. Who is behind
    decides by the stored one.
    """

    async with counting() as counters:
        admitted = 0
        for version in range(1, 5):
            rule = params((before, after)[version % 2], 100, version)
            admitted += (await one(counters, CounterRequest(at("k"), rule, times=99))).admitted
        assert admitted == 100
        behind = await one(
            counters, CounterRequest(at("k"), params("concurrency", 5, version=1), hold="h")
        )
        assert (behind.admitted, behind.limit, behind.stamp) == (0, 100, RuleVersion(1, 4))


@pytest.mark.parametrize("before", AMOUNTS)
@pytest.mark.parametrize("after", AMOUNTS)
async def test_used_amount_is_capped_at_a_lower_capacity_and_stays_capped(
    counting: OpenCounters, before: Algorithm, after: Algorithm
) -> None:
    """Lowering a limit locked subjects out for as long as all they had used took to
    drain at the new rate.
    """

    async with counting() as counters:
        day = 86_400_000.0
        await one(
            counters, CounterRequest(at("k"), params(before, 10_000, window_ms=day), cost=9_900)
        )
        lowered = await one(
            counters, CounterRequest(at("k"), params(after, 10, version=2, window_ms=day))
        )
        assert (lowered.admitted, lowered.remaining) == (0, 0)
        assert lowered.reset_ms <= 2 * day and lowered.wait_ms <= 2 * day
        raised = await one(
            counters,
            CounterRequest(at("k"), params(after, 10_000, version=3, window_ms=day), cost=9_980),
        )
        assert raised.admitted == 1, "ten are used, no more"


@pytest.mark.parametrize("algorithm", AMOUNTS)
async def test_limit_lowered_and_raised_grants_the_difference_each_time(
    counting: OpenCounters, algorithm: Algorithm
) -> None:
    async with counting() as counters:
        granted = 0
        for version in range(1, 10):
            rule = params(algorithm, 100 if version % 2 else 50, version)
            granted += (await one(counters, CounterRequest(at("k"), rule, times=200))).admitted
        assert granted == 100 + 4 * 50


@pytest.mark.parametrize("algorithm", AMOUNTS)
async def test_holds_and_amounts_do_not_convert_into_each_other(
    counting: OpenCounters, algorithm: Algorithm
) -> None:
    async with counting() as counters:
        amounts, slots = params(algorithm, 3, 1), params("concurrency", 1, 2)
        await one(counters, CounterRequest(at("k"), amounts, cost=3))
        assert (await one(counters, CounterRequest(at("k"), slots, hold="a"))).admitted == 1, (
            "holders begin with nobody"
        )
        behind = await one(counters, CounterRequest(at("k"), amounts, times=2))
        assert (behind.admitted, behind.wait_ms > 0, behind.limit) == (
            0,
            True,
            1,
        ), "who is behind decides by holders"
        newer = params(algorithm, 3, 3)
        assert await counters.adjust([Adjustment(at("k"), newer, released="a")]) == 1, (
            "by whatever rule it is asked"
        )
        assert (await one(counters, CounterRequest(at("k"), amounts, times=2))).admitted == 1, (
            "a place is free, and he takes none"
        )
        assert (await one(counters, CounterRequest(at("k"), newer, times=9))).admitted == 3
        debts = [
            Adjustment(at("k"), slots, held="b", held_ms=1e6),
            Adjustment(at("k"), slots, released="b"),
        ]
        assert await counters.adjust(debts) == 0
        assert (await one(counters, CounterRequest(at("k"), newer))).admitted == 0


@pytest.mark.parametrize("algorithm", AMOUNTS)
async def test_charge_may_overdraw_and_gives_back_down_to_nothing_used(
    counting: OpenCounters, algorithm: Algorithm
) -> None:
    async with counting() as counters:
        rule = params(algorithm, 10)

        async def charge(amount: int) -> int:
            """What is left then."""
            request = CounterRequest(at("k"), rule, amount, spent=1)
            return (await one(counters, request)).remaining

        assert await charge(8) == 2
        assert await charge(52) == 0, "fifty too many"
        assert await charge(-30) == 0, "still twenty"
        assert (await one(counters, CounterRequest(at("k"), rule))).admitted == 0
        assert await charge(-23) == 3
        assert await charge(-1000) == 10
        assert (await one(counters, CounterRequest(at("k"), rule, times=20))).admitted == 10


@pytest.mark.parametrize("algorithm", AMOUNTS)
async def test_uncounted_checks_are_charged_beyond_the_limit(
    counting: OpenCounters, algorithm: Algorithm
) -> None:
    async with counting() as counters:
        rule = params(algorithm, 10)
        first = await one(counters, CounterRequest(at("k"), rule, times=16, spent=15))
        assert (first.admitted, first.remaining) == (10, 0)
        if algorithm == "token_bucket":
            assert first.wait_ms == pytest.approx(6 * YEAR_MS / 10, abs=60_000), (
                "the wait covers what is owed"
            )
        raised = await one(counters, CounterRequest(at("k"), params(algorithm, 20, version=2)))
        assert (raised.admitted, raised.remaining) == (1, 4)


@pytest.mark.parametrize("algorithm", [*AMOUNTS, "concurrency"])
async def test_reset_forgets_the_use_of_one_counter(
    counting: OpenCounters, algorithm: Algorithm
) -> None:
    async with counting() as counters:
        rule, hold = params(algorithm, 2), "h" if algorithm == "concurrency" else ""
        for name in ("a", "b"):
            for n in range(2):
                await one(counters, CounterRequest(at(name), rule, hold=hold and f"h{n}"))
        assert (await counters.announce("n", 30)).resets == frozenset()
        assert await counters.reset(at("a")) and not await counters.reset(at("nobody"))
        left = {
            name: (await one(counters, CounterRequest(at(name), rule, 1, 0))).remaining
            for name in ("a", "b")
        }
        assert left == {"a": 2, "b": 0}
        if isinstance(counters, RedisCounters):
            expected = frozenset(counters.name(at(name)) for name in ("a", "nobody"))
            assert (await counters.announce("n", 30)).resets == expected
            assert (await counters.announce("n", 30)).resets == frozenset(), "each is reported once"


async def test_group_of_rules_is_taken_whole_or_not_at_all(counting: OpenCounters) -> None:
    async with counting() as counters:
        wide, narrow = (
            CounterRequest(at("wide"), params("fixed_window", 100)),
            CounterRequest(at("narrow"), params("fixed_window", 1)),
        )
        first = await counters.take([[wide, narrow]])
        assert [r.admitted for r in first.readings[0]] == [1, 1]
        second = await counters.take([[wide, narrow]])
        assert [r.admitted for r in second.readings[0]] == [0, 0]
        assert [r.wait_ms > 0 for r in second.readings[0]] == [
            False,
            True,
        ], "the refusing rule is named"
        assert (await one(counters, wide)).remaining == 98, "a refused group uses nothing"


async def test_expired_hold_does_not_count_in_a_group(counting: OpenCounters) -> None:
    async with counting() as counters:
        brief, slots, wide = (
            params("concurrency", 1, window_ms=20),
            params("concurrency", 1, 2),
            params("fixed_window"),
        )
        await one(counters, CounterRequest(at("slots"), brief, hold="old"))
        await counters.adjust([Adjustment(at("slots"), brief, held="new", held_ms=60_000)])
        await asyncio.sleep(0.03)
        readings = (
            await counters.take(
                [[CounterRequest(at("slots"), slots, hold="old"), CounterRequest(at("wide"), wide)]]
            )
        ).readings[0]
        assert [reading.admitted for reading in readings] == [0, 0]


async def test_returns_charges_and_releases_adjust_counters(
    counting: OpenCounters,
) -> None:
    async with counting() as counters:
        rule, slots = params("fixed_window", 10), params("concurrency", 1)
        taken = await counters.take(
            [[CounterRequest(at("a"), rule, cost=8)], [CounterRequest(at("c"), slots, hold="x")]]
        )
        found = await counters.adjust(
            [
                Adjustment(at("a"), rule, given=3, taken_at=taken.now),
                Adjustment(at("b"), rule, charged=9),
                Adjustment(at("c"), slots, released="x"),
                Adjustment(at("c"), slots, released="x"),
                Adjustment(at("gone"), slots, released="x"),
                Adjustment(at("gone"), rule, given=3, taken_at=taken.now),
            ]
        )
        assert found == 3, "what is gone cannot be put right"
        assert (await one(counters, CounterRequest(at("a"), rule))).remaining == 4
        assert (await one(counters, CounterRequest(at("b"), rule))).remaining == 0
        assert (await one(counters, CounterRequest(at("c"), slots, hold="y"))).admitted == 1
        assert (await one(counters, CounterRequest(at("gone"), rule))).remaining == 9
        old = structs.replace(rule, stamp=RuleVersion(1, 0))
        assert await counters.adjust([Adjustment(at("a"), old, given=5, taken_at=taken.now)]) == 0
        theirs = structs.replace(rule, store=7)
        assert (
            await counters.adjust([Adjustment(at("a"), theirs, given=5, taken_at=taken.now)]) == 0
        )
        assert (await one(counters, CounterRequest(at("a"), rule))).remaining == 3, (
            "an old lease is charged, not given back"
        )


@pytest.mark.parametrize("algorithm", AMOUNTS)
async def test_charge_is_capped_at_the_capacity(
    counting: OpenCounters, algorithm: Algorithm
) -> None:
    async with counting() as counters:
        rule = params(algorithm, 10)
        for _ in range(3):
            await counters.adjust([Adjustment(at("k"), rule, charged=8)])
        raised = await one(counters, CounterRequest(at("k"), params(algorithm, 30, version=2)))
        assert raised.remaining == 30 - 10 - 1


async def test_hold_granted_elsewhere_counts_beyond_the_limit(
    counting: OpenCounters,
) -> None:
    async with counting() as counters:
        slots = params("concurrency", 2)
        left = {"a": 30_000.0, "b": 40_000.0, "c": 50_000.0}
        await counters.adjust(
            [Adjustment(at("new"), slots, held=hold, held_ms=ms) for hold, ms in left.items()]
        )
        refused = await one(counters, CounterRequest(at("new"), slots, hold="d"))
        assert refused.admitted == 0 and 35_000 < refused.wait_ms <= 40_000, (
            "when the second of them ends"
        )
        assert (await one(counters, CounterRequest(at("new"), slots, hold="c"))).admitted == 1, (
            "it is its holder's"
        )
        await counters.adjust([Adjustment(at("new"), slots, released=hold) for hold in "ab"])
        assert (await one(counters, CounterRequest(at("new"), slots, hold="d"))).admitted == 1


async def test_full_batch_is_one_script_call(counting: OpenCounters) -> None:
    async with counting() as counters:
        entries = [
            [CounterRequest(at(f"k{n}"), params("token_bucket"))] for n in range(KEYS_PER_CALL_MAX)
        ]
        taken = await counters.take(entries)
        assert len(taken.readings) == KEYS_PER_CALL_MAX
        assert all(answers[0].admitted == 1 for answers in taken.readings)


async def test_call_without_entries_is_answered(counting: OpenCounters) -> None:
    async with counting() as counters:
        taken = await counters.take([])
        assert taken.now > 0 and taken.readings == []


async def test_call_reads_the_redis_clock_once_for_all_keys(
    redis_server: Server,
) -> None:
    client = redis.asyncio.Redis.from_url(redis_server.url)
    counters = RedisCounters(RedisSettings(redis_server.url))
    entries = [
        [CounterRequest(at(f"k{n}"), params("token_bucket"))] for n in range(KEYS_PER_CALL_MAX)
    ]
    await counters.take(entries)
    await client.config_resetstat()
    await counters.take(entries)
    stats = await client.info("commandstats")
    expected = {"evalsha": 1, "time": 1, "get": KEYS_PER_CALL_MAX, "set": KEYS_PER_CALL_MAX}
    assert {name: stats[f"cmdstat_{name}"]["calls"] for name in expected} == expected
    await counters.aclose()
    await client.aclose()


async def test_redis_counter_is_named_by_tenant_and_rule_and_hides_its_subject(
    redis_server: Server,
) -> None:
    client = redis.asyncio.Redis.from_url(redis_server.url)
    counters = RedisCounters(RedisSettings(redis_server.url, names_max=3))
    await client.flushall()
    rule = Rule("*", "/api/*", "sliding_window", 5, 60.0)
    prefix = key_prefix("acme", rule)
    for subject in [*(f"ann@example.org{n}" for n in range(10)), "ann@example.org0"]:
        await counters.take([[CounterRequest((prefix, subject), params_of(rule, rule.stamp))]])
        assert len(counters._names) <= 3
    names = [name.decode() for name in await client.keys("*")]
    assert len(names) == 10, "one for each subject, also for one whose name was forgotten"
    pattern = r"rl:\{acme\}:\*//api/\*:[0-9a-f]{24}"
    assert all(re.fullmatch(pattern, name) for name in names), names
    await counters.aclose()
    await client.aclose()


@pytest.mark.parametrize("algorithm", [*AMOUNTS, "concurrency"])
async def test_corrupt_counter_does_not_affect_others(
    counting: OpenCounters, algorithm: Algorithm
) -> None:
    """A billion used, then a rule that gives one back a year: a debt of a billion
    years, longer than Redis keeps.
    """

    async with counting() as counters:
        full = params(algorithm, 1_000_000_000, 1, YEAR_MS)
        slow = params(algorithm, 1, 2, YEAR_MS)
        absurd, other = at("absurd"), CounterRequest(at("other"), params("token_bucket"))
        hold = "h" if algorithm == "concurrency" else ""
        judge = Judge()
        for rule, cost in ((full, 1_000_000_000), (full, 1), (slow, 1)):
            entries = [[CounterRequest(absurd, rule, 1 if hold else cost, hold=hold)], [other]]
            taken = await counters.take(entries)
            assert taken.readings == [judge.entry(entry, taken.now) for entry in entries]
        charge = Adjustment(absurd, slow, charged=10_000_000_000)
        await counters.adjust([Adjustment(absurd, slow, released="h") if hold else charge])
        group = [
            CounterRequest(absurd, slow, hold=hold),
            CounterRequest(at("third"), params("token_bucket")),
        ]
        readings = (await counters.take([group, [other]])).readings
        assert [reading.admitted for reading in readings[0]] == ([1, 1] if hold else [0, 0])
        assert (readings[1][0].admitted, readings[1][0].remaining) == (1, 6)


async def test_announced_nodes_are_counted(counting: OpenCounters) -> None:
    async with counting() as counters:
        assert await counters.announce("a", 30) == NodesAnnounced(1, ("a",))
        shared = not isinstance(counters, MemoryCounters)
        assert await counters.announce("b", 30) == (
            NodesAnnounced(2, ("a", "b")) if shared else NodesAnnounced(1, ("b",))
        )


async def test_node_that_stops_announcing_is_not_counted(redis_server: Server) -> None:
    async with redis.asyncio.Redis.from_url(redis_server.url) as client:
        await client.zadd("silent:nodes", {"gone": 1.0})
    counters = RedisCounters(RedisSettings(redis_server.url, prefix="silent"))
    assert await counters.announce("here", 30) == NodesAnnounced(1, ("here",))
    await counters.aclose()


async def test_only_the_newest_resets_are_reported(redis_server: Server) -> None:
    counters = RedisCounters(RedisSettings(redis_server.url, prefix="bounded", resets_max=2))
    await counters.announce("n", 30)
    for name in "abc":
        await counters.reset(at(name))
    assert (await counters.announce("n", 30)).resets == {counters.name(at(name)) for name in "bc"}
    await counters.aclose()


async def test_redis_lost_before_the_send_is_unavailable_and_after_it_unknown(
    redis_server: Server,
) -> None:
    nobody = RedisCounters(RedisSettings("redis://127.0.0.1:1/0"))
    with pytest.raises(Unavailable):
        await one(nobody, CounterRequest(at("k"), params("token_bucket")))
    requests = 0

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Says OK to the greeting, takes the script call and hangs up."""
        nonlocal requests
        while data := await reader.read(65536):
            if b"EVALSHA" in data:
                requests += 1
                break
            writer.write(greeted(data))
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    lost = RedisCounters(RedisSettings(f"redis://127.0.0.1:{port}/0?protocol=2"))
    with pytest.raises(OutcomeUnknown):
        await one(lost, CounterRequest(at("k"), params("token_bucket")))
    assert requests == 1, "what may have been counted is never sent again"
    await lost.aclose()
    server.close()


@pytest.mark.parametrize("algorithm", [*AMOUNTS, "concurrency"])
async def test_redis_counter_expires_when_nothing_is_used(
    redis_server: Server, algorithm: Algorithm
) -> None:
    counters = RedisCounters(RedisSettings(redis_server.url))
    client = redis.asyncio.Redis.from_url(redis_server.url)
    key, hold = at(f"kept by {algorithm}"), "h" if algorithm == "concurrency" else ""
    name = counters._name(key).decode()
    rule = params(algorithm, window_ms=5000)
    for _ in range(2):
        reading = await one(counters, CounterRequest(key, rule, hold=hold))
        assert reading.reset_ms < await client.pttl(name) <= reading.reset_ms + 1001
    adjusted = Adjustment(key, rule, released="h") if hold else Adjustment(key, rule, charged=3)
    await counters.adjust([adjusted])
    assert 0 < await client.pttl(name) <= 11_001
    await counters.announce("node", 30)
    assert 0 < await client.pttl("rl:nodes") <= 30_000
    await client.aclose()
    await counters.aclose()


def greeted(data: bytes) -> bytes:
    """What a server that says nothing of itself answers while it is connected to."""
    return b"+OK\r\n" * data.count(b"CLIENT") + b"$0\r\n\r\n" * data.count(b"$4\r\nINFO\r\n")


async def test_redis_that_refuses_to_count_gets_a_new_connection() -> None:
    """A primary that became a replica goes on answering on the connections it has."""
    connections = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while data := await reader.read(65536):
            refusal = b"-READONLY You can't write against a read only replica.\r\n"
            writer.write(refusal if b"EVALSHA" in data else greeted(data))
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    counters = RedisCounters(RedisSettings(f"redis://127.0.0.1:{port}/0"))
    for expected in (1, 2, 3):
        with pytest.raises(Unavailable, match="READONLY"):
            await one(counters, CounterRequest(at("k"), params("token_bucket")))
        assert connections == expected
    await counters.aclose()
    server.close()


async def test_existing_hold_is_admitted_again_in_a_group(counting: OpenCounters) -> None:
    async with counting() as counters:
        slots, wide = params("concurrency", 1), params("fixed_window")
        await one(counters, CounterRequest(at("slots"), slots, hold="mine"))
        group = [CounterRequest(at("slots"), slots, hold="mine"), CounterRequest(at("wide"), wide)]
        assert [r.admitted for r in (await counters.take([group])).readings[0]] == [1, 1]
        other = [CounterRequest(at("slots"), slots, hold="other"), CounterRequest(at("wide"), wide)]
        assert [r.admitted for r in (await counters.take([other])).readings[0]] == [0, 0]


async def test_concurrent_calls_each_get_their_own_answer(redis_server: Server) -> None:
    counters = RedisCounters(RedisSettings(redis_server.url))
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await one(counters, CounterRequest(at("first"), params("token_bucket")))
    await client.script_flush()  # so that some are made twice, behind others
    calls = [
        counters.take([[CounterRequest(at(f"pipe{n}"), params("token_bucket", 20), cost=n)]])
        for n in range(1, 9)
    ]
    abandoned = asyncio.ensure_future(calls[3])
    abandoned.cancel()
    answers = [await call for n, call in enumerate(calls) if n != 3]
    assert [answer.readings[0][0].remaining for answer in answers] == [19, 18, 17, 15, 14, 13, 12]
    await client.aclose()
    await counters.aclose()


async def test_connection_closed_by_redis_is_replaced(redis_server: Server) -> None:
    counters = RedisCounters(RedisSettings(redis_server.url))
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await one(counters, CounterRequest(at("closed"), params("token_bucket")))
    pipe = counters._scripts.pipe
    assert pipe is not None
    await client.client_kill_filter(_type="normal", skipme=True)
    async with asyncio.timeout(5):
        while pipe.usable:  # noqa: ASYNC110 - until the loop has read the end
            await asyncio.sleep(0.001)
    assert (
        await one(counters, CounterRequest(at("closed"), params("token_bucket")))
    ).remaining == 8
    await client.aclose()
    await counters.aclose()


@pytest.mark.parametrize("answer", [b"", b":1\r\n:2\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
async def test_silent_or_nonsensical_server_is_unknown_and_disconnected(answer: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Says OK to the greeting and ``answer`` to a call."""
        while data := await reader.read(65536):
            writer.write(answer if b"EVALSHA" in data else greeted(data))
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    settings = RedisSettings(f"redis://127.0.0.1:{port}/0", socket_timeout_seconds=0.05)
    counters = RedisCounters(settings)
    with pytest.raises(OutcomeUnknown):
        await one(counters, CounterRequest(at("k"), params("token_bucket")))
    async with asyncio.timeout(5):
        while (pipe := counters._scripts.pipe) is not None and pipe.usable:  # noqa: ASYNC110
            await asyncio.sleep(0.001)  # until it is closed
    server.close()


async def test_silent_redis_does_not_delay_startup() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = f"redis://127.0.0.1:{port}/0"
    counters = RedisCounters(RedisSettings(url, socket_timeout_seconds=3600.0, check_seconds=0.1))
    async with asyncio.timeout(30):
        await counters.check()
    trouble = counters.take_trouble()
    assert trouble is not None and trouble.reason == "timeout"
    await counters.aclose()
    server.close()


async def test_aborted_script_is_unknown_and_refused_script_is_unavailable(
    redis_server: Server,
) -> None:
    counters = RedisCounters(RedisSettings(redis_server.url))
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await client.hset(counters._name(at("foreign")).decode(), "not", "ours")
    bucket = params("token_bucket")
    with pytest.raises(OutcomeUnknown):
        await counters.take(
            [[CounterRequest(at("before"), bucket)], [CounterRequest(at("foreign"), bucket)]]
        )
    with pytest.raises(OutcomeUnknown):
        await counters.adjust(
            [Adjustment(at(name), bucket, charged=1) for name in ("before", "foreign")]
        )
    assert (await one(counters, CounterRequest(at("before"), bucket))).remaining == 7, (
        "what came before was counted"
    )

    await client.acl_setuser(
        "reader", enabled=True, nopass=True, keys=["*"], commands=["+get", "+client", "+hello"]
    )
    url = redis_server.url.replace("://", "://reader:x@", 1)
    refused = RedisCounters(RedisSettings(url))
    with pytest.raises(Unavailable):
        await one(refused, CounterRequest(at("before"), bucket))
    await client.acl_deluser("reader")
    await client.aclose()
    await counters.aclose()


async def test_script_that_redis_forgot_is_loaded_again(redis_server: Server) -> None:
    counters = RedisCounters(RedisSettings(redis_server.url))
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await client.script_flush()
    assert (await one(counters, CounterRequest(at("again"), params("token_bucket")))).admitted == 1
    await client.aclose()
    await counters.aclose()


def test_memory_counters_evict_idle_keys_first_and_stay_bounded() -> None:
    clock = ManualClock()
    counters = MemoryCounters(clock, subjects_max=100)
    rule = params("fixed_window", 10, window_ms=1000)
    for n in range(50):
        counters.take_now(at(f"old{n}"), rule, 1)
    clock.advance(2)
    for n in range(50):
        counters.take_now(at(f"new{n}"), rule, 1)
    assert len(counters.table) < 100
    assert all(at(f"new{n}") in counters.table for n in range(50))
    for n in range(500):
        counters.take_now(at(f"more{n}"), rule, 1)
    assert len(counters.table) <= 100


def test_new_subject_costs_the_same_among_many_as_among_few() -> None:
    counters = MemoryCounters(ManualClock(), subjects_max=100_000)
    rule = params("token_bucket", 10, window_ms=86_400_000)

    def spent(first: int) -> float:
        begin = time.process_time()
        for n in range(first, first + 20_000):
            counters.take_now(at(f"s{n}"), rule, 1)
        return time.process_time() - begin

    gc.collect()
    gc.disable()  # what others left behind would be looked through in one of them
    try:
        few, *_, many = [spent(first) for first in range(0, 140_000, 20_000)]
    finally:
        gc.enable()
    assert many < 8 * few, "making room must not look past everything that was removed before"
