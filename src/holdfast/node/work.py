"""Builds and runs work, webhooks and assistants of a node: worker, readers, gauges."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.drivers.cluster import ROLES
from holdfast.errors import HoldfastError, NotFound, OutcomeUnknown, Unavailable
from holdfast.eventlog.contract import EventLog, SharedLog
from holdfast.fanout.job_reader import JobReader
from holdfast.fanout.log_expiry import LogExpiry
from holdfast.history.history import ChatHistory
from holdfast.message import Message
from holdfast.node.supervisor import GAUGES_SECONDS, background_task
from holdfast.store.contract import ChatStore
from holdfast.store.leases.contract import Leases
from holdfast.store.leases.held import HeldLease
from holdfast.streaming.assistants.jobs import with_assistants
from holdfast.streaming.assistants.reader import AssistantReader
from holdfast.streaming.assistants.replying import AssistantDeps, AssistantReplies
from holdfast.streaming.assistants.triggers import Assistants
from holdfast.streaming.settings import AssistantSettings
from holdfast.webhooks.contract import WebhookEndpoints
from holdfast.webhooks.delivery import (
    FailingEndpoints,
    Find,
    WebhookSender,
    recall_paces,
    with_webhooks,
)
from holdfast.webhooks.parking import Parking
from holdfast.webhooks.parts import WebhookParts, WorkParts, WorkSettings
from holdfast.webhooks.reader import WebhookReader
from holdfast.work.contract import WorkStore
from holdfast.work.handlers import Handlers
from holdfast.work.inspection import Stats, by_name
from holdfast.work.job import Policies
from holdfast.work.worker import Worker, WorkerSettings

_GAUGES_PAUSE = 20
"""The pause between two counts, as a multiple of what the count took."""
MESSAGE_BYTES_MAX = 1 << 20
READERS = (WebhookReader.reader, AssistantReader.reader)
START_SECONDS_MAX = 5.0
"""How long a start waits for PostgreSQL, whose host may not answer."""


class NodeWork:
    """Jobs and webhooks of a node: built first, run once the node can read messages."""

    def __init__(
        self,
        settings: WorkSettings,
        node_id: str,
        jobs: WorkStore,
        endpoints: WebhookEndpoints,
        log: EventLog,
        chats: ChatStore,
        clock: Clock,
        assistants: Iterable[AssistantSettings] = (),
        roles: Sequence[str] = ROLES,
    ) -> None:
        self._settings = settings
        self._is_worker = "work" in roles
        self._endpoints = endpoints
        self._jobs, self._log, self._chats = jobs, log, chats
        self._clock = clock
        self._assistants = Assistants(assistants if "streaming" in roles else ())
        self.handlers = Handlers()
        self._worker = Worker(
            jobs,
            self.handlers,
            name=node_id,
            policies=with_assistants(with_webhooks(Policies())),
            settings=WorkerSettings(
                concurrency=settings.concurrency,
                jobs_max=max(4096, settings.concurrency),
                stuck_loop_seconds=settings.stuck_loop_seconds,
            ),
        )
        self._reader = reader = WebhookReader(log, endpoints, jobs, chats, clock)
        worker = self._worker
        self._failing = FailingEndpoints()
        self._parking = parking = Parking(
            endpoints, jobs, worker.pause, worker.group, clock, settings.webhooks, self._failing
        )
        self._gauges = gauges = _Gauges(jobs, lambda: parking.status.parked, clock)
        webhooks = WebhookParts(
            endpoints,
            settings.webhooks.private_allowed,
            begun=lambda: reader.begun,
            parked=lambda: parking.status,
        )
        self.parts = WorkParts(jobs, webhooks, up=lambda: gauges.up)

    @asynccontextmanager
    async def running(
        self, assistants: AssistantDeps, leases: Leases, shared_log: SharedLog | None = None
    ) -> AsyncIterator[None]:
        """Run jobs, send webhooks and let assistants reply while the block runs;
        leaving it drains running jobs. Nodes with the leases read the log for all, and
        forget old events of a log that is shared.

        It starts and goes on while PostgreSQL is unavailable: the worker and the reader
        retry until it answers, and the reader's position is stored there, so no message
        is skipped. BadSetting or StateCorrupted if PostgreSQL answers and cannot be
        used.
        """
        async with AsyncExitStack() as stack:
            if not self._is_worker:
                await stack.enter_async_context(self._watching())
                yield
                return
            sender = await stack.enter_async_context(
                WebhookSender.opened(
                    self._endpoints,
                    _finding(assistants.history),
                    self._clock,
                    self._settings.webhooks,
                    self._failing,
                )
            )
            sender.register(self.handlers)
            replying = AssistantReplies(self._assistants, assistants)
            replying.register(self.handlers, self._settings.concurrency)
            await _begun(self._reader)
            self._gauges.report(self._reader.begun)
            await self._parking.update()
            await recall_paces(self._endpoints, self._worker.paces)
            await stack.enter_async_context(self._worker.running())
            await stack.enter_async_context(self._reading(self._reader, leases))
            if self._assistants:
                reader = AssistantReader(
                    self._log,
                    self._assistants,
                    self._jobs,
                    self._chats,
                    assistants.history,
                    self._clock,
                )
                await _begun(reader)
                await stack.enter_async_context(self._reading(reader, leases))
            if shared_log is not None:
                expiry = LogExpiry(shared_log, self._jobs, READERS, leases, self._clock)
                await stack.enter_async_context(background_task("log_expiry", expiry.run))
            await stack.enter_async_context(background_task("work_gauges", self._gauges.run))
            await stack.enter_async_context(background_task("webhook_parking", self._parking.run))
            yield

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        """For a node that runs no jobs: what its API shows of them stays true."""
        await _begun(self._reader)  # so that a new endpoint misses nothing
        self._gauges.report(self._reader.begun)
        async with (
            background_task("work_gauges", self._gauges.run),
            background_task("webhook_parking", self._parking.run),
        ):
            yield

    @asynccontextmanager
    async def _reading(self, reader: JobReader, leases: Leases) -> AsyncIterator[None]:
        """Read the log while the block runs and this node holds the reader's lease."""
        lease = HeldLease(leases, f"reader.{reader.reader}", self._clock)
        reader.is_held = lambda: lease.fence is not None
        async with (
            background_task(f"{reader.reader}_lease", lease.run),
            background_task(reader.reader, reader.run),
        ):
            yield


async def _begun(reader: JobReader) -> None:
    """Start the reader; wait for the job store no longer than a start may take."""
    try:
        async with asyncio.timeout(START_SECONDS_MAX):
            await reader.begin()
    except (Unavailable, OutcomeUnknown, TimeoutError) as error:
        telemetry.log.warning(
            "work.store_unavailable_at_startup", error=str(error) or "no answer in time"
        )


def _finding(history: ChatHistory) -> Find:
    async def find(chat_id: str, sequence: int) -> Message | None:
        try:
            page = await history.ask(
                lambda store: store.read_after(chat_id, sequence - 1, 1, MESSAGE_BYTES_MAX)
            )
        except NotFound:
            return None
        return next((message for message in page.messages if message.sequence == sequence), None)

    return find


class _Gauges:
    """Counts jobs for the gauges. ``parked``: the destinations whose jobs wait on
    purpose; ``up``: whether the job store answered last time.
    """

    def __init__(
        self, store: WorkStore, parked: Callable[[], Collection[str]], clock: Clock
    ) -> None:
        self._store, self._parked, self._clock = store, parked, clock
        self.up = False

    async def run(self) -> None:
        """Count again and again. A count reads all jobs: the longer, the rarer."""
        while True:
            started = self._clock.monotonic()
            try:
                stats = await self._store.stats(self._parked())
                took = self._clock.monotonic() - started
                breakers = await self._store.open_breakers()
            except HoldfastError:
                self.report(False)
                raise
            self.report(True)
            _show(stats, len(breakers))
            await asyncio.sleep(max(GAUGES_SECONDS, _GAUGES_PAUSE * took))

    def report(self, up: bool) -> None:
        self.up = up
        telemetry.dependency_up("jobs", up)


def _show(stats: Stats, breakers: int) -> None:
    by_state = {state.name.lower(): count for state, count in stats.by_state.items()}
    telemetry.work_counts(by_state, by_name(stats.by_reason), breakers)
    telemetry.work_schedule(stats.by_attempt, stats.next_due_at, stats.last_due_at)
    telemetry.work_totals(
        stats.dead,
        stats.poison_candidates,
        stats.scheduled,
        stats.oldest_age_seconds,
        stats.blocked_streams,
    )
