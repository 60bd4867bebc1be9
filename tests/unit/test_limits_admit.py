"""How many sends of a turn fit, after any history of the counter."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.clock import ManualClock
from holdfast.errors import InternalError, RateLimited
from holdfast.ingest.admission import AdmissionControl
from holdfast.limits.algorithms import CODES, LimitParams
from holdfast.limits.counters.contract import Adjustment, CounterRequest
from holdfast.limits.counters.memory import MemoryCounters
from holdfast.limits.counters.table import CounterTable
from holdfast.limits.entry_points import EntryPoints
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.rules import Algorithm, Rule, RuleSet, RuleVersion
from holdfast.message import Outcome, User
from holdfast.wire.frames import SendBody

KEY = ("rule", "ann")
T0 = 1_700_000_040_000.0


class Life:
    """A counter under everything that can happen to one: takes, gifts, charges, changed
    rules, a clock that steps.
    """

    def __init__(self, algorithm: Algorithm, seed: int) -> None:
        self.algorithm: Algorithm = algorithm
        self.rng = random.Random(seed)
        self.table = CounterTable()
        self.now = T0
        self.version = 0
        self.change_rule()

    def change_rule(self) -> None:
        self.version += 1
        limit, window = (
            self.rng.choice([1, 2, 5, 10, 50]),
            self.rng.choice([100.0, 1000.0, 60_000.0, 3_600_000.0]),
        )
        burst = self.rng.choice([0, 0, 3, 50]) if self.algorithm == "token_bucket" else 0
        self.params = LimitParams(
            self.algorithm, RuleVersion(1, self.version), limit, window, burst or limit
        )

    def step(self) -> None:
        rng = self.rng
        self.now += rng.choice(
            [0, 0, 1, 50, 999, 1000, 60_000, -500, -3_600_000, 2000 * rng.random()]
        )
        if rng.random() < 0.1:
            self.change_rule()
        if self.algorithm == "concurrency":
            hold = f"h{rng.randrange(9)}"
            if rng.random() < 0.3:
                self.table.adjust(Adjustment(KEY, self.params, released=hold), self.now)
            else:
                self.table.take(
                    CounterRequest(KEY, self.params, hold=hold, spent=rng.choice([0, 1])), self.now
                )
            return
        cost, times = rng.randint(1, self.params.capacity), rng.randint(0, 4)
        spent = rng.choice([0, 0, times])
        self.table.take(
            CounterRequest(KEY, self.params, cost, times, rng.choice([0, 0, 5]), spent=spent),
            self.now,
        )
        given = Adjustment(
            KEY, self.params, given=rng.randint(1, 5), taken_at=self.now - rng.randint(0, 2000)
        )
        charged = Adjustment(KEY, self.params, charged=rng.randint(1, 50))
        self.table.adjust(rng.choice([given, charged]), self.now)

    def admits_one(self, hold: str) -> bool:
        named = hold if self.algorithm == "concurrency" else ""
        return self.table.take(CounterRequest(KEY, self.params, hold=named), self.now).admitted == 1


@pytest.mark.parametrize("algorithm", CODES)
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 30), count=st.integers(1, 60))
def test_peek_says_how_many_fit_and_when_the_next_does(
    algorithm: Algorithm, seed: int, steps: int, count: int
) -> None:
    life = Life(algorithm, seed)
    for _ in range(steps):
        life.step()
        life.table.peek(KEY, life.params, life.rng.randint(1, 40), life.now)
    refused = life.table.peek(KEY, life.params, count, life.now)
    fits = count if refused is None else refused.admitted
    assert all(life.admits_one(f"new{n}") for n in range(fits))
    if refused is not None:
        assert fits < count
        assert not life.admits_one("more") and refused.wait_ms > 0 and refused.remaining == 0
        life.now += refused.wait_ms + 1
        assert life.admits_one("later"), (
            "a caller that waits as long as the refusal says is admitted"
        )


class Taken:
    """Where sends go in: answers nobody, and keeps what came."""

    def __init__(self) -> None:
        self.senders: list[str] = []

    def submit(
        self, body: SendBody, sender: User, source: str, deadline: float, answer: object
    ) -> None:
        self.senders.append(sender.user_id)


async def send_all(points: EntryPoints, senders: list[str]) -> tuple[list[str], list[Outcome]]:
    """Sends of one turn: who was let in, and what the others were refused."""
    taken, refused = Taken(), list[Outcome]()
    sends = AdmissionControl(taken, points, ManualClock())
    for name in senders:
        sends.submit(
            SendBody("m", "chat", "hello"), User("acme", name), "socket", 1.0, refused.append
        )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return taken.senders, refused


@pytest.mark.parametrize(
    ("algorithm", "least"), [("token_bucket", 11.9), ("fixed_window", 0.0), ("sliding_window", 0.0)]
)
async def test_every_send_of_a_turn_is_answered_beyond_the_tenants_capacity(
    algorithm: Algorithm, least: float
) -> None:
    clock = ManualClock()
    rules = [
        Rule("*", "send:user", "token_bucket", 3000, 60.0),
        Rule("*", "send:tenant", algorithm, 5, 60.0),
    ]
    points = EntryPoints(Limiter(MemoryCounters(clock), clock, rules=RuleSet.of(rules)))
    admitted, refused = await send_all(points, ["ann"] * 12)
    assert len(admitted) == 5
    assert len(refused) == 7 and all(isinstance(each, RateLimited) for each in refused)
    assert isinstance(refused[0], RateLimited) and refused[0].retry_after_seconds > least


async def test_defect_in_a_check_fails_only_its_own_sends() -> None:
    class Broken(EntryPoints):
        def admit_at_once(
            self, entry_point: object, who: User, count: int, address: str = ""
        ) -> tuple[int, RateLimited | None]:
            if who.user_id == "bob":
                raise ZeroDivisionError
            return count, None

    clock = ManualClock()
    points = Broken(Limiter(MemoryCounters(clock), clock))
    admitted, refused = await send_all(points, ["ann", "bob", "bob", "cid"])
    assert admitted == ["ann", "cid"]
    assert len(refused) == 2 and all(isinstance(each, InternalError) for each in refused)
