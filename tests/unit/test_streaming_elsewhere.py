"""Replies made at one node and read, cancelled or lost at another. On virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec import structs
from reply_rig import ANNA, FakeProvider, ReplyRig, read

from holdfast.errors import NotFound, RateLimited
from holdfast.streaming.attached import READERS_MAX
from holdfast.streaming.pool.contract import Pool, PoolSizes, QueueBounds
from holdfast.streaming.pool.memory import MemoryPool
from holdfast.streaming.reader import SILENT_SECONDS
from holdfast.streaming.reply import EntryId, ReplyBegin, ReplyDelta
from holdfast.streaming.reply_log.contract import KeyClaim, LogAppend
from holdfast.streaming.reply_log.memory import MemoryReplyLog
from proof.virtual_loop import LoopClock


class SharedLog(MemoryReplyLog):
    shared = True


@asynccontextmanager
async def two_nodes(steps: int = 40) -> AsyncIterator[tuple[ReplyRig, ReplyRig]]:
    clock = LoopClock()
    pool: Pool = MemoryPool(PoolSizes(100, {}), QueueBounds(), clock)
    log = SharedLog(clock)
    provider = FakeProvider(steps=["x"] * steps, token_seconds=1.0)
    one = ReplyRig(provider=provider, log=log, node="node-a", pool=pool)
    two = ReplyRig(provider=provider, log=log, node="node-b", pool=pool)
    async with one.running(), two.running():
        await asyncio.sleep(2)
        yield one, two


@pytest.mark.covers("002 the worker publishes tokens")
async def test_reply_is_read_at_another_node_with_the_same_ids() -> None:
    async with two_nodes() as (one, two):
        made = await one.start(replicated=True)
        here, there = await asyncio.gather(
            read(made), read(await two.parts.find(ANNA, made.reply_id))
        )
        assert there.entries == here.entries
        assert there.code == "done"


async def test_reply_has_a_bound_of_readers_at_another_node_too() -> None:
    async with two_nodes() as (one, two):
        made = await one.start(replicated=True)
        found = await two.parts.find(ANNA, made.reply_id)
        cursors = [found.entries() for _ in range(READERS_MAX)]
        with pytest.raises(RateLimited, match="readers"):
            found.entries()
        await cursors.pop().aclose()
        assert (await read(found)).code == "done"


async def test_reply_read_elsewhere_is_not_cancelled_when_its_own_client_leaves() -> None:
    async with two_nodes(60) as (one, two):
        made = await one.start(replicated=True)
        cursor = made.entries()
        await anext(cursor)
        reading = asyncio.create_task(read(await two.parts.find(ANNA, made.reply_id)))
        await asyncio.sleep(2)
        await cursor.aclose()
        assert (await reading).code == "done"


async def test_reply_whose_readers_have_left_everywhere_is_cancelled() -> None:
    async with two_nodes(200) as (one, two):
        made = await one.start(replicated=True)
        cursor = (await two.parts.find(ANNA, made.reply_id)).entries()
        await anext(cursor)
        await asyncio.sleep(40)
        assert not one.provider.closed
        await cursor.aclose()
        await asyncio.sleep(40)
        assert one.provider.closed


async def test_cancel_at_another_node_reaches_the_producer() -> None:
    async with two_nodes() as (one, two):
        made = await one.start(replicated=True)
        reading = asyncio.create_task(read(made))
        await asyncio.sleep(2.5)
        await two.parts.cancel(ANNA, made.reply_id)
        assert (await reading).code == "cancelled"
        assert asyncio.get_running_loop().time() < 7


async def test_same_key_at_another_node_attaches_to_the_running_reply() -> None:
    async with two_nodes() as (one, two):
        first = await one.start(replicated=True, key="k", body_hash=b"1")
        reading = asyncio.create_task(read(first))
        second = await two.start(replicated=True, key="k", body_hash=b"1")
        assert second.reply_id == first.reply_id
        assert (await read(second)).entries == (await reading).entries
        assert len(one.provider.opened) == 1


def begin(node: str) -> ReplyBegin:
    return ReplyBegin(*ANNA, "plain", "responses", "tiny", node, 0.0)


@pytest.mark.parametrize("text", ["half", ""], ids=["generating", "queued"])
async def test_reader_of_a_dead_node_gets_what_there_is_and_worker_lost(text: str) -> None:
    async with two_nodes() as (_, two):
        epoch = await two.log.begin("rpl_dead", begin("node-z"))
        if text:
            delta = ReplyDelta(b'{"choices":[{"delta":{"content":"half"}}]}')
            await two.log.append([LogAppend("rpl_dead", EntryId(epoch, 1), [delta])])
        began = asyncio.get_running_loop().time()
        reading = await read(await two.parts.find(ANNA, "rpl_dead"))
        assert (reading.text, reading.code) == (text, "worker_lost")
        assert asyncio.get_running_loop().time() - began <= 4


async def test_key_of_a_dead_node_begins_a_new_reply() -> None:
    async with two_nodes(1) as (one, two):
        await two.log.begin("rpl_dead", begin("node-z"))
        await two.log.claim(KeyClaim(ANNA, "k", b"1", "rpl_dead", "node-z"))
        again = await one.start(replicated=True, key="k", body_hash=b"1")
        assert again.reply_id != "rpl_dead"
        assert (await read(again)).code == "done"


async def test_silent_producer_that_does_not_hold_the_reply_is_worker_lost() -> None:
    async with two_nodes() as (_, two):
        await two.log.begin("rpl_gone", begin("node-a"))
        began = asyncio.get_running_loop().time()
        reading = await read(await two.parts.find(ANNA, "rpl_gone"))
        assert reading.code == "worker_lost"
        took = asyncio.get_running_loop().time() - began
        assert SILENT_SECONDS <= took <= 15, "a node that restarts keeps its name"


async def test_log_that_vanishes_is_a_gap_for_its_readers() -> None:
    async with two_nodes() as (one, two):
        made = await one.start(replicated=True)
        own = asyncio.create_task(read(made))
        there = asyncio.create_task(read(await two.parts.find(ANNA, made.reply_id)))
        await asyncio.sleep(3.5)
        await one.log.delete([made.reply_id])
        assert (await there).code == "gap"
        assert (await own).code == "done"  # the producer's own client goes on


async def test_log_with_a_hole_is_a_gap_for_its_readers() -> None:
    async with two_nodes() as (_, two):
        epoch = await two.log.begin("rpl_hole", begin("node-a"))
        deltas = [ReplyDelta(b'{"choices":[{"delta":{"content":"%d"}}]}' % n) for n in range(4)]
        await two.log.append([LogAppend("rpl_hole", EntryId(epoch, 1), deltas)])
        assert isinstance(two.log, MemoryReplyLog)
        del two.log._logs["rpl_hole"].entries[3]
        reading = await read(await two.parts.find(ANNA, "rpl_hole"))
        assert reading.code == "gap"
        behind = await read(await two.parts.find(ANNA, "rpl_hole"), EntryId(epoch, 2))
        assert (behind.code, behind.entries) == ("gap", []), "no entry behind the hole"


async def test_response_that_waits_at_another_node_is_seen_waiting() -> None:
    async with two_nodes(5) as (one, two):
        one.per_user = 1
        await one.start(kind="background", replicated=True)
        waits = await one.start(kind="background", replicated=True)
        found = await two.parts.find(ANNA, waits.reply_id)
        assert (await found.snapshot()).waiting
        await asyncio.sleep(7)
        assert not (await found.snapshot()).waiting


async def test_operator_sees_and_cancels_a_reply_from_any_node() -> None:
    """Where it is made, and elsewhere by the log; never its text."""
    async with two_nodes(200) as (one, two):
        made = await one.start(replicated=True)
        reading = asyncio.create_task(read(made))
        await asyncio.sleep(3)
        here, there = [await node.parts.summary(made.reply_id) for node in (one, two)]
        assert [summary.reply_id for summary in one.parts.replies()] == [made.reply_id]
        assert list(two.parts.replies()) == [], "each node lists what it makes"
        assert (here.node, here.state, here.readers, here.entries > 1) == (
            "node-a",
            "running",
            1,
            True,
        )
        unknown_elsewhere = {"readers": 0, "entries": 0, "position": 0}
        assert there == structs.replace(here, **unknown_elsewhere)
        assert (here.tenant, here.owner_kind, here.owner) == ANNA
        assert await two.parts.cancel_any(made.reply_id)
        assert (await reading).code == "cancelled"
        assert (await two.parts.summary(made.reply_id)).state == "ended"
        assert not await two.parts.cancel_any(made.reply_id), "it has ended"
        assert not await two.parts.cancel_any("unknown")
        with pytest.raises(NotFound):
            await two.parts.summary("unknown")


async def test_key_of_a_node_that_restarted_begins_a_new_reply() -> None:
    async with two_nodes(1) as (_, two):
        await two.log.begin("rpl_old", begin("node-a"))  # which lives, but does not make it
        await two.log.claim(KeyClaim(ANNA, "k", b"1", "rpl_old", "node-a"))
        reply = await two.start(replicated=True, key="k", body_hash=b"1")
        assert reply.reply_id != "rpl_old"
        assert (await read(reply)).code == "done"


async def test_key_whose_reply_never_began_at_a_living_node_is_free() -> None:
    async with two_nodes(1) as (_, two):
        await two.log.claim(KeyClaim(ANNA, "k", b"1", "rpl_old", "node-a"))
        reply = await two.start(replicated=True, key="k", body_hash=b"1")
        assert (await read(reply)).code == "done"


async def test_reader_that_is_closed_after_its_end_leaves_the_others_counted() -> None:
    async with two_nodes() as (one, two):
        made = await one.start(replicated=True)
        found = await two.parts.find(ANNA, made.reply_id)
        stays, leaves = found.entries(), found.entries()
        await anext(stays)
        for _ in range(2):
            await leaves.aclose()
        await asyncio.sleep(15)
        assert made.reply_id in one.leases.read_elsewhere


async def test_reader_that_nobody_closed_is_not_counted() -> None:
    async with two_nodes() as (one, two):
        made = await one.start(replicated=True)
        cursor = (await two.parts.find(ANNA, made.reply_id)).entries()
        await asyncio.sleep(2)
        assert made.reply_id in one.leases.read_elsewhere
        del cursor
        await asyncio.sleep(15)
        assert made.reply_id not in one.leases.read_elsewhere


async def test_node_is_missing_only_in_a_view_that_is_newer_than_its_last_entry() -> None:
    leases = ReplyRig().leases
    assert not leases.knows_since(0)
    async with leases.running():
        await asyncio.sleep(4.5)
        assert leases.knows_since(1)
        assert not leases.knows_since(2)


async def test_reply_of_a_node_that_just_started_is_read_and_attached_elsewhere() -> None:
    """The other node has not seen it in the pool yet."""
    async with two_nodes() as (_, two):
        new = ReplyRig(provider=two.provider, log=two.log, node="node-c", pool=two.pool)
        async with new.running():
            made = await new.start(replicated=True, key="k", body_hash=b"1")
            assert "node-c" not in two.leases.nodes
            there = asyncio.create_task(read(await two.parts.find(ANNA, made.reply_id)))
            again = await two.start(replicated=True, key="k", body_hash=b"1")
            assert again.reply_id == made.reply_id
            assert (await there).code == "done"
