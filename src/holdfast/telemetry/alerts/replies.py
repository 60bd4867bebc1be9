"""Alerts about AI replies. (Pure.)"""

from __future__ import annotations

from holdfast.telemetry.alert import (
    FIVE_MINUTES,
    MINUTE,
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

_DEPTH = Ratio(Sum(Series("reply_queue_depth"), ("pool",)), Series("reply_queue_limit"))
_TIMED_OUT = Ratio(
    rise("reply_queue_timeouts", FIVE_MINUTES),
    risen("reply_admissions", FIVE_MINUTES, ("layer",), (("layer", "=", "queue"),)),
)
_DONE = Ratio(
    risen("reply_ends", FIVE_MINUTES, ("surface", "end"), (("end", "=", "done"),)),
    risen("reply_ends", FIVE_MINUTES, ("surface", "end"), (("end", "!=", "cancelled"),)),
)
_OPEN: Match = ("state", "=", "open")
_PROVIDERS = Series("circuit_breaker_state", (("dependency", "=~", "provider:.*"), _OPEN))

REPLIES = (
    Alert(
        "HoldfastReplyQueueFull",
        Severity.SEV3,
        at_least(_DEPTH, 0.8, MINUTE),
        "The queue for AI replies is almost full; then requests are refused.",
        "runbooks/replies-queue-full.md",
        ("streaming §12: depth",),
        warning=at_least(_DEPTH, 0.5, MINUTE),
        explains=("HoldfastReplyQueueTimeouts",),
    ),
    Alert(
        "HoldfastReplyQueueTimeouts",
        Severity.SEV3,
        at_least(_TIMED_OUT, 0.05, FIVE_MINUTES),
        "Requests for AI replies wait in vain.",
        "runbooks/replies-queue-timeouts.md",
        ("streaming §12: timeouts",),
        warning=at_least(_TIMED_OUT, 0.01, FIVE_MINUTES),
    ),
    Alert(
        "HoldfastRepliesFailing",
        Severity.SEV2,
        below(_DONE, 0.95, FIVE_MINUTES),
        "AI replies fail, cancelled ones apart.",
        "runbooks/reply-provider-down.md",
        ("streaming §12: success",),
        warning=below(_DONE, 0.98, FIVE_MINUTES),
    ),
    Alert(
        "HoldfastReplyPoolExhausted",
        Severity.SEV3,
        equals(series("reply_pool_state", state="exhausted"), 1, FIVE_MINUTES),
        "Every place of a pool is taken.",
        "runbooks/replies-queue-full.md",
        ("streaming §12: pool exhausted",),
        warning=equals(series("reply_pool_state", state="critical"), 1, FIVE_MINUTES),
        explains=("HoldfastReplyQueueFull", "HoldfastReplyQueueTimeouts"),
    ),
    Alert(
        "HoldfastProviderBreakerOpen",
        Severity.SEV2,
        equals(_PROVIDERS, 1, MINUTE),
        "A provider of AI replies has failed so often that it is not called.",
        "runbooks/reply-provider-down.md",
        ("streaming §12: provider breaker",),
        where="with a provider of AI replies",
        explains=("HoldfastRepliesFailing",),
    ),
    Alert(
        "HoldfastRepliesDown",
        Severity.SEV2,
        equals(series("dependency_up", dependency="replies"), 0, 10),
        "The pool or the log of AI replies does not answer; replies cannot be resumed.",
        "runbooks/replies-redis-down.md",
        ("streaming §12: replies down",),
        explains=("HoldfastRepliesNotResumable",),
    ),
    Alert(
        "HoldfastRepliesNotResumable",
        Severity.WARNING,
        above(risen("reply_not_resumable", FIVE_MINUTES, ("cause",)), 0),
        "AI replies cannot be resumed although they should be.",
        "runbooks/replies-not-resumable.md",
    ),
)
