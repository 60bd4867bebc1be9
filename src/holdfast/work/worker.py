"""A worker: it joins the job store, works until its session ends, leaves, and joins
again.

``worker_loop`` is one session. A session ends early for two reasons:

- The lease is lost, because another worker declared this one dead. The worker cancels
  everything that runs, reports nothing, and joins again.
- Every runner is occupied by a handler that does not end (see ``runners``). The worker
  reports and leaves, so that other workers take over its streams, and joins again only
  when a stuck handler has ended. With a watchdog the process ends instead.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, nullcontext

from holdfast import telemetry
from holdfast.clock import Clock, SystemClock, wait_at_most
from holdfast.errors import HoldfastError
from holdfast.resilience import Backoff
from holdfast.work.breakers import Breakers
from holdfast.work.contract import LeaseLost, SessionTaken, WorkerSession, WorkStore
from holdfast.work.destinations import Paces
from holdfast.work.failures import Hook
from holdfast.work.handlers import Handlers
from holdfast.work.job import Policies
from holdfast.work.runner import Runner
from holdfast.work.settings import WorkerSettings
from holdfast.work.watchdog import EXIT_CODE, Watchdog
from holdfast.work.worker_loop import WorkerLoop, log_failed_call
from holdfast.work.worker_task import WorkerTask, on_restart, start

__all__ = ["Worker", "WorkerSettings"]


class Worker:
    """Runs the jobs of a store with the given handlers until it is stopped.

    It can be stopped at any moment.
    """

    def __init__(
        self,
        store: WorkStore,
        handlers: Handlers,
        *,
        name: str = "worker",
        policies: Policies | None = None,
        settings: WorkerSettings | None = None,
        hook: Hook | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._store = store
        self._name = name
        self._settings = settings or WorkerSettings()
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._breakers = Breakers(self._settings.breaker, self._clock)
        self._runner = Runner(
            handlers, policies or Policies(), self._breakers, self._clock, self._rng, hook
        )
        self.paces = Paces(self._settings.slow_seconds)
        """Which destinations are slow; the owner may preload it after a restart."""
        self._stopping = asyncio.Event()
        self._worker_loop: WorkerLoop | None = None
        self._paused: frozenset[tuple[str, str]] = frozenset()
        self._groups: dict[tuple[str, str], str] = {}
        self._task: WorkerTask[None]

    def stop(self) -> None:
        """Start no more jobs and let ``run`` return.

        Running jobs have ``drain_seconds`` to end. After that they are cancelled and
        have another ``cancel_seconds``.
        """
        self._stopping.set()
        if self._worker_loop is not None:
            self._worker_loop.stop()

    async def run(self) -> None:
        """Work until ``stop``, through losses of the lease and of the store.

        Cancelling ``run`` cancels the running jobs.
        """
        await self._until_ended(self._start())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Worker]:
        """Run in the background of an ``async with`` block; leaving it drains."""
        ended = self._start()
        try:
            yield self
        finally:
            self.stop()
            await self._until_ended(ended)

    def _start(self) -> asyncio.Future[None]:
        """Start the worker in its own task, and restart that task if it is cancelled.

        The returned future is done when the worker has ended.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                ended.set_exception(error)
            elif task.cancelled() and not self._stopping.is_set():
                on_restart(task)
                begin()
            else:
                ended.set_result(None)

        def begin() -> None:
            self._task = start(self._watched(), f"holdfast-{self._name}")
            self._task.add_done_callback(on_ended)

        begin()
        return ended

    async def _until_ended(self, ended: asyncio.Future[None]) -> None:
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._stopping.set()
            self._task.end()
            await asyncio.wait({ended})
            raise

    async def _watched(self) -> None:
        seconds, loop = self._settings.stuck_loop_seconds, asyncio.get_running_loop()
        watchdog = (
            Watchdog(seconds, lambda stack: self._report_before_exit(loop, stack))
            if seconds
            else None
        )
        async with watchdog.watching() if watchdog is not None else nullcontext():
            await self._run(watchdog)

    def _report_before_exit(self, loop: asyncio.AbstractEventLoop, stack: str) -> None:
        if self._worker_loop is not None:
            self._worker_loop.report_before_exit(
                self._runner.culprit(loop, self._settings.stuck_loop_seconds, stack)
            )

    async def _run(self, watchdog: Watchdog | None) -> None:
        backoff, failures = Backoff(0.1, 5.0), 0
        while not self._stopping.is_set():
            if not self._has_runners:
                await self._wait_for_runners(watchdog)
                continue
            try:
                session = await self._store.join(self._name)
                await self._serve(session)
                failures = 0
            except SessionTaken as error:
                failures += 1
                if failures == 1:
                    telemetry.log.warning(
                        "work.session_taken", worker=self._name, error=error.message, action="waits"
                    )
                await wait_at_most(self._stopping, backoff.delay(failures, self._rng))
            except HoldfastError as error:
                failures += 1
                log_failed_call(error)
                await wait_at_most(self._stopping, backoff.delay(failures, self._rng))
            except Exception as error:
                # A defect ends this session only; the next one reads the jobs again.
                failures += 1
                telemetry.defect("work", error)
                await wait_at_most(self._stopping, backoff.delay(failures, self._rng))

    def pause(self, destinations: Collection[tuple[str, str]]) -> None:
        """Start no jobs of these destinations, given as (job type, destination).

        Each call replaces the one before. Waiting jobs of a paused destination stay in
        the store; running jobs end normally. The job type must have a cap per
        destination.
        """
        if (paused := frozenset(destinations)) == self._paused:
            return  # a change makes the worker read all its streams again
        self._paused = paused
        if self._worker_loop is not None:
            self._worker_loop.pause(self._paused)

    def group(self, groups: Mapping[tuple[str, str], str]) -> None:
        """Assign destinations, given as (job type, destination), to named groups.

        No group can take all runners. An unassigned destination is its own group.
        """
        self._groups = dict(groups)
        if self._worker_loop is not None:
            self._worker_loop.group(self._groups)

    @property
    def _has_runners(self) -> bool:
        return self._settings.runners(len(self._runner.stuck)) > 0

    async def _wait_for_runners(self, watchdog: Watchdog | None) -> None:
        """Wait until a stuck handler ends: every runner is lost to one."""
        exit_code = EXIT_CODE if watchdog is not None else None
        telemetry.work_runners_exhausted()
        telemetry.log.critical(
            "work.runners_exhausted",
            worker=self._name,
            stuck=len(self._runner.stuck),
            exit_code=exit_code,
        )
        if watchdog is not None:
            watchdog.end_process()
        while not (self._has_runners or self._stopping.is_set()):
            await wait_at_most(self._stopping, self._settings.poll_max_seconds)
        if self._has_runners:
            telemetry.log.warning(
                "work.runners_available", worker=self._name, stuck=len(self._runner.stuck)
            )

    async def _serve(self, session: WorkerSession) -> None:
        self._worker_loop = WorkerLoop(
            session, self._store.shared, self._runner, self._settings, self._clock, self.paces
        )
        self._worker_loop.group(self._groups)
        if self._paused:
            self._worker_loop.pause(self._paused)
        if self._stopping.is_set():
            self._worker_loop.stop()
        try:
            await self._worker_loop.run()
        except LeaseLost as error:
            telemetry.work_lease_lost()
            telemetry.log.warning(
                "work.lease_lost", worker=self._name, instance=session.instance, error=str(error)
            )
        finally:
            self._worker_loop = None
            await asyncio.shield(session.leave())
