"""The replies of one node on memory adapters and a provider that follows a script."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from msgspec import structs

from holdfast.clock import Clock, Ids
from holdfast.errors import RateLimited
from holdfast.limits.counters.memory import MemoryCounters
from holdfast.limits.entry_points import EntryPoints
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.rules import Rule, RuleSet
from holdfast.streaming.admission import Admission, ReplyRequest
from holdfast.streaming.attached import AttachedReply
from holdfast.streaming.parts import StreamingDeps, StreamingParts
from holdfast.streaming.pool.contract import DEFAULT_POOL, Pool, PoolSizes, QueueBounds
from holdfast.streaming.pool.leases import NodeLeases
from holdfast.streaming.pool.memory import MemoryPool
from holdfast.streaming.producer import Producer
from holdfast.streaming.providers.contract import ProviderChunk, ProviderFailed, ProviderRequest
from holdfast.streaming.providers.routing import Routing
from holdfast.streaming.reader import Lost, Queued, ReaderEvent
from holdfast.streaming.reply import (
    EntryId,
    Owner,
    Payer,
    ReplyDelta,
    ReplyDone,
    ReplyEntry,
    ReplyError,
    ReplyUsage,
)
from holdfast.streaming.reply_log.contract import ReplyLog
from holdfast.streaming.reply_log.memory import MemoryReplyLog
from holdfast.streaming.reply_log.writer import LogWriter
from holdfast.streaming.settings import ModelSettings, StreamingSettings
from holdfast.streaming.usage import ReplyAccounts
from holdfast.streaming.usage_store.contract import RunUsage
from holdfast.streaming.usage_store.memory import MemoryUsage
from proof.virtual_loop import LoopClock

ANNA = Owner("acme", "user", "anna")
MODEL = "tiny"
Step = str | float | ProviderFailed
"""A token, seconds to wait, or how the stream breaks."""


def chunk(text: str, finish: str | None = None) -> bytes:
    return msgspec.json.encode(
        {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}
    )


@dataclass
class FakeProvider:
    """Streams ``steps``, then a finish and the usage. ``hang``: never sends headers."""

    name: str = "fake"
    pool: str = DEFAULT_POOL
    steps: Sequence[Step] = ("Hello", " world")
    token_seconds: float = 0.0
    hang: bool = False
    ends: bool = True
    """False: it goes silent after its steps."""
    opened: list[float] = field(default_factory=list)
    closed: list[float] = field(default_factory=list)
    requests: list[ProviderRequest] = field(default_factory=list)

    @asynccontextmanager
    async def stream(
        self, request: ProviderRequest
    ) -> AsyncIterator[AsyncIterator[Sequence[ProviderChunk]]]:
        now = asyncio.get_running_loop().time
        self.opened.append(now())
        self.requests.append(request)
        try:
            if self.hang:
                await asyncio.Event().wait()
            yield self._chunks()
        finally:
            self.closed.append(now())

    async def _chunks(self) -> AsyncIterator[Sequence[ProviderChunk]]:
        for step in self.steps:
            if isinstance(step, ProviderFailed):
                raise step
            await asyncio.sleep(step if isinstance(step, float) else self.token_seconds)
            if isinstance(step, str):
                yield [ProviderChunk(chunk(step), content=True, text_bytes=len(step))]
        if not self.ends:
            await asyncio.Event().wait()
        yield [ProviderChunk(chunk("", "stop"), finish=True)]
        yield [ProviderChunk(b"", usage=ReplyUsage(7, 2, chunk=b'{"usage":1}'))]

    async def close(self) -> None:
        pass


class CountedAccounts(ReplyAccounts):
    """Keeps every run that has ended."""

    ended: list[RunUsage]

    def end(self, ended: RunUsage, payer: Payer, tokens: int) -> None:
        self.ended.append(ended)
        super().end(ended, payer, tokens)


@dataclass
class ReplyRig:
    """``await rig.start()``, then read; ``running`` must be entered."""

    settings: StreamingSettings = field(default_factory=StreamingSettings)
    provider: FakeProvider = field(default_factory=FakeProvider)
    log: ReplyLog = field(default_factory=lambda: MemoryReplyLog(LoopClock()))
    node: str = "node-a"
    pool: Pool | None = None
    per_user: int = 3
    rules: Sequence[Rule] = ()
    rates: Callable[[Payer], RateLimited | None] = lambda payer: None
    clock: Clock = field(default_factory=LoopClock)
    count: int = 0

    def __post_init__(self) -> None:
        settings, clock = self.settings, self.clock
        queue = settings.queue_failover
        sizes = PoolSizes(settings.pool.total, {})
        bounds = QueueBounds(queue.waiting_max, queue.waiting_per_tenant, queue.waiting_per_user)
        self.pool = self.pool or MemoryPool(sizes, bounds, clock)
        self.leases = NodeLeases(self.node, self.pool, sizes, clock)
        self.writer = LogWriter(self.log)
        self.limiter = Limiter(MemoryCounters(clock), clock, rules=RuleSet.of(self.rules))
        points = self.entry_points = EntryPoints(self.limiter)
        self.usage = MemoryUsage()
        self.accounts = CountedAccounts(points, self.usage, clock, Ids(clock))
        self.accounts.ended = []
        models = [ModelSettings(MODEL, (f"{self.provider.name}:tiny-1",))]
        self.routing = Routing(
            [self.provider], models, settings.clocks, queue, clock, random.Random(1)
        )
        admission = Admission(
            settings, self.routing, self.leases, self._check_rates, self._active_limit
        )
        producer = Producer(settings, self.routing, self.leases, self.writer, self.accounts, clock)
        deps = StreamingDeps(self.node, settings, self.leases, self.log, self.writer, clock)
        self.parts = StreamingParts(deps, admission, producer)

    async def _check_rates(self, request: ReplyRequest) -> None:
        if (refused := self.rates(request.payer)) is not None:
            raise refused
        await self.accounts.check(request.payer)

    def _active_limit(self, payer: Payer) -> int:
        points = self.entry_points
        return points.active_limit(payer.tenant, self.per_user, is_key=payer.is_key)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(run()) for run in (self.writer.run, self.accounts.run)]
        try:
            async with self.leases.running(), self.parts.running():
                yield
        finally:
            for task in tasks:
                task.cancel()

    def request(self, **given: object) -> ReplyRequest:
        self.count += 1
        plain = ReplyRequest(
            f"rpl_{self.node}_{self.count}", ANNA, Payer("acme", "anna"), "plain", "chat", MODEL,
            {"messages": b"[]"},
        )  # fmt: skip
        return structs.replace(plain, **given)

    async def start(self, **given: object) -> AttachedReply:
        return await self.parts.start(self.request(**given))


@dataclass
class Reading:
    """What a reader got."""

    entries: list[tuple[EntryId, ReplyEntry]] = field(default_factory=list)
    queued: list[Queued] = field(default_factory=list)
    lost: ReplyError | None = None

    def add(self, event: ReaderEvent) -> None:
        if isinstance(event, Queued):
            self.queued.append(event)
        elif isinstance(event, Lost):
            self.lost = event.error
        else:
            self.entries += event

    @property
    def text(self) -> str:
        deltas = [entry.chunk for _, entry in self.entries if isinstance(entry, ReplyDelta)]
        choices = [msgspec.json.decode(each)["choices"][0] for each in deltas]
        return "".join(choice["delta"]["content"] for choice in choices)

    @property
    def end(self) -> ReplyEntry | None:
        last = self.entries[-1][1] if self.entries else None
        return last if isinstance(last, ReplyDone | ReplyError) else None

    @property
    def code(self) -> str:
        """How it ended: ``done`` or the failure's code."""
        end = self.lost or self.end
        return end.code if isinstance(end, ReplyError) else "done" if end else ""


async def read(reply: AttachedReply, after: EntryId | None = None) -> Reading:
    """Read to the end."""
    reading = Reading()
    async for event in reply.entries(after):
        reading.add(event)
    return reading
