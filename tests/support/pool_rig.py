"""A stand-in for the Redis of a pool, on the loop's clock, with the faults of a real one.

It runs the shared ``FairQueue``. A call takes some time on the way; what was sent is
carried out even if its caller gave up, as Redis does after a pause with what its
sockets hold.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.errors import OutcomeUnknown, Unavailable
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

LATENCY_SECONDS = 0.001


class PoolServer:
    """The queue of all nodes. ``stop`` refuses, ``pause`` hangs, ``flush`` forgets."""

    def __init__(self, sizes: PoolSizes, bounds: QueueBounds, rng: random.Random) -> None:
        self.sizes = sizes
        self.bounds = bounds
        self.rng = rng
        self.queue = FairQueue(sizes, bounds)
        self.is_down = False
        self.answers_lost = 0.0
        """The part of the answers that get lost, and of the wake-ups."""
        self.wake_delay_seconds = 0.0
        self.freed: dict[str, int] = {}
        """What the queue took from nodes, by cause, over all."""
        self.on_call: Callable[[], None] = lambda: None
        """Called after each call that was carried out."""
        self._listeners: dict[str, tuple[Callable[[str], None], Callable[[str], None]]] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()

    def pause(self) -> None:
        self._resumed.clear()

    def resume(self) -> None:
        self._resumed.set()

    def flush(self) -> None:
        self.queue = FairQueue(self.sizes, self.bounds)

    def link(self) -> PoolLink:
        return PoolLink(self)

    def listen(
        self, node: str, on_grant: Callable[[str], None], on_cancel: Callable[[str], None]
    ) -> None:
        self._listeners[node] = on_grant, on_cancel

    async def until_resumed(self) -> None:
        await self._resumed.wait()

    def carry_out(self, work: Callable[[FairQueue, int], Any]) -> Any:
        loop = asyncio.get_running_loop()
        queue = self.queue
        answer = work(queue, round(loop.time() * 1000))
        wakes, queue.wakes = queue.wakes, []
        for node, reply_id, is_cancel in wakes:
            if node in self._listeners and self.rng.random() >= self.answers_lost:
                delay = self.wake_delay_seconds * self.rng.random()
                loop.call_later(delay, self._listeners[node][is_cancel], reply_id)
        freed, queue.freed = queue.freed, {}
        for cause, count in freed.items():
            self.freed[cause] = self.freed.get(cause, 0) + count
        self.on_call()
        return answer


class PoolLink:
    """``contract.Pool`` of one node. While ``is_cut``, nothing gets through."""

    def __init__(self, server: PoolServer) -> None:
        self._server = server
        self.is_cut = False
        self.calls = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def call(self, node: str, operations: Sequence[PoolOperation]) -> Sequence[PoolAnswer]:
        return await self._ask(lambda queue, now: queue.call(node, operations, now))

    def call_at_once(self, node: str, operations: Sequence[PoolOperation]) -> None:
        return None

    async def beat(self, node: str, beat: NodeBeat) -> PoolView:
        return await self._ask(lambda queue, now: queue.beat(node, beat, now))

    async def announce(
        self, node: str, leases: Sequence[PoolRequest], waiting: Sequence[PoolRequest]
    ) -> PoolView:
        return await self._ask(lambda queue, now: queue.announce(node, leases, waiting, now))

    async def leave(self, node: str) -> None:
        await self._ask(lambda queue, now: queue.leave(node, now))

    def listen(
        self, node: str, on_grant: Callable[[str], None], on_cancel: Callable[[str], None]
    ) -> None:
        self._server.listen(node, self._uncut(on_grant), self._uncut(on_cancel))

    async def close(self) -> None:
        pass

    def _uncut(self, wake: Callable[[str], None]) -> Callable[[str], None]:
        return lambda reply_id: None if self.is_cut else wake(reply_id)

    async def _ask(self, work: Callable[[FairQueue, int], Any]) -> Any:
        """Carried out in a task of its own: who gives up does not undo the send."""
        self.calls += 1
        if self._server.is_down:
            raise Unavailable("refused")
        if self.is_cut:
            await asyncio.Event().wait()
        task = asyncio.create_task(self._send(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        answer = await asyncio.shield(task)
        if self.is_cut:
            await asyncio.Event().wait()
        if self._server.rng.random() < self._server.answers_lost:
            raise OutcomeUnknown("lost")
        return answer

    async def _send(self, work: Callable[[FairQueue, int], Any]) -> Any:
        await asyncio.sleep(LATENCY_SECONDS)
        await self._server.until_resumed()
        return self._server.carry_out(work)
