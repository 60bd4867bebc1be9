"""What the pool and the log of replies cost Redis: its processor time, asked of itself.

- pool: 10,000 active replies and 10,000 that wait, of 4,000 users on three nodes; each
  step releases one, which grants another, confirms that and admits a new one
- log: 500 replies of 20 tokens a second, as one node writes them: every 25 ms one call
  with what has come; and the memory of replies of 300 tokens, all of their log counted
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from itertools import cycle, islice

from engines import Server, redis
from harness import say
from holdfast.streaming.pool.contract import (
    Admit,
    Confirm,
    NodeBeat,
    Pool,
    PoolOperation,
    PoolRequest,
    PoolSizes,
    QueueBounds,
    Release,
)
from holdfast.streaming.pool.redis import RedisPool
from holdfast.streaming.reply import EntryId, ReplyBegin, ReplyDelta
from holdfast.streaming.reply_log.contract import LogAppend
from holdfast.streaming.reply_log.redis import RedisReplyLog

ACTIVE = WAITING = 10_000
USERS = 4_000
NODES = ("a", "b", "c")
BATCH = 16
"""Operations of one turn of a busy node's loop."""
REPLIES = 500
FLUSHES_PER_SECOND = 40
TOKENS_PER_SECOND = 20
TOKENS = 300
WORDS = (b"the", b"a", b"of", b"streaming", b"and", b"connection", b"is", b"to", b"reply,")
CHUNK = (
    b'{"id":"chatcmpl-9XK","object":"chat.completion.chunk","created":1700000000,"model":"m",'
    b'"system_fingerprint":"fp_1","choices":[{"index":0,"delta":{"content":" %b"},'
    b'"logprobs":null,"finish_reason":null}]}'
)


def cpu_seconds(server: Server) -> float:
    info = redis.say(server, "INFO", "cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


class PoolLoad:
    """Keeps a pool full of active and waiting replies."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._active: dict[str, deque[str]] = {node: deque() for node in NODES}
        self._granted: dict[str, list[str]] = {node: [] for node in NODES}
        self._made = 0
        self._beaten = 0.0
        self.operations = 0
        for node in NODES:
            pool.listen(node, self._granted[node].append, lambda reply_id: None)

    async def fill(self) -> None:
        await self._beat()
        await asyncio.sleep(3.1)  # a new pool grants nothing for so long
        await self._beat()
        while self._made < ACTIVE + WAITING:
            for node in NODES:
                await self._call(node, [self._admit() for _ in range(64)])
            await self._confirm()

    async def turn(self) -> None:
        """Each node: release some, admit as many, confirm what is granted."""
        for node, active in self._active.items():
            released = [Release(active.popleft()) for _ in range(min(BATCH // 2, len(active)))]
            await self._call(node, [*released, *(self._admit() for _ in released)])
        await self._confirm()

    async def _confirm(self) -> None:
        await asyncio.sleep(0)  # wake-ups
        await self._beat()
        for node, granted in self._granted.items():
            if granted:
                await self._call(node, [Confirm(reply_id) for reply_id in granted])
                self._active[node].extend(granted)
                granted.clear()

    def _admit(self) -> Admit:
        self._made += 1
        reply_id = f"reply_{self._made:026}"
        return Admit(PoolRequest(reply_id, f"t{self._made % 20}", f"u{self._made % USERS}", 3))

    async def _call(self, node: str, operations: Sequence[PoolOperation]) -> None:
        answers = await self._pool.call(node, operations)
        self.operations += len(operations)
        for operation, answer in zip(operations, answers, strict=True):
            if isinstance(operation, Admit) and getattr(answer, "leased", False):
                self._active[node].append(operation.request.reply_id)

    async def _beat(self) -> None:
        if time.monotonic() - self._beaten < 1:
            return
        self._beaten = time.monotonic()
        for node in NODES:
            view = await self._pool.beat(node, NodeBeat(0, 0, 0, 0))
            known = set(self._granted[node])
            self._granted[node] += [each for each in view.granted if each not in known]


async def measure_pool(server: Server, quick: bool, figures: dict[str, float]) -> None:
    bounds = QueueBounds(2 * WAITING, 2 * WAITING, WAITING)
    pool = RedisPool(server.url, PoolSizes(ACTIVE), bounds)
    load = PoolLoad(pool)
    await load.fill()
    operations, cpu = load.operations, cpu_seconds(server)
    stop = time.monotonic() + (2 if quick else 15)
    while time.monotonic() < stop:
        await load.turn()
    operations, cpu = load.operations - operations, cpu_seconds(server) - cpu
    figures["pool_us_per_op"] = cpu / operations * 1e6
    say(f"  pool: {operations:,} operations, {cpu:.2f} s of Redis")
    await pool.close()


async def measure_log(server: Server, quick: bool, figures: dict[str, float]) -> None:
    redis.say(server, "FLUSHALL")
    log = RedisReplyLog(server.url)
    seconds, count = 3 if quick else 20, REPLIES * TOKENS_PER_SECOND // FLUSHES_PER_SECOND
    replies = [await LoggedTokens.begin(log, number) for number in range(REPLIES)]
    turn, cpu = cycle(replies), cpu_seconds(server)
    for _ in range(seconds * FLUSHES_PER_SECOND):
        appends = [reply.append(1) for reply in islice(turn, count)]
        answers = await log.append(appends)
        assert [answer.last for answer in answers] == [append.first for append in appends]
    cpu = cpu_seconds(server) - cpu
    figures["log_us_per_token"] = cpu / (seconds * FLUSHES_PER_SECOND * count) * 1e6
    longer = [await LoggedTokens.begin(log, REPLIES + number) for number in range(20)]
    await log.append([reply.append(TOKENS) for reply in longer])
    usage = [redis.say(server, "MEMORY", "USAGE", f"replies:log:{r.reply_id}") for r in longer]
    figures["log_bytes_per_token"] = sum(usage) / len(usage) / TOKENS
    await log.close()


class LoggedTokens:
    """A reply that grows by tokens."""

    def __init__(self, reply_id: str, epoch: int) -> None:
        self.reply_id, self._epoch, self._next = reply_id, epoch, 1

    @classmethod
    async def begin(cls, log: RedisReplyLog, number: int) -> LoggedTokens:
        begin = ReplyBegin("acme", "user", "ann", "native", "native", "m", "a", 0.0)
        reply_id = f"reply_{number:026}"
        return cls(reply_id, await log.begin(reply_id, begin))

    def append(self, count: int) -> LogAppend:
        first = EntryId(self._epoch, self._next)
        self._next += count
        entries = [ReplyDelta(CHUNK % WORDS[(first.n + n) % len(WORDS)]) for n in range(count)]
        return LogAppend(self.reply_id, first, entries)
