"""The log of replies on a real Redis: failovers, flushes, cut and silent connections."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import redis.asyncio

from engines import Server
from holdfast.errors import BadSetting, HoldfastError
from holdfast.streaming.reply import (
    EntryId,
    Owner,
    ReplyBegin,
    ReplyDelta,
    ReplyDone,
    ReplyEntry,
    ReplyError,
)
from holdfast.streaming.reply_log.contract import Appended, LogAppend
from holdfast.streaming.reply_log.redis import RedisReplyLog
from holdfast.streaming.reply_log.writer import LogWriter, NotResumableCause
from proof.proxy import Proxy

BEGIN = ReplyBegin("acme", "user", "ann", "native", "native", "m", "node-1", 1.0)
KEY = "replies:log:r1"
ANSWER_SECONDS = 0.5
"""How long a connection may be silent; 2 s in use."""


def deltas(*tokens: str) -> list[ReplyEntry]:
    return [ReplyDelta(b'{"choices":[{"delta":{"content":"%s"}}]}' % t.encode()) for t in tokens]


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[RedisReplyLog]:
    log = await RedisReplyLog.open(url, ANSWER_SECONDS)
    yield log
    await log.close()


@asynccontextmanager
async def fresh(server: Server) -> AsyncIterator[tuple[redis.asyncio.Redis, RedisReplyLog]]:
    async with redis.asyncio.Redis.from_url(server.url) as client, opened(server.url) as log:
        await client.flushall()
        yield client, log


async def append(log: RedisReplyLog, epoch: int, n: int, *entries: ReplyEntry) -> Appended:
    (answer,) = await log.append([LogAppend("r1", EntryId(epoch, n), entries)])
    return answer


async def whole(log: RedisReplyLog, reply_id: str = "r1") -> list[ReplyEntry]:
    page = await log.read(reply_id, None, 100_000)
    assert page is not None
    assert [entry_id.n for entry_id, _ in page.entries] == list(range(len(page.entries)))
    return [entry for _, entry in page.entries]


async def test_tail_lost_by_a_failover_is_noticed_and_written_again(redis_server: Server) -> None:
    async with fresh(redis_server) as (client, log):
        epoch = await log.begin("r1", BEGIN)
        await append(log, epoch, 1, *deltas("a", "b"))
        replica = await client.dump(KEY)
        await append(log, epoch, 3, *deltas("c", "d"))
        await client.restore(KEY, 60_000, replica, replace=True)
        assert await append(log, epoch, 5, *deltas("e")) == Appended(EntryId(epoch, 2))
        assert (await append(log, epoch, 3, *deltas("c", "d", "e"))).last == EntryId(epoch, 5)
        assert await whole(log) == [BEGIN, *deltas("a", "b", "c", "d", "e")]


async def test_older_epoch_is_refused_also_if_the_log_is_as_long_as_it_expects(
    redis_server: Server,
) -> None:
    async with fresh(redis_server) as (client, log), opened(redis_server.url) as other:
        older = await log.begin("r1", BEGIN)
        await append(log, older, 1, *deltas("a"))
        replica = await client.dump(KEY)
        await append(log, older, 2, *deltas("b"))
        await client.restore(KEY, 60_000, replica, replace=True)
        newer = await other.begin("r1", BEGIN)
        assert await client.xlen(KEY) == 3
        assert await append(log, older, 3, *deltas("c")) == Appended(EntryId(newer, 0))
        assert await whole(other) == [BEGIN]


async def test_flushed_log_is_not_made_again_by_an_append(redis_server: Server) -> None:
    async with fresh(redis_server) as (client, log):
        epoch = await log.begin("r1", BEGIN)
        await client.flushall()
        assert await append(log, epoch, 1, *deltas("a")) == Appended(None)
        assert await client.exists(KEY) == 0


async def test_full_redis_takes_nothing_and_says_so(redis_server: Server) -> None:
    async with fresh(redis_server) as (client, log):
        epoch = await log.begin("r1", BEGIN)
        await client.config_set("maxmemory", "1mb")
        try:
            with pytest.raises(HoldfastError):
                await append(log, epoch, 1, *deltas("a"))
            with pytest.raises(HoldfastError):
                await log.begin("r2", BEGIN)
        finally:
            await client.config_set("maxmemory", "0")
        assert (await append(log, epoch, 1, *deltas("a"))).last == EntryId(epoch, 1)
        assert await whole(log) == [BEGIN, *deltas("a")]


async def test_redis_that_evicts_is_refused_at_the_start(redis_server: Server) -> None:
    async with redis.asyncio.Redis.from_url(redis_server.url) as client:
        await client.config_set("maxmemory", "100mb")
        await client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(BadSetting, match=r"streaming\.replies_url.*noeviction"):
                await RedisReplyLog.open(redis_server.url)
        finally:
            await client.config_set("maxmemory", "0")
            await client.config_set("maxmemory-policy", "noeviction")


async def test_erasure_finds_its_logs_among_many_keys_of_others(redis_server: Server) -> None:
    async with fresh(redis_server) as (client, log):
        await client.mset({f"rl:other:{n}": n for n in range(3000)})
        for n in range(20):
            owner = ("acme", "user", f"u{n % 2}")
            await log.begin(f"r{n}", ReplyBegin(*owner, "plain", "chat", "m", "n", 1.0))
        assert await log.forget_owner(Owner("acme", "user", "u1")) == 10
        assert await client.dbsize() == 3010


class Reply:
    """A reply in memory, as the writer sees it."""

    def __init__(self, reply_id: str) -> None:
        self.reply_id = reply_id
        self.epoch = 0
        self.entries: list[ReplyEntry] = [BEGIN]
        self.reports: list[str] = []

    def on_superseded(self) -> None:
        self.reports.append("superseded")

    def on_not_resumable(self, cause: NotResumableCause) -> None:
        self.reports.append(cause)


@asynccontextmanager
async def writing(log: RedisReplyLog) -> AsyncIterator[LogWriter]:
    writer = LogWriter(log, end_seconds=2.0)
    running = asyncio.create_task(writer.run())
    yield writer
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def follow(log: RedisReplyLog, reply_id: str, gaps: list[float]) -> list[Any]:
    """Every entry until the end; ``gaps``: seconds between tokens beyond those made."""
    entries: list[Any] = []
    async for page in log.follow(reply_id, None):
        entries += page.entries
        gaps.append(time.monotonic())
        if entries and isinstance(entries[-1][1], ReplyDone | ReplyError):
            break
    return entries


async def produce(writer: LogWriter, reply: Reply, tokens: int, seconds: float) -> bool:
    for n in range(tokens):
        await asyncio.sleep(seconds)
        reply.entries += deltas(f"token {n}")
        writer.appended(reply)
    reply.entries.append(ReplyDone())
    return await writer.end(reply)


async def begun(writer: LogWriter, names: Sequence[str]) -> list[Reply]:
    replies = [Reply(name) for name in names]
    for reply in replies:
        reply.epoch = await writer.begin(reply)
    return replies


async def test_cut_connections_lose_and_repeat_no_entry(redis_server: Server) -> None:
    """100 replies; the connections of producer and reader are cut 40 times."""
    rng = random.Random(15)
    async with (
        Proxy("127.0.0.1", redis_server.port) as near,
        Proxy("127.0.0.1", redis_server.port) as far,
        fresh(redis_server) as (_, direct),
        opened(f"redis://127.0.0.1:{near.port}") as log,
        opened(f"redis://127.0.0.1:{far.port}") as elsewhere,
        writing(log) as writer,
    ):
        replies = await begun(writer, [f"r{n}" for n in range(100)])

        async def cut() -> None:
            for _ in range(40):
                await asyncio.sleep(rng.uniform(0.01, 0.08))
                rng.choice([near, far]).reset()

        async with asyncio.TaskGroup() as group:
            following = [
                group.create_task(follow(elsewhere, reply.reply_id, [])) for reply in replies
            ]
            group.create_task(cut())
            ended = [
                group.create_task(produce(writer, reply, 40, rng.uniform(0.03, 0.05)))
                for reply in replies
            ]
        assert near.accepted > 5 and far.accepted > 5
        for reply, seen, end in zip(replies, following, ended, strict=True):
            assert [each[0].n for each in seen.result()] == list(range(42))
            assert [each[1] for each in seen.result()] == reply.entries
            assert await whole(direct, reply.reply_id) == reply.entries
            assert end.result() or reply.reports == ["late"]


async def test_paused_redis_delays_the_log_and_loses_nothing(redis_server: Server) -> None:
    async with (
        fresh(redis_server) as (_, log),
        opened(redis_server.url) as elsewhere,
        writing(log) as writer,
    ):
        (reply,) = await begun(writer, ["r1"])
        following = asyncio.create_task(follow(elsewhere, "r1", []))
        await asyncio.sleep(0.1)
        os.kill(redis_server.pid, signal.SIGSTOP)
        try:
            await produce(writer, reply, 20, 0.005)
            assert reply.reports == ["late"]
            await asyncio.sleep(ANSWER_SECONDS)  # beyond what a connection may be silent
        finally:
            os.kill(redis_server.pid, signal.SIGCONT)
        seen = await asyncio.wait_for(following, 10)
        assert [entry for _, entry in seen] == reply.entries


@pytest.mark.parametrize("one_way", ["up", "down", None])
async def test_redis_behind_a_black_hole_is_left_and_found_again(
    redis_server: Server, one_way: Any
) -> None:
    async with (
        Proxy("127.0.0.1", redis_server.port) as near,
        fresh(redis_server) as (_, direct),
        opened(f"redis://127.0.0.1:{near.port}") as log,
        writing(log) as writer,
    ):
        (reply,) = await begun(writer, ["r1"])
        near.set(blackhole=True, one_way=one_way)
        assert await produce(writer, reply, 5, 0.01) is False
        near.set(blackhole=False, one_way=None)
        seen = await asyncio.wait_for(follow(direct, "r1", []), 10)
        assert [entry for _, entry in seen] == reply.entries


async def test_followers_of_many_logs_share_one_connection_and_are_close_behind(
    redis_server: Server,
) -> None:
    async with (
        fresh(redis_server) as (client, log),
        opened(redis_server.url) as elsewhere,
        writing(log) as writer,
    ):
        replies = await begun(writer, [f"r{n}" for n in range(100)])
        before = len(await client.client_list())
        seen_at: list[list[float]] = [[] for _ in replies]
        async with asyncio.TaskGroup() as group:
            for reply, into in zip(replies, seen_at, strict=True):
                group.create_task(follow(elsewhere, reply.reply_id, into))
            await asyncio.sleep(0.5)
            assert len(await client.client_list()) - before <= 2
            for reply in replies:
                group.create_task(produce(writer, reply, 30, 0.05))
    gaps = sorted(b - a for times in seen_at for a, b in pairwise(times[2:]))
    assert gaps[len(gaps) // 2] < 0.1, "it follows the log, it does not poll each second"
