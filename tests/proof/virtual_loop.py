"""An asyncio loop on virtual time: an hour of timers runs in milliseconds, repeatably.

The loop's selector never waits for a timer; it moves the loop's clock to it. Two things
are not virtual:

- Calls in the loop's executor run on real threads. While one is in flight the clock
  stands still, so that no timeout overtakes work that takes almost no real time. With a
  seed they run at once, in the loop's own thread: otherwise the end of a real thread
  would decide how many turns the loop takes, and so how tasks are shuffled.
- The loop does not see threads started in any other way, so code that needs them cannot
  run on it.

With a seed, tasks that are ready in the same turn run in a shuffled order, as a busy
machine and a network do to a real program. Plain callbacks keep asyncio's order.

Several processes may share the loop. What a process runs has the process as ``OWNER``
in its context, which tasks and timers inherit, so ``pause`` is a SIGSTOP: nothing of
its owner runs until ``resume``, and time goes on.

For unit tests and simulation only, never against real servers.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

T = TypeVar("T")

WALL_CLOCK_START = 1_800_000_000.0
"""The start of a virtual wall clock: fixed, so that runs are comparable."""


OWNER: ContextVar[object] = ContextVar("OWNER", default=None)
"""The process that a callback belongs to; None: the test itself."""


class Deadlock(RuntimeError):
    """Nothing is ready, no timer set, no thread at work: it would never end."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs like any loop, but ``time()`` is virtual and starts at 0."""

    def __init__(self, seed: int | None = None) -> None:
        self._virtual_now = 0.0
        self._at_work = 0
        self._paused: dict[object, list[asyncio.Handle]] = {}
        """What each paused owner would have run since."""
        self._rng = None if seed is None else random.Random(seed)
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._virtual_now

    def run_in_executor(  # type: ignore[override]  # typeshed names this signature by TypeVarTuple
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        if self._rng is not None:
            return self._made_at_once(func, *args)
        future = super().run_in_executor(executor, func, *args)
        self._at_work += 1
        future.add_done_callback(self._work_done)
        return future

    def _made_at_once(self, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """The caller waits one turn; cancelling it does not undo the work."""
        future: asyncio.Future[T] = self.create_future()
        try:
            complete = partial(future.set_result, func(*args))
        except Exception as error:
            complete = partial(future.set_exception, error)
        self.call_soon(lambda: None if future.done() else complete())
        return future

    def _work_done(self, _future: asyncio.Future[Any]) -> None:
        self._at_work -= 1

    async def shutdown_default_executor(self, *args: Any, **options: Any) -> None:
        with self.holding():
            await super().shutdown_default_executor(*args, **options)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold the clock: inside, a thread of the caller will wake the loop."""
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1

    @property
    def alone(self) -> bool:
        """Whether no thread is at work for this loop."""
        return not self._at_work

    def next_turn(self, timeout: float | None) -> float | None:
        """How long the selector may really wait; called once per turn."""
        if self._paused:
            self._hold_ready()
        if self._rng is not None:
            self._shuffle(self._rng)
        wait = self._advance(timeout)
        if self._paused:
            self._hold_due()
        return wait

    def _advance(self, timeout: float | None) -> float | None:
        if self._at_work or timeout == 0:
            return timeout if timeout == 0 else None
        if timeout is None:
            raise Deadlock(
                "nothing is ready and no timer is set; every task waits for something that cannot"
                " happen"
            )
        self._virtual_now += timeout
        return 0

    def pause(self, owner: object) -> None:
        """Run nothing of ``owner`` until ``resume``."""
        self._paused[owner] = []

    def resume(self, owner: object) -> None:
        """Run what was held back, in its order."""
        self._queue().extend(self._paused.pop(owner, ()))

    def _queue(self) -> Any:
        return self._ready  # type: ignore[attr-defined]

    def _hold_ready(self) -> None:
        ready = self._queue()
        handles = list(ready)
        ready.clear()
        ready.extend(handle for handle in handles if not self._held(handle))

    def _hold_due(self) -> None:
        """asyncio runs the timers that are due in the turn in which it finds them."""
        timers: Any = self._scheduled  # type: ignore[attr-defined]
        until = self._virtual_now + self._clock_resolution  # type: ignore[attr-defined]
        due = []
        while timers and timers[0]._when < until:
            due.append(heappop(timers))
        for handle in due:
            if not handle._cancelled and self._held(handle):
                handle._scheduled = False
            else:
                heappush(timers, handle)

    def _held(self, handle: Any) -> bool:
        held = self._paused.get(handle._context.get(OWNER))
        if held is None:
            return False
        held.append(handle)
        return True

    def _shuffle(self, rng: random.Random) -> None:
        ready = self._queue()
        if len(ready) < 2:
            return
        steps = [i for i, handle in enumerate(ready) if isinstance(_owner(handle), asyncio.Task)]
        shuffled = rng.sample(steps, len(steps))
        handles = [ready[i] for i in shuffled]
        for i, handle in zip(steps, handles, strict=True):
            ready[i] = handle


def _owner(handle: Any) -> object:
    """The task whose step a handle is; None of it for a plain callback."""
    return getattr(handle._callback, "__self__", None)


class _JumpingSelector(selectors.BaseSelector):
    """A real selector that lets the loop jump to its next timer instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # only its own wake-up pipe, without a writer
        if self._loop.alone and len(self._real.get_map()) == 1:
            self._loop.next_turn(timeout)
            return []
        events = self._real.select(0)
        if events:
            return events
        return self._real.select(self._loop.next_turn(timeout))

    def register(
        self, fileobj: FileDescriptorLike, events: int, data: Any = None
    ) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(
        self, fileobj: FileDescriptorLike, events: int, data: Any = None
    ) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class LoopClock:
    """The clocks of the running loop; on a virtual loop both are virtual."""

    def now(self) -> float:
        return WALL_CLOCK_START + self.monotonic()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


def run(main: Coroutine[Any, Any, T], seed: int | None = None) -> T:
    """Run ``main`` to its end on a virtual loop; cancel the tasks it left running."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed)) as runner:
        return runner.run(main)
