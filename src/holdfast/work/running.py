"""One run of one job: decode, call the handler, judge the outcome. Nothing is reported here; see ``coordinator``."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.work.breakers import Breakers
from holdfast.work.contract import Child, Failed, JobGone, LeaseLost, Seat
from holdfast.work.failures import Hook, UnknownType, classify, kind_of
from holdfast.work.handling import Context, Handlers, Handling
from holdfast.work.job import DEFAULTS, Action, Failure, Job, Policies, Policy, Reason, Verdict, decide

_DEADLINE_TICK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. ``finished``: there is nothing to report, the job completed itself in its own transaction or
    is gone.
    """

    failed: Failed | None = None
    finished: bool = False
    children: Sequence[Child] = ()
    released: Sequence[int] = ()


_DONE = Outcome()
_FINISHED = Outcome(finished=True)


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
        self._deadlines: dict[asyncio.Task[None], float] = {}
        self._overdue: set[asyncio.Task[None]] = set()

    async def run(self, job: Job, seat: Seat, task: asyncio.Task[None]) -> Outcome:
        """Raises LeaseLost when the store says so; every other error of a handler is an outcome of this run only.

        ``task`` is the caller's own, which is cancelled at the deadline.
        """
        handling = self._handlers.find(job)
        if handling is None:
            told = f"no handler for the job type {job.type!r}, no transport for {job.destination!r}"
            return self._failed(job, UnknownType(told), 0)
        seconds = self._breakers.put_off(job.type)
        if seconds is not None:
            return self._put_off(job, seconds)
        if self._breakers.is_probe(job.type):
            telemetry.work_probed()
        context = Context(job, seat)
        try:
            await self._call(handling, context, task)
        except LeaseLost:
            self._breakers.neither(job.type)
            raise
        except JobGone as error:
            self._breakers.neither(job.type)
            telemetry.log.warning("work_job_gone", seq=job.seq, type=job.type, error=error.message)
            return _FINISHED
        except asyncio.CancelledError as error:
            if not task.cancelling():  # something the handler waited for was cancelled, not the handler
                return self._raised(context, error)
            self._breakers.neither(job.type)
            raise
        except Exception as error:
            return self._raised(context, error)
        self._breakers.succeeded(job.type)
        if context.finished:
            return _FINISHED
        return Outcome(children=context.children) if context.children else _DONE

    async def watch_deadlines(self) -> None:
        """Cancel runs that exceed their deadline; one timer for all of them."""
        while True:
            await asyncio.sleep(_DEADLINE_TICK_SECONDS)
            now = self._clock.monotonic()
            for task, deadline in list(self._deadlines.items()):
                if deadline < now and task not in self._overdue:
                    self._overdue.add(task)
                    task.cancel()

    def shut(self) -> tuple[list[str], list[str]]:
        """Job types not to be claimed now, and those of them that one may be claimed of; see ``Breakers.shut``."""
        return self._breakers.shut()

    def caps(self) -> dict[str, int]:
        """How many jobs of one destination may run at once, by job type."""
        return self._handlers.caps()

    async def share_breakers(self, seat: Seat) -> None:
        """Tell the store about our breakers and learn of the others'."""
        self._breakers.heard(await seat.breakers(*self._breakers.news()))

    async def _call(self, handling: Handling, context: Context, task: asyncio.Task[None]) -> None:
        payload = handling.decode(context.job.payload)
        self._deadlines[task] = self._clock.monotonic() + handling.deadline_seconds
        overdue = False
        try:
            await handling.run(context, payload)
        except asyncio.CancelledError:
            if task not in self._overdue or task.cancelling() > 1:
                raise
        finally:
            del self._deadlines[task]
            overdue = task in self._overdue
            if overdue:
                self._overdue.discard(task)
                task.uncancel()
        if overdue and not context.finished:
            raise TimeoutError(f"the run took longer than {handling.deadline_seconds} s")

    def _raised(self, context: Context, error: BaseException) -> Outcome:
        """A failure; but after its own transaction the job is completed, and cannot be tried again."""
        job = context.job
        if not context.finished:
            return self._failed(job, error, context.stages, context.released)
        self._breakers.neither(job.type)
        failure, _ = self._judged(job, error)
        told = f"{failure.error_type}: {failure.error}"[:200]
        telemetry.log.error("work_failed_after_its_end", seq=job.seq, type=job.type, error=told)
        return _FINISHED

    def _failed(self, job: Job, error: BaseException, stages: int, released: Sequence[int] = ()) -> Outcome:
        failure, policy = self._judged(job, error)
        if policy.feeds_breaker:
            self._breakers.failed(job.type)
        else:
            self._breakers.neither(job.type)
        verdict = decide(job, failure, policy, self._rng)
        telemetry.work_failed(verdict.reason.name.lower())
        log = telemetry.log.error if verdict.action is Action.DEAD else telemetry.log.warning
        log(
            "work_job_failed",
            seq=job.seq,
            type=job.type,
            attempt=job.attempt,
            reason=verdict.reason.name.lower(),
            action=verdict.action.name.lower(),
            error=f"{failure.error_type}: {failure.error}"[:200],
        )
        return Outcome(Failed(job.seq, job.attempt, verdict, failure, stages), released=released)

    def _judged(self, job: Job, error: BaseException) -> tuple[Failure, Policy]:
        """What cannot be judged (its text raises, no policy for its reason) concerns this job only."""
        try:
            failure = classify(error, self._hook)
            return failure, self._policies.lookup(job.type, failure.reason)
        except Exception as defect:
            telemetry.defect("work", defect)
            told = f"the failure could not be judged: {kind_of(defect)}"
            return Failure(Reason.UNKNOWN, kind_of(error), told), DEFAULTS[Reason.UNKNOWN]

    def _put_off(self, job: Job, seconds: float) -> Outcome:
        delay = seconds * (1 + 0.1 * self._rng.random())
        verdict = Verdict(Action.POSTPONE, Reason.DEPENDENCY_FAILURE, delay)
        failure = Failure(Reason.DEPENDENCY_FAILURE, "BreakerOpen", f"the breaker of {job.type!r} is open")
        return Outcome(Failed(job.seq, job.attempt, verdict, failure))
