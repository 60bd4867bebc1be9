"""One session of a worker: lease partitions, claim jobs, report their outcomes.

One task, ``_exchange``, calls the store; ``concurrency`` runners take jobs from
memory. A round trip reports all jobs that ended during the previous one, so batches
grow with the load.

While the store is unavailable, running jobs continue, no job starts, and the same
report is sent again: reports are idempotent. When the store refuses a report because of
a value in it, the loop halves the report until it finds the job at fault. That job
fails; all others are reported.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.errors import Deferred, HoldfastError, OutcomeUnknown, Refused
from holdfast.resilience import Backoff
from holdfast.work.contract import (
    PER_BACKLOG,
    Child,
    Claimed,
    ClaimRequest,
    Failed,
    LeaseLost,
    Report,
    WorkerSession,
)
from holdfast.work.destinations import Destinations, Paces
from holdfast.work.job import PARTITIONS, Block, Job, share_of
from holdfast.work.reports import fitting, joined, split
from holdfast.work.runner import Runner, RunOutcome
from holdfast.work.runners import Runners
from holdfast.work.settings import WorkerSettings
from holdfast.work.streams import Streams
from holdfast.work.worker_task import WorkerTask, on_restart, start

_CROWDED_SECONDS = 1.0
"""How often a worker checks whether a few slow streams fill its memory."""


class WorkerLoop:
    """One session of a worker, from joining the store to leaving it."""

    def __init__(
        self,
        session: WorkerSession,
        many_workers: bool,
        runner: Runner,
        settings: WorkerSettings,
        clock: Clock,
        paces: Paces,
    ) -> None:
        self._session, self._many_workers, self._runner, self._settings, self._clock = (
            session,
            many_workers,
            runner,
            settings,
            clock,
        )
        self._destinations = Destinations(
            runner.caps(), settings.concurrency, clock.monotonic, paces
        )
        self._streams = Streams(
            settings.jobs_max, settings.bytes_max, settings.per_stream_max, self._destinations
        )
        self._report = Report()
        self._sending = Report()  # the report of the call in progress
        # parents whose child's stream another transaction has locked
        self._locked_parents_report = Report()
        self._locked_parents_due_at, self._locked_parents_delay_seconds = (
            0.0,
            settings.poll_min_seconds,
        )
        self._owned: set[int] = set()
        self._closing: set[int] = set()
        self._stopping = False
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._window = settings.concurrency
        self._crowding_at, self._ended_since = clock.monotonic() + _CROWDED_SECONDS, 0
        self._recently_ended: deque[int] = deque(maxlen=8)
        self._blamed_seqs: set[int] = set()
        self._poll = settings.poll_min_seconds
        self._store_will_wake_us = self._waiting = False
        self._balance_at = float("-inf")
        self._runners = Runners(runner, session, self._streams, self._record, settings)
        self._paused: frozenset[tuple[str, str]] = frozenset()
        # read all streams from the start: at first, and after an unknown outcome
        self._rewind_needed = True

    def stop(self) -> None:
        self._stopping = self._runners.paused = True
        if not self._stopped.done():
            self._stopped.set_result(None)
        self._session.wake()

    def pause(self, destinations: frozenset[tuple[str, str]]) -> None:
        """Pause these destinations, and resume all others, with the next rewind.

        A rewind reads held jobs before newer ones, so the order of a stream is kept.
        """
        self._paused = destinations
        self._rewind_needed = True
        self._session.wake()

    def group(self, groups: Mapping[tuple[str, str], str]) -> None:
        self._destinations.regroup(groups)

    async def run(self) -> None:
        """Work until stopped and drained, or no runner is left. Raises LeaseLost."""
        self._runners.start()
        exchange: WorkerTask[None] = start(self._exchange(), "holdfast-worker-loop")
        try:
            await asyncio.wait({exchange, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not exchange.done():
                await asyncio.wait({exchange}, timeout=self._settings.drain_seconds)
        finally:
            await self._runners.end()
            # the call may have waited for a handler's transaction, which has ended now
            if self._stopping:
                await asyncio.wait({exchange}, timeout=self._settings.cancel_seconds)
            exchange.end()
            await asyncio.wait({exchange})
        if not exchange.cancelled():
            exchange.result()
        elif not self._stopping:  # cancelled by the surrounding program: the worker joins again
            on_restart(exchange)

    def report_before_exit(self, culprit: Failed | None) -> None:
        """Report what ended, blame the culprit and leave; from another thread, while
        the event loop is stuck.
        """
        blamed = [culprit] if culprit is not None else []
        seq = culprit.seq if culprit is not None else None
        running = [each for each in self._streams.dispatch.announced if each != seq]
        report = joined([self._sending, self._report, Report(failed=blamed)], running)
        try:
            self._session.report_before_exit(report, seq)
        except Refused:
            self._session.report_before_exit(Report(failed=blamed, running=running), seq)

    async def _exchange(self) -> None:
        drain_deadline: float | None = None
        failures, backoff = 0, Backoff(0.05, 2.0)
        while self._runners.failed_with is None:
            if self._runners.exhausted:
                self.stop()
            if self._stopping:
                drain_deadline = (
                    drain_deadline or self._clock.monotonic() + self._settings.drain_seconds
                )
                if self._drained or self._clock.monotonic() > drain_deadline:
                    return
            report = Report()
            try:
                if not self._stopping:  # a stopping worker only reports
                    await self._balance()
                # after _balance: a rewind drops the jobs that were to be held
                report = self._take_report()
                request, self._sending = self._claim_request(), report
                try:
                    claimed = await self._session.process(report, request)
                except Refused as error:
                    await self._isolate(report, error)
                    continue
                self._sending = Report()
                self._apply(report, request, claimed)
                if claimed.notice:
                    await self._rewind()
                failures = 0
            except LeaseLost:
                if report.completed or self._report.completed:
                    telemetry.work_completion_refused()
                raise
            except HoldfastError as error:
                failures += 1
                log_failed_call(error)
                self._requeue_report(report)
                self._rewind_needed = True
                self._balance_at = float("-inf")
                await asyncio.sleep(backoff.bound(failures))
                continue
            self._runners.wake()
            claim_again = self._must_claim_again(request, claimed)
            if self._has_work_to_report or claim_again:
                await asyncio.sleep(0)
            else:
                await self._wait(claimed)
        raise self._runners.failed_with

    async def _rewind(self) -> None:
        # a later pause() takes effect with the next rewind
        self._rewind_needed, paused = False, self._paused
        rewound = await self._session.rewind()
        self._streams.rewound(rewound.blocks, rewound.backlogs, paused)

    async def _balance(self) -> None:
        """Every ``balance_seconds``: sync breakers, reap dead workers, lease the
        partitions assigned to this worker and release the others.
        """
        now = self._clock.monotonic()
        if now >= self._balance_at:
            self._balance_at = now + self._settings.balance_seconds
            await self._runner.sync_breakers(self._session)
            await self._lease_assigned()
        if self._closing:
            await self._release_idle_partitions()
        if self._rewind_needed:
            await self._rewind()

    async def _lease_assigned(self) -> None:
        """Lease the partitions that rendezvous hashing assigns to this worker.

        The store's record decides which partitions this worker owns, because the reply
        to an earlier ``take`` or ``release_partitions`` may have been lost.
        """
        owners = await self._session.owners()
        assigned = (
            share_of(self._session.instance, owners.alive)
            if self._many_workers
            else set(range(PARTITIONS))
        )
        ours = {
            partition
            for partition, owner in owners.by_partition.items()
            if owner == self._session.instance
        }
        free = {partition for partition, owner in owners.by_partition.items() if owner is None}
        if self._closing & assigned:
            self._streams.reopen(self._closing & assigned)
            self._closing -= assigned
            self._rewind_needed = True
        self._closing |= ours - assigned
        self._streams.close(self._closing)
        missing = (assigned & (free | ours)) - self._owned
        if missing:
            self._owned = set(await self._session.take(sorted(missing)))
            self._rewind_needed = True

    async def _release_idle_partitions(self) -> None:
        """Release closing partitions that are no longer in use.

        They count as released even if the call fails; the next ``owners`` shows the
        truth.
        """
        idle = self._closing - self._streams.in_use()
        if idle:
            self._owned -= idle
            self._closing -= idle
            self._streams.reopen(idle)
            await self._session.release_partitions(sorted(idle))

    def _take_report(self) -> Report:
        """The jobs that ended since the last report, and the jobs that may start next.

        The window of announced jobs is three times what recently ended in a round trip,
        so that runners never wait for an announcement. Jobs behind others of their
        stream are announced only if the window has room: they may wait long, and would
        be suspects if this process died.
        """
        report, self._report = fitting(self._report)
        if (
            self._locked_parents_report.completed
            and self._clock.monotonic() >= self._locked_parents_due_at
        ):
            report.completed.extend(self._locked_parents_report.completed)
            report.children.extend(self._locked_parents_report.children)
            self._locked_parents_report = Report()
        ended = len(report.completed) + len(report.failed)
        self._recently_ended.append(ended)
        fastest = max(self._recently_ended)
        self._window = max(
            self._settings.concurrency, min(3 * fastest, self._settings.jobs_max // 2)
        )
        if not self._stopping:
            self._make_room(ended)
            self._streams.dispatch.announce(*self._announceable())
        report.held = self._streams.take_held()
        report.running = list(self._streams.dispatch.announced)
        return report

    def _announceable(self) -> tuple[int, int]:
        """How many more heads of streams and followers may be announced."""
        ahead = self._window - len(self._streams.dispatch.announced)
        return ahead + self._streams.dispatch.ahead, ahead

    def _make_room(self, ended: int) -> None:
        """Give jobs back if a few slow streams fill the memory (``Streams.make_room``).

        Not if a full memory's worth of jobs ends within a second: each job that is
        given back costs another write.
        """
        self._ended_since += ended
        if (now := self._clock.monotonic()) < self._crowding_at:
            return
        slow = self._ended_since < self._settings.jobs_max
        self._crowding_at, self._ended_since = now + _CROWDED_SECONDS, 0
        jobs, bytes_left = self._streams.room()
        if slow and (
            jobs < self._settings.jobs_max // 8 or bytes_left < self._settings.bytes_max // 8
        ):
            self._streams.make_room(self._settings.concurrency)

    def _claim_request(self) -> ClaimRequest:
        if self._stopping:
            return ClaimRequest()
        jobs, bytes_max = self._streams.room()
        if not bytes_max:
            jobs = 0
        dispatch = self._streams.dispatch
        starting = 0 if dispatch.isolates else max(0, self._window - len(dispatch.announced))
        backlogs = self._streams.backlogs(max(1, jobs // PER_BACKLOG)) if jobs else {}
        paused_types, probing = self._runner.paused_types()
        return ClaimRequest(
            jobs,
            bytes_max,
            starting,
            backlogs,
            wake_on_enqueue=jobs > 0,
            paused_types=paused_types,
            probing=probing,
        )

    def _apply(self, report: Report, request: ClaimRequest, claimed: Claimed) -> None:
        locked_parents = set(claimed.busy)
        if locked_parents:
            children = [child for child in report.children if child.parent in locked_parents]
            self._report_again_later(locked_parents, children)
        elif report.children:
            self._locked_parents_delay_seconds = self._settings.poll_min_seconds
        self._streams.reported(seq for seq in report.completed if seq not in locked_parents)
        self._streams.reported(failed.seq for failed in report.failed)
        self._blamed_seqs.difference_update(failed.seq for failed in report.failed)
        self._streams.add_backlog(claimed.backlog, request, claimed.through)
        self._streams.add(claimed.jobs)
        self._streams.announced_by_store(claimed.started)
        telemetry.work_completed(len(report.completed) - len(locked_parents))
        if claimed.jobs or claimed.backlog:
            self._poll = self._settings.poll_min_seconds

    async def _isolate(self, report: Report, refusal: Refused) -> None:
        """Halve a refused report until the jobs at fault stand alone; report the
        others.

        An interruption is harmless: the whole report is sent again, and the store
        ignores what it already has.
        """
        groups = [split(report)]
        if not groups[0]:
            raise RuntimeError("the store refuses a report that says nothing") from refusal
        while groups:
            pieces = groups.pop()
            part = joined(pieces, report.running)
            try:
                claimed = await self._session.process(part, ClaimRequest())
            except Refused as error:
                if len(pieces) > 1:
                    middle = len(pieces) // 2
                    groups += [pieces[middle:], pieces[:middle]]
                else:
                    groups += self._blamed(part, error)
            else:
                self._apply(part, ClaimRequest(), claimed)
        self._rewind_needed = True  # streams have continued past jobs that have now failed

    def _blamed(self, part: Report, refusal: Refused) -> list[list[Report]]:
        """The failure to report instead, for the job whose report was refused."""
        seqs = [*part.completed, *(failed.seq for failed in part.failed)]
        telemetry.log.error("work.report_refused", seqs=seqs[:1], error=refusal.message[:200])
        job = self._streams.ended(seqs[0]) if seqs else None
        if job is None:  # already reported, or the refused piece names no job that ended
            return []
        if job.seq in self._blamed_seqs:
            raise RuntimeError(f"the store refuses even the failure of job {job.seq}") from refusal
        self._blamed_seqs.add(job.seq)
        failed = self._runner.refused(job, refusal).failed
        return [[Report(failed=[failed])]] if failed is not None else []

    def _report_again_later(self, parents: set[int], children: list[Child]) -> None:
        """Report these parents again later, with a doubling delay.

        The transaction that locks their children's streams may stay open for hours.
        """
        if not self._locked_parents_report.completed:
            self._locked_parents_due_at = (
                self._clock.monotonic() + self._locked_parents_delay_seconds
            )
            self._locked_parents_delay_seconds = min(
                2 * self._locked_parents_delay_seconds, self._settings.poll_max_seconds
            )
        self._locked_parents_report.completed.extend(parents)
        self._locked_parents_report.children.extend(children)

    def _requeue_report(self, report: Report) -> None:
        """Send this report again, before later ones: its outcome is unknown."""
        self._report.completed[:0] = report.completed
        self._report.failed[:0] = report.failed
        self._report.children[:0] = report.children
        self._report.released[:0] = report.released

    @property
    def _has_work_to_report(self) -> bool:
        """Whether there is something to report or announce at once."""
        report = self._report
        if report.completed or report.failed:
            return True
        return not self._stopping and self._streams.dispatch.possible(*self._announceable())

    def _must_claim_again(self, request: ClaimRequest, claimed: Claimed) -> bool:
        """Whether to claim once more before waiting.

        A call that finds nothing records that we sleep. A producer that committed
        before that record could not wake us, so claim once more.
        """
        if claimed.jobs or claimed.backlog:
            self._store_will_wake_us = False
            return request.wake_on_enqueue
        recorded_before = self._store_will_wake_us
        self._store_will_wake_us = self._many_workers and request.wake_on_enqueue
        return self._store_will_wake_us and not recorded_before

    @property
    def _drained(self) -> bool:
        return not (
            self._streams.started
            or self._report.completed
            or self._report.failed
            or self._locked_parents_report.completed
        )

    async def _wait(self, claimed: Claimed) -> None:
        """Sleep until a job ends, arrives or is due."""
        seconds = self._poll
        if not claimed.jobs:
            self._poll = min(self._poll * 2, self._settings.poll_max_seconds)
        if claimed.next_due_seconds is not None:
            seconds = min(seconds, max(claimed.next_due_seconds, 0.001))
        if self._locked_parents_report.completed:
            seconds = min(
                seconds, max(self._locked_parents_due_at - self._clock.monotonic(), 0.001)
            )
        if self._closing:
            seconds = min(seconds, self._settings.poll_min_seconds)
        self._waiting = True
        try:
            if await self._session.wait(seconds):
                self._poll = self._settings.poll_min_seconds
        finally:
            self._waiting = False

    def _record(self, job: Job, outcome: RunOutcome) -> None:
        if self._waiting:
            self._session.wake()
        failed = outcome.failed
        if failed is not None:
            self._report.failed.append(failed)
            self._report.released.extend(outcome.released)
            blocked = failed.verdict.blocks and job.stream is not None
            self._streams.failed(
                job, Block(job.stream or "", job.seq, failed.verdict.stream) if blocked else None
            )
            return
        self._streams.done(job)
        if outcome.finished:
            self._streams.reported((job.seq,))
            return
        self._report.completed.append(job.seq)
        self._report.children.extend(outcome.children)


def log_failed_call(error: HoldfastError) -> None:
    """Log a failed call: as unavailability only if the store may recover by itself."""
    if isinstance(error, Deferred | OutcomeUnknown):
        telemetry.log.warning("work.store_unavailable", error=error.message)
    else:
        telemetry.log.error(
            "work.store_call_failed", kind=type(error).__name__, error=error.message
        )
