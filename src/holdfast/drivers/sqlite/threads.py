"""Threads that own a connection each and take bounded work from one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

import apsw

from holdfast import telemetry
from holdfast.clock import start_thread
from holdfast.drivers.sqlite.database import Handle, unavailable_while_closing
from holdfast.errors import HoldfastError, InternalError

T = TypeVar("T")


class _Unit(Generic[T]):
    """A piece of work, the future of its result, and a callback for the loop."""

    __slots__ = ("answer", "error", "future", "then", "work")

    def __init__(
        self,
        work: Callable[[Handle], T],
        future: asyncio.Future[T],
        then: Callable[[], None] | None,
    ) -> None:
        self.work = work
        self.future = future
        self.then = then
        self.answer: T | None = None
        self.error: HoldfastError | None = None


class WorkerThreads:
    """Takes work while fewer than ``waiting_max`` pieces wait; then raises ``refusal``.

    Accepted work is done whether or not its caller still waits. A single thread works
    in order.
    """

    def __init__(
        self,
        name: str,
        handles: list[Handle],
        waiting_max: int,
        refusal: Callable[[], HoldfastError],
    ) -> None:
        self._queue: SimpleQueue[_Unit[object] | None] = SimpleQueue()
        self._waiting = 0
        self._waiting_max = waiting_max
        self._refusal = refusal
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._ended = [
            start_thread(partial(self._run, handle), f"{name}-{n}")
            for n, handle in enumerate(handles)
        ]

    def do(
        self, work: Callable[[Handle], T], then: Callable[[], None] | None = None
    ) -> asyncio.Future[T]:
        """Queue ``work`` for one of the threads. Cancelling the future changes nothing.

        ``then`` runs on the event loop when the work has ended, before the caller
        resumes, and also if the caller no longer waits.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        if self._closing:
            future.set_exception(unavailable_while_closing())
        elif self._waiting >= self._waiting_max:
            future.set_exception(self._refusal())
        else:
            self._waiting += 1
            self._queue.put(_Unit(work, future, then))  # type: ignore[arg-type]
        return future

    def transact(self, work: Callable[[apsw.Connection], T]) -> asyncio.Future[T]:
        """Run ``work`` in a write transaction, durable when the future is done."""

        def transaction(handle: Handle) -> T:
            with handle.transaction() as connection:
                return work(connection)

        return self.do(transaction)

    async def close(self) -> None:
        """Finish accepted work, then end the threads and close their connections."""
        self._closing = True
        for _ in self._ended:
            self._queue.put(None)
        for ended in self._ended:
            await ended.wait()

    def _run(self, handle: Handle) -> None:
        while (unit := self._queue.get()) is not None:
            try:
                unit.answer = unit.work(handle)
            except HoldfastError as error:
                unit.error = error
            except Exception as error:
                telemetry.log.exception("drivers.thread_failed")
                unit.error = InternalError(f"{type(error).__name__}: {error}")
                unit.error.__cause__ = error
            try:
                self._loop.call_soon_threadsafe(self._settle, unit)
            except RuntimeError:
                break  # the loop is closed: no caller is left
        handle.close()

    def _settle(self, unit: _Unit[object]) -> None:
        self._waiting -= 1
        if not unit.future.cancelled():
            if unit.error is not None:
                unit.future.set_exception(unit.error)
            else:
                unit.future.set_result(unit.answer)
        if unit.then is not None:
            unit.then()
