"""Entry points that cannot wait, with remote counters: uncounted checks."""

from __future__ import annotations

import asyncio

import pytest
from limits_rig import Shared

from holdfast.clock import ManualClock
from holdfast.ingest.admission import AdmissionControl
from holdfast.limits.algorithms import LimitParams
from holdfast.limits.counters.contract import key_prefix
from holdfast.limits.counters.memory import MemoryCounters
from holdfast.limits.entry_points import EntryPoints
from holdfast.limits.entry_rules import ADMIN, ADMIN_CALLS_PER_MINUTE_MIN, DEFAULT_RULES
from holdfast.limits.http import refusal
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.rules import Algorithm, Check, Mode, Rule, RuleSet
from holdfast.message import User
from holdfast.wire.frames import SendBody
from proof import virtual_loop


@pytest.mark.parametrize(
    ("algorithm", "slips"), [("token_bucket", 1), ("fixed_window", 4), ("sliding_window", 3)]
)
@pytest.mark.parametrize("sizes", [[10], [1] * 10, list(range(20, 0, -1)), [50, 3]])
async def test_sends_with_remote_counters_are_limited_in_groups_of_any_size(
    sizes: list[int], algorithm: Algorithm, slips: int
) -> None:
    """One round trip's worth slips through, and is paid back before the next; windows
    forget it when they end.
    """
    rule = Rule(
        "*", "send:user", algorithm, 60, 60.0, burst_size=10 if algorithm == "token_bucket" else 0
    )
    points = EntryPoints(Limiter(Shared(), virtual_loop.LoopClock(), rules=RuleSet.of([rule])))
    loop, sent = asyncio.get_running_loop(), 0
    while loop.time() < 179:
        for size in sizes:
            sent += points.admit_at_once("send", User("acme", "ann"), size)[0]
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.5)
    assert rule.capacity + 100 <= sent <= rule.capacity + 180 + slips * max(sizes)


async def test_uncounted_sends_before_an_outage_are_charged_to_the_share() -> None:
    counters, sent = Shared(), []
    counters.mood = "unavailable"
    rule = Rule("*", "send:user", "token_bucket", 60, 60.0, burst_size=10)
    points = EntryPoints(Limiter(counters, virtual_loop.LoopClock(), rules=RuleSet.of([rule])))
    for _ in range(100):
        sent.append(points.admit_at_once("send", User("acme", "ann"), 30)[0])
        await asyncio.sleep(0.1)
    assert sent == [30] + [0] * 99, "once; nothing drains of what is owed for 20 s"


async def test_hanging_calls_admit_no_uncounted_sends_twice() -> None:
    """Two calls hang and the breaker saw no third, while heartbeats are answered."""
    counters, sent = Shared(), 0
    rule = Rule("*", "send:user", "token_bucket", 60, 60.0, burst_size=10)
    async with Limiter(counters, virtual_loop.LoopClock(), rules=RuleSet.of([rule])) as limits:
        counters.mood = "silent"
        for name in ("bob", "cid"):
            EntryPoints(limits).admit_at_once("send", User("acme", name), 1)
            await asyncio.sleep(0.1)
        counters.mood = "well"
        assert limits.counters_state == "down", "nothing that was asked is answered"
        for _ in range(600):
            sent += EntryPoints(limits).admit_at_once("send", User("acme", "ann"), 10)[0]
            await asyncio.sleep(0.1)
    assert 60 <= sent <= 10 + 60 + 10


def test_addresses_of_one_ipv6_network_are_counted_as_one() -> None:
    clock = ManualClock()
    rules = RuleSet.of([Rule("*", "connect:address", "fixed_window", 60, 60.0)])
    points = EntryPoints(Limiter(MemoryCounters(clock), clock, rules=rules))

    def admitted(addresses: list[str]) -> int:
        return sum(
            points.ask_at_once("connect", User("", ""), address) is None for address in addresses
        )

    assert admitted([f"2001:db8:1:2::{n:x}" for n in range(100)]) == 60
    assert admitted([f"2001:db8:1:{n:x}::1" for n in range(3, 103)]) == 100, (
        "another /64 is somebody else"
    )
    assert admitted(["192.0.2.1", "::ffff:192.0.2.1"] * 50) == 60
    assert admitted([f"192.0.2.{n}" for n in range(2, 102)]) == 100


@pytest.mark.parametrize("mood", ["unavailable", "lost", "silent", "broken"])
async def test_send_never_waits_for_limits_in_any_state_of_the_counters(mood: str) -> None:
    class Taken:
        def __init__(self) -> None:
            self.at: list[float] = []

        def submit(self, *_: object) -> None:
            self.at.append(asyncio.get_running_loop().time())

    counters, loop, taken = Shared(), asyncio.get_running_loop(), Taken()
    counters.mood = mood
    rule = Rule("*", "send:user", "token_bucket", 1000, 60.0)
    sends = AdmissionControl(
        taken,
        EntryPoints(Limiter(counters, virtual_loop.LoopClock(), rules=RuleSet.of([rule]))),
        virtual_loop.LoopClock(),
    )
    asked = []
    for _ in range(100):
        asked.append(loop.time())
        sends.submit(
            SendBody("m1", "lobby", "hi"), User("acme", "ann"), "", 0.0, lambda outcome: None
        )
        await asyncio.sleep(0.01)
    assert taken.at == asked, "in the very turn in which they came"


def tally(limits: Limiter, by: str) -> list[int]:
    """Checks refused, allowed, and over a limit in shadow mode."""
    return limits._decisions.tally[by]


@pytest.mark.parametrize(
    "algorithm", ["token_bucket", "fixed_window", "sliding_window", "concurrency"]
)
@pytest.mark.parametrize("mode", ["enforce", "shadow"])
def test_shadow_rule_counts_like_an_enforced_one_and_each_check_once(
    algorithm: Algorithm, mode: Mode
) -> None:
    clock = ManualClock()
    rule = Rule("*", "send:user", algorithm, 15, 3600.0, mode=mode)
    limits = Limiter(MemoryCounters(clock), clock, rules=RuleSet.of([rule]))
    passed = [
        EntryPoints(limits).admit_at_once("send", User("acme", "ann"), 10)[0] for _ in range(3)
    ]
    hold = "h" if algorithm == "concurrency" else ""
    assert passed == ([10, 5, 0] if mode == "enforce" else [10, 10, 10])
    assert (
        limits._counters.take_now(
            (key_prefix("acme", rule), "ann"), _terms(limits), 1, hold
        ).remaining
        == 0
    )
    assert tally(limits, "counters") == ([15, 15, 0] if mode == "enforce" else [0, 15, 15])


def _terms(limits: Limiter) -> LimitParams:
    compiled = limits._compiler.find("acme", "send:user")
    assert compiled is not None
    return compiled.params


@pytest.mark.parametrize("counters", ["near", "far", "unavailable"])
async def test_every_check_is_counted_once_with_its_result(counters: str) -> None:
    clock, shared = virtual_loop.LoopClock(), Shared()
    shared.mood = "unavailable" if counters == "unavailable" else "well"
    rules = [
        Rule("*", f"send:{whose}", "fixed_window", limit, 3600.0) for whose, limit in WHOSE.items()
    ]
    near = MemoryCounters(clock)
    limits = Limiter(near if counters == "near" else shared, clock, rules=RuleSet.of(rules))
    points, asked, passed = EntryPoints(limits), 0, 0
    for size in (10, 7, 1, 20, 3, 1, 12):
        asked += size
        passed += points.admit_at_once("send", User("acme", "ann"), size)[0]
        await asyncio.sleep(0.2)
    refused, allowed, exceeded = (
        sum(counts) for counts in zip(*limits._decisions.tally.values(), strict=True)
    )
    assert (allowed, exceeded) == (2 * passed, 0), "by each of the two rules"
    assert refused == asked - passed, "by the first that refused"


WHOSE = {"user": 15, "tenant": 100}


async def test_checks_of_a_group_are_counted_one_by_one_even_for_one_key() -> None:
    clock = ManualClock()
    rules = RuleSet.of([Rule("*", name, "fixed_window", 4, 3600.0) for name in ("x", "y")])
    limits = Limiter(MemoryCounters(clock), clock, rules=rules)
    group = [
        Check("acme", "x", "ann"),
        Check("acme", "x", "ann"),
        Check("acme", "y", "ann"),
        Check("acme", "-", "ann"),
    ]
    for _ in range(3):
        await limits.check_many(group)
    assert (tally(limits, "counters"), tally(limits, "no_rule")) == ([3, 6, 0], [0, 3, 0])


def _without_a_share(limiter: Limiter) -> str:
    """An operator's key of whose limit this node has no share."""
    keys = (f"key-{n}" for n in range(100))
    return next(
        key
        for key in keys
        if limiter._share._part(ADMIN_CALLS_PER_MINUTE_MIN, ("{*}:*/admin:key:", key)) == 0
    )


async def test_operator_has_admin_calls_on_every_node_without_the_counters() -> None:
    """Ten a minute among twenty nodes are nothing on half of them, and whoever set that
    must be able to undo it.
    """
    counters = Shared()
    counters.nodes = 20
    rule = Rule(*ADMIN, "token_bucket", ADMIN_CALLS_PER_MINUTE_MIN, 60.0)
    async with Limiter(counters, virtual_loop.LoopClock(), rules=RuleSet.of([rule])) as limiter:
        counters.mood = "unavailable"
        points, operator = EntryPoints(limiter), User("", _without_a_share(limiter))

        async def passed(calls: int) -> int:
            return [refusal(await points.decide("admin", operator)) for _ in range(calls)].count(
                None
            )

        assert await passed(30) == ADMIN_CALLS_PER_MINUTE_MIN
        await asyncio.sleep(60)
        assert await passed(30) == ADMIN_CALLS_PER_MINUTE_MIN
        counters.mood = "well"
        await asyncio.sleep(1.1)
        assert await passed(30) == ADMIN_CALLS_PER_MINUTE_MIN, "by the rule alone"


@pytest.mark.parametrize(("user", "burst"), [("ann", 100), ("", 6_000)])
async def test_reply_is_limited_by_user_and_tenant_and_of_a_key_by_tenant(
    user: str, burst: int
) -> None:
    clock = ManualClock()
    points = EntryPoints(Limiter(MemoryCounters(clock), clock, rules=RuleSet.of(DEFAULT_RULES)))
    who = User("acme", user)
    passed = [refusal(await points.decide("reply", who)) for _ in range(burst + 1)]
    assert passed[:burst] == [None] * burst
    refused = passed[burst]
    assert refused is not None
    assert refused.details["rule"] == ("*/reply:user" if user else "*/reply:tenant")
    clock.advance(60)
    assert refusal(await points.decide("reply", who)) is None


@pytest.mark.parametrize("is_key", [False, True])
def test_active_limit_is_that_of_the_live_rule_in_force(is_key: bool) -> None:
    name, default = ("replies:active:key", 1_000) if is_key else ("replies:active", 3)

    def limit(*rules: Rule, tenant: str = "acme") -> int:
        clock = ManualClock()
        limiter = Limiter(MemoryCounters(clock), clock)
        limiter.use(RuleSet.of(rules))
        return EntryPoints(limiter).active_limit(tenant, 3, is_key=is_key)

    def live(tenant: str, limit: int, mode: Mode = "enforce", resource: str = name) -> Rule:
        return Rule(tenant, resource, "concurrency", limit, 60.0, mode=mode)

    assert limit() == default
    assert limit(live("*", 7)) == 7
    assert limit(live("*", 7), live("acme", 9)) == 9
    assert limit(live("*", 7), live("acme", 9), tenant="other") == 7
    assert limit(live("*", 8, resource="replies:*")) == 8
    assert limit(live("*", 7, "off")) == limit(live("*", 7, "shadow")) == default


async def test_live_rule_counts_no_checks() -> None:
    """A tenant that checks it through the API cannot store holders beyond the bound."""
    clock = ManualClock()
    rules = RuleSet.of([Rule("*", "replies:*", "concurrency", 1, 60.0)])
    limiter = Limiter(MemoryCounters(clock), clock, rules=rules)
    for resource in ("replies:active", "replies:other"):
        decisions = [await limiter.check("acme", resource, "ann") for _ in range(3)]
        assert [(d.allowed, d.decided_by) for d in decisions] == [(True, "no_rule")] * 3
