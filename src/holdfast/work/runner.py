"""One run of one job: decode the payload, call the handler, judge the outcome.

``worker_loop`` reports the outcomes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.errors import Deferred, OutcomeUnknown, Refused
from holdfast.work.breakers import Breakers
from holdfast.work.contract import Child, Failed, JobGone, LeaseLost, WorkerSession
from holdfast.work.failures import (
    Hook,
    LoopStuck,
    ReportRefused,
    UnknownType,
    carries,
    classify,
    kind_of,
)
from holdfast.work.handlers import Context, Handlers, HandlerSpec
from holdfast.work.job import (
    CRASHES_MAX,
    DEFAULTS,
    Failure,
    FailureAction,
    FailureVerdict,
    Job,
    Policies,
    Policy,
    Reason,
    decide,
)

_DEADLINE_TICK_SECONDS = 0.1
_AWAITS_MAX = 100
_FRAMES_MAX = 3


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended.

    ``finished``: there is nothing to report, because the job was completed in its own
    transaction, or is gone.
    """

    failed: Failed | None = None
    finished: bool = False
    children: Sequence[Child] = ()
    released: Sequence[int] = ()


OnStuck = Callable[[asyncio.Task[None], Job, RunOutcome], None]
_DONE = RunOutcome()
_FINISHED = RunOutcome(finished=True)


class Runner:
    """Runs jobs with the user's handlers and judges their failures by the policies."""

    def __init__(
        self,
        handlers: Handlers,
        policies: Policies,
        breakers: Breakers,
        clock: Clock,
        rng: random.Random,
        hook: Hook | None,
    ) -> None:
        self._handlers, self._policies, self._breakers = handlers, policies, breakers
        self._clock, self._rng, self._hook = clock, rng, hook
        self._running: dict[asyncio.Task[None], Context] = {}
        self._has_begun = asyncio.Event()
        self.stuck: set[asyncio.Task[None]] = set()
        """Tasks whose handler ignored its cancellation; their runs are over and fenced.
        """

    async def run(
        self, job: Job, session: WorkerSession, task: asyncio.Task[None]
    ) -> RunOutcome | None:
        """Run a job; whatever the handler does is an outcome of this run only.

        Returns None if the run was given up or dismissed. Raises LeaseLost only if the
        store raised it. ``task`` is the caller's, and is cancelled at the deadline.
        """
        spec = self._handlers.find(job)
        if spec is None:
            message = (
                f"no handler for the job type {job.type!r}, no transport for {job.destination!r}"
            )
            return self._failed(job, UnknownType(message), 0)
        seconds = self._breakers.postpone_seconds(job.type)
        if seconds is not None:
            return self._postponed(job, seconds)
        if self._breakers.is_probe(job.type):
            telemetry.work_probed()
        context = Context(job, session, self._clock.monotonic() + spec.deadline_seconds)
        self._running[task] = context
        self._has_begun.set()
        try:
            await spec.run(context, spec.decoded(job.payload))
        except BaseException as error:  # a handler may raise more than Exceptions
            return self._ended(job, context, spec, task, error)
        return self._ended(job, context, spec, task, None)

    def _ended(
        self,
        job: Job,
        context: Context,
        spec: HandlerSpec,
        task: asyncio.Task[None],
        error: BaseException | None,
    ) -> RunOutcome | None:
        if context.over:  # give_up has recorded its outcome
            return None
        del self._running[task]
        context.over = True
        if context.entered:  # a task that the handler left behind is still in the transaction
            context.session.revoke(job)
            error = error or RuntimeError(
                "the handler returned while its transaction was open in another task"
            )
        if context.dismissed:
            self._breakers.neither(job.type)
            return None
        if context.overdue:
            task.uncancel()
            if not context.finished:
                error = _late(spec, error)
        if error is not None:
            return self._raised(job, context, error)
        self._breakers.succeeded(job.type)
        if context.finished:
            return _FINISHED
        return RunOutcome(children=context.children) if context.children else _DONE

    async def watch_deadlines(self, cancel_seconds: float, on_stuck: OnStuck) -> None:
        """Cancel runs at their deadline, and give up those that do not end then.

        One timer serves all runs; while nothing runs, there is none. ``on_stuck`` gets
        the task, job and outcome of each run that is given up.
        """
        while True:
            if not self._running:
                self._has_begun.clear()
                await self._has_begun.wait()
            await asyncio.sleep(_DEADLINE_TICK_SECONDS)
            now = self._clock.monotonic()
            for task, context in [(t, c) for t, c in self._running.items() if c.deadline < now]:
                if not context.overdue:
                    context.overdue = True
                    context.deadline = now + cancel_seconds
                    task.cancel()
                    continue
                job = context.job
                self.give_up(task, "recorded as a timeout")
                message = (
                    f"the run did not end within {cancel_seconds} s of being cancelled at its"
                    " deadline"
                )
                error = TimeoutError(f"{message}; it hangs at {where(task)}")
                on_stuck(task, job, self._raised(job, context, error))

    def dismiss(self) -> None:
        """Discard the outcomes of all current runs; the caller cancels their tasks."""
        for context in self._running.values():
            context.dismissed = True

    def give_up(self, task: asyncio.Task[None], action: str) -> bool:
        """Close the run of a task that ignored its cancellation; False if it runs no
        job.

        Whatever the handler does or returns later has no effect.
        """
        context = self._running.pop(task, None)
        if context is None:
            return False
        context.over = True
        job = context.job
        if context.entered:
            context.session.revoke(job)
        if context.dismissed:
            self._breakers.neither(job.type)
        self.stuck.add(task)
        task.add_done_callback(self._stuck_ended)
        telemetry.work_stuck(len(self.stuck))
        telemetry.log.error(
            "work.handler_stuck",
            seq=job.seq,
            type=job.type,
            task=task.get_name(),
            where=where(task),
            job=action,
        )
        asyncio._unregister_task(task)  # or asyncio.run would wait for it
        task.cancel()  # some handlers end at the second cancellation
        return True

    def _stuck_ended(self, task: asyncio.Task[None]) -> None:
        self.stuck.discard(task)
        telemetry.work_stuck(len(self.stuck))
        telemetry.log.warning("work.stuck_handler_ended", task=task.get_name())

    def refused(self, job: Job, error: Refused) -> RunOutcome:
        """The failure of a run whose report the store refuses."""
        telemetry.work_report_refused()
        return self._failed(
            job, ReportRefused(f"the store refused the report of this run: {error.message}"), 0
        )

    def culprit(self, loop: asyncio.AbstractEventLoop, seconds: float, stack: str) -> Failed | None:
        """The failure of the job whose handler blocks the event loop; from another
        thread.

        None if the current task is no runner's, for example one that a handler started.
        """
        task = asyncio.current_task(loop)
        context = self._running.get(task) if task is not None else None
        if context is None:
            return None
        error = LoopStuck(
            f"the handler kept the event loop from running for {seconds} s; its process was ended"
        )
        error.add_note(stack)
        failed = self._failed(context.job, error, context.stages).failed
        if failed is not None and context.job.crashes + 1 >= CRASHES_MAX:
            return replace(
                failed,
                verdict=FailureVerdict(FailureAction.DEAD, Reason.POISON_MESSAGE, strike=True),
            )
        return failed

    def paused_types(self) -> tuple[list[str], list[str]]:
        """The job types not to claim now, and those to probe with one job each."""
        return self._breakers.paused_types()

    def caps(self) -> dict[str, int]:
        """How many jobs of one destination may run at once, by job type."""
        return self._handlers.caps()

    async def sync_breakers(self, session: WorkerSession) -> None:
        """Publish own breakers to the store and learn the others'."""
        self._breakers.update_elsewhere(await session.breakers(*self._breakers.changes()))

    def _raised(self, job: Job, context: Context, error: BaseException) -> RunOutcome:
        """The outcome of a run that raised.

        After its own transaction the job is completed: it cannot fail any more.
        """
        if error is context.store_error and isinstance(error, LeaseLost):
            self._breakers.neither(job.type)
            raise error
        if error is context.store_error and isinstance(error, JobGone):
            self._breakers.neither(job.type)
            telemetry.log.warning("work.job_gone", seq=job.seq, type=job.type, error=error.message)
            return _FINISHED
        if not context.finished:
            blip = isinstance(context.store_error, Deferred | OutcomeUnknown) and carries(
                error, context.store_error
            )
            return self._failed(job, error, context.stages, context.released, store_failed=blip)
        self._breakers.neither(job.type)
        failure, _ = self._judged(job, error)
        message = f"{failure.error_type}: {failure.error}"[:200]
        telemetry.log.error("work.job_failed_after_end", seq=job.seq, type=job.type, error=message)
        return _FINISHED

    def _failed(
        self,
        job: Job,
        error: BaseException,
        stages: int,
        released: Sequence[int] = (),
        *,
        store_failed: bool = False,
    ) -> RunOutcome:
        """Judge a failure, count and log it.

        ``store_failed``: the job store was unavailable, which says nothing about the
        job or its type.
        """
        failure, policy = self._judged(job, error)
        if store_failed:
            failure = replace(failure, reason=Reason.DEPENDENCY_FAILURE)
            policy = self._policies.after_store_failure(job.type)
        if policy.feeds_breaker:
            self._breakers.failed(job.type)
        else:
            self._breakers.neither(job.type)
        verdict = decide(job, failure, policy, self._rng)
        telemetry.work_failed(
            verdict.reason.name.lower(), is_dead=verdict.action is FailureAction.DEAD
        )
        log = telemetry.log.error if verdict.action is FailureAction.DEAD else telemetry.log.warning
        log(
            "work.job_failed",
            seq=job.seq,
            type=job.type,
            attempt=job.attempt,
            reason=verdict.reason.name.lower(),
            action=verdict.action.name.lower(),
            error=f"{failure.error_type}: {failure.error}"[:200],
        )
        return RunOutcome(Failed(job.seq, job.attempt, verdict, failure, stages), released=released)

    def _judged(self, job: Job, error: BaseException) -> tuple[Failure, Policy]:
        """The failure and its policy; an error in here also fails this job only."""
        try:
            spec = self._handlers.find(job)
            failure = classify(error, self._hook, spec.reasons if spec is not None else None)
            return failure, self._policies.lookup(job.type, failure.reason)
        except BaseException as defect:
            telemetry.defect("work", defect)
            message = f"the failure could not be judged: {kind_of(defect)}"
            return Failure(Reason.UNKNOWN, kind_of(error), message), DEFAULTS[Reason.UNKNOWN]

    def _postponed(self, job: Job, seconds: float) -> RunOutcome:
        delay = seconds * (1 + 0.1 * self._rng.random())
        verdict = FailureVerdict(FailureAction.POSTPONE, Reason.DEPENDENCY_FAILURE, delay)
        failure = Failure(
            Reason.DEPENDENCY_FAILURE, "BreakerOpen", f"the breaker of {job.type!r} is open"
        )
        return RunOutcome(Failed(job.seq, job.attempt, verdict, failure))


def _late(spec: HandlerSpec, error: BaseException | None) -> TimeoutError:
    """The error of a run that was cancelled at its deadline, whatever it raised."""
    late = TimeoutError(f"the run took longer than {spec.deadline_seconds} s")
    if error is not None and not isinstance(error, asyncio.CancelledError):
        late.__cause__ = error
    return late


def where(task: asyncio.Task[None]) -> str:
    """The source lines at which a task waits, innermost first."""
    lines: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None and len(lines) < _AWAITS_MAX:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            lines.append(f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return " in ".join(reversed(lines[-_FRAMES_MAX:])) or "an unknown line"
