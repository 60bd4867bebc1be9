"""Three nodes, a database that lags, fails over and loses notifications, and counters
that come and go: checkers 13 and 14.

Every control breaks one thing on purpose and must turn its checker red, and no other.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import AsyncIterator, Sequence, Set
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from limits_rig import Log, Members
from msgspec import structs
from result_counts import tally

from holdfast.limits.counters.contract import CounterRequest, CounterResponse
from holdfast.limits.feed import RuleFeed
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.limiter.settings import LimiterSettings, NodeIdentity
from holdfast.limits.rule_changes import RuleChange
from holdfast.limits.rules import Algorithm, Decision, Rule, RuleName, RuleSet, RuleSnapshot
from holdfast.limits.rulestore.contract import ChangeNotification, RuleLogHead
from holdfast.verify.checkers.verdict import Verdict
from proof import virtual_loop
from proof.limits_checkers import (
    AdmittedAmount,
    Bound,
    InForce,
    LimitsHistory,
    admitted_within_bound,
    most_over_rate,
    rules_monotone_and_converging,
)
from proof.results import Row

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "1000")) // 50
NODES = 3
LIMIT, WINDOW = 60, 60.0
LOAD = Rule("acme", "load", "token_bucket", LIMIT, WINDOW)
LEASED = Rule("acme", "leased", "token_bucket", LIMIT, WINDOW, precision="leased")
RULES = (LOAD, LEASED)
"""The first of the log, which no replica has not seen: so whoever finds no rule for
them has lost it.
"""
WINDOW_MIN = 30.0
"""Changed rules have this or that window, and this or that limit, none above the first.
"""
ALGORITHMS: tuple[Algorithm, ...] = ("token_bucket", "fixed_window", "sliding_window")
LEASE_PERCENT = 10.0
SOON_MAX = 10
"""What one node lets through without waiting in one round trip."""


class Reader:
    """One node's view of the database: it may lag, and it loses notifications."""

    def __init__(self, log: Log, rng: random.Random) -> None:
        self.log = log
        self.rng = rng
        self.lag = 0
        self.unavailable = False

    def _at(self) -> None:
        self.log.lag, self.log.unavailable = (
            min(self.lag, len(self.log.changes) - len(RULES)),
            self.unavailable,
        )

    async def head(self) -> RuleLogHead:
        self._at()
        head = await self.log.head()
        behind = self.log.committed_at[head.seq :]  # a replica says how old what it has may be
        lag_seconds = asyncio.get_running_loop().time() - behind[0] if behind else 0.0
        return structs.replace(head, lag_seconds=lag_seconds)

    async def changes_after(self, seq: int, limit: int = 100) -> Sequence[RuleChange]:
        self._at()
        return await self.log.changes_after(seq, limit)

    async def snapshot(self) -> RuleSnapshot:
        self._at()
        return await self.log.snapshot()

    async def notifications(self) -> AsyncIterator[ChangeNotification]:
        held: list[ChangeNotification] = []
        async for notification in self.log.channel.notifications():
            held.append(notification)
            if notification.seq and self.rng.random() < 0.4:
                continue  # lost for now, perhaps delivered later and out of order
            self.rng.shuffle(held)
            for each in held:
                yield each
            held = held[:1] if self.rng.random() < 0.2 else []


class ReplacingFeed(RuleFeed):
    """Control: a full sync from a lagging replica moves rules backwards."""

    async def sync(self) -> None:
        snapshot = await self._reader.snapshot()
        self._put(RuleSet.of(snapshot.rules, snapshot.epoch), "snapshot")
        self.cursor = (snapshot.epoch, snapshot.seq)


class UpsertOnlyFeed(RuleFeed):
    """Control: deletions do not travel, so deleted rules live on."""

    def _put(self, rules: RuleSet, by: str, names: Set[RuleName] | None = None) -> None:
        super()._put(
            RuleSet.of([structs.replace(r, deleted=False) for r in rules.all()], rules.epoch),
            by,
            names,
        )

    async def _take_snapshot(self, head: RuleLogHead) -> None:
        if self.cursor == (0, 0):
            await super()._take_snapshot(head)


class Node:
    """One node, which can die without a word and come back under its name, knowing only
    what all start with.

    What it knew of the others is on its disk.
    """

    def __init__(self, name: str, reader: Reader, world: World) -> None:
        self.name = name
        self.reader = reader
        self.world = world
        self.alive = False

    async def start(self) -> None:
        world, clock = self.world, virtual_loop.LoopClock()
        self.limiter = world.limiter(
            world.counters,
            clock,
            LimiterSettings(lease_percent=LEASE_PERCENT),
            node=NodeIdentity(self.name),
            file=world.disk / f"{self.name}.json",
        )
        self.feed = world.feed(
            self.reader, [self.reader], self._apply, clock, starts_with=world.rules
        )
        await self.limiter.__aenter__()
        await self.feed.__aenter__()
        self.alive = True

    async def die(self) -> None:
        """It returns and charges nothing; what it knew need no longer converge."""
        self.alive = False
        history = self.world.history
        history.in_force = [each for each in history.in_force if each.node != self.name]
        for task in (*self.limiter._heartbeat._background, *self.limiter._remote.batcher._calls):
            task.cancel()
        await self.feed.__aexit__()

    async def leave(self) -> None:
        await self.feed.__aexit__()
        await self.limiter.__aexit__()

    def _apply(self, rules: RuleSet) -> None:
        self.limiter.use(rules)
        stamps = {
            rule.name: rule.stamp
            for rule in rules.all()
            if not rule.deleted or self.world.feed is RuleFeed
        }
        now = asyncio.get_running_loop().time()
        self.world.history.in_force.append(InForce(self.name, now, rules.epoch, stamps))


class Undivided(Limiter):
    """Control: every node takes the whole limit for its share."""

    def _report(self, alive: bool) -> None:
        super()._report(alive)
        self._share.share_among(1)


class Forgiving(Members):
    """Control: what slipped through before it was asked for is not charged."""

    async def take(self, entries: Sequence[Sequence[CounterRequest]]) -> CounterResponse:
        return await super().take(
            [[structs.replace(ask, spent=0) for ask in entry] for entry in entries]
        )


class World:
    """Runs one seed and writes its history."""

    def __init__(
        self,
        seed: int,
        feed: type[RuleFeed] = RuleFeed,
        limiter: type[Limiter] = Limiter,
        counters: type[Members] = Members,
        forgetful: bool = False,
        mortal: bool = False,
        algorithm: Algorithm = "token_bucket",
        changing: bool = False,
    ) -> None:
        """``changing``: the rules that limit are changed too, and a failover or a
        restore may lose the changes.
        """
        self.rng = random.Random(seed)
        self.rules = [structs.replace(rule, algorithm=algorithm) for rule in RULES]
        self.changing = changing
        self.changed = 0
        self.feed = feed
        self.limiter = limiter
        self.forgetful = forgetful
        self.mortal = mortal
        self.log = Log()
        self.counters = counters()
        self.history = LimitsHistory()
        self.disk: Path
        self.starts = 0

    async def run(self) -> LimitsHistory:
        for rule in self.rules:
            self.log.commit(rule)
        readers = [Reader(self.log, random.Random(self.rng.random())) for _ in range(NODES)]
        nodes = [Node(f"n{n}", reader, self) for n, reader in enumerate(readers)]
        for node in nodes:
            await node.start()
        await asyncio.sleep(1)  # they know each other
        await self._disturb(nodes)
        await self._heal(nodes)
        for node in nodes:
            await node.leave()
        return self.history

    async def _disturb(self, nodes: list[Node]) -> None:
        for _ in range(60):
            self._change_something([node.reader for node in nodes])
            if self.forgetful and self.rng.random() < 0.3:
                self._forget_something()
            if self.changing and self.rng.random() < 0.2:
                self._change_a_limit()
            if self.mortal and self.rng.random() < 0.1:
                await self._kill_or_start(nodes)
            await asyncio.gather(*[self._ask(node.limiter) for node in nodes if node.alive])
            await asyncio.sleep(self.rng.random() * 2)

    async def _kill_or_start(self, nodes: list[Node]) -> None:
        """At most one is dead at a time. It may start while nobody answers."""
        dead = [node for node in nodes if not node.alive]
        if not dead:
            await self.rng.choice(nodes).die()
        else:
            await dead[0].start()
            self.starts += 1

    def _change_something(self, readers: list[Reader]) -> None:
        rng, reader = self.rng, self.rng.choice(readers)
        match rng.randrange(7):
            case 0 | 1:
                self.log.put(rng.choice("abc"), rng.randint(1, 100), deleted=rng.random() < 0.3)
            case 2:
                reader.lag = rng.choice([0, 1, 3])
            case 3:
                reader.unavailable = not reader.unavailable
            case 4 if len(self.log.changes) > 5 and rng.random() < 0.3:
                self.log.fail_over(lost=rng.choice([0, 1, 2, 3]))
            case 5 | 6:
                self.counters.mood = rng.choice(["well", "well", "unavailable", "lost", "silent"])
            case _:
                pass

    def _change_a_limit(self) -> None:
        rng = self.rng
        rule, limit, window = (
            rng.choice(self.rules),
            rng.choice([20, LIMIT]),
            rng.choice([WINDOW_MIN, WINDOW]),
        )
        self.log.commit(structs.replace(rule, limit=limit, window_seconds=window))
        self.changed += 1

    def _forget_something(self) -> None:
        """The database's retention goes on, its tombstones with it."""
        self.log.lag, self.log.unavailable = 0, False  # as no reader sees it, but as it is
        before = set(self.log.rules())
        self.log.forget(len(self.log.changes) - self.rng.randint(2, 8))
        self.history.forgotten |= before - set(self.log.rules())

    async def _ask(self, limiter: Limiter) -> None:
        rng = self.rng
        for _ in range(rng.randint(0, 30)):
            self._note("ann", await limiter.check("acme", "load", "ann"))
        for _ in range(rng.randint(0, 30)):
            self._note("bob", await limiter.check("acme", "leased", "bob"))
        for _ in range(rng.randint(0, SOON_MAX)):
            self._note("cid", limiter.check_optimistic("acme", "load", "cid"))

    def _note(self, subject: str, decision: Decision) -> None:
        """Whatever decided, and if it was that there is no rule."""
        if decision.allowed:
            self.history.admitted.append(
                AdmittedAmount(subject, asyncio.get_running_loop().time(), 1)
            )

    async def _heal(self, nodes: list[Node]) -> None:
        self.counters.mood = "well"
        for node in nodes:
            node.reader.lag, node.reader.unavailable = 0, False
            if not node.alive:
                await node.start()
        await asyncio.sleep(25)
        self.log.lag, self.log.unavailable = 0, False
        truth = self.log.rules()
        for node, rule in product(nodes, self.rules if self.feed is RuleFeed else ()):
            there = truth[rule.name]
            for subject in ("ann", "bob", "cid"):
                decision = await node.limiter.check("acme", rule.resource, subject)
                assert decision.rule_version == there.version, "a lost rule decides"
                assert decision.degraded or decision.limit == there.limit, "a lost rule decides"
        self.history.truth = {
            name: rule.stamp
            for name, rule in truth.items()
            if not rule.deleted or self.feed is RuleFeed
        }

    def bounds(self) -> dict[str, Bound]:
        """What each subject may have got at most.

        Where a node may be dead, the others share the limit among fewer, and who is
        started has a new share. What does not wait slips through for one round trip, of
        the counters and of the share.
        """
        known = NODES - 1 if self.mortal else NODES
        share = math.ceil(LIMIT / known)
        window = WINDOW_MIN if self.changing else WINDOW
        at_once, per_second = (
            LIMIT + (NODES + self.starts) * share,
            LIMIT / window * (1 + NODES / known),
        )
        slip = NODES * SOON_MAX
        slips, slips_per_second = 2 * slip, 0.0
        # two windows meet, and each forgets what slipped through
        if self.rules[0].algorithm != "token_bucket":
            at_once, slips_per_second = 2 * at_once, slip / window
            slips += slip * self.changed
        leases = NODES * int(LIMIT * LEASE_PERCENT / 100)
        return {
            "ann": Bound(at_once, per_second),
            "bob": Bound(at_once + leases, per_second),
            "cid": Bound(at_once + slips, per_second + slips_per_second),
        }


def judged(world: World, seed: int) -> tuple[Verdict, Verdict]:
    """Checkers 13 and 14."""
    with TemporaryDirectory() as folder:
        world.disk = Path(folder)
        history = virtual_loop.run(world.run(), seed=seed)
    admission = Verdict("admitted_within_bound")
    for subject, bound in world.bounds().items():
        theirs = LimitsHistory(
            admitted=[each for each in history.admitted if each.subject == subject]
        )
        verdict = admitted_within_bound(theirs, bound)
        admission.examined += verdict.examined
        admission.violations += verdict.violations
    return rules_monotone_and_converging(history), admission


def held(world: World, seed: int) -> None:
    rules, admission = judged(world, seed)
    assert rules.ok, f"seed {seed}\n{rules}"
    assert admission.ok, f"seed {seed}\n{admission}"
    assert rules.examined > (10 if world.mortal else 50) and admission.examined == 3


def test_rules_converge_with_a_trimmed_log() -> None:
    for seed in range(10):
        held(World(seed, forgetful=True), seed)


@pytest.mark.covers("004 never allows unbounded traffic")
def test_rules_converge_and_admission_is_bounded_under_faults() -> None:
    began = time.monotonic()
    for seed in range(SEEDS):
        changing = seed % 4 > 1
        held(
            World(seed, mortal=seed % 2 == 1, algorithm=ALGORITHMS[seed % 3], changing=changing),
            seed,
        )
    tally(
        Row(
            name="limits simulation",
            how=(
                "three nodes that die and return; exact, leased and not waiting; buckets and"
                " windows; limits that are changed; lagging readers, lost notifications,"
                " failovers that lose writes, counters unavailable, lost or silent"
            ),
            runs=SEEDS,
            failures=0,
            requirement="checkers 13 and 14 green",
            seed=f"0..{SEEDS - 1}",
            seconds=time.monotonic() - began,
        )
    )


@pytest.mark.covers("004 `ReplaceAll`")
@pytest.mark.parametrize("broken", [ReplacingFeed, UpsertOnlyFeed])
def test_broken_feed_fails_checker_13_only(broken: type[RuleFeed]) -> None:
    verdicts = [judged(World(seed, broken), seed) for seed in range(5)]
    assert not all(rules.ok for rules, _ in verdicts), "the control was not noticed"
    assert all(admission.ok for _, admission in verdicts)


def test_fallback_without_division_fails_checker_14_only() -> None:
    verdicts = [judged(World(seed, limiter=Undivided), seed) for seed in range(6)]
    assert not all(admission.ok for _, admission in verdicts), "the control was not noticed"
    assert all(rules.ok for rules, _ in verdicts)


def test_counters_that_do_not_charge_uncounted_checks_fail_checker_14_only() -> None:
    verdicts = [judged(World(seed, counters=Forgiving), seed) for seed in range(6)]
    assert not all(admission.ok for _, admission in verdicts), "the control was not noticed"
    assert all(rules.ok for rules, _ in verdicts)


def test_bound_checker_finds_the_worst_interval() -> None:
    burst = [
        AdmittedAmount("a", 0.0, 5),
        AdmittedAmount("a", 1.0, 5),
        AdmittedAmount("a", 100.0, 9),
    ]
    assert most_over_rate(burst, 1.0) == 9
    assert most_over_rate(burst, 0.0) == 19
    assert most_over_rate([], 1.0) == 0


def test_checker_finds_a_vanished_name_and_a_lower_epoch() -> None:
    name, stamp = RuleName("acme", "a"), RuleSet.of([LOAD]).get(LOAD.name)
    assert stamp is not None
    history = LimitsHistory(
        [InForce("n", 0.0, 2, {name: stamp.stamp}), InForce("n", 1.0, 2, {})], truth={}
    )
    assert not rules_monotone_and_converging(history).ok
    history = LimitsHistory([InForce("n", 0.0, 2, {}), InForce("n", 1.0, 1, {})], truth={})
    assert not rules_monotone_and_converging(history).ok
