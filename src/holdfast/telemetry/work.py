"""Work: jobs and what became of them."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.telemetry.marks import sometimes
from holdfast.telemetry.metrics import counter, gauge

_jobs_completed = counter("work_jobs_completed", "Jobs done, as their worker reported them")
_jobs_failed = counter("work_jobs_failed", "Failed runs of jobs, by reason [failure_reason]", ("reason",))
_lease_lost = counter("work_leases_lost", "Times this process was declared dead while it lived")
_reports_refused = counter("work_reports_refused", "Reports of jobs that held a value the job store cannot take")
_runners_replaced = counter("work_runners_replaced", "Runners that ended by what a handler did, and were replaced")
_restarted = counter("work_workers_restarted", "Workers whose task was cancelled by the program, and started again")
_exhausted = counter("work_runners_exhausted", "Times a worker lost all its runners to handlers that never end")
_stuck = gauge("work_stuck_handlers", "Handlers that did not end when they were cancelled and still run")
_jobs = gauge("work_jobs", "Jobs that are not done, by state [jobs by status]", ("state",))
_jobs_by_reason = gauge("work_jobs_waiting", "Failed jobs that wait, by reason [failure_reason]", ("reason",))
_jobs_by_attempt = gauge(
    "work_jobs_by_attempt", "Failed jobs that wait, by attempt; 10 stands for more too [attempts]", ("attempt",)
)
_next_due = gauge("work_next_due_timestamp_seconds", "When the next waiting job is due; 0 if none waits [next_retry]")
_last_due = gauge("work_last_due_timestamp_seconds", "When the last waiting job is due; 0 if none waits [last_retry]")
_work_dead = gauge("work_dead_letters", "Dead letters [dead_letters]")
_poison = gauge("work_poison_candidates", "Failed jobs with ten attempts or more [poison_candidates]")
_scheduled = gauge("work_scheduled_jobs", "Jobs that wait for their time [scheduled_count]")
_oldest_job = gauge("work_oldest_job_age_seconds", "Age of the oldest job that is not done [outbox oldest age]")
_blocked_streams = gauge("work_blocked_streams", "Streams that wait behind a failed head")
_work_breakers = gauge("work_breakers_open", "Job types whose breaker is open")

_webhooks_disabled = gauge("webhooks_endpoints_disabled", "Endpoints of webhooks that are disabled")
_webhooks_parked = gauge("webhooks_jobs_parked", "Jobs that wait for disabled endpoints")
_webhooks_expired = counter("webhooks_jobs_expired", "Parked jobs that became dead letters: too many, or too old")


def webhooks_parked(endpoints: int, jobs: int) -> None:
    _webhooks_disabled.set(endpoints)
    _webhooks_parked.set(jobs)


def webhooks_expired(count: int) -> None:
    _webhooks_expired.inc(count)


def work_completed(count: int) -> None:
    _jobs_completed.inc(count)


def work_failed(reason: str) -> None:
    _jobs_failed.labels(reason).inc()


def work_lease_lost() -> None:
    _lease_lost.inc()
    sometimes("a worker lost its lease")


def work_report_refused() -> None:
    _reports_refused.inc()


def work_runner_replaced() -> None:
    _runners_replaced.inc()


def work_restarted() -> None:
    _restarted.inc()


def work_runners_exhausted() -> None:
    _exhausted.inc()


def work_stuck(count: int) -> None:
    _stuck.set(count)


def work_completion_refused() -> None:
    sometimes("a zombie's completion was refused")


def work_probed() -> None:
    sometimes("a job type was probed: half_open")


def work_known_already() -> None:
    sometimes("a message from outside was known already")


def work_counts(by_state: Mapping[str, int], by_reason: Mapping[str, int], open_breakers: int) -> None:
    """The state of the whole store, as last read."""
    _jobs.clear()
    _jobs_by_reason.clear()
    for state, count in by_state.items():
        _jobs.labels(state).set(count)
    for reason, count in by_reason.items():
        _jobs_by_reason.labels(reason).set(count)
    _work_breakers.set(open_breakers)


def work_schedule(by_attempt: Mapping[int, int], next_due_at: float | None, last_due_at: float | None) -> None:
    _jobs_by_attempt.clear()
    for attempt, count in by_attempt.items():
        _jobs_by_attempt.labels(str(min(attempt, 10))).inc(count)
    _next_due.set(next_due_at or 0.0)
    _last_due.set(last_due_at or 0.0)


def work_totals(dead: int, poison: int, scheduled: int, oldest_age_seconds: float, blocked_streams: int) -> None:
    _work_dead.set(dead)
    _poison.set(poison)
    _scheduled.set(scheduled)
    _oldest_job.set(oldest_age_seconds)
    _blocked_streams.set(blocked_streams)
