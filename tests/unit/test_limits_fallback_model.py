"""What a node remembers and admits by itself, against models too simple to be wrong."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.limits.algorithms import params_of
from holdfast.limits.counters.contract import CounterKey, CounterRequest
from holdfast.limits.limiter.cache import LruDict
from holdfast.limits.limiter.fallback import OPEN_FACTOR, FallbackLimiter
from holdfast.limits.rules import Algorithm, OnStoreFailure, Rule

SIZE_MAX = 3
KEYS = st.sampled_from([("r", name) for name in "abcde"])


class Memory(RuleBasedStateMachine):
    """A bounded memory beside a list of pairs, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.bounded: LruDict[int] = LruDict(SIZE_MAX)
        self.pairs: list[tuple[CounterKey, int]] = []

    @rule(key=KEYS, value=st.integers(), last=st.booleans())
    def put(self, key: CounterKey, value: int, last: bool) -> None:
        known = [name for name, _ in self.pairs]
        if key in known and not last:
            self.pairs[known.index(key)] = (key, value)
        else:
            self.pairs = [*(pair for pair in self.pairs if pair[0] != key), (key, value)][
                -SIZE_MAX:
            ]
        (self.bounded.put_last if last else self.bounded.put)(key, value)

    @rule(key=KEYS)
    def drop(self, key: CounterKey) -> None:
        self.pairs = [pair for pair in self.pairs if pair[0] != key]
        self.bounded.drop(key)

    @invariant()
    def they_agree(self) -> None:
        assert list(self.bounded.items()) == self.pairs
        assert self.bounded.first() == (self.pairs[0] if self.pairs else None)
        assert len(self.bounded) == len(self.pairs) <= SIZE_MAX
        assert all(self.bounded.get(key) == value for key, value in self.pairs)


class Shares(RuleBasedStateMachine):
    """Nodes without their counters, each of which knows of all: together they admit no
    more than the rule says.
    """

    @initialize(
        nodes=st.integers(1, 6),
        limit=st.integers(1, 9),
        burst=st.sampled_from([0, 0, 1, 5, 20]),
        algorithm=st.sampled_from(["token_bucket", "fixed_window"]),
        failing=st.sampled_from(["local_share", "local_share", "open", "closed"]),
    )
    def begin(
        self, nodes: int, limit: int, burst: int, algorithm: Algorithm, failing: OnStoreFailure
    ) -> None:
        burst = burst if algorithm == "token_bucket" else 0
        self.rule = Rule(
            "*", "r", algorithm, limit, 10.0, burst_size=burst, on_store_failure=failing
        )
        names = [f"n{n}" for n in range(nodes)]
        self.nodes = [FallbackLimiter(100, name) for name in names]
        for node in self.nodes:
            node.share_among(nodes, names)
        self.now = 0.0
        self.admitted: list[tuple[int, float]] = []
        self.owed: Counter[int] = Counter()

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 9.9, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds * 1000

    @rule(at=st.integers(0, 5), times=st.integers(1, 12))
    def request(self, at: int, times: int) -> None:
        """One alone, or many in a row."""
        at %= len(self.nodes)
        for _ in range(times):
            reading = self.nodes[at].decide_one(
                self.rule,
                CounterRequest(("r", "ann"), params_of(self.rule, self.rule.stamp)),
                None,
                self.now,
            )
            if reading.admitted:
                self.admitted.append((at, self.now))
                self.owed[at] += 1
            else:
                assert reading.wait_ms > 0, "who is refused learns when to come back"

    @rule(at=st.integers(0, 3))
    def settle(self, at: int) -> None:
        """The counters answer: a node charges at most what it admitted since then."""
        at %= len(self.nodes)
        charged = sum(charge.charged for charge in self.nodes[at].take_pending(self.now, 100))
        assert charged <= self.owed[at] and not self.nodes[at].has_pending
        self.owed[at] = 0

    @invariant()
    def together_they_admit_no_more_than_the_rule_grants(self) -> None:
        if not hasattr(self, "rule"):
            return
        nodes: list[set[int]] = [set(range(len(self.nodes)))]
        if self.rule.on_store_failure == "open":
            nodes = [{node} for node in nodes[0]]
        times_of = {"closed": 0, "open": OPEN_FACTOR, "local_share": 1}[self.rule.on_store_failure]
        for group in nodes:
            times = [at for name, at in self.admitted if name in group]
            for since in times:
                # What fits at once, and a limit for every window that drains since, or
                # may begin.
                windows = (self.now - since) / 10_000 + (self.rule.algorithm == "fixed_window")
                most = times_of * (self.rule.capacity + self.rule.limit * windows)
                assert sum(at >= since for at in times) <= most + 1e-6
        if self.rule.on_store_failure == "closed":
            assert not self.admitted


TestMemory = Memory.TestCase
TestShares = Shares.TestCase
TestMemory.settings = TestShares.settings = settings(max_examples=40, deadline=None)


def test_shares_of_a_bucket_drain_together_at_the_rules_rate() -> None:
    """Of 2 a minute, each of six nodes has at least 1; of a burst of 12, it has 2."""
    names, limited = (
        [f"n{n}" for n in range(6)],
        Rule("acme", "x", "token_bucket", 2, 60.0, burst_size=12),
    )
    crowd = [FallbackLimiter(10, name) for name in names]
    admitted, minutes = 0, 10
    for second in range(minutes * 60):
        for share in crowd:
            share.share_among(6, names)
            request = CounterRequest(("r", "a"), params_of(limited, limited.stamp))
            admitted += share.decide_one(limited, request, None, second * 1000.0).admitted
    bound = limited.capacity + limited.limit * minutes
    assert bound - len(crowd) <= admitted <= bound
