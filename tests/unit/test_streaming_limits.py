"""The rules of limits and the replies of a node, together. On virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from reply_rig import ANNA, FakeProvider, ReplyRig, read

from holdfast.errors import RateLimited
from holdfast.limits.rules import Rule, RuleSet
from holdfast.streaming.providers.contract import ProviderFailed
from holdfast.streaming.reply import Owner, Payer, ReplyError
from holdfast.streaming.usage_store.contract import UsageQuery, UsageRow
from holdfast.telemetry.metrics import REGISTRY

EVER = UsageQuery("0000-01-01", "9999-12-31")
KEY = {"owner": Owner("acme", "key", "k1"), "payer": Payer("acme", "k1", is_key=True)}


def active(limit: int, resource: str = "replies:active") -> Rule:
    return Rule("*", resource, "concurrency", limit, 60.0)


def tokens(limit: int, whose: str = "user") -> Rule:
    return Rule("*", f"tokens:{whose}", "fixed_window", limit, 86_400.0)


def refused_for_tokens() -> float:
    found = REGISTRY.get_sample_value("holdfast_reply_refusals_total", {"cause": "tokens"})
    return found or 0.0


def endless() -> FakeProvider:
    return FakeProvider(steps=["word"] * 1000, token_seconds=0.25)


def states(rig: ReplyRig) -> list[str]:
    return [summary.state for summary in rig.parts.replies() if summary.state != "ended"]


async def test_changed_or_deleted_rule_of_active_replies_counts_at_the_next_admission() -> None:
    rig = ReplyRig(provider=endless())
    async with rig.running():

        async def start() -> list[str]:
            await rig.start(kind="background")
            await asyncio.sleep(2)  # a heartbeat, at the latest
            return states(rig)

        for _ in range(3):
            await start()
        assert (await start()).count("waiting") == 1, "three by default"
        rig.limiter.use(RuleSet.of([active(6)]))
        await asyncio.sleep(5)
        assert states(rig).count("waiting") == 1, "nobody asks, nothing changes"
        assert await start() == ["running"] * 5, "the next request brings the new limit"
        assert await start() == ["running"] * 6
        rig.limiter.use(RuleSet.of([]))
        assert (await start()).count("waiting") == 1, "nobody is stopped, and nobody starts"
        assert states(rig).count("running") == 6


async def test_key_that_names_no_user_has_its_own_number_of_active_replies() -> None:
    rig = ReplyRig(provider=endless(), rules=[active(1), active(5, "replies:active:key")])
    async with rig.running():
        for _ in range(7):
            await rig.start(kind="background", **KEY)
        await asyncio.sleep(1)
        assert (states(rig).count("running"), states(rig).count("waiting")) == (5, 2)


async def test_payer_without_tokens_is_refused_on_arrival() -> None:
    rig = ReplyRig(rules=[tokens(8)])
    async with rig.running():
        assert (await read(await rig.start())).code == "done", "it may overdraw: 9 of 8"
        with pytest.raises(RateLimited) as refused:
            await rig.start()
        assert refused.value.details["rule"] == "*/tokens:user"
        other = await rig.start(payer=Payer("acme", "bob"))
        assert (await read(other)).code == "done"


async def test_payer_without_tokens_when_its_turn_comes_gets_an_end_and_no_generation() -> None:
    provider = FakeProvider(steps=["word"] * 4, token_seconds=1.0)
    rig = ReplyRig(provider=provider, rules=[tokens(8), active(1)])
    async with rig.running():
        first = await rig.start(max_output_tokens=1)
        second = await rig.start(max_output_tokens=1)
        before = refused_for_tokens()
        assert (await read(first)).code == "done"
        end = (await read(second)).end
        assert isinstance(end, ReplyError) and end.code == "tokens_used_up"
        assert end.retry_after_seconds > 60, "the window is a day"
        assert refused_for_tokens() == before + 1
        assert len(provider.opened) == 1
        assert states(rig) == [] and len(rig.accounts.ended) == 1


BROKEN = ProviderFailed(ReplyError("upstream_lost", "the connection broke"))


@pytest.mark.parametrize(
    ("provider", "expected"),
    [
        (FakeProvider(steps=["four", "more", "word"]), [("fake", 7, 2, 0)]),
        (FakeProvider(steps=["four", "more", BROKEN]), [("fake", 1, 2, 1)]),
        (FakeProvider(steps=[BROKEN]), [("", 0, 0, 0)]),
        (FakeProvider(steps=["four", "more"], ends=False), [("fake", 1, 2, 1)]),
    ],
    ids=["done", "broken", "refused", "cancelled"],
)
async def test_every_end_counts_once_with_the_providers_numbers_or_an_estimate(
    provider: FakeProvider, expected: Sequence[tuple[object, ...]]
) -> None:
    rig = ReplyRig(provider=provider)
    async with rig.running():
        reply = await rig.start(kind="background")
        reading = asyncio.create_task(read(reply))
        if not provider.ends:
            await asyncio.sleep(5)
            await rig.parts.cancel(ANNA, reply.reply_id)
        await reading
        rows: Sequence[UsageRow] = await rig.usage.rows(EVER)
        assert [
            (row.key.provider, row.prompt_tokens, row.completion_tokens, row.estimated)
            for row in rows
        ] == expected
        assert [row.replies for row in rows] == [1]


async def test_reply_that_never_ran_is_not_counted() -> None:
    rig = ReplyRig(provider=endless(), rules=[active(1)])
    async with rig.running():
        await rig.start(kind="background")
        waits = await rig.start(queue_seconds=2.0)
        assert (await read(waits)).code == "queue_timeout"
        assert rig.accounts.ended == []
        assert await rig.usage.rows(EVER) == []
