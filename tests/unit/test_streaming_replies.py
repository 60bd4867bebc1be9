"""Replies of one node: how they begin, are read, and end. On virtual time."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from reply_rig import ANNA, FakeProvider, Reading, ReplyRig, read

from holdfast.errors import InvalidMessage, KeyReused, NotFound, RateLimited, Unavailable
from holdfast.streaming.attached import READERS_MAX
from holdfast.streaming.parts import KEPT_SECONDS, SWEPT_AT_ONCE
from holdfast.streaming.pool.contract import (
    DEFAULT_POOL,
    PoolSettings,
    PoolSizes,
    QueueBounds,
)
from holdfast.streaming.pool.memory import MemoryPool
from holdfast.streaming.providers.contract import ProviderFailed
from holdfast.streaming.reader import LiveCursor
from holdfast.streaming.reply import (
    EntryId,
    FailureCode,
    Owner,
    ReplyBegin,
    ReplyDelta,
    ReplyDone,
    ReplyError,
    ReplyUsage,
)
from holdfast.streaming.reply_log.contract import LogAppend
from holdfast.streaming.reply_log.memory import MemoryReplyLog
from holdfast.streaming.settings import QueueFailoverSettings, ReplyClocks, StreamingSettings
from holdfast.streaming.usage import UsageRun
from proof.virtual_loop import LoopClock


def slow(seconds: float = 1.0, tokens: int = 10) -> FakeProvider:
    return FakeProvider(steps=["x"] * tokens, token_seconds=seconds)


async def passed(seconds: float) -> None:
    await asyncio.sleep(seconds)


@pytest.mark.covers("002 the handler generates `request_id`")
@pytest.mark.covers("002 the worker picks up the job and generates tokens")
@pytest.mark.covers("002 an additional worker to manage")
@pytest.mark.covers("002 Queue Consumer Worker")
async def test_reply_is_its_begin_its_tokens_its_usage_and_one_end() -> None:
    rig = ReplyRig()
    async with rig.running():
        reply = await rig.start()
        reading = await read(reply)
    kinds = [type(entry).__name__ for _, entry in reading.entries]
    assert kinds == [
        "ReplyBegin", "ReplyDelta", "ReplyDelta", "ReplyDelta", "ReplyUsage", "ReplyDone"
    ]  # fmt: skip
    assert reading.text == "Hello world"
    assert [entry_id.n for entry_id, _ in reading.entries] == list(range(6))
    assert [(run.prompt_tokens, run.completion_tokens) for run in rig.accounts.ended] == [(7, 2)]


async def test_finish_usage_and_end_are_visible_together() -> None:
    rig = ReplyRig(provider=FakeProvider(steps=["a", "b", 1.0]))
    async with rig.running():
        reply = await rig.start()
        batches = [event async for event in reply.entries()]
    last = [type(entry).__name__ for _, entry in batches[-1]]
    assert last == ["ReplyDelta", "ReplyUsage", "ReplyDone"]


@pytest.mark.covers("002 the handler yields chunks to the connection")
async def test_two_readers_and_one_that_comes_late_read_the_same_entries() -> None:
    rig = ReplyRig(provider=slow(0.1))
    async with rig.running():
        reply = await rig.start(replicated=True)
        first = asyncio.create_task(read(reply))
        await passed(0.45)
        late = asyncio.create_task(read(await rig.parts.find(ANNA, reply.reply_id)))
        assert (await first).entries == (await late).entries


async def test_reader_that_comes_back_after_the_end_gets_the_rest_and_the_end() -> None:
    rig = ReplyRig()
    async with rig.running():
        reply = await rig.start(replicated=True)
        whole = await read(reply)
        found = await rig.parts.find(ANNA, reply.reply_id)
        assert found.ended_at == whole.entries[-1][0]
        rest = await read(found, whole.entries[2][0])
        assert rest.entries == whole.entries[3:]


async def test_entry_of_another_epoch_or_beyond_the_end_is_refused() -> None:
    rig = ReplyRig()
    async with rig.running():
        reply = await rig.start(replicated=True)
        await read(reply)
        found = await rig.parts.find(ANNA, reply.reply_id)
        assert found.ended_at is not None
        for wrong in (EntryId(found.epoch - 1, 2), EntryId(found.epoch, found.ended_at.n + 1)):
            with pytest.raises(InvalidMessage):
                found.entries(wrong)


@pytest.mark.parametrize("last", [2, 3, 7])
@pytest.mark.parametrize("code", ["gap", "server_restarted"])
async def test_reader_that_has_more_than_a_log_that_was_cut_short_gets_its_end(
    code: FailureCode, last: int
) -> None:
    """It read from memory what the log never got."""
    rig = ReplyRig()
    async with rig.running():
        begin = ReplyBegin(*ANNA, "native", "native", "tiny", rig.node, 0.0)
        epoch = await rig.log.begin("rpl_cut", begin)
        entries = [ReplyDelta(b"{}"), ReplyError(code, "cut")]
        await rig.log.append([LogAppend("rpl_cut", EntryId(epoch, 1), entries)])
        found = await rig.parts.find(ANNA, "rpl_cut")
        got = await read(found, EntryId(epoch, last))
        assert got.entries == [(EntryId(epoch, 2), entries[1])]


async def test_entry_ahead_of_a_running_reply_is_waited_for_and_gap_if_it_never_comes() -> None:
    rig = ReplyRig(provider=slow(1.0, 5))
    async with rig.running():
        reply = await rig.start(replicated=True)
        ahead, beyond = EntryId(reply.epoch, 3), EntryId(reply.epoch, 30)
        one, two = await asyncio.gather(read(reply, ahead), read(reply, beyond))
        assert (one.code, one.entries[0][0].n) == ("done", 4)
        assert (two.code, two.entries) == ("gap", [])


async def test_foreign_unknown_and_plain_ended_replies_are_all_not_found() -> None:
    rig = ReplyRig()
    async with rig.running():
        kept = await rig.start(replicated=True)
        plain = await rig.start()
        await read(kept)
        await read(plain)
        for owner, reply_id in (
            (Owner("acme", "user", "bert"), kept.reply_id),
            (Owner("other", "user", "anna"), kept.reply_id),
            (Owner("acme", "key", "anna"), kept.reply_id),
            (ANNA, plain.reply_id),
            (ANNA, "rpl_unknown"),
        ):
            with pytest.raises(NotFound):
                await rig.parts.find(owner, reply_id)


async def test_reply_has_a_bound_of_readers_and_one_that_leaves_makes_room() -> None:
    """Every token is written to each: thousands of one user would take the node from
    everybody.
    """
    rig = ReplyRig(provider=slow())
    async with rig.running():
        reply = await rig.start(replicated=True)
        cursors = [reply.entries() for _ in range(READERS_MAX)]
        with pytest.raises(RateLimited, match="readers"):
            reply.entries()
        await cursors.pop().aclose()
        assert (await read(reply)).code == "done"


# --- readers that leave


async def test_client_gone_before_the_first_token_closes_the_upstream_at_once() -> None:
    rig = ReplyRig(provider=FakeProvider(steps=[20.0, "late"]))
    async with rig.running():
        reply = await rig.start()
        cursor = reply.entries()
        await anext(cursor)
        await passed(1)
        left = asyncio.get_running_loop().time()
        await cursor.aclose()
        await passed(0.01)
        assert rig.provider.closed == [pytest.approx(left, abs=0.01)]


async def test_client_gone_before_the_first_token_of_a_resumable_reply_may_return() -> None:
    rig = ReplyRig(provider=FakeProvider(steps=[50.0, "late"]))
    async with rig.running():
        reply = await rig.start(replicated=True)
        cursor = reply.entries()
        await anext(cursor)
        await cursor.aclose()
        await passed(29.9)
        assert not rig.provider.closed
        await passed(0.2)
        assert rig.provider.closed


async def test_reader_that_was_never_read_nor_closed_does_not_keep_the_reply() -> None:
    rig = ReplyRig(provider=slow(1.0, 100))
    async with rig.running():
        reply = await rig.start()
        cursor = reply.entries()
        await passed(8)
        assert not rig.provider.closed, "somebody may still read"
        del cursor
        gc.collect()
        await passed(5.5)
        assert rig.provider.closed and not sum(rig.leases.status().active.values())


@pytest.mark.parametrize(("replicated", "grace"), [(False, 5.0), (True, 30.0)])
async def test_client_gone_later_cancels_the_reply_after_its_grace(
    replicated: bool, grace: float
) -> None:
    rig = ReplyRig(provider=slow(1.0, 100))
    async with rig.running():
        reply = await rig.start(replicated=replicated)
        cursor = reply.entries()
        await anext(cursor)
        await passed(2.5)
        await anext(cursor)
        left = asyncio.get_running_loop().time()
        await cursor.aclose()
        await passed(grace - 0.1)
        assert not rig.provider.closed
        await passed(0.2)
        assert rig.provider.closed == [pytest.approx(left + grace, abs=0.05)]


@pytest.mark.parametrize("replicated", [False, True])
async def test_reply_that_was_read_to_its_end_is_not_kept_for_a_grace(replicated: bool) -> None:
    rig = ReplyRig(provider=FakeProvider(steps=["all"]))
    async with rig.running():
        reply = await rig.start(replicated=replicated)
        cursor = reply.entries()
        assert isinstance(cursor, LiveCursor)
        kept = weakref.ref(cursor.reply)
        while cursor.reply.end is None:
            await anext(cursor)
        await passed(0.1)
        await cursor.aclose()
        del reply, cursor
        gc.collect()
        assert kept() is None


async def test_reader_that_returns_within_the_grace_keeps_the_reply() -> None:
    rig = ReplyRig(provider=slow(1.0, 60))
    async with rig.running():
        reply = await rig.start(replicated=True)
        cursor = reply.entries()
        await anext(cursor)
        await cursor.aclose()
        await passed(20)
        reading = await read(await rig.parts.find(ANNA, reply.reply_id))
        assert reading.code == "done"
        assert reading.text == "x" * 60


@pytest.mark.parametrize("had_reader", [False, True])
@pytest.mark.parametrize("kind", ["background", "assistant"])
async def test_reply_without_readers_runs_on_if_its_kind_does(kind: str, had_reader: bool) -> None:
    rig = ReplyRig(provider=slow(1.0, 60))
    async with rig.running():
        reply = await rig.start(kind=kind, replicated=True)
        if had_reader:
            cursor = reply.entries()
            await anext(cursor)
            await cursor.aclose()
        await passed(62)
        assert (await read(await rig.parts.find(ANNA, reply.reply_id))).code == "done"


async def test_native_reply_that_nobody_reads_is_cancelled() -> None:
    rig = ReplyRig(provider=slow(1.0, 60))
    async with rig.running():
        reply = await rig.start(kind="native", replicated=True)
        await passed(31)
        assert (await read(await rig.parts.find(ANNA, reply.reply_id))).code == "cancelled"


async def test_cancelled_reply_ends_once_and_a_second_cancel_changes_nothing() -> None:
    rig = ReplyRig(provider=slow(1.0, 60))
    async with rig.running():
        reply = await rig.start(replicated=True)
        reading = asyncio.create_task(read(reply))
        await passed(2.5)
        await rig.parts.cancel(ANNA, reply.reply_id)
        await rig.parts.cancel(ANNA, reply.reply_id)
        got = await reading
        assert got.code == "cancelled"
        assert got.text == "xx"
        assert [type(entry).__name__ for _, entry in got.entries][-2:] == [
            "ReplyUsage",
            "ReplyError",
        ]
        await rig.parts.cancel(ANNA, reply.reply_id)


async def test_slow_reader_beyond_the_kept_bytes_ends_with_gap_and_others_go_on() -> None:
    rig = ReplyRig(provider=FakeProvider(steps=["y" * 100_000] * 100, token_seconds=0.01))
    async with rig.running():
        reply = await rig.start()
        behind = reply.entries()
        await anext(behind)
        reading = await read(reply)
        assert reading.code == "done"
        slow_reading = Reading()
        async for event in behind:
            slow_reading.add(event)
        assert slow_reading.code == "gap"


async def test_provider_that_sends_without_end_is_cut_off() -> None:
    rig = ReplyRig(provider=FakeProvider(steps=["y" * 1_000_000] * 40))
    async with rig.running():
        assert (await read(await rig.start())).code == "upstream_garbage"


# --- the queue


@pytest.mark.covers("002 users see errors during peak load")
@pytest.mark.covers("002 true streaming is preserved during failover")
@pytest.mark.covers("002 requests succeed, just later")
@pytest.mark.covers("002 queued requests take longer")
async def test_fourth_reply_of_a_user_waits_for_the_first_to_end() -> None:
    rig = ReplyRig(provider=slow(1.0, 3))
    async with rig.running():
        running = [asyncio.create_task(read(await rig.start())) for _ in range(3)]
        fourth = await rig.start()
        assert fourth.state == "waiting"
        reading = await read(fourth)
        assert reading.queued[0].position == 1
        assert reading.code == "done"
        assert asyncio.get_running_loop().time() == pytest.approx(6, abs=0.5)
        assert all(task.result().code == "done" for task in running)


@pytest.mark.covers("002 load spikes cause instant rejections")
@pytest.mark.covers("002 `QUEUE_FAILOVER_TIMEOUT_SECONDS`")
@pytest.mark.covers("002 requests can still time out after 30 s")
@pytest.mark.parametrize(
    ("queue", "seconds"),
    [(QueueFailoverSettings(), 30), (QueueFailoverSettings(timeout_seconds=45), 45)],
)
async def test_reply_that_waits_too_long_ends_with_queue_timeout(
    queue: QueueFailoverSettings, seconds: float
) -> None:
    rig = ReplyRig(StreamingSettings(queue_failover=queue), slow(1.0, 200))
    async with rig.running():
        readings = [asyncio.create_task(read(await rig.start())) for _ in range(4)]
        got = await readings[3]
        assert got.end == ReplyError("queue_timeout", "no model was free in time; try again", 503)
        assert asyncio.get_running_loop().time() == pytest.approx(seconds, abs=0.1)


async def test_prefer_wait_lowers_the_time_in_the_queue_only() -> None:
    rig = ReplyRig(provider=slow(1.0, 10))
    async with rig.running():
        readings = [asyncio.create_task(read(await rig.start(queue_seconds=2))) for _ in range(4)]
        assert (await readings[3]).code == "queue_timeout"
        assert asyncio.get_running_loop().time() == pytest.approx(2, abs=0.1)
        assert (await readings[0]).code == "done"


async def test_client_that_leaves_the_queue_frees_its_place() -> None:
    rig = ReplyRig(provider=slow(1.0, 5))
    async with rig.running():
        readings = [asyncio.create_task(read(await rig.start())) for _ in range(3)]
        fourth, fifth = await rig.start(), await rig.start()
        cursor = fourth.entries()
        await anext(cursor)
        await anext(cursor)
        await cursor.aclose()
        await passed(0.01)
        waiting = [each.reply_id for each in rig.parts.replies() if each.state == "waiting"]
        assert waiting == [fifth.reply_id], "at once"
        got = await read(fifth)
        assert got.code == "done"
        assert len(rig.provider.opened) == 4
        await asyncio.gather(*readings)


@pytest.mark.covers("002 `QUEUE_FAILOVER_ENABLED`")
@pytest.mark.covers("002 can be switched off")
async def test_without_failover_a_reply_that_cannot_run_is_refused_at_once() -> None:
    settings = StreamingSettings(queue_failover=QueueFailoverSettings(enabled=False))
    rig = ReplyRig(settings=settings, provider=slow())
    async with rig.running():
        for _ in range(3):
            await rig.start()
        with pytest.raises(RateLimited) as refused:
            await rig.start()
        assert refused.value.retry_after_seconds
        assert len(list(rig.parts.replies())) == 3


async def test_reply_of_an_assistant_waits_without_failover_and_beyond_every_bound() -> None:
    queue = QueueFailoverSettings(enabled=False, timeout_seconds=5, waiting_per_user=1)
    rig = ReplyRig(StreamingSettings(queue_failover=queue), slow(1.0, 60), per_user=1)
    async with rig.running():
        replies = [await rig.start(kind="assistant", replicated=True) for _ in range(4)]
        ends = [(await read(reply)).code for reply in replies]
        assert ends == ["done"] * 4


@pytest.mark.covers("002 zero 429 errors")
@pytest.mark.covers("002 clients retry by themselves: rejected")
async def test_own_waiting_cap_is_rate_limited_and_a_full_queue_unavailable() -> None:
    queue = QueueFailoverSettings(waiting_per_user=2, waiting_max=3)
    settings = StreamingSettings(queue_failover=queue, pool=PoolSettings(total=3))
    rig = ReplyRig(settings=settings, provider=slow())
    async with rig.running():
        for _ in range(5):
            await rig.start()
        with pytest.raises(RateLimited):
            await rig.start()
        other = rig.request().payer._replace(user="bert")
        await rig.start(payer=other)
        with pytest.raises(Unavailable) as full:
            await rig.start(payer=other)
        assert full.value.retry_after_seconds


async def test_rate_of_the_caller_refuses_before_anything_begins() -> None:
    refused = RateLimited("too many", retry_after_seconds=3.0)
    rig = ReplyRig(rates=lambda payer: refused)
    async with rig.running():
        with pytest.raises(RateLimited):
            await rig.start()
        assert not rig.provider.opened


async def test_unknown_model_is_not_found_and_named() -> None:
    rig = ReplyRig()
    async with rig.running():
        with pytest.raises(NotFound, match="gpt-9"):
            await rig.start(model="gpt-9")


# --- ends


async def test_failure_after_the_first_token_is_the_end() -> None:
    broken = ProviderFailed(ReplyError("upstream_lost", "reset"))
    rig = ReplyRig(provider=FakeProvider(steps=["a", "b", broken]))
    async with rig.running():
        reading = await read(await rig.start())
        assert (reading.text, reading.code) == ("ab", "upstream_lost")
        assert rig.accounts.ended[0].estimated


async def test_whole_reply_has_a_deadline_with_the_queue_in_it() -> None:
    settings = StreamingSettings(clocks=ReplyClocks(reply_seconds=40, gap_seconds=100))
    rig = ReplyRig(settings, provider=FakeProvider(steps=["x", 25.0]), per_user=1)
    async with rig.running():
        first = asyncio.create_task(read(await rig.start()))
        second = asyncio.create_task(read(await rig.start()))
        assert (await first).code == "done"
        reading = await second
        assert reading.queued and reading.text == "x"
        assert reading.end == ReplyError("deadline", "the reply took too long", 504)
        assert asyncio.get_running_loop().time() == pytest.approx(40, abs=0.1)


async def test_reply_that_is_not_streamed_has_its_own_deadline() -> None:
    rig = ReplyRig(provider=slow(1.0, 1000))
    async with rig.running():
        assert (await read(await rig.start(streamed=False))).code == "deadline"
        assert asyncio.get_running_loop().time() == pytest.approx(280, abs=0.1)


async def test_owner_who_is_revoked_loses_running_replies_within_five_seconds() -> None:
    allowed = [True]
    rig = ReplyRig(provider=slow(1.0, 100))
    async with rig.running():
        reply = await rig.start(is_allowed=lambda: allowed[0])
        reading = asyncio.create_task(read(reply))
        await passed(3)
        allowed[0] = False
        assert (await reading).code == "cancelled"
        assert asyncio.get_running_loop().time() <= 8


class DeadLog(MemoryReplyLog):
    """Takes begins and never answers an append."""

    async def append(self, appends: object) -> object:  # type: ignore[override]
        await asyncio.Event().wait()
        raise AssertionError


async def test_end_waits_a_second_for_the_log_and_is_then_not_resumable() -> None:
    rig = ReplyRig(log=DeadLog(LoopClock()))
    async with rig.running():
        reply = await rig.start(replicated=True)
        cursor, seen = reply.entries(), Reading()
        async for event in cursor:
            seen.add(event)
            if not seen.end:
                assert "stop" not in str(seen.entries)
        assert seen.code == "done"
        assert asyncio.get_running_loop().time() == pytest.approx(1.0, abs=0.1)
        await passed(29)
        again = await read(await rig.parts.find(ANNA, reply.reply_id))
        assert again.entries == seen.entries, "this node has it for 30 s"


class UnavailableLog(MemoryReplyLog):
    async def begin(self, reply_id: str, begin: ReplyBegin) -> int:
        raise Unavailable("Redis is unavailable")

    async def claim(self, claim: object) -> object:  # type: ignore[override]
        raise Unavailable("Redis is unavailable")


async def test_without_a_log_only_replies_that_must_resume_are_refused() -> None:
    rig = ReplyRig(log=UnavailableLog(LoopClock()))
    async with rig.running():
        assert (await read(await rig.start(replicated=True))).code == "done"
        for given in ({"kind": "native"}, {"kind": "background"}, {"key": "k1"}):
            with pytest.raises(Unavailable):
                await rig.start(replicated=True, **given)
        assert {summary.state for summary in rig.parts.replies()} == {"ended"}


async def test_full_memory_refuses_what_must_resume_and_lets_the_rest_run() -> None:
    settings = StreamingSettings(replies_bytes_max=50_000)
    rig = ReplyRig(settings=settings, provider=FakeProvider(steps=["y" * 60_000], ends=False))
    async with rig.running():
        await rig.start(kind="background", replicated=True)
        await passed(2)
        with pytest.raises(Unavailable):
            await rig.start(kind="native", replicated=True)
        plain = await rig.start(replicated=True)
        assert plain.reply_id in {summary.reply_id for summary in rig.parts.replies()}


# --- Idempotency-Key


async def test_same_key_and_body_attach_while_it_waits_runs_or_is_done() -> None:
    rig = ReplyRig(provider=slow(0.1, 5))
    async with rig.running():
        first = await rig.start(key="k", body_hash=b"1", replicated=True)
        second = await rig.start(key="k", body_hash=b"1", replicated=True)
        assert second.reply_id == first.reply_id
        one, two = await asyncio.gather(read(first), read(second))
        assert one.entries == two.entries
        third = await rig.start(key="k", body_hash=b"1", replicated=True)
        assert (await read(third)).entries == one.entries
        assert len(rig.provider.opened) == 1


async def test_same_key_with_another_body_is_refused_and_with_another_owner_is_not() -> None:
    rig = ReplyRig(provider=slow(0.1, 5))
    async with rig.running():
        first = await rig.start(key="k", body_hash=b"1", replicated=True)
        with pytest.raises(KeyReused):
            await rig.start(key="k", body_hash=b"2", replicated=True)
        bert = Owner("acme", "user", "bert")
        other = await rig.start(key="k", body_hash=b"2", owner=bert, replicated=True)
        assert other.reply_id != first.reply_id


async def test_reply_that_failed_or_was_refused_frees_its_key() -> None:
    broken = ProviderFailed(ReplyError("upstream_refused", "no", 400), final=True)
    rig = ReplyRig(provider=FakeProvider(steps=[broken]))
    async with rig.running():
        first = await rig.start(key="k", body_hash=b"1", replicated=True)
        assert (await read(first)).code == "upstream_refused"
        await passed(0.1)
        rig.provider.steps = ["ok"]
        second = await rig.start(key="k", body_hash=b"2", replicated=True)
        assert (await read(second)).text == "ok"


async def test_reply_that_was_cancelled_or_never_admitted_frees_its_key() -> None:
    queue = QueueFailoverSettings(enabled=False)
    rig = ReplyRig(StreamingSettings(queue_failover=queue), slow(1.0, 5), per_user=1)
    async with rig.running():
        running = await rig.start(key="a", body_hash=b"1", replicated=True)
        with pytest.raises(RateLimited):
            await rig.start(key="b", body_hash=b"1", replicated=True)
        reading = asyncio.create_task(read(running))
        await passed(1.5)
        await rig.parts.cancel(ANNA, running.reply_id)
        assert (await reading).code == "cancelled"
        await passed(0.1)
        for key in ("a", "b"):
            again = await rig.start(key=key, body_hash=b"2", replicated=True)
            assert again.reply_id != running.reply_id
            assert (await read(again)).code == "done"


# --- planned stop


async def test_planned_stop_ends_what_waits_at_once_and_what_runs_in_its_time() -> None:
    rig = ReplyRig(provider=slow(1.0, 100), per_user=1)
    async with rig.running():
        running = asyncio.create_task(read(await rig.start(replicated=True)))
        waiting = asyncio.create_task(read(await rig.start()))
        await passed(1.5)
        stopping = asyncio.create_task(rig.parts.drain())
        assert (await waiting).code == "server_shutdown"
        assert asyncio.get_running_loop().time() < 2
        with pytest.raises(Unavailable):
            await rig.start()
        got = await running
        assert got.code == "server_shutdown"
        await stopping
        assert asyncio.get_running_loop().time() == pytest.approx(21.5, abs=0.5)


async def test_planned_stop_is_over_when_the_last_reply_has_ended() -> None:
    rig = ReplyRig(provider=slow(1.0, 3))
    async with rig.running():
        running = asyncio.create_task(read(await rig.start()))
        await passed(1.5)
        await rig.parts.drain()
        assert (await running).code == "done"
        assert asyncio.get_running_loop().time() < 4


async def test_reply_that_is_ending_is_not_stopped_again() -> None:
    rig = ReplyRig(log=DeadLog(LoopClock()))
    async with rig.running():
        reply = await rig.start(replicated=True)
        reading = asyncio.create_task(read(reply))
        await passed(0.5)  # the end waits for the log
        await rig.parts.cancel(ANNA, reply.reply_id)
        assert (await reading).code == "done"


@pytest.mark.parametrize(("place", "code"), [("log", "done"), ("usage", "internal")])
async def test_defect_while_a_reply_ends_leaves_it_with_one_end(place: str, code: str) -> None:
    class Broken(UsageRun):
        def end(self, provider: str, counted: ReplyUsage | None) -> ReplyUsage:
            raise RuntimeError("defect")

    async def broken(reply: object) -> bool:
        raise RuntimeError("defect")

    rig = ReplyRig()
    if place == "log":
        rig.writer.end = broken  # type: ignore[method-assign,assignment]
    else:
        rig.accounts.begin = lambda request: Broken(rig.accounts, request)  # type: ignore[method-assign]
    async with rig.running():
        reading = await read(await rig.start(replicated=True))
    ends = [entry for _, entry in reading.entries if isinstance(entry, ReplyDone | ReplyError)]
    assert (reading.code, len(ends)) == (code, 1)


async def test_providers_retry_after_comes_with_the_failure() -> None:
    full = ProviderFailed(
        ReplyError("upstream_unavailable", "busy", 503), final=True, retry_after_seconds=7.0
    )
    rig = ReplyRig(provider=FakeProvider(steps=[full]))
    async with rig.running():
        end = (await read(await rig.start())).end
        assert isinstance(end, ReplyError)
        assert end.retry_after_seconds == 7


async def test_failed_reply_is_begun_again_even_if_its_key_was_not_freed() -> None:
    broken = ProviderFailed(ReplyError("upstream_refused", "no", 400), final=True)
    rig = ReplyRig(provider=FakeProvider(steps=[broken]))
    async with rig.running():
        request = rig.request(key="k", body_hash=b"1", replicated=True)
        first = await rig.parts.start(request)
        assert (await read(first)).code == "upstream_refused"
        rig.provider.steps = ["ok"]
        second = await rig.start(key="k", body_hash=b"1", replicated=True)
        assert second.reply_id != first.reply_id
        assert (await read(second)).text == "ok"


async def test_reply_granted_by_the_call_that_admitted_it_runs_at_once() -> None:
    rig = ReplyRig(provider=slow(10.0, 3), per_user=1)
    async with rig.running():
        await passed(0.5)  # away from a heartbeat
        await rig.start()
        await rig.start()
        rig.per_user = 3
        await rig.start()  # its admission raises the limit: all three may run
        await passed(0.1)
        assert len(rig.provider.opened) == 3


class FlakyLog(MemoryReplyLog):
    """Its connection is broken for a while."""

    broken_until = 0.0

    async def read(self, *given: object) -> object:  # type: ignore[override]
        if asyncio.get_running_loop().time() < self.broken_until:
            raise Unavailable("the connection broke")
        return await super().read(*given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("seconds", "is_found"), [(0.5, True), (5.0, False)])
async def test_reply_is_looked_for_again_while_the_log_fails_for_a_moment(
    seconds: float, is_found: bool
) -> None:
    log = FlakyLog(LoopClock())
    rig = ReplyRig(log=log)
    async with rig.running():
        reply = await rig.start(replicated=True)
        await read(reply)
        await passed(0.1)  # the node forgets it: the log has it
        log.broken_until = asyncio.get_running_loop().time() + seconds
        if is_found:
            assert (await read(await rig.parts.find(ANNA, reply.reply_id))).code == "done"
        else:
            with pytest.raises(Unavailable, match="read"):
                await rig.parts.find(ANNA, reply.reply_id)


async def test_reply_stopped_before_its_first_step_ends_and_frees_its_lease() -> None:
    rig = ReplyRig()
    async with rig.running():
        reply = await rig.start()
        await rig.parts.cancel(ANNA, reply.reply_id)
        async with asyncio.timeout(5):
            reading = await read(reply)
        assert reading.code == "cancelled"
        await asyncio.sleep(2)
        assert sum(rig.leases.status().active.values()) == 0


@pytest.mark.parametrize(("queue_seconds", "ends_at"), [(None, 30), (7.0, 7), (0.0, 1)])
async def test_wait_for_a_lease_in_another_pool_is_a_wait_in_the_queue(
    queue_seconds: float | None, ends_at: float
) -> None:
    pool = MemoryPool(PoolSizes(100, {"own": 1}), QueueBounds(), LoopClock())
    rig = ReplyRig(provider=FakeProvider(pool="own", ends=False), pool=pool)
    async with rig.running():
        holder = asyncio.create_task(read(await rig.start()))
        await passed(0.1)
        rig.provider.pool = DEFAULT_POOL
        reply = await rig.start(queue_seconds=queue_seconds)
        rig.provider.pool = "own"
        begun_at = asyncio.get_running_loop().time()
        assert (await read(reply)).code == "queue_timeout"
        assert asyncio.get_running_loop().time() - begun_at == pytest.approx(ends_at, abs=0.1)
        holder.cancel()


@pytest.mark.parametrize("hour", [3600.0, -3600.0])
async def test_wall_clock_that_jumps_an_hour_changes_nothing(hour: float) -> None:
    class Jumping(LoopClock):
        jump = 0.0

        def now(self) -> float:
            return super().now() + self.jump

    clock = Jumping()
    log = MemoryReplyLog(clock)
    rig = ReplyRig(provider=slow(1.0, 10), per_user=2, log=log, clock=clock)
    async with rig.running():
        running, waiting = [await rig.start(replicated=True) for _ in range(3)][::2]
        reading = [asyncio.create_task(read(each)) for each in (running, waiting)]
        await passed(3.5)
        clock.jump += hour
        whole = [await each for each in reading]
        assert [(each.text, each.code) for each in whole] == [("x" * 10, "done")] * 2
        assert asyncio.get_running_loop().time() == pytest.approx(20, abs=1.5)
        await passed(KEPT_SECONDS + 1)  # from now on only the log has it
        again = await read(await rig.parts.find(ANNA, running.reply_id), whole[0].entries[4][0])
        assert again.entries == whole[0].entries[5:]


async def test_owners_of_many_replies_are_checked_in_several_turns_of_the_loop() -> None:
    rig = ReplyRig(provider=FakeProvider(hang=True), per_user=1000)
    loop, checked = asyncio.get_running_loop(), [0]

    def is_allowed() -> bool:
        checked[-1] += 1
        if checked[-1] == 1:
            loop.call_soon(checked.append, 0)
        return True

    async with rig.running():
        for _ in range(SWEPT_AT_ONCE + 100):
            await rig.start(kind="background", is_allowed=is_allowed)
        await passed(1.5)
    assert sum(checked) >= SWEPT_AT_ONCE + 100
    assert max(checked) <= SWEPT_AT_ONCE


async def test_reply_whose_task_is_cancelled_by_a_stranger_has_an_end() -> None:
    rig = ReplyRig(provider=slow())
    async with rig.running():
        reply = await rig.start()
        reading = asyncio.create_task(read(reply))
        await passed(2.5)
        name = f"holdfast-reply-{reply.reply_id}"
        next(task for task in asyncio.all_tasks() if task.get_name() == name).cancel()
        async with asyncio.timeout(5):
            assert (await reading).code == "internal"


class SlowLog(MemoryReplyLog):
    """Takes half a second to begin a log."""

    async def begin(self, *given: object) -> int:  # type: ignore[override]
        await asyncio.sleep(0.5)
        return await super().begin(*given)  # type: ignore[arg-type]


async def test_request_that_was_admitted_before_the_node_stops_does_not_begin_after() -> None:
    rig = ReplyRig(provider=slow(), log=SlowLog(LoopClock()))
    async with rig.running():
        starting = asyncio.create_task(rig.start(replicated=True))
        await passed(0.1)
        await rig.parts.drain()
        with pytest.raises(Unavailable, match="stopping"):
            await starting
        await passed(1.5)
        assert not rig.provider.opened
        assert sum(rig.leases.status().active.values()) == 0


async def test_reply_begun_again_here_ends_its_earlier_run_and_keeps_its_own_lease() -> None:
    rig = ReplyRig(provider=slow())
    async with rig.running():
        again = {"reply_id": "rpl_job", "kind": "assistant", "replicated": True}
        earlier = asyncio.create_task(read(await rig.start(**again)))
        await passed(2.5)
        later = asyncio.create_task(read(await rig.start(**again)))
        assert (await earlier).code == "superseded"
        await passed(2)
        assert sum(rig.leases.status().active.values()) == 1
        assert (await later).code == "done"
