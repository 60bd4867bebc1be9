"""The runners of a worker: tasks that take jobs from memory, one after another.

A handler runs in its runner's own task, because a task per job would cost another
3.6 µs, and a whole job costs 16 µs on SQLite and 22 µs on PostgreSQL
(docs/decisions/0027). So a handler that cancels its task ends its runner, and a handler
that ignores its cancellation keeps it. In both cases a new runner replaces the old one.

``stuck_max`` bounds the handlers that do not end. Each one beyond it costs the worker a
runner, so that stuck tasks cannot fill the memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import count

from holdfast import telemetry
from holdfast.work.contract import WorkerSession
from holdfast.work.job import Job
from holdfast.work.runner import Runner, RunOutcome
from holdfast.work.settings import WorkerSettings
from holdfast.work.streams import Streams
from holdfast.work.worker_task import enter_handlers

_Record = Callable[[Job, RunOutcome], None]
"""Records the outcome of a run."""


class Runners:
    """The ``settings.concurrency`` runners of one session."""

    def __init__(
        self,
        runner: Runner,
        session: WorkerSession,
        streams: Streams,
        record: _Record,
        settings: WorkerSettings,
    ) -> None:
        self._runner, self._session, self._streams, self._record = runner, session, streams, record
        self._settings = settings
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = count(1)
        self._idle: deque[asyncio.Future[None]] = deque()
        self._watching: asyncio.Task[None] | None = None
        self._ending = False
        self.paused = False
        """Start no more jobs."""
        self.failed_with: Exception | None = None
        """LeaseLost, or a defect in the worker: it ends the session."""

    def start(self) -> None:
        self._watch()
        self._fill()

    @property
    def exhausted(self) -> bool:
        """Whether every runner is lost to a stuck handler."""
        return not self._tasks and self._settings.runners(len(self._runner.stuck)) == 0

    def wake(self) -> None:
        """Wake one idle runner for each job that may start."""
        if len(self._tasks) < self._settings.concurrency:
            self._fill()
        startable = self._streams.dispatch.startable
        while self._idle and startable:
            future = self._idle.popleft()
            if not future.done():
                future.set_result(None)
                startable -= 1

    async def end(self) -> None:
        """Cancel the running jobs, and give them back.

        Handlers that do not end within ``cancel_seconds`` are given up.
        """
        self._ending = True
        self._runner.dismiss()
        tasks = list(self._tasks)
        if self._watching is not None:
            tasks.append(self._watching)
        for task in tasks:
            task.cancel()
        if not tasks:
            return
        _, hanging = await asyncio.wait(tasks, timeout=self._settings.cancel_seconds)
        for task in hanging:
            self._runner.give_up(task, "given back")

    def _fill(self) -> None:
        """Start missing runners; each stuck handler beyond ``stuck_max`` costs one."""
        wanted = self._settings.runners(len(self._runner.stuck))
        while len(self._tasks) < wanted:
            task = asyncio.create_task(
                self._run_jobs(), name=f"holdfast-runner-{next(self._numbers)}"
            )
            self._tasks.add(task)
            task.add_done_callback(self._on_ended)

    def _on_ended(self, task: asyncio.Task[None]) -> None:
        given_up = task not in self._tasks
        self._tasks.discard(task)
        if self._ending:
            return
        if not given_up:
            error = None if task.cancelled() else task.exception()
            telemetry.work_runner_replaced()
            message = "cancelled from inside" if error is None else type(error).__qualname__
            telemetry.log.warning("work.runner_replaced", task=task.get_name(), error=message)
        self._fill()

    def _watch(self, ended: asyncio.Task[None] | None = None) -> None:
        """Watch the deadlines; restart the watcher if a handler cancels it."""
        if ended is not None and not ended.cancelled() and (error := ended.exception()) is not None:
            telemetry.defect("work", error)
        if not self._ending:
            watching = self._runner.watch_deadlines(self._settings.cancel_seconds, self._on_stuck)
            self._watching = asyncio.create_task(watching, name="holdfast-deadlines")
            self._watching.add_done_callback(self._watch)

    def _on_stuck(self, task: asyncio.Task[None], job: Job, outcome: RunOutcome) -> None:
        self._tasks.discard(task)
        self._record(job, outcome)
        self._fill()

    async def _run_jobs(self) -> None:
        """One runner: run jobs until cancelled, from outside or by a handler."""
        streams, loop, task = self._streams, asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        enter_handlers()
        while True:
            job = streams.next() if not self.paused and self._session.may_start else None
            if job is None:
                self._idle.append(future := loop.create_future())
                await future
                continue
            try:
                outcome = await self._runner.run(job, self._session, task)
                if outcome is None:
                    return
                self._record(job, outcome)
            except Exception as error:
                self.failed_with = error
                self._session.wake()
            if task.cancelling():
                return
