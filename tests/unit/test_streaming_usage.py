"""Accounts of replies: token rules before they run, counts when they end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from limits_rig import Shared

from holdfast.clock import Ids, timestamp
from holdfast.errors import RateLimited, Unavailable
from holdfast.limits.counters.memory import MemoryCounters
from holdfast.limits.entry_points import EntryPoints
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.rules import Check, Mode, Rule, RuleSet
from holdfast.streaming.reply import Payer, ReplyUsage
from holdfast.streaming.usage import OUTPUT_TOKENS_MAX, ReplyAccounts, UsageRun
from holdfast.streaming.usage_store.contract import RunUsage, UsageQuery, UsageRow
from holdfast.streaming.usage_store.memory import MemoryUsage
from holdfast.telemetry import REGISTRY
from proof import virtual_loop

ANN = Payer("acme", "ann")
KEY = Payer("acme", "key-1", is_key=True)
EVER = UsageQuery("0000-01-01", "9999-12-31")
DAY = 86_400.0
PROMPT = 25
"""Tokens of the prompt, as they are estimated."""


@dataclass(frozen=True)
class Request:
    payer: Payer = ANN
    model: str = "fast"
    fields: Mapping[str, bytes] = field(default_factory=lambda: {"messages": b"m" * 4 * PROMPT})
    max_output_tokens: int | None = None


class Noted(MemoryUsage):
    """Keeps what was noted last; fails while ``broken``."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[RunUsage] = []
        self.broken = False
        self.delay_seconds = 0.0

    async def note(self, running: Sequence[RunUsage]) -> None:
        self.noted = list(running)

    async def count(self, ended: Sequence[RunUsage]) -> None:
        await asyncio.sleep(self.delay_seconds)
        if self.broken:
            raise Unavailable("disk full")
        await super().count(ended)


class Rig:
    def __init__(self, *rules: Rule, counters: MemoryCounters | None = None) -> None:
        clock = virtual_loop.LoopClock()
        self.limiter = Limiter(counters or MemoryCounters(clock), clock, rules=RuleSet.of(rules))
        self.store = Noted()
        self.accounts = ReplyAccounts(EntryPoints(self.limiter), self.store, clock, Ids(clock))

    async def granted(self, request: Request | None = None) -> UsageRun:
        run = self.accounts.begin(request or Request())
        await run.on_granted()
        return run

    async def used(self, resource: str = "tokens:user", subject: str = "ann") -> int:
        await asyncio.sleep(0.01)  # remote counters are told a moment later
        standing = await self.limiter.peek(Check("acme", resource, subject))
        assert standing is not None
        return standing.used

    @contextlib.asynccontextmanager
    async def counting(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.accounts.run())
        yield
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self.accounts.flush()

    async def rows(self) -> list[UsageRow]:
        return list(await self.accounts.rows(EVER))


def rule(whose: str = "user", limit: int = 5_000, mode: Mode = "enforce") -> Rule:
    return Rule("*", f"tokens:{whose}", "token_bucket", limit, DAY, mode=mode)


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize(
    ("said", "charged"),
    [(None, 1_000), (200, 200), (0, 0), (10**9, OUTPUT_TOKENS_MAX)],
)
async def test_grant_charges_an_estimate_and_the_end_corrects_it(
    near: bool, said: int | None, charged: int
) -> None:
    rig = Rig(rule(limit=10**6), counters=None if near else Shared())
    run = await rig.granted(Request(max_output_tokens=said))
    assert await rig.used() == PROMPT + charged
    run.end("openai", ReplyUsage(30, 70))
    assert await rig.used() == 100


@pytest.mark.parametrize("mode", ["enforce", "shadow"])
async def test_arrival_takes_no_tokens(mode: Mode) -> None:
    rig = Rig(rule(mode=mode))
    for _ in range(3):
        await rig.accounts.check(ANN)
    assert await rig.used() == 0


@pytest.mark.parametrize("whose", ["user", "tenant"])
async def test_payer_without_tokens_is_refused_on_arrival_and_at_the_grant(whose: str) -> None:
    rig = Rig(rule(whose, 100))
    waiting = rig.accounts.begin(Request())
    await rig.accounts.check(ANN)
    running = await rig.granted(Request(max_output_tokens=60))
    running.end("openai", ReplyUsage(30, 100))
    for refused in (rig.accounts.check(ANN), waiting.on_granted()):
        with pytest.raises(RateLimited) as raised:
            await refused
        assert raised.value.details["rule"] == f"*/tokens:{whose}"
        assert raised.value.retry_after_seconds == pytest.approx(DAY * 31 / 100)
    waiting.end("", None)
    async with rig.counting():
        pass
    assert [row.replies for row in await rig.rows()] == [1], "the refused one never ran"
    await asyncio.sleep(DAY * 0.32)
    await rig.accounts.check(ANN)


async def test_overdraft_is_at_most_output_beyond_the_estimates_and_one_estimate() -> None:
    """Ten replies are granted until nothing is left, each generates twice its estimate."""
    rig, runs = Rig(rule(limit=450)), []
    with pytest.raises(RateLimited):
        while len(runs) < 10:
            runs.append(await rig.granted(Request(max_output_tokens=75)))
    assert len(runs) == 5, "a hundred each"
    for run in runs:
        run.end("openai", ReplyUsage(PROMPT, 150))
    assert await rig.used() <= 450 + 100 + 5 * 75


async def test_key_that_names_no_user_counts_by_its_tenant_alone() -> None:
    rig = Rig(rule("user", 1), rule("tenant", 5_000))
    run = await rig.granted(Request(KEY))
    run.end("openai", ReplyUsage(30, 70))
    assert await rig.used("tokens:tenant", "acme") == 100
    assert await rig.used("tokens:user", "key-1") == 0
    async with rig.counting():
        pass
    assert (await rig.rows())[0].key.user == "key:key-1"


async def test_without_a_rule_nothing_is_refused_or_charged() -> None:
    rig = Rig()
    await rig.accounts.check(ANN)
    run = await rig.granted(Request(max_output_tokens=10**9))
    assert run.end("openai", ReplyUsage(1, 2)) == ReplyUsage(1, 2)


@pytest.mark.parametrize(
    ("provider", "named", "grown", "expected"),
    [
        ("openai", ReplyUsage(31, 72, chunk=b"{}"), 40, (31, 72, 0)),
        ("openai", None, 41, (PROMPT, 11, 1)),
        ("openai", None, 0, (PROMPT, 0, 1)),
        ("", None, 0, (0, 0, 0)),
    ],
)
async def test_run_counts_by_the_provider_else_by_an_estimate(
    provider: str, named: ReplyUsage | None, grown: int, expected: tuple[int, int, int]
) -> None:
    rig = Rig()
    async with rig.counting():
        run = await rig.granted()
        run.text_bytes += grown
        usage = run.end(provider, named)
        assert usage == (named or ReplyUsage(*expected[:2], estimated=bool(expected[2])))
        assert run.end("another", ReplyUsage(9, 9)) == usage, "it ends once"
    [row] = await rig.rows()
    assert (row.replies, *row[2:]) == (1, *expected)
    assert row.key[1:] == ("acme", "ann", "fast", provider)


async def test_every_run_of_one_reply_counts() -> None:
    rig, request = Rig(), Request()
    async with rig.counting():
        for _ in range(3):
            (await rig.granted(request)).end("openai", ReplyUsage(10, 20))
    assert [row[1:] for row in await rig.rows()] == [(3, 30, 60, 0)]


async def test_running_runs_are_noted_each_second_with_their_estimate() -> None:
    rig = Rig()
    async with rig.counting():
        run, other = await rig.granted(), await rig.granted()
        run.text_bytes, run.provider = 400, "openai"
        await asyncio.sleep(1.1)
        assert {(r.prompt_tokens, r.completion_tokens, r.estimated) for r in rig.store.noted} == {
            (PROMPT, 100, True),
            (0, 0, False),
        }
        other.end("", None)
        await asyncio.sleep(1.1)
        assert [r.key.provider for r in rig.store.noted] == ["openai"]
        run.end("openai", None)


async def test_ends_wait_while_the_store_fails_and_count_once() -> None:
    rig = Rig()
    rig.store.broken = True
    async with rig.counting():
        for _ in range(5):
            (await rig.granted()).end("openai", ReplyUsage(1, 1))
        await asyncio.sleep(3)
        assert await rig.rows() == []
        rig.store.broken = False
        await asyncio.sleep(3)
    assert [row.replies for row in await rig.rows()] == [5]
    assert rig.accounts.lost == 0


async def test_end_waits_for_its_count_unless_the_store_fails() -> None:
    rig, loop = Rig(), asyncio.get_running_loop()

    async def seconds_to_store() -> float:
        run, began = await rig.granted(), loop.time()
        run.end("openai", ReplyUsage(1, 1))
        await run.stored()
        return loop.time() - began

    async with rig.counting():
        rig.store.delay_seconds = 0.25
        assert await asyncio.gather(seconds_to_store(), seconds_to_store()) == [0.25, 0.25]
        assert [row.replies for row in await rig.rows()] == [2]
        rig.store.delay_seconds = 5
        assert await seconds_to_store() == 1, "no longer, even if it hangs"
        await asyncio.sleep(5)
        rig.store.delay_seconds, rig.store.broken = 0.25, True
        assert await seconds_to_store() == 0.25
        assert await seconds_to_store() == 0, "it is known to fail"
        await asyncio.sleep(10)
        rig.store.broken = False
        await asyncio.sleep(5)
        assert await seconds_to_store() == 0.25
    assert [row.replies for row in await rig.rows()] == [6]


async def test_day_is_that_of_the_grant_in_utc() -> None:
    rig, clock = Rig(), virtual_loop.LoopClock()
    today, run = timestamp(clock.now())[:10], await rig.granted()
    await asyncio.sleep(DAY)
    assert timestamp(clock.now())[:10] > today
    async with rig.counting():
        run.end("openai", ReplyUsage(1, 1))
    assert [row.key.day for row in await rig.rows()] == [today]


async def test_tokens_are_in_the_metrics_by_kind() -> None:
    def tokens(kind: str) -> float:
        return REGISTRY.get_sample_value("holdfast_reply_tokens_total", {"kind": kind}) or 0.0

    rig, before = Rig(), (tokens("prompt"), tokens("completion"))
    (await rig.granted()).end("openai", ReplyUsage(7, 9))
    assert (tokens("prompt"), tokens("completion")) == (before[0] + 7, before[1] + 9)
