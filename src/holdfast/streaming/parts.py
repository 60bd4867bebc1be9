"""Replies of a node: start them, find them, cancel them, stop them all.

What the API and the assistants use. A reply that is made here is read from memory, any
other from the log. Only its owner finds it: a foreign reply and an unknown one look the
same.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any, Literal, NamedTuple

from msgspec import structs

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.errors import (
    Deferred,
    KeyReused,
    NotFound,
    OutcomeUnknown,
    RateLimited,
    Unavailable,
)
from holdfast.streaming.admission import Admission, ReplyRequest
from holdfast.streaming.attached import READERS_MAX, AttachedReply, attach_live, attach_log
from holdfast.streaming.live_reply import LiveReply, ReplyState
from holdfast.streaming.pool.leases import NodeLeases
from holdfast.streaming.producer import Producer
from holdfast.streaming.reply import (
    Owner,
    ReplyBegin,
    ReplyDone,
    ReplyError,
)
from holdfast.streaming.reply_log.contract import KeyClaim, ReplyLog
from holdfast.streaming.reply_log.writer import LogWriter
from holdfast.streaming.settings import StreamingSettings
from holdfast.streaming.summary import ReplySummary, summarize

SWEEP_SECONDS = 1.0
SWEPT_AT_ONCE = 500
"""Replies looked at in one turn of the loop: 20,000 took 34 ms."""
KEPT_SECONDS = 30.0
"""How long an ended reply stays in memory whose end the log does not have."""
END_SECONDS = 3.0
"""How long stopped replies may take to end while the node stops."""
FIND_SECONDS = 1.0
"""How long a failing log is asked again for a reply."""
FIND_PAUSE_SECONDS = 0.1
UNLISTED_SECONDS = 2.5
"""How long a reply may begin or end while the pool does not list it."""
LOOK_AGAIN_SECONDS = 0.25
CLAIM_TRIES_MAX = 3
CancelCause = Literal["owner", "operator", "unread", "revoked", "elsewhere"]

CANCELLED = ReplyError("cancelled", "the reply was cancelled", 499)
SHUTDOWN = ReplyError("server_shutdown", "this node is stopping; ask again", 503)


class _Held(NamedTuple):
    """A reply of this node. It keeps nothing of the request's body."""

    live: LiveReply
    claim: KeyClaim | None
    replicated: bool
    is_allowed: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class StreamingDeps:
    """What the replies of a node need."""

    node: str
    settings: StreamingSettings
    leases: NodeLeases
    log: ReplyLog
    writer: LogWriter
    clock: Clock


class StreamingParts:
    """The replies of one node."""

    def __init__(self, deps: StreamingDeps, admission: Admission, producer: Producer) -> None:
        self._node, self.settings, self._clock = deps.node, deps.settings, deps.clock
        self._leases, self._log, self._writer = deps.leases, deps.log, deps.writer
        self._admission, self._producer = admission, producer
        self._held: dict[str, _Held] = {}
        """Bounded by the pool and the queue: each waits, runs, or has just ended."""
        self._beginning: dict[str, asyncio.Event] = {}  # by key, and not held yet
        self._kept_bytes = 0
        self._read_whole = Counter[Owner]()
        self._leases.on_cancel = self._on_cancel
        self._closing = set[asyncio.Task[None]]()

    def models(self) -> Sequence[str]:
        """The models that clients may ask for."""
        return self._admission.models()

    # --- start

    async def start(self, request: ReplyRequest) -> AttachedReply:
        """Begin a reply, or attach to the one that its Idempotency-Key began.

        It returns when the reply runs or waits; the rest happens in a task of its own.
        Raises the reason why it may not begin.
        """
        await self._admission.check(request)
        if request.key is None:
            return await self._begin(request, None)
        claim = KeyClaim(
            request.owner, request.key, request.body_hash, request.reply_id, self._node
        )
        for _ in range(CLAIM_TRIES_MAX):
            winner = await self._claim(claim)
            if winner == claim:
                return await self._begin_claimed(request, claim)
            if (attached := await self._attach(winner, request)) is not None:
                return attached
            await self._log.free(winner)
        raise Unavailable("another request has this Idempotency-Key", retry_after_seconds=1.0)

    async def _claim(self, claim: KeyClaim) -> KeyClaim:
        try:
            return await self._log.claim(claim)
        except OutcomeUnknown:
            self._in_background(self._free(claim))
            raise _log_unavailable() from None
        except Deferred:
            raise _log_unavailable() from None

    async def _attach(self, winner: KeyClaim, request: ReplyRequest) -> AttachedReply | None:
        """The reply of an earlier claim; None if it failed or nobody makes it."""
        if winner.body_hash != request.body_hash:
            raise KeyReused("this Idempotency-Key belongs to another request")
        if (beginning := self._beginning.get(winner.reply_id)) is not None:
            await beginning.wait()
        found = await self._find_claimed(winner)
        if found is None or isinstance(found.end, ReplyError):
            return None
        request.reservation.free()
        return found

    async def _find_claimed(self, winner: KeyClaim) -> AttachedReply | None:
        """The reply of a claim; None if it has no end and nobody makes it.

        Whether its node lives says nothing: one that restarts has its old name, and one
        that just started is known to few. The pool must list the reply. A reply that
        just begins or ends is not in the pool either.
        """
        until = self._clock.monotonic() + UNLISTED_SECONDS
        while True:
            try:
                found = await self.find(winner.owner, winner.reply_id)
            except NotFound:
                found = None
            if found is not None and found.end is not None:
                return found
            if await self._is_made(winner):
                if found is None:
                    raise Unavailable("it is just being begun", retry_after_seconds=1.0)
                return found
            if winner.node == self._node or self._clock.monotonic() >= until:
                return None
            await asyncio.sleep(LOOK_AGAIN_SECONDS)

    async def _is_made(self, claim: KeyClaim) -> bool:
        if claim.node == self._node:
            return claim.reply_id in self._held
        try:
            return await self._leases.locate(claim.reply_id) == claim.node
        except Unavailable:
            return True  # nobody can say

    async def _begin_claimed(self, request: ReplyRequest, claim: KeyClaim) -> AttachedReply:
        begun = self._beginning[request.reply_id] = asyncio.Event()
        try:
            return await self._begin(request, claim)
        except BaseException:
            self._in_background(self._free(claim))
            raise
        finally:
            del self._beginning[request.reply_id]
            begun.set()

    async def _begin(self, request: ReplyRequest, claim: KeyClaim | None) -> AttachedReply:
        arrived_at = self._clock.monotonic()
        must_resume = request.kind in ("native", "background") or claim is not None
        full = self._kept_bytes > self.settings.replies_bytes_max
        if full and must_resume:
            telemetry.reply_refused("memory")
            raise Unavailable("this node keeps too many replies", retry_after_seconds=5.0)
        place = await self._admission.take_place(request)
        begin = ReplyBegin(
            *request.owner,
            request.kind,
            request.surface,
            request.model,
            self._node,
            self._clock.now(),
            request.shown,
        )
        epoch = int(self._clock.now() * 1000)
        live = LiveReply(request.reply_id, begin, epoch, arrived_at)
        try:
            if request.replicated:
                await self._begin_log(live, full, must_resume)
            self._admission.refuse_if_draining()  # that may have begun meanwhile
        except BaseException:
            self._leases.release(request.reply_id)
            self._writer.forget(live)
            raise
        self._hold(_Held(live, claim, request.replicated, request.is_allowed))
        self._producer.start(live, request, place, self._on_ended)
        return attach_live(live)

    async def _begin_log(self, live: LiveReply, full: bool, must_resume: bool) -> None:
        """Make the reply resumable; if that is impossible, it may go on unless it must
        be.
        """
        if full:
            telemetry.reply_not_resumable("memory")
            return
        try:
            live.epoch = await self._writer.begin(live)
        except (Deferred, OutcomeUnknown):
            if must_resume:
                telemetry.reply_refused("log")
                raise _log_unavailable() from None
            telemetry.reply_not_resumable("log")
        else:
            live.resumable = True

    def _hold(self, held: _Held) -> None:
        live = held.live
        if (earlier := self._held.get(live.reply_id)) is not None:
            earlier.live.on_superseded()  # an assistant's job runs again
        self._held[live.reply_id] = held
        live.on_unread = lambda: self._on_unread(live)
        if live.begin.kind in ("plain", "native"):
            self._cancel_later(live)

    # --- readers that leave

    def _on_unread(self, live: LiveReply) -> None:
        if live.state == "ended" or live.begin.kind not in ("plain", "native"):
            return
        if not live.resumable and not live.has_token:
            self._stop(live, "unread")
        else:
            self._cancel_later(live)

    def _cancel_later(self, live: LiveReply) -> None:
        times = self.settings.times
        grace = times.cancel_replicated_seconds if live.resumable else times.cancel_seconds
        if live.unread_timer is not None:
            live.unread_timer.cancel()
        live.unread_timer = asyncio.get_running_loop().call_later(
            grace, self._cancel_if_unread, live
        )

    def _cancel_if_unread(self, live: LiveReply) -> None:
        if live.readers or live.state == "ended":
            return
        if live.reply_id in self._leases.read_elsewhere:
            asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._cancel_if_unread, live)
        else:
            self._stop(live, "unread")

    def _stop(self, live: LiveReply, cause: CancelCause) -> None:
        if live.stop(CANCELLED):
            telemetry.reply_cancelled(cause)

    def _on_cancel(self, reply_id: str) -> None:
        """Another node was asked to cancel a reply that is made here."""
        if (held := self._held.get(reply_id)) is not None:
            self._stop(held.live, "elsewhere")

    def _on_ended(self, live: LiveReply) -> None:
        if live.unread_timer is not None:
            live.unread_timer.cancel()
        held = self._held.get(live.reply_id)
        if held is None:
            return  # erased meanwhile
        if held.claim is not None and not isinstance(live.end, ReplyDone):
            self._in_background(self._free(held.claim))
        if held.replicated and not live.resumable:
            asyncio.get_running_loop().call_later(KEPT_SECONDS, self._forget, live)
        else:
            self._forget(live)

    def _forget(self, live: LiveReply) -> None:
        held = self._held.get(live.reply_id)
        if held is not None and held.live is live:
            del self._held[live.reply_id]

    async def _free(self, claim: KeyClaim) -> None:
        try:
            await self._log.free(claim)
        except (Deferred, OutcomeUnknown) as error:
            telemetry.log.warning("streaming.claim_kept", error=str(error))

    # --- find and cancel

    async def find(
        self, owner: Owner, reply_id: str, patience_seconds: float = FIND_SECONDS
    ) -> AttachedReply:
        """NotFound if there is none that ``owner`` may read; Unavailable if the log has
        failed for so long.
        """
        held = self._held.get(reply_id)
        if held is not None:
            if held.live.begin.owner != owner:
                raise NotFound("there is no such reply")
            return attach_live(held.live)
        found = await self._find_in_log(reply_id, patience_seconds)
        if found is None or found.begin.owner != owner:
            raise NotFound("there is no such reply")
        return found

    async def _find_in_log(
        self, reply_id: str, patience_seconds: float = FIND_SECONDS
    ) -> AttachedReply | None:
        until = self._clock.monotonic() + patience_seconds
        while True:
            try:
                return await attach_log(reply_id, self._log, self._leases, self._clock)
            except (Deferred, OutcomeUnknown):
                if self._clock.monotonic() >= until:
                    raise Unavailable(
                        "replies cannot be read now", retry_after_seconds=2.0
                    ) from None
            await asyncio.sleep(FIND_PAUSE_SECONDS)

    @contextmanager
    def reading_whole(self, owner: Owner) -> Iterator[None]:
        """While a reply is read and put together at once; RateLimited if the owner does
        that too often already: 30,000 entries take 0.2 s, in many turns of the loop.
        """
        if self._read_whole[owner] >= READERS_MAX:
            raise RateLimited("too many replies are being read", retry_after_seconds=1.0)
        self._read_whole[owner] += 1
        try:
            yield
        finally:
            self._read_whole[owner] -= 1
            if not self._read_whole[owner]:
                del self._read_whole[owner]

    async def cancel(self, owner: Owner, reply_id: str) -> AttachedReply:
        """Cancel the owner's reply, here or at another node. Repeats change nothing."""
        found = await self.find(owner, reply_id)
        if found.state != "ended":
            await self._cancel_found(found, "owner")
        return found

    async def cancel_any(self, reply_id: str) -> bool:
        """For operators. False if this node and the log know no such running reply."""
        if (held := self._held.get(reply_id)) is not None:
            self._stop(held.live, "operator")
            return True
        found = await self._find_in_log(reply_id)
        if found is None or found.state == "ended":
            return False
        await self._cancel_found(found, "operator")
        return True

    async def _cancel_found(self, found: AttachedReply, cause: CancelCause) -> None:
        if (held := self._held.get(found.reply_id)) is not None:
            self._stop(held.live, cause)
        else:
            await self._leases.cancel_elsewhere(found.reply_id, found.begin.node)

    async def delete(self, owner: Owner, reply_id: str) -> None:
        """Cancel the reply and forget what it said."""
        found = await self.cancel(owner, reply_id)
        held = self._held.get(found.reply_id)
        if held is not None and held.live.task is not None:
            await asyncio.wait([held.live.task])
            self._forget(held.live)
        await self._log.delete([reply_id])

    async def forget_owner(self, owner: Owner) -> int:
        """Erase every reply of an owner; returns how many."""
        for held in list(self._held.values()):
            if held.live.begin.owner == owner:
                self._stop(held.live, "owner")
                if held.live.end is not None:
                    self._forget(held.live)
        return await self._log.forget_owner(owner)

    @property
    def node(self) -> str:
        return self._node

    @property
    def nodes(self) -> Sequence[str]:
        """The living nodes that share replies, this one too, as last known."""
        return self._leases.nodes

    def replies(
        self,
        after: str = "",
        limit: int = 1000,
        fits: Callable[[ReplyBegin, ReplyState], bool] = lambda begin, state: True,
    ) -> list[ReplySummary]:
        """Replies that this node makes, of ids after ``after`` and in their order."""
        ids = (
            reply_id
            for reply_id, held in self._held.items()
            if reply_id > after and fits(held.live.begin, held.live.state)
        )
        return [self._summary(self._held[reply_id].live) for reply_id in nsmallest(limit, ids)]

    async def summary(self, reply_id: str) -> ReplySummary:
        """For operators: any reply that this node or the log knows; else NotFound."""
        if (held := self._held.get(reply_id)) is not None:
            return self._summary(held.live)
        found = await self._find_in_log(reply_id)
        if found is None:
            raise NotFound("there is no such reply")
        return summarize(reply_id, found.begin, found.state, self._clock.now())

    def _summary(self, live: LiveReply) -> ReplySummary:
        place = live.place
        return structs.replace(
            summarize(live.reply_id, live.begin, live.state, self._clock.now()),
            readers=live.readers,
            entries=live.visible,
            position=place.position if place is not None and place.waiting else 0,
        )

    # --- the life of the node

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        sweep = asyncio.create_task(self._sweep(), name="holdfast-replies")
        try:
            yield
        finally:
            sweep.cancel()
            await asyncio.gather(sweep, *self._closing, return_exceptions=True)

    async def _sweep(self) -> None:
        """Each second: count the bytes, and stop replies whose owner was revoked."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._kept_bytes = sum(held.live.kept_bytes for held in self._held.values())
            try:
                for count, held in enumerate(list(self._held.values()), 1):
                    if count % SWEPT_AT_ONCE == 0:
                        await asyncio.sleep(0)
                    held.live.notify_position()
                    if held.live.state != "ended" and not held.is_allowed():
                        self._stop(held.live, "revoked")
            except Exception as error:
                telemetry.defect("replies", error)

    async def drain(self) -> None:
        """Refuse what arrives, end what waits, let what runs end in its time.

        It returns when every reply has its end, with ``server_shutdown`` at the latest.
        """
        self._admission.draining.set()
        for held in list(self._held.values()):
            if held.live.state == "waiting":
                held.live.stop(SHUTDOWN)
        await self._wait_for_ends(self.settings.times.drain_seconds)
        for held in list(self._held.values()):
            held.live.stop(SHUTDOWN)
        await self._wait_for_ends(END_SECONDS)

    async def _wait_for_ends(self, seconds: float) -> None:
        tasks = [held.live.task for held in self._held.values() if held.live.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    def _in_background(self, doing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(doing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _log_unavailable() -> Unavailable:
    return Unavailable(
        "replies cannot be kept now, so this one could not be resumed", retry_after_seconds=2.0
    )
