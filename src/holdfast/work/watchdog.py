"""Ends a process whose event loop is stuck in a handler's synchronous code.

A thread checks whether the loop ticks. If it has not for ``seconds``, the thread writes
the stacks of all threads to stderr, lets the worker record what it knows and give up
its lease, and ends the process with ``EXIT_CODE``, so that its supervisor restarts it.

The thread counts its own turns, not a clock: while a process is stopped (SIGSTOP, a
paused container), neither the loop nor the thread runs. Code that holds the interpreter
lock stops this thread too; then the heartbeat's thread also stops, and other workers
take over.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from holdfast import telemetry
from holdfast.clock import start_thread, wait_at_most

EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h: an internal error."""
_STEPS = 10


class Watchdog:
    """Calls ``on_stuck`` in another thread with the stack of the loop's thread.

    The call records why the process ends. It may block, but has at most
    ``report_seconds_max``.
    """

    def __init__(
        self,
        seconds: float,
        on_stuck: Callable[[str], None],
        end: Callable[[int], object] = os._exit,
        *,
        report_seconds_max: float = 5.0,
    ) -> None:
        self._seconds, self._on_stuck, self._end = seconds, on_stuck, end
        self._report_seconds_max = report_seconds_max
        self._step = min(1.0, seconds / _STEPS)
        self._ticked = True
        self._stopping = threading.Event()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the running loop until the block is left."""
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._tick()
        ended = start_thread(self._watch, "holdfast-watchdog")
        try:
            yield
        finally:
            self._stopping.set()
            await wait_at_most(ended, self._report_seconds_max)

    def _tick(self) -> None:
        """A timer, not a task: a handler that cancels all tasks is no stuck loop."""
        self._ticked = True
        if not self._stopping.is_set():
            self._loop.call_later(self._step / 2, self._tick)

    def _watch(self) -> None:
        silent = 0
        while not self._stopping.wait(self._step):
            silent = 0 if self._ticked else silent + 1
            self._ticked = False
            if silent * self._step >= self._seconds:
                self._give_up()
                return

    def _give_up(self) -> None:
        frame = sys._current_frames().get(self._thread_id)
        stack = "".join(traceback.format_stack(frame))
        report = threading.Thread(
            target=self._report, args=(stack,), name="holdfast-final-report", daemon=True
        )
        report.start()
        report.join(self._report_seconds_max)
        self.end_process()

    def end_process(self) -> None:
        """End the process at once with EXIT_CODE; the caller has logged why."""
        with suppress(Exception):
            sys.stderr.flush()
        self._end(EXIT_CODE)

    def _report(self, stack: str) -> None:
        """Record the stacks and call ``on_stuck``, in a thread of its own.

        The stuck code may hold a lock that is needed here.
        """
        with suppress(Exception):  # stderr may not be a file
            faulthandler.dump_traceback(all_threads=True)
        telemetry.log.critical(
            "work.loop_stuck",
            seconds=self._seconds,
            exit_code=EXIT_CODE,
            where=stack.rstrip().rpartition("  File ")[2],
        )
        try:
            self._on_stuck(stack)
        except Exception as error:
            telemetry.log.error(
                "work.final_report_failed", error=f"{type(error).__name__}: {error}"
            )
