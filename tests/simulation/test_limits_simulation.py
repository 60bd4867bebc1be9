"""Three nodes, a database that lags, fails over and loses rings, counters that come and go: checkers 13 and 14.

Every control breaks one thing on purpose and must turn its checker red, and no other.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Sequence

import pytest
import virtual
from limitworld import Log, Shared
from msgspec import structs
from tally import tally

from holdfast.limits.changes import RuleChange
from holdfast.limits.feed import Feed
from holdfast.limits.limiter import Limiter, Place
from holdfast.limits.rules import Rule, RuleName, RuleSet, Snapshot
from holdfast.limits.rulestore.contract import Head, Ring
from holdfast.verify.limits import (
    Admitted,
    InForce,
    LimitsHistory,
    admitted_within_bound,
    bound,
    most_over_rate,
    rules_monotone_and_converging,
)
from holdfast.verify.results import Row

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "1000")) // 50
NODES = 3
LIMIT, WINDOW = 60, 60.0
LOAD = Rule("acme", "load", "token_bucket", LIMIT, WINDOW)


class Reader:
    """One node's way to the database: it may lag behind, and its doorbell loses rings."""

    def __init__(self, log: Log, rng: random.Random) -> None:
        self.log = log
        self.rng = rng
        self.lag = 0
        self.away = False

    def _at(self) -> None:
        self.log.lag, self.log.away = min(self.lag, len(self.log.changes)), self.away

    async def head(self) -> Head:
        self._at()
        head = await self.log.head()
        unseen = self.log.committed_at[head.seq :]  # a replica says how old what it has may be
        lag_seconds = asyncio.get_running_loop().time() - unseen[0] if unseen else 0.0
        return structs.replace(head, lag_seconds=lag_seconds)

    async def changes_after(self, seq: int, limit: int = 100) -> Sequence[RuleChange]:
        self._at()
        return await self.log.changes_after(seq, limit)

    async def snapshot(self) -> Snapshot:
        self._at()
        return await self.log.snapshot()

    async def rings(self) -> AsyncIterator[Ring]:
        held: list[Ring] = []
        async for ring in self.log.bell.rings():
            held.append(ring)
            if ring.seq and self.rng.random() < 0.4:
                continue  # lost for now, perhaps told later and out of order
            self.rng.shuffle(held)
            for each in held:
                yield each
            held = held[:1] if self.rng.random() < 0.2 else []


class ReplacingFeed(Feed):
    """Control: a full sync replaces everything, so one from a lagging replica moves rules backwards."""

    async def sync(self) -> None:
        snapshot = await self._reader.snapshot()
        self._put(RuleSet.of(snapshot.rules, snapshot.epoch), "snapshot")
        self.cursor = (snapshot.epoch, snapshot.seq)


class UpsertOnlyFeed(Feed):
    """Control: deletions do not travel, so deleted rules live on."""

    def _put(self, rules: RuleSet, by: str, count: int | None = None) -> None:
        super()._put(RuleSet.of([structs.replace(r, deleted=False) for r in rules.all()], rules.epoch), by, count)

    async def _take_snapshot(self, head: Head) -> None:
        if self.cursor == (0, 0):
            await super()._take_snapshot(head)


class World:
    """Runs one seed and writes its history."""

    def __init__(self, seed: int, feed: type[Feed] = Feed, divided: bool = True, forgetful: bool = False) -> None:
        self.rng = random.Random(seed)
        self.feed = feed
        self.divided = divided
        self.forgetful = forgetful
        self.log = Log()
        self.counters = Shared()
        self.history = LimitsHistory()

    async def run(self) -> LimitsHistory:
        self.counters.nodes = NODES
        self.log.put("load", LIMIT)
        self.log.changes[0] = structs.replace(self.log.changes[0], rule=LOAD)
        readers = [Reader(self.log, random.Random(self.rng.random())) for _ in range(NODES)]
        limiters = [Limiter(self.counters, virtual.LoopClock(), place=Place(f"n{n}")) for n in range(NODES)]
        feeds = [self._followed(f"n{n}", reader, limiters[n]) for n, reader in enumerate(readers)]
        for limiter, feed in zip(limiters, feeds, strict=True):
            await limiter.__aenter__()
            await feed.__aenter__()
            if not self.divided:
                limiter._share.nodes = 1
        await self._disturb(readers, limiters)
        await self._heal(readers, feeds)
        for limiter, feed in zip(limiters, feeds, strict=True):
            await feed.__aexit__()
            await limiter.__aexit__()
        return self.history

    def _followed(self, name: str, reader: Reader, limiter: Limiter) -> Feed:
        def apply(rules: RuleSet) -> None:
            limiter.use(rules)
            stamps = {rule.name: rule.stamp for rule in rules.all() if not rule.deleted or self.feed is Feed}
            now = asyncio.get_running_loop().time()
            self.history.in_force.append(InForce(name, now, rules.epoch, stamps))

        return self.feed(reader, [reader], apply, virtual.LoopClock())

    async def _disturb(self, readers: list[Reader], limiters: list[Limiter]) -> None:
        for _ in range(60):
            self._change_something(readers)
            if self.forgetful and self.rng.random() < 0.3:
                self._forget_something()
            await asyncio.gather(*[self._ask(limiter) for limiter in limiters])
            await asyncio.sleep(self.rng.random() * 2)
            if not self.divided:
                for limiter in limiters:
                    limiter._share.nodes = 1

    def _change_something(self, readers: list[Reader]) -> None:
        rng, reader = self.rng, self.rng.choice(readers)
        match rng.randrange(7):
            case 0 | 1:
                self.log.put(rng.choice("abc"), rng.randint(1, 100), deleted=rng.random() < 0.3)
            case 2:
                reader.lag = rng.choice([0, 1, 3])
            case 3:
                reader.away = not reader.away
            case 4 if len(self.log.changes) > 4 and rng.random() < 0.3:
                self.log.fail_over(lost=rng.choice([0, 1, 2]))
            case 5 | 6:
                self.counters.mood = rng.choice(["well", "well", "away", "lost", "silent"])
            case _:
                pass

    def _forget_something(self) -> None:
        """The database's retention goes on, its tombstones with it."""
        self.log.lag, self.log.away = 0, False  # as no reader sees it, but as it is
        before = set(self.log.rules())
        self.log.forget(len(self.log.changes) - self.rng.randint(2, 8))
        self.history.forgotten |= before - set(self.log.rules())

    async def _ask(self, limiter: Limiter) -> None:
        for _ in range(self.rng.randint(0, 40)):
            decision = await limiter.check("acme", "load", "ann")
            if decision.allowed and decision.decided_by != "no_rule":
                self.history.admitted.append(Admitted("ann", asyncio.get_running_loop().time(), 1))

    async def _heal(self, readers: list[Reader], feeds: list[Feed]) -> None:
        self.counters.mood = "well"
        for reader in readers:
            reader.lag, reader.away = 0, False
        await asyncio.sleep(25)
        self.log.lag, self.log.away = 0, False
        truth = self.log.rules()
        self.history.truth = {name: rule.stamp for name, rule in truth.items() if not rule.deleted or self.feed is Feed}


def judged(seed: int, feed: type[Feed] = Feed, divided: bool = True, forgetful: bool = False) -> tuple[bool, bool]:
    """Whether checkers 13 and 14 are green."""
    history = virtual.run(World(seed, feed, divided, forgetful).run(), seed=seed)
    rules = rules_monotone_and_converging(history)
    admission = admitted_within_bound(history, bound(LIMIT, LIMIT / WINDOW, NODES, outages=True))
    if feed is Feed and divided:
        assert rules.ok, f"seed {seed}\n{rules}"
        assert admission.ok, f"seed {seed}\n{admission}"
        assert rules.examined > 50 and admission.examined == 1
    return rules.ok, admission.ok


def test_rules_converge_also_when_the_database_forgets_its_oldest_changes() -> None:
    for seed in range(20):
        judged(seed, forgetful=True)


def test_rules_converge_and_admission_is_bounded_whatever_happens() -> None:
    began = time.monotonic()
    for seed in range(SEEDS):
        judged(seed)
    tally(
        Row(
            name="limits simulation",
            how="three nodes; lagging readers, lost rings, failovers that lose writes, counters away, lost or silent",
            runs=SEEDS,
            failures=0,
            requirement="checkers 13 and 14 green",
            seed=f"0..{SEEDS - 1}",
            seconds=time.monotonic() - began,
        )
    )


@pytest.mark.parametrize("broken", [ReplacingFeed, UpsertOnlyFeed])
def test_a_broken_feed_turns_checker_13_red_and_no_other(broken: type[Feed]) -> None:
    verdicts = [judged(seed, broken) for seed in range(5)]
    assert not all(rules for rules, _ in verdicts), "the control was not noticed"
    assert all(admission for _, admission in verdicts)


def test_a_fallback_without_division_turns_checker_14_red_and_no_other() -> None:
    verdicts = [judged(seed, divided=False) for seed in range(10)]
    assert not all(admission for _, admission in verdicts), "the control was not noticed"
    assert all(rules for rules, _ in verdicts)


def test_the_bound_finds_the_worst_stretch() -> None:
    burst = [Admitted("a", 0.0, 5), Admitted("a", 1.0, 5), Admitted("a", 100.0, 9)]
    assert most_over_rate(burst, 1.0) == 9
    assert most_over_rate(burst, 0.0) == 19
    assert most_over_rate([], 1.0) == 0


def test_a_name_that_vanishes_and_an_epoch_that_goes_back_are_found() -> None:
    name, stamp = RuleName("acme", "a"), RuleSet.of([LOAD]).get(LOAD.name)
    assert stamp is not None
    history = LimitsHistory([InForce("n", 0.0, 2, {name: stamp.stamp}), InForce("n", 1.0, 2, {})], truth={})
    assert not rules_monotone_and_converging(history).ok
    history = LimitsHistory([InForce("n", 0.0, 2, {}), InForce("n", 1.0, 1, {})], truth={})
    assert not rules_monotone_and_converging(history).ok
