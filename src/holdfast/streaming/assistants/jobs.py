"""The job of a reply: one per (chat, sequence, assistant), stored once.

The jobs of an assistant in one chat are a stream, so its replies come in the order of
their triggers; a failed one lets the others pass. All assistants together take at most
half of the runners, so that webhooks have room: their jobs are spread over four
*destinations* with a cap each, because one destination alone gets no more than a
quarter of the runners (``work.destinations``).
"""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

import msgspec

from holdfast.message import Message
from holdfast.streaming.assistants.triggers import reply_id, reply_id_of
from holdfast.streaming.reply import FailureCode, ReplyError
from holdfast.work.failures import JobFailed, JobPostponed
from holdfast.work.job import JobDraft, OnFailure, Policies, Reason

JOB_TYPE = "assistant.reply"
SOURCE = "assistants"
"""The inbox's source: a reply's id is stored once."""
DEADLINE_SECONDS = 700.0
"""Above the ten minutes of a reply, so that the reply's own clock ends it first."""
TRIES_MAX = 3
TRIES_SECONDS = 120.0
"""A failure later than this after the first one is final."""
RETRY_SECONDS = 2.5
"""Doubled with each attempt: the tries come 5 s and 10 s after a failure."""
SHUTDOWN_SECONDS = 1.0
NO_STRIKE = frozenset({Reason.THROTTLED, Reason.DEPENDENCY_FAILURE})
"""The sender's rate, or an outage of ours: retried until it is over."""
_DESTINATIONS = 4

_encode = msgspec.json.Encoder().encode

FINAL: frozenset[FailureCode] = frozenset({"upstream_refused"})
"""The provider refuses the request itself, and would again."""
NO_TRY: frozenset[FailureCode] = frozenset({"server_shutdown", "superseded", "server_restarted"})
"""It was stopped on the way; the job is given back."""
THROTTLED: frozenset[FailureCode] = frozenset({"tokens_used_up"})


class AssistantNotice(msgspec.Struct, frozen=True):
    """The payload of the job: which message triggered which assistant."""

    tenant: str
    assistant: str
    chat_id: str
    sequence: int
    message_id: str
    sender_id: str

    @property
    def reply_id(self) -> str:
        return reply_id(self.chat_id, self.sequence, self.message_id, self.assistant)


def draft_of(tenant: str, message: Message, assistant: str) -> JobDraft:
    notice = AssistantNotice(
        tenant,
        assistant,
        message.chat_id,
        message.sequence,
        message.message_id,
        message.sender_id,
    )
    return JobDraft(
        JOB_TYPE,
        _encode(notice),
        f"assistant/{assistant}/{message.chat_id}",
        f"assistants/{crc32(message.chat_id.encode()) % _DESTINATIONS}",
        source=SOURCE,
        source_id=reply_id_of(message, assistant),
    )


def per_destination_max(concurrency: int) -> int:
    """The cap of each destination, so that all together have half of the runners."""
    return max(1, concurrency // (2 * _DESTINATIONS))


def with_assistants(policies: Policies) -> Policies:
    """The policies plus assistants' own: three tries, and the stream goes on.

    A provider's failures open no breaker of the job type: each provider has its own.
    After an outage of ours, or a restart, nobody waits longer than necessary.
    """
    for reason in Reason:
        policies = policies.with_type(
            JOB_TYPE,
            reason,
            base_seconds=RETRY_SECONDS,
            factor=1.0 if reason is Reason.DEPENDENCY_FAILURE else 2.0,
            cap_seconds=60.0,
            strikes_max=TRIES_MAX,
            strike=reason not in NO_STRIKE,
            feeds_breaker=False,
            stream=OnFailure.SKIP,
        )
    return policies


_REASONS: Mapping[FailureCode, Reason] = {
    "upstream_timeout": Reason.TIMEOUT_EXCEEDED,
    "deadline": Reason.TIMEOUT_EXCEEDED,
    "internal": Reason.HANDLER_EXCEPTION,
}


def failure_of(error: ReplyError) -> JobFailed:
    """What the end of a reply means for its job."""
    text = f"{error.code}: {error.message}"
    if error.code in NO_TRY:
        return JobPostponed(Reason.DEPENDENCY_FAILURE, text, retry_after_seconds=SHUTDOWN_SECONDS)
    if error.code in THROTTLED:
        return JobFailed(Reason.THROTTLED, text)
    if error.code in FINAL:
        return JobFailed(Reason.VALIDATION_FAILURE, text)
    return JobFailed(_REASONS.get(error.code, Reason.TRANSPORT_UNAVAILABLE), text)
