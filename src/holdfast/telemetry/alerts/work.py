"""Alerts about jobs and webhooks. (Pure.)"""

from __future__ import annotations

from holdfast.telemetry.alert import (
    FIVE_MINUTES,
    HOUR,
    MINUTE,
    Alert,
    Severity,
    above,
    equals,
    risen,
    series,
)
from holdfast.telemetry.expressions import Series

WORK = (
    Alert(
        "HoldfastJobStoreDown",
        Severity.SEV2,
        equals(series("dependency_up", dependency="jobs"), 0, 30),
        "The job store does not answer: no webhook is sent, no assistant replies.",
        "runbooks/job-store-down.md",
        explains=("HoldfastJobsOld", "HoldfastStreamsBlocked"),
    ),
    Alert(
        "HoldfastWebhookFailing",
        Severity.SEV3,
        above(Series("webhooks_endpoints_failing"), 0, MINUTE),
        "The last delivery to a webhook endpoint failed; its jobs wait and are tried again.",
        "runbooks/webhook-failing.md",
        warning=above(Series("webhooks_endpoints_disabled"), 0),
        explains=(
            "HoldfastJobsOld",
            "HoldfastStreamsBlocked",
            "HoldfastPoisonJobs",
            "HoldfastJobDeadLetters",
        ),
    ),
    Alert(
        "HoldfastJobsOld",
        Severity.SEV3,
        above(Series("work_oldest_job_age_seconds"), 30, MINUTE),
        "Jobs wait longer than they should.",
        "runbooks/blocked-stream.md",
        ("003: outbox oldest age",),
    ),
    Alert(
        "HoldfastStreamsBlocked",
        Severity.SEV3,
        above(Series("work_blocked_streams"), 0, FIVE_MINUTES),
        "Streams of jobs wait behind a failed head.",
        "runbooks/blocked-stream.md",
        explains=("HoldfastJobsOld",),
    ),
    Alert(
        "HoldfastJobDeadLetters",
        Severity.SEV3,
        above(risen("work_jobs_dead", HOUR, ("reason",)), 100),
        "Many jobs were given up.",
        "runbooks/retry-loop.md",
        ("003: dead letters",),
        warning=above(risen("work_jobs_dead", HOUR, ("reason",)), 0),
    ),
    Alert(
        "HoldfastPoisonJobs",
        Severity.SEV3,
        above(Series("work_poison_candidates"), 0),
        "Jobs have failed ten times or more.",
        "runbooks/retry-loop.md",
        ("003 metric 4: poison_candidates", "003: poison messages, 2"),
        explains=("HoldfastStreamsBlocked", "HoldfastJobsOld"),
    ),
    Alert(
        "HoldfastJobBreakerOpen",
        Severity.SEV3,
        above(Series("work_breakers_open"), 0, MINUTE),
        "A type of jobs fails so often that none of it is started.",
        "runbooks/retry-loop.md",
        ("003: poison messages, 3",),
        explains=("HoldfastJobsOld", "HoldfastStreamsBlocked"),
    ),
    Alert(
        "HoldfastHandlersStuck",
        Severity.WARNING,
        above(Series("work_stuck_handlers"), 0),
        "Handlers of jobs did not end when they were cancelled.",
        "runbooks/retry-loop.md",
    ),
)
