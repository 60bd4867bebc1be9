"""The producer: from a place in the pool to the reply's one end.

One task for each reply that has its lease. It streams the provider's chunks into the
reply's entries, and ends it: the chunk with the finish_reason, the usage and the end
become visible together, when the log has them or after a second without it. Whatever
happens on the way becomes the reply's end; nothing is left without one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import structs

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.errors import HoldfastError, RateLimited
from holdfast.streaming.admission import ReplyRequest
from holdfast.streaming.live_reply import REPLY_BYTES_MAX, LiveReply
from holdfast.streaming.pool.leases import NodeLeases
from holdfast.streaming.pool.places import PoolPlace
from holdfast.streaming.providers.contract import (
    ProviderChunk,
    ProviderFailed,
    ProviderRequest,
)
from holdfast.streaming.providers.routing import RoutedStream, Routing
from holdfast.streaming.reply import (
    ReplyDelta,
    ReplyDone,
    ReplyEnd,
    ReplyEntry,
    ReplyError,
    ReplyFailed,
    ReplyUsage,
)
from holdfast.streaming.reply_log.writer import LogWriter
from holdfast.streaming.settings import StreamingSettings
from holdfast.streaming.usage import ReplyAccounts, UsageRun

QUEUE_TIMEOUT = ReplyError("queue_timeout", "no model was free in time; try again", 503)
MOVE_SECONDS = 1.0
"""How long the pool may take to move a lease, also for a request that may not wait."""
DEADLINE = ReplyError("deadline", "the reply took too long", 504)
TOO_LONG = ReplyError("upstream_garbage", "the provider sent more than a reply may have", 502)
INTERNAL = ReplyError("internal", "something went wrong here; it is logged", 500)


class _Lease:
    """The lease of one reply, for ``Routing``. ``queue_seconds``: how long it may still
    wait for one; None: as long as the reply may take.
    """

    def __init__(self, leases: NodeLeases, reply_id: str, pool: str, clock: Clock) -> None:
        self._leases, self._reply_id, self._clock = leases, reply_id, clock
        self.pool = pool
        self.queue_seconds: float | None = None

    async def move(self, pool: str) -> None:
        since, seconds = self._clock.monotonic(), self.queue_seconds
        try:
            async with asyncio.timeout(None if seconds is None else max(seconds, MOVE_SECONDS)):
                await self._leases.move(self._reply_id, pool)
        except TimeoutError:
            raise ReplyFailed(QUEUE_TIMEOUT) from None
        self.pool = pool
        if seconds is not None:
            self.queue_seconds = seconds - (self._clock.monotonic() - since)


@dataclass(slots=True)
class _Run:
    """One reply being made."""

    live: LiveReply
    request: ReplyRequest
    place: PoolPlace
    lease: _Lease
    usage: UsageRun
    on_ended: Callable[[LiveReply], None]
    timer: asyncio.TimerHandle | None = None
    granted_at: float = 0.0
    chunk_at: float = 0.0
    tail: list[ReplyEntry] = field(default_factory=list)
    """The chunk with the finish_reason, and what comes after it."""
    counted: ReplyUsage | None = None
    provider: str = ""


class _Stopped(Exception):
    """The reply ends with this error."""

    def __init__(self, error: ReplyError) -> None:
        super().__init__(error.code)
        self.error = error


class Producer:
    """Makes the replies of one node."""

    def __init__(
        self,
        settings: StreamingSettings,
        routing: Routing,
        leases: NodeLeases,
        writer: LogWriter,
        accounts: ReplyAccounts,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._routing = routing
        self._leases = leases
        self._writer = writer
        self._accounts = accounts
        self._clock = clock

    def start(
        self,
        live: LiveReply,
        request: ReplyRequest,
        place: PoolPlace,
        on_ended: Callable[[LiveReply], None],
    ) -> None:
        """Make the reply; ``on_ended`` is called after its end.

        A reply that waits has no task yet, because thousands of them may wait: a grant,
        a stop or the end of its time begins one.
        """
        live.place = place
        lease = _Lease(self._leases, live.reply_id, place.request.pool, self._clock)
        usage = self._accounts.begin(request)
        run = _Run(live, request, place, lease, usage, on_ended)
        if not place.waiting:
            self._launch(run)
            return
        loop, seconds = asyncio.get_running_loop(), self._waiting_seconds(request, live)
        run.timer = loop.call_later(max(seconds, 0.0), self._launch, run)
        live.on_stopped = partial(self._launch, run)
        place.on_change = partial(self._on_place, run)

    def _waiting_seconds(self, request: ReplyRequest, live: LiveReply) -> float:
        """How long it may wait now: an assistant's reply until its deadline."""
        left = self._deadline(request, live) - self._clock.monotonic()
        queue_seconds = self._queue_seconds(request)
        return left if queue_seconds is None else min(queue_seconds, left)

    def _queue_seconds(self, request: ReplyRequest) -> float | None:
        """How long it may wait in queues, all in all."""
        if request.is_assistant:
            return None
        limit = self._settings.queue_failover.timeout_seconds
        return limit if request.queue_seconds is None else min(limit, request.queue_seconds)

    def _deadline(self, request: ReplyRequest, live: LiveReply) -> float:
        clocks = self._routing.clocks(request.model)
        seconds = clocks.reply_seconds if request.streamed else clocks.whole_seconds
        return live.arrived_at + seconds

    def _on_place(self, run: _Run) -> None:
        if not run.place.waiting:
            self._launch(run)

    def _launch(self, run: _Run) -> None:
        live = run.live
        if live.task is not None:
            return
        run.place.on_change = None
        if run.timer is not None:
            run.timer.cancel()
        loop = asyncio.get_running_loop()
        live.task = loop.create_task(self._run(run), name=f"holdfast-reply-{live.reply_id}")
        live.task.add_done_callback(lambda _: run.on_ended(live))

    async def _run(self, run: _Run) -> None:
        end: ReplyEnd = INTERNAL
        run.live.has_begun = True
        try:
            end = await self._make(run)
        except asyncio.CancelledError:
            if run.live.stop_cause is None:  # the node itself is being torn down
                run.live.show_end(INTERNAL)
                raise
            end = run.live.stop_cause
        except Exception as error:
            telemetry.defect("replies", error)
        finally:
            self._leases.release_place(run.place)
            run.request.reservation.free()
        run.live.is_ending = True
        try:
            await self._end(run, end)
        except Exception as error:
            telemetry.defect("replies", error)
        finally:
            run.live.show_end(INTERNAL)

    async def _make(self, run: _Run) -> ReplyEnd:
        if run.live.stop_cause is not None:
            return run.live.stop_cause
        left = self._deadline(run.request, run.live) - self._clock.monotonic()
        if run.place.waiting:
            return QUEUE_TIMEOUT if left > 0 else DEADLINE
        timer = asyncio.get_running_loop().call_later(left, run.live.stop, DEADLINE)
        try:
            await self._on_turn(run)
            await self._generate(run)
        except ProviderFailed as failed:
            return _with_retry(failed.error, failed.retry_after_seconds)
        except (_Stopped, ReplyFailed) as stopped:
            return stopped.error
        finally:
            timer.cancel()
        return ReplyDone()

    async def _on_turn(self, run: _Run) -> None:
        """It has its lease; do its tokens suffice?"""
        await run.place.granted()
        run.granted_at = self._clock.monotonic()
        waited_seconds = run.granted_at - run.live.arrived_at
        telemetry.reply_granted(waited_seconds)
        if (queue_seconds := self._queue_seconds(run.request)) is not None:
            run.lease.queue_seconds = queue_seconds - waited_seconds
        try:
            await run.usage.on_granted()
        except RateLimited as refused:
            used_up = ReplyError("tokens_used_up", refused.message, 429)
            raise _Stopped(_with_retry(used_up, refused.retry_after_seconds)) from None
        except HoldfastError as error:
            raise _Stopped(ReplyError("internal", error.public.message, 503)) from None
        run.live.set_state("running")

    async def _generate(self, run: _Run) -> None:
        request = run.request
        asked = ProviderRequest(request.model, request.fields, request.reply_id, request.payer)
        run.request = structs.replace(request, fields={})  # routing frees it at the first token
        routed = self._routing.stream(asked, run.lease)
        del asked, request
        try:
            await routed.pour(lambda chunks: self._take(run, routed, chunks))
        finally:
            run.provider = routed.provider

    def _take(self, run: _Run, routed: RoutedStream, chunks: Sequence[ProviderChunk]) -> None:
        live, now = run.live, self._clock.monotonic()
        entries: list[ReplyEntry] = []
        if run.chunk_at:
            telemetry.reply_gap(now - run.chunk_at)
        else:
            run.usage.provider = routed.provider
        run.chunk_at = now
        for chunk in chunks:
            run.usage.text_bytes += chunk.text_bytes
            if chunk.usage is not None:
                run.counted = chunk.usage
            if not chunk.data:
                continue
            if chunk.content and not live.has_token:
                self._on_first_token(run)
            if chunk.finish or run.tail:
                run.tail.append(ReplyDelta(chunk.data))
            else:
                entries.append(ReplyDelta(chunk.data))
        if entries:
            live.append(entries)
            if live.resumable:
                self._writer.appended(live)
        if live.size_bytes > REPLY_BYTES_MAX:
            raise _Stopped(TOO_LONG)

    def _on_first_token(self, run: _Run) -> None:
        run.live.has_token = True
        run.request.reservation.free()
        now = self._clock.monotonic()
        telemetry.reply_first_token(now - run.live.arrived_at, now - run.granted_at)

    async def _end(self, run: _Run, end: ReplyEnd) -> None:
        """Make the end visible; count the reply once."""
        live = run.live
        counted = run.usage.end(run.provider, run.counted)
        tail = [*run.tail, counted] if isinstance(end, ReplyDone) else [counted]
        live.hold([*tail, end])
        if live.resumable:
            if run.request.is_assistant and not isinstance(end, ReplyDone):
                self._writer.forget(live)  # its job may try again, in a new epoch
            else:
                await self._writer.end(live)
        await run.usage.stored()
        name = end.code if isinstance(end, ReplyError) else "done"
        telemetry.reply_ended(live.begin.surface, name, self._clock.monotonic() - live.arrived_at)


def _with_retry(error: ReplyError, seconds: float | None) -> ReplyError:
    return structs.replace(error, retry_after_seconds=seconds) if seconds else error
