"""The part of the list of alerts beside the message path. (Pure.)

Limits, access, jobs, webhooks, AI replies; see ``telemetry.alerts``.
"""

from __future__ import annotations

from holdfast.telemetry.alert import (
    Alert,
    Severity,
    above,
    at_least,
    below,
    equals,
    rise,
    risen,
    series,
)
from holdfast.telemetry.expressions import Match, Ratio, Series, Sum

_MINUTE, _HOUR = 60, 3600
_5M = 5 * _MINUTE

_DEPTH = Ratio(Sum(Series("reply_queue_depth"), ("pool",)), Series("reply_queue_limit"))
_TIMED_OUT = Ratio(
    rise("reply_queue_timeouts", _5M),
    risen("reply_admissions", _5M, ("layer",), (("layer", "=", "queue"),)),
)
_DONE = Ratio(
    risen("reply_ends", _5M, ("surface", "end"), (("end", "=", "done"),)),
    risen("reply_ends", _5M, ("surface", "end"), (("end", "!=", "cancelled"),)),
)
_OPEN: Match = ("state", "=", "open")
_PROVIDERS = Series("circuit_breaker_state", (("dependency", "=~", "provider:.*"), _OPEN))

BESIDE = (
    Alert(
        "HoldfastRulesStale",
        Severity.SEV3,
        above(Series("limits_rule_staleness_seconds"), 10),
        "This node does not know whether its rules are the newest.",
        "runbooks/rules-stale.md",
        ("004: rule staleness",),
    ),
    Alert(
        "HoldfastRulesPrimaryDown",
        Severity.SEV2,
        equals(series("dependency_up", dependency="rules"), 0, 30),
        "Rules cannot be changed; those in force stay.",
        "runbooks/rules-primary-down.md",
        ("004: PostgreSQL primary unreachable",),
    ),
    Alert(
        "HoldfastAdminDatabaseErrors",
        Severity.SEV3,
        above(
            risen(
                "admin_errors",
                _MINUTE,
                ("operation", "error"),
                (("error", "=", "db_connection_failed"),),
            ),
            5,
        ),
        "Operators' changes of rules fail, because their database does not answer.",
        "runbooks/rules-primary-down.md",
        ("004: Admin API database errors > 5 in 1 minute",),
    ),
    Alert(
        "HoldfastCountersUnavailable",
        Severity.SEV3,
        equals(series("dependency_up", dependency="counters"), 0, 30),
        "Limits are counted by each node alone, with its share.",
        "runbooks/limits-redis.md",
        ("004: Redis unavailable",),
    ),
    Alert(
        "HoldfastIssuerKeysFailing",
        Severity.WARNING,
        above(
            risen("access_jwks_fetches", 10 * _MINUTE, ("outcome",), (("outcome", "!=", "ok"),)), 0
        ),
        "The keys of a token issuer cannot be fetched; known keys stay in use.",
        "runbooks/issuer-keys.md",
    ),
    Alert(
        "HoldfastJobStoreDown",
        Severity.SEV2,
        equals(series("dependency_up", dependency="jobs"), 0, 30),
        "The job store does not answer: no webhook is sent, no assistant replies.",
        "runbooks/job-store-down.md",
    ),
    Alert(
        "HoldfastJobsOld",
        Severity.SEV3,
        above(Series("work_oldest_job_age_seconds"), 30, _MINUTE),
        "Jobs wait longer than they should.",
        "runbooks/blocked-stream.md",
        ("003: outbox oldest age",),
    ),
    Alert(
        "HoldfastJobDeadLetters",
        Severity.SEV3,
        above(risen("work_jobs_dead", _HOUR, ("reason",)), 100),
        "Many jobs were given up.",
        "runbooks/retry-loop.md",
        ("003: dead letters",),
        warning=above(risen("work_jobs_dead", _HOUR, ("reason",)), 0),
    ),
    Alert(
        "HoldfastPoisonJobs",
        Severity.SEV3,
        above(Series("work_poison_candidates"), 0),
        "Jobs have failed ten times or more.",
        "runbooks/retry-loop.md",
        ("003 metric 4: poison_candidates", "003: poison messages, 2"),
    ),
    Alert(
        "HoldfastStreamsBlocked",
        Severity.SEV3,
        above(Series("work_blocked_streams"), 0, _5M),
        "Streams of jobs wait behind a failed head.",
        "runbooks/blocked-stream.md",
    ),
    Alert(
        "HoldfastJobBreakerOpen",
        Severity.SEV3,
        above(Series("work_breakers_open"), 0, _MINUTE),
        "A type of jobs fails so often that none of it is started.",
        "runbooks/retry-loop.md",
        ("003: poison messages, 3",),
    ),
    Alert(
        "HoldfastHandlersStuck",
        Severity.WARNING,
        above(Series("work_stuck_handlers"), 0),
        "Handlers of jobs did not end when they were cancelled.",
        "runbooks/retry-loop.md",
    ),
    Alert(
        "HoldfastWebhookFailing",
        Severity.SEV3,
        above(Series("webhooks_endpoints_failing"), 0, _MINUTE),
        "The last delivery to a webhook endpoint failed; its jobs wait and are tried again.",
        "runbooks/webhook-failing.md",
        warning=above(Series("webhooks_endpoints_disabled"), 0),
    ),
)

REPLIES = (
    Alert(
        "HoldfastReplyQueueFull",
        Severity.SEV3,
        at_least(_DEPTH, 0.8, _MINUTE),
        "The queue for AI replies is almost full; then requests are refused.",
        "runbooks/replies-queue-full.md",
        ("streaming §12: depth",),
        warning=at_least(_DEPTH, 0.5, _MINUTE),
    ),
    Alert(
        "HoldfastReplyQueueTimeouts",
        Severity.SEV3,
        at_least(_TIMED_OUT, 0.05, _5M),
        "Requests for AI replies wait in vain.",
        "runbooks/replies-queue-timeouts.md",
        ("streaming §12: timeouts",),
        warning=at_least(_TIMED_OUT, 0.01, _5M),
    ),
    Alert(
        "HoldfastRepliesFailing",
        Severity.SEV2,
        below(_DONE, 0.95, _5M),
        "AI replies fail, cancelled ones apart.",
        "runbooks/reply-provider-down.md",
        ("streaming §12: success",),
        warning=below(_DONE, 0.98, _5M),
    ),
    Alert(
        "HoldfastReplyPoolExhausted",
        Severity.SEV3,
        equals(series("reply_pool_state", state="exhausted"), 1, _5M),
        "Every place of a pool is taken.",
        "runbooks/replies-queue-full.md",
        ("streaming §12: pool exhausted",),
        warning=equals(series("reply_pool_state", state="critical"), 1, _5M),
    ),
    Alert(
        "HoldfastProviderBreakerOpen",
        Severity.SEV2,
        equals(_PROVIDERS, 1, _MINUTE),
        "A provider of AI replies has failed so often that it is not called.",
        "runbooks/reply-provider-down.md",
        ("streaming §12: provider breaker",),
        where="with a provider of AI replies",
    ),
    Alert(
        "HoldfastRepliesDown",
        Severity.SEV2,
        equals(series("dependency_up", dependency="replies"), 0, 10),
        "The pool or the log of AI replies does not answer; replies cannot be resumed.",
        "runbooks/replies-redis-down.md",
        ("streaming §12: replies down",),
    ),
    Alert(
        "HoldfastRepliesNotResumable",
        Severity.WARNING,
        above(risen("reply_not_resumable", _5M, ("cause",)), 0),
        "AI replies cannot be resumed although they should be.",
        "runbooks/replies-not-resumable.md",
    ),
)
