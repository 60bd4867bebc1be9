"""The node's side of the pool: places for its replies, heartbeats, confirmations.

One task sends everything: a batch of operations for each turn of the loop, and a
heartbeat each second; one call at a time. So a heartbeat describes exactly what the
pool should have. If it has something else (a lost answer, a flush, a node presumed
dead), the node announces its lists.

A call whose answer is lost is not repeated, but the next heartbeat comes at once. What
it asked for counts as waiting: if the pool has given a lease, the announcement turns it
into a grant, which is confirmed like any other.

**The shared pool unavailable.** After a second of failed calls the node goes on with a
pool in memory, built from its own lists, with every limit divided by the nodes that it
saw last. A heartbeat each second, beside the other calls, finds out when the shared
pool answers again; then the node announces its lists there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from typing import NamedTuple

from holdfast import telemetry
from holdfast.clock import Clock, SharedTimeout
from holdfast.errors import HoldfastError, OutcomeUnknown, Unavailable
from holdfast.streaming.pool.contract import (
    BEAT_SECONDS,
    CONFIRM_SECONDS,
    DEFAULT_POOL,
    Admit,
    Admitted,
    CancelElsewhere,
    Confirm,
    Locate,
    Move,
    Pool,
    PoolAnswer,
    PoolOperation,
    PoolRequest,
    PoolSizes,
    PoolStatus,
    PoolView,
    Release,
    pool_state,
)
from holdfast.streaming.pool.places import NodePlaces, PlaceReleased, PlaceState, PoolPlace

CALL_SECONDS = 1.0
"""How long a call of the pool may take."""
ANNOUNCE_SECONDS = 4.0
"""How long an announcement may take: 20,000 ids took half a second."""
ANNOUNCED_SECONDS = 2.5
"""A living node has announced itself within this time; two heartbeats, and a bit."""
RETRY_SECONDS = 0.2
"""The pause after a failed call."""
FALLBACK_SECONDS = 1.0
"""How long calls may fail before the node goes on alone."""
TIMER_SECONDS = 1e-6
"""A timer may fire this much early."""
OPERATIONS_MAX = 256
"""Operations in one call."""
_MEANT_FOR: Mapping[type[PoolOperation], PlaceState] = {
    Admit: "asked",
    Confirm: "waiting",
    Move: "moving",
}
"""The state of the place that an operation is sent for."""


class _Request(NamedTuple):
    """An operation, and what its answer is for."""

    operation: PoolOperation
    place: PoolPlace | None = None
    answer: asyncio.Future[PoolAnswer] | None = None


class NodeLeases:
    """See the module. Works while ``running`` is entered.

    ``fallback`` makes a pool in memory for this node as one of that many; None: the
    pool is in memory already. ``nodes_last_seen`` says how many there are to a node
    that has not reached the shared pool since it started.
    """

    def __init__(
        self,
        node: str,
        pool: Pool,
        sizes: PoolSizes,
        clock: Clock,
        *,
        fallback: Callable[[int], Pool] | None = None,
        nodes_last_seen: Callable[[], int] = lambda: 1,
    ) -> None:
        self._node = node
        self._shared = pool
        self._sizes = sizes
        self._clock = clock
        self._fallback = fallback
        self._local: Pool | None = None
        self._places = NodePlaces()
        self._outbox: list[_Request] = []
        self._has_work = asyncio.Event()
        self._is_calling = False  # at once, and that may ask for more
        self._beat_at = 0.0
        self._failing_since: float | None = None
        self._probe: asyncio.Task[None] | None = None
        self._shared_answers = False
        self._view = PoolView("", True, (), (node,), (), (), {}, {}, {}, 0.0)
        self._nodes_last_seen = nodes_last_seen
        self._share = 1
        self._pool_id = ""
        self._pool_known_at = self._viewed_at = 0.0
        self._reading: dict[str, tuple[str, int]] = {}
        self._cancelled: frozenset[str] = frozenset()
        self.nodes: Sequence[str] = (node,)
        """The names of the living nodes, as last seen."""
        self.read_elsewhere: frozenset[str] = frozenset()
        """The replies of this node that are read at another, as last seen."""
        self.on_cancel: Callable[[str], None] = lambda reply_id: None
        """Called for a reply of this node that another node cancels; may repeat."""

    # For the replies of this node

    def ask(self, request: PoolRequest) -> PoolPlace:
        """A place for a reply. Never fails and never waits: ask the place.

        An id that has a place gives it up.
        """
        self.release(request.reply_id)
        place = PoolPlace(request, self.release)
        self._places.add(place)
        self._post(_Request(Admit(request), place))
        return place

    def release(self, reply_id: str) -> None:
        """Give up the place, whatever its state. Idempotent."""
        place = self._places.get(reply_id)
        if place is None:
            return
        self._places.change(place, "released")
        if place.is_sent:
            self._post(_Request(Release(reply_id)))

    def release_place(self, place: PoolPlace) -> None:
        """The same, unless its id has asked again and has another place."""
        if self._places.get(place.request.reply_id) is place:
            self.release(place.request.reply_id)

    async def move(self, reply_id: str, pool: str) -> None:
        """Release the lease and wait for one in another pool, at the head of the
        user's list. Cancelling it releases the place.
        """
        place = self._places.get(reply_id)
        if place is None:
            raise PlaceReleased("the place was released")
        if place.request.pool != pool:
            self._places.change(place, "moving")
            self._post(_Request(Move(reply_id, pool), place))
        await place.granted()

    # For replies of other nodes

    def reading(self, reply_id: str, node: str) -> None:
        """A reader here follows a reply of another node; that node learns of it."""
        _, readers = self._reading.get(reply_id, (node, 0))
        self._reading[reply_id] = node, readers + 1

    def not_reading(self, reply_id: str) -> None:
        node, readers = self._reading.pop(reply_id, ("", 0))
        if readers > 1:
            self._reading[reply_id] = node, readers - 1

    def readers_here(self, reply_id: str) -> int:
        return self._reading.get(reply_id, ("", 0))[1]

    async def cancel_elsewhere(self, reply_id: str, node: str) -> bool:
        """Whether that node is asked. Unavailable without the shared pool."""
        return bool(await self._ask_shared(CancelElsewhere(reply_id, node)))

    async def locate(self, reply_id: str) -> str:
        """The node that has a place for it, or "". Unavailable as above."""
        return str(await self._ask_shared(Locate(reply_id)))

    # What is known

    @property
    def shared_up(self) -> bool:
        return self._local is None and self._failing_since is None

    def knows_since(self, moment: float) -> bool:
        """Whether a node that lives, and was there at this moment of the monotonic
        clock, must be in ``nodes``. False while the shared pool cannot be asked, and
        just after it began: then the nodes announce themselves.
        """
        since = max(moment, self._pool_known_at) + ANNOUNCED_SECONDS
        return self.shared_up and self._viewed_at >= since

    def status(self) -> PoolStatus:
        view = self._view
        sizes = self._sizes if self._local is None else self._sizes.share(self._share)
        pools = {DEFAULT_POOL: sizes.total, **sizes.providers}
        active = {pool: view.active.get(pool, 0) for pool in pools}
        depth = {pool: view.waiting.get(pool, 0) for pool in pools}
        state = {pool: pool_state(active[pool], size) for pool, size in pools.items()}
        state[DEFAULT_POOL] = pool_state(sum(view.active.values()), sizes.total)
        return PoolStatus(active, depth, state, tuple(self.nodes), self.shared_up)

    # The one task

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Works until the block ends; then the pool forgets this node."""
        self._shared.listen(self._node, self._on_grant, self._on_cancel)
        task = asyncio.create_task(self.run(), name="holdfast-leases")
        try:
            yield
        finally:
            for each in (task, self._probe):
                if each is not None:
                    each.cancel()
                    await asyncio.gather(each, return_exceptions=True)
            with suppress(HoldfastError, TimeoutError):
                async with asyncio.timeout(CALL_SECONDS):
                    await self._shared.leave(self._node)

    async def run(self) -> None:
        with closing(SharedTimeout()) as self._timeout:
            while True:
                try:
                    await self._turn()
                except Exception as error:
                    telemetry.defect("streaming", error)
                    await asyncio.sleep(BEAT_SECONDS)

    async def _turn(self) -> None:
        if self._failing_since is not None and self._local is None:
            await asyncio.sleep(RETRY_SECONDS)
        else:
            seconds = self._beat_at - self._clock.monotonic()
            await self._timeout.wait_for(self._has_work, seconds)
        self._has_work.clear()
        if self._local is None:
            await self._work_with_shared()
        else:
            await self._work_with_local(self._local)

    async def _work_with_shared(self) -> None:
        try:
            if self._is_beat_due() or self._failing_since is not None:
                await self._beat(self._shared)
            if self._outbox:
                await self._send(self._shared)
        except (Unavailable, OutcomeUnknown, TimeoutError) as error:
            await self._on_failure(error)
        else:
            self._failing_since = None

    async def _work_with_local(self, local: Pool) -> None:
        if self._shared_answers:
            await self._return_to_shared()
            return
        if self._is_beat_due():
            self._probe = self._probe or asyncio.create_task(self._try_shared())
            await self._beat(local)
        if self._outbox:
            await self._send(local)

    async def _on_failure(self, error: Exception) -> None:
        now = self._clock.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        elif self._fallback is not None and now - self._failing_since >= FALLBACK_SECONDS:
            if not self._pool_id:
                self._share = max(1, self._nodes_last_seen())
            reason = str(error) or "no answer in time"
            telemetry.log.warning("streaming.pool_unavailable", error=reason, nodes=self._share)
            await self._go_on_alone(self._fallback(self._share))

    async def _go_on_alone(self, local: Pool) -> None:
        """The local pool knows nothing of other nodes: questions about them fail."""
        local.listen(self._node, self._on_grant, self._on_cancel)
        self._local = local
        self._on_unknown(each for each in self._outbox if each.answer is not None)
        self._outbox = [each for each in self._outbox if each.answer is None]
        await self._announce(local)
        self._has_work.set()

    async def _try_shared(self) -> None:
        """Ask the shared pool for a sign of life, beside the calls of the local one."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await self._shared.beat(self._node, self._places.beat())
            self._shared_answers = True
            self._has_work.set()
        except (HoldfastError, TimeoutError):
            pass
        finally:
            self._probe = None

    async def _return_to_shared(self) -> None:
        self._shared_answers = False
        try:
            await self._announce(self._shared)
        except (Unavailable, OutcomeUnknown, TimeoutError):
            return
        self._local = self._failing_since = None
        self._has_work.set()
        telemetry.log.info("streaming.pool_available")

    # Calls

    def _is_beat_due(self) -> bool:
        now = self._clock.monotonic()
        if now < self._beat_at - TIMER_SECONDS:
            return False
        self._beat_at = now + BEAT_SECONDS
        return True

    async def _beat(self, pool: Pool) -> None:
        reading = {reply_id: node for reply_id, (node, _) in self._reading.items()}
        beat = self._places.beat()._replace(reading=reading)
        async with asyncio.timeout(CALL_SECONDS):
            view = await pool.beat(self._node, beat)
        if view.same:
            self._apply(pool, view)
        else:
            await self._announce(pool)

    async def _announce(self, pool: Pool) -> None:
        leases = [self._fitted(pool, place.request) for place in self._places.leases()]
        waiting = [self._fitted(pool, place.request) for place in self._places.waiting()]
        async with asyncio.timeout(ANNOUNCE_SECONDS):
            view = await pool.announce(self._node, leases, waiting)
        self._apply(pool, view)

    async def _send(self, pool: Pool) -> None:
        """One call. What is not needed any more is left out."""
        batch = [each for each in self._outbox[:OPERATIONS_MAX] if _is_needed(each)]
        self._outbox = self._outbox[OPERATIONS_MAX:]
        if self._outbox:
            self._has_work.set()
        for each in batch:
            if each.place is not None:
                each.place.is_sent = True
        operations = [self._fitted_operation(pool, each.operation) for each in batch]
        sent_at = self._clock.monotonic()
        try:
            call = pool.call(self._node, operations)
            answers = await self._timeout.wait_within(call, CALL_SECONDS)
        except Unavailable:
            self._outbox[:0] = batch
            raise
        except Exception:
            self._on_unknown(batch)
            raise
        in_time = self._clock.monotonic() - sent_at <= CONFIRM_SECONDS
        for each, answer in zip(batch, answers, strict=True):
            self._on_answer(each, answer, in_time)

    def _fitted(self, pool: Pool, request: PoolRequest) -> PoolRequest:
        """In the memory of this node a user has its share of the limits only."""
        if pool is self._shared or self._share == 1:
            return request
        return request._replace(
            user_limit=-(-request.user_limit // self._share),
            waiting_max=-(-request.waiting_max // self._share),
        )

    def _fitted_operation(self, pool: Pool, operation: PoolOperation) -> PoolOperation:
        if pool is not self._shared and isinstance(operation, Admit):
            return Admit(self._fitted(pool, operation.request))
        return operation

    def _post(self, request: _Request) -> None:
        if self._outbox or self._is_calling or not self._send_at_once(request):
            self._outbox.append(request)
            self._has_work.set()

    def _send_at_once(self, request: _Request) -> bool:
        """Whether the pool is in this process and has answered: that spares a reply two
        turns of the task, 150 µs of its 2 ms."""
        if self._local is not None or self._clock.monotonic() >= self._beat_at:
            return False
        self._is_calling = True
        try:
            answers = self._shared.call_at_once(self._node, [request.operation])
        finally:
            self._is_calling = False
        if answers is None:
            return False
        if request.place is not None:
            request.place.is_sent = True
        self._on_answer(request, answers[0], in_time=True)
        return True

    async def _ask_shared(self, operation: PoolOperation) -> PoolAnswer:
        if not self.shared_up:
            raise Unavailable("the pool of replies is unavailable")
        answer: asyncio.Future[PoolAnswer] = asyncio.get_running_loop().create_future()
        self._post(_Request(operation, answer=answer))
        return await answer

    # Answers

    def _on_answer(self, request: _Request, answer: PoolAnswer, in_time: bool) -> None:
        """A lease counts only if the answer came before the pool could doubt it."""
        place = request.place
        if request.answer is not None:
            if not request.answer.done():
                request.answer.set_result(answer)
        elif place is not None and isinstance(answer, Admitted):
            self._on_admitted(place, request.operation, answer, in_time)
        elif place is not None:
            place.is_confirming = False
            if answer is True and in_time:
                self._places.change(place, "leased")
            elif answer is True:
                self._confirm(place)

    def _on_admitted(
        self, place: PoolPlace, operation: PoolOperation, answer: Admitted, in_time: bool
    ) -> None:
        if isinstance(operation, Move):
            place.request = place.request._replace(pool=operation.pool, head=True)
        place.full = answer.full
        self._place_at(place, answer.position)
        if answer.full is not None:
            self._places.change(place, "refused")
        elif answer.leased and in_time:
            self._places.change(place, "leased")
        else:
            self._places.change(place, "waiting")
            if answer.leased or place.is_granted:
                self._confirm(place)

    def _place_at(self, place: PoolPlace, position: int) -> None:
        rate = self._view.grants_per_second
        place.position = position
        place.eta_seconds = position / rate if rate and position else None

    def _on_unknown(self, batch: Iterable[_Request]) -> None:
        """The next heartbeat brings both sides to the same lists."""
        for each in batch:
            if each.answer is not None and not each.answer.done():
                each.answer.set_exception(Unavailable("the pool of replies did not answer"))
            if each.place is None:
                continue
            each.place.is_confirming = False
            if not isinstance(each.operation, Confirm):
                self._on_admitted(each.place, each.operation, Admitted(False), in_time=False)

    def _apply(self, pool: Pool, view: PoolView) -> None:
        self._view = view
        if pool is self._shared:
            self._viewed_at = self._clock.monotonic()
            if view.pool_id != self._pool_id:
                if self._pool_id:
                    telemetry.log.warning("streaming.pool_replaced", pool=view.pool_id)
                self._pool_id, self._pool_known_at = view.pool_id, self._viewed_at
            self.nodes = view.nodes
            self._share = max(1, len(view.nodes))
            self.read_elsewhere = frozenset(view.read_elsewhere)
        for reply_id, position in view.positions.items():
            place = self._places.get(reply_id)
            if place is not None:
                self._place_at(place, position)
        for reply_id in view.granted:
            self._on_grant(reply_id)
        for reply_id in frozenset(view.cancels) - self._cancelled:
            self.on_cancel(reply_id)
        self._cancelled = frozenset(view.cancels)

    def _on_grant(self, reply_id: str) -> None:
        place = self._places.get(reply_id)
        if place is None:
            return
        if place.state in ("asked", "moving"):
            place.is_granted = True
        elif place.state == "waiting" and not place.is_confirming:
            self._confirm(place)

    def _confirm(self, place: PoolPlace) -> None:
        place.is_confirming, place.is_granted = True, False
        self._post(_Request(Confirm(place.request.reply_id), place))

    def _on_cancel(self, reply_id: str) -> None:
        if reply_id not in self._cancelled and self._places.get(reply_id) is not None:
            self._cancelled |= {reply_id}
            self.on_cancel(reply_id)


def _is_needed(request: _Request) -> bool:
    """Whether its place is still in the state that the operation was meant for."""
    if request.place is None:
        return True
    return request.place.state == _MEANT_FOR[type(request.operation)]
