"""What is decided when a job fails: the document's retry table and timeline, policies,
and the bounds of a draft.
"""

from __future__ import annotations

import random

import aiohttp
import asyncpg
import httpx
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidMessage, MessageTooLarge
from holdfast.work.failures import classify
from holdfast.work.job import (
    DEFAULTS,
    PAYLOAD_BYTES_MAX,
    Block,
    Failure,
    FailureAction,
    Job,
    JobDraft,
    OnFailure,
    Policies,
    Policy,
    Reason,
    Stage,
    check_stage,
    decide,
)

RNG = random.Random(7)


def verdict(
    reason: Reason, *, attempt: int = 1, strikes: int = 0, policies: Policies | None = None
):  # type: ignore[no-untyped-def]
    job = Job(1, "order", b"{}", attempt=attempt, strikes=strikes)
    return decide(job, Failure(reason), (policies or Policies()).lookup("order", reason), RNG)


@pytest.mark.covers("003 the formula: 30 s × 2^attempts")
def test_uniform_preset_reproduces_the_retry_table() -> None:
    policy = Policies.preset("uniform").lookup("order", Reason.UNKNOWN)
    minutes = [policy.delay(attempt, RNG) / 60 for attempt in range(1, 6)]
    assert minutes == [1, 2, 4, 8, 16]


@pytest.mark.covers("003 the timeline of two failures and a success")
def test_uniform_preset_reproduces_the_timeline_of_two_failures() -> None:
    policies, now = Policies.preset("uniform"), 0.0
    first = verdict(Reason.TRANSPORT_UNAVAILABLE, attempt=1, strikes=0, policies=policies)
    now += first.delay_seconds
    assert now == 60
    second = verdict(Reason.TRANSPORT_UNAVAILABLE, attempt=2, strikes=1, policies=policies)
    now += second.delay_seconds
    assert now == 180
    assert first.action is second.action is FailureAction.RETRY


@pytest.mark.covers("003 optional cap of one hour")
def test_default_delay_is_capped_at_an_hour_uniform_is_not() -> None:
    uniform = Policies.preset("uniform").lookup("order", Reason.UNKNOWN)
    assert uniform.delay(21, RNG) / 86400 > 700
    assert DEFAULTS[Reason.UNKNOWN].delay(21, RNG) <= 3600 * 1.1


def test_unknown_preset_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ValueError, match="'seed'; known presets: default, uniform"):
        Policies.preset("seed")


@pytest.mark.covers("003 ten attempts recommended")
@pytest.mark.parametrize("reason", list(Reason))
def test_uniform_preset_retries_every_reason_nine_times_then_dead(
    reason: Reason,
) -> None:
    policies = Policies.preset("uniform")
    assert [
        verdict(reason, attempt=n + 1, strikes=n, policies=policies).action for n in range(9)
    ] == [FailureAction.RETRY] * 9
    last = verdict(reason, attempt=10, strikes=9, policies=policies)
    assert (last.action, last.reason) == (FailureAction.DEAD, Reason.POISON_MESSAGE)


@pytest.mark.covers("003 Unknown = 99")
@pytest.mark.parametrize(
    ("number", "name", "action", "strike", "breaker"),
    [
        (1, "TRANSPORT_UNAVAILABLE", FailureAction.RETRY, False, True),
        (2, "HANDLER_EXCEPTION", FailureAction.RETRY, True, False),
        (3, "VALIDATION_FAILURE", FailureAction.DEAD, True, False),
        (4, "TIMEOUT_EXCEEDED", FailureAction.RETRY, True, False),
        (5, "SERIALIZATION_ERROR", FailureAction.DEAD, True, False),
        (6, "DEPENDENCY_FAILURE", FailureAction.RETRY, False, True),
        (7, "POISON_MESSAGE", FailureAction.DEAD, True, False),
        (8, "THROTTLED", FailureAction.RETRY, False, False),
        (99, "UNKNOWN", FailureAction.RETRY, True, False),
    ],
)
def test_the_default_for_each_reason(
    number: int, name: str, action: FailureAction, strike: bool, breaker: bool
) -> None:
    """The numbers are stored with jobs and dead letters, the names are labels of
    metrics and values in JSON.
    """
    reason = Reason(number)
    assert reason.name == name
    decided = verdict(reason)
    assert (decided.action, decided.strike, DEFAULTS[reason].feeds_breaker) == (
        action,
        strike,
        breaker,
    )


@pytest.mark.covers("003 TransportUnavailable = 1")
def test_unavailable_transport_never_makes_poison() -> None:
    assert (
        verdict(Reason.TRANSPORT_UNAVAILABLE, attempt=500, strikes=9).action is FailureAction.RETRY
    )


@pytest.mark.covers("003 a ninth reason: Throttled = 8")
def test_throttled_job_waits_at_least_for_retry_after() -> None:
    job = Job(1, "order", b"{}")
    failure = Failure(Reason.THROTTLED, retry_after_seconds=900)
    assert decide(job, failure, DEFAULTS[Reason.THROTTLED], RNG).delay_seconds == 900


@pytest.mark.covers("003 different strategies per reason")
def test_type_may_have_its_own_policy_for_one_reason() -> None:
    policies = Policies().with_type(
        "order", Reason.UNKNOWN, stream=OnFailure.SKIP, base_seconds=1.0
    )
    assert policies.lookup("order", Reason.UNKNOWN).stream is OnFailure.SKIP
    assert policies.lookup("order", Reason.TIMEOUT_EXCEEDED) == DEFAULTS[Reason.TIMEOUT_EXCEEDED]
    assert policies.lookup("other", Reason.UNKNOWN) == DEFAULTS[Reason.UNKNOWN]


@pytest.mark.covers("003 base interval 30 s, configurable")
def test_type_may_have_one_policy_for_all_reasons() -> None:
    policies = Policies().with_type("order", strikes_max=2)
    assert {policies.lookup("order", reason).strikes_max for reason in Reason} == {2}


def test_park_stops_the_stream_until_an_operator_acts() -> None:
    policies = Policies().with_type("order", Reason.UNKNOWN, stream=OnFailure.PARK)
    decided = verdict(Reason.UNKNOWN, policies=policies)
    assert decided.action is FailureAction.PARK
    assert decided.blocks


@given(st.integers(1, 10_000), st.sampled_from(list(Reason)), st.integers(0, 2**32))
def test_delay_is_within_its_jitter_and_never_above_the_cap(
    attempt: int, reason: Reason, seed: int
) -> None:
    policy = DEFAULTS[reason]
    delay = policy.delay(attempt, random.Random(seed))
    expected = min(3600.0, 30.0 * 2.0 ** min(attempt, 60))
    assert expected * 0.9 <= delay <= expected * 1.1


@given(st.integers(1, 50), st.integers(0, 50), st.sampled_from(list(Reason)))
def test_dead_verdict_lifts_the_block_and_a_retry_keeps_it(
    attempt: int, strikes: int, reason: Reason
) -> None:
    decided = verdict(reason, attempt=attempt, strikes=strikes)
    assert decided.blocks is (decided.action is not FailureAction.DEAD)


@pytest.mark.parametrize("wrong", [0, 3, 32768, 65536, -1])
def test_unknown_stage_is_refused(wrong: int) -> None:
    with pytest.raises(InvalidMessage):
        check_stage(wrong)


@pytest.mark.covers("003 Stored 1, EventStored 2, Published 4, bitwise")
def test_stages_are_the_bits_of_the_document_and_users_have_their_own() -> None:
    assert [check_stage(stage) for stage in (1, 2, 4, 8, 16384)] == [1, 2, 4, 8, 16384]
    assert {stage.name: int(stage) for stage in Stage} == {
        "STORED": 1,
        "EVENT_STORED": 2,
        "PUBLISHED": 4,
        "USER": 8,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": ""},
        {"type": "x" * 201},
        {"stream": ""},
        {"stream": "a\x00b"},
        {"delay_seconds": -1},
        {"delay_seconds": float("nan")},
        {"source": "shop"},
        {"source_id": "1"},
    ],
)
def test_draft_with_a_bad_field_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidMessage):
        JobDraft(**{"type": "order", "payload": b"{}", **wrong})  # type: ignore[arg-type]


def test_payload_above_one_mebibyte_is_refused() -> None:
    JobDraft("order", bytes(PAYLOAD_BYTES_MAX))
    with pytest.raises(MessageTooLarge):
        JobDraft("order", bytes(PAYLOAD_BYTES_MAX + 1))


@pytest.mark.parametrize(
    "wrong", [{"base_seconds": 0}, {"factor": 0.5}, {"jitter": 1}, {"strikes_max": 0}]
)
def test_invalid_policy_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Policy(**wrong)  # type: ignore[arg-type]


def test_block_holds_jobs_behind_its_head_unless_released() -> None:
    block = Block(
        "s",
        head=10,
        released_through=12,
        released_ids=frozenset({15}),
        released_types=frozenset({"mail"}),
    )
    held = [seq for seq in range(9, 18) if block.holds(seq, "order")]
    assert held == [13, 14, 16, 17]
    assert not block.holds(17, "mail")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (asyncpg.ConnectionDoesNotExistError("gone"), Reason.DEPENDENCY_FAILURE),
        (asyncpg.AdminShutdownError("stopping"), Reason.DEPENDENCY_FAILURE),
        (asyncpg.UniqueViolationError("twice"), Reason.HANDLER_EXCEPTION),
        (aiohttp.ServerDisconnectedError(), Reason.TRANSPORT_UNAVAILABLE),
        (httpx.ReadTimeout("slow"), Reason.TRANSPORT_UNAVAILABLE),
        (redis.ConnectionError("unavailable"), Reason.DEPENDENCY_FAILURE),
        (ConnectionRefusedError(), Reason.TRANSPORT_UNAVAILABLE),
        (RuntimeError("a defect"), Reason.HANDLER_EXCEPTION),
    ],
)
def test_unavailability_errors_of_known_libraries_have_their_reason(
    error: Exception, reason: Reason
) -> None:
    assert classify(error).reason is reason
    assert classify(error, lambda _: Reason.UNKNOWN).reason is Reason.UNKNOWN, (
        "the user's hook comes first"
    )
