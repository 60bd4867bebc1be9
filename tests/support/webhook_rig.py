"""Webhooks for tests: a log that a test fills, real receivers on loopback, endpoints,
jobs and a worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from holdfast.clock import SystemClock
from holdfast.errors import Unavailable
from holdfast.eventlog.contract import LogLost, Position
from holdfast.message import LogEntry, Message
from holdfast.store.memory import MemoryStore
from holdfast.webhooks.contract import JOB_TYPE, WebhookEndpoint
from holdfast.webhooks.delivery import WebhookSender, WebhookSettings, recall_paces, with_webhooks
from holdfast.webhooks.parking import Parking
from holdfast.webhooks.reader import WebhookReader
from holdfast.webhooks.signature import new_secret
from holdfast.webhooks.sqlite import SqliteEndpoints
from holdfast.work.contract import WorkStore
from holdfast.work.handlers import Handlers
from holdfast.work.job import Policies
from holdfast.work.sqlite.store import MemoryWork
from holdfast.work.worker import Worker, WorkerSettings

SECRET = new_secret(bytes(range(32)))


def entry(position: int, chat: str = "c1", tenant: str = "acme") -> LogEntry:
    text = Message(
        f"msg_{position}",
        chat,
        position,
        "text",
        "alice",
        f"k{position}",
        "hi",
        "text/plain",
        "2026-01-01",
    )
    return LogEntry(0, position, tenant, text.chat_id, 1, text)


@dataclass
class Log:
    """A log that a test fills."""

    entries: list[LogEntry] = field(default_factory=list)
    now: dict[tuple[str, int], Message | None] = field(default_factory=dict)
    """What became of messages since they were logged."""
    failing: int = 0
    """How many times a message cannot be read."""
    waited_for: asyncio.Event = field(default_factory=asyncio.Event)
    """A reader has come to where it waits for more."""

    async def end(self) -> Position:
        return Position((self.entries[-1].offset if self.entries else 0,))

    async def read(self, after: Position, limit: int) -> tuple[list[LogEntry], Position]:
        if after.is_beyond(await self.end()):
            raise LogLost
        entries = [e for e in self.entries if not after.includes(e)][:limit]
        return entries, Position((entries[-1].offset,)) if entries else after

    async def wait(self, after: Position) -> None:
        self.waited_for.set()
        await until(lambda: bool(self.entries) and not after.includes(self.entries[-1]))

    async def lag(self, after: Position) -> int:
        return (await self.end()).offset(0) - after.offset(0)

    async def find(self, chat_id: str, sequence: int) -> Message | None:
        """As the store of chats: what is there now."""
        if self.failing:
            self.failing -= 1
            raise Unavailable("the store is unavailable")
        return self.now.get(
            (chat_id, sequence),
            next(
                (
                    e.what
                    for e in self.entries
                    if (e.chat_id, e.what.sequence) == (chat_id, sequence)
                ),
                None,
            ),
        )


@dataclass
class Receiver:
    """What the receiver got; ``answer`` decides the status by the number of calls."""

    url: str = ""
    calls: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    answer: Callable[[int], web.Response] = lambda _: web.Response(status=204)
    seconds: float = 0.0
    """How long it takes to answer."""

    def sequences(self) -> list[int]:
        return [msgspec.json.decode(body)["data"]["sequence"] for _, body in self.calls]

    async def _take(self, request: web.Request) -> web.Response:
        self.calls.append(
            ({name.lower(): value for name, value in request.headers.items()}, await request.read())
        )
        number = len(self.calls)
        await asyncio.sleep(self.seconds)
        return self.answer(number)


@asynccontextmanager
async def receiving(port: int = 0) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/hook", receiver._take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)  # who hangs then may hang
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    try:
        yield receiver
    finally:
        await runner.cleanup()


async def until(condition: Callable[[], Any]) -> None:
    """Poll what happens on other threads and sockets."""
    async with asyncio.timeout(60):
        while True:
            result = condition()
            if await result if asyncio.iscoroutine(result) else result:
                return
            await asyncio.sleep(0.01)


@dataclass
class Scene:
    endpoints: SqliteEndpoints
    jobs: WorkStore
    log: Log
    reader: WebhookReader

    async def add(
        self, url: str, tenant: str = "acme", endpoint_id: str = "ep_1"
    ) -> WebhookEndpoint:
        endpoint = WebhookEndpoint(endpoint_id, tenant, url, SECRET, "", "2026-01-01")
        await self.endpoints.add(endpoint)
        return endpoint


@asynccontextmanager
async def scene(
    folder: Path,
    *,
    settings: WebhookSettings | None = None,
    worker: WorkerSettings | None = None,
    jobs: WorkStore | None = None,
    log: Log | None = None,
    **policy: Any,
) -> AsyncIterator[Scene]:
    clock = SystemClock()
    endpoints, jobs, log = (
        await SqliteEndpoints.open(folder / "webhooks.db"),
        jobs or MemoryWork(clock),
        log or Log(),
    )
    policies = with_webhooks(Policies()).with_type(
        JOB_TYPE, base_seconds=0.02, cap_seconds=0.05, **policy
    )
    handlers = Handlers()
    settings = settings or WebhookSettings(private_allowed=True, timeout_seconds=30)
    async with WebhookSender.opened(endpoints, log.find, clock, settings) as deliveries:
        deliveries.register(handlers)
        reader = WebhookReader(log, endpoints, jobs, MemoryStore(), clock)
        quick = worker or WorkerSettings(concurrency=8, poll_max_seconds=0.02, balance_seconds=0.5)
        running = Worker(jobs, handlers, settings=quick, policies=policies)
        parking = Parking(endpoints, jobs, running.pause, running.group, clock, settings)
        await parking.update()
        await recall_paces(endpoints, running.paces)
        async with running.running():
            tasks = [asyncio.create_task(each.run()) for each in (reader, parking)]
            await asyncio.sleep(0)
            try:
                yield Scene(endpoints, jobs, log, reader)
            finally:
                for task in tasks:
                    task.cancel()
    await endpoints.close()
