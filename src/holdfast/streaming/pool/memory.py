"""The pool of one node, or of several within a process, in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.streaming.fair_queue import FairQueue
from holdfast.streaming.pool.contract import (
    NodeBeat,
    PoolAnswer,
    PoolOperation,
    PoolRequest,
    PoolSizes,
    PoolView,
    QueueBounds,
)

_Listeners = tuple[Callable[[str], None], Callable[[str], None]]


class MemoryPool:
    """``contract.Pool`` over ``FairQueue``. It never waits and never fails."""

    def __init__(self, sizes: PoolSizes, bounds: QueueBounds, clock: Clock) -> None:
        self._queue = FairQueue(sizes, bounds, rebuilds=False)
        self._clock = clock
        self._listeners: dict[str, _Listeners] = {}

    async def check(self) -> None:
        pass

    async def call(self, node: str, operations: Sequence[PoolOperation]) -> Sequence[PoolAnswer]:
        return self.call_at_once(node, operations)

    def call_at_once(self, node: str, operations: Sequence[PoolOperation]) -> Sequence[PoolAnswer]:
        answers = self._queue.call(node, operations, self._now_ms())
        self._report()
        return answers

    async def beat(self, node: str, beat: NodeBeat) -> PoolView:
        view = self._queue.beat(node, beat, self._now_ms())
        self._report()
        return view

    async def announce(
        self, node: str, leases: Sequence[PoolRequest], waiting: Sequence[PoolRequest]
    ) -> PoolView:
        view = self._queue.announce(node, leases, waiting, self._now_ms())
        self._report()
        return view

    async def leave(self, node: str) -> None:
        self._queue.leave(node, self._now_ms())
        self._report()

    def listen(
        self, node: str, on_grant: Callable[[str], None], on_cancel: Callable[[str], None]
    ) -> None:
        self._listeners[node] = on_grant, on_cancel

    async def close(self) -> None:
        self._listeners.clear()

    def _now_ms(self) -> int:
        return round(self._clock.monotonic() * 1000)

    def _report(self) -> None:
        queue = self._queue
        wakes, queue.wakes = queue.wakes, []
        for node, reply_id, is_cancel in wakes:
            if node in self._listeners:
                self._listeners[node][is_cancel](reply_id)
        freed, queue.freed = queue.freed, {}
        for cause, count in freed.items():
            telemetry.reply_lease_freed(cause, count)
