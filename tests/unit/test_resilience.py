"""The breaker, the backoff and the bucket."""

from __future__ import annotations

import random

import pytest

from holdfast.resilience import (
    Backoff,
    Breaker,
    BreakerSettings,
    BreakerState,
    Bucket,
    retry_after_seconds,
)


def opened(settings: BreakerSettings | None = None) -> Breaker:
    breaker = Breaker(settings or BreakerSettings())
    for _ in range(5):
        assert breaker.admit(0.0)
        breaker.failure(0.0)
    return breaker


@pytest.mark.covers("000 breaker 5 failures in 30 s")
def test_opens_after_five_failures_in_thirty_seconds() -> None:
    breaker = Breaker(BreakerSettings())
    for n in range(4):
        breaker.failure(float(n))
    assert breaker.state(4.0) is BreakerState.CLOSED
    breaker.failure(4.0)
    assert breaker.state(4.0) is BreakerState.OPEN
    assert not breaker.admit(5.0)


def test_old_failures_are_forgotten() -> None:
    breaker = Breaker(BreakerSettings())
    for n in range(4):
        breaker.failure(float(n))
    breaker.failure(40.0)
    assert breaker.state(40.0) is BreakerState.CLOSED


@pytest.mark.covers("000 breaker, few failures among many calls")
def test_few_failures_among_many_calls_do_not_open_it() -> None:
    breaker = Breaker(BreakerSettings())
    for _ in range(1000):
        breaker.success(1.0)
    for _ in range(5):
        breaker.failure(1.0)
    assert breaker.state(1.0) is BreakerState.CLOSED


@pytest.mark.covers("000 breaker, few failures among many calls")
def test_ratio_zero_opens_by_the_count_alone() -> None:
    breaker = Breaker(BreakerSettings(min_failure_ratio=0))
    for _ in range(1000):
        breaker.success(1.0)
    for _ in range(5):
        breaker.failure(1.0)
    assert breaker.state(1.0) is BreakerState.OPEN


@pytest.mark.covers("000 1.3 open: reject, 30 s to half-open")
def test_one_probe_after_the_rest_and_its_success_closes() -> None:
    breaker = opened()
    assert not breaker.admit(29.9)
    assert breaker.admit(30.0)
    assert not breaker.admit(30.0)
    breaker.success(30.1)
    assert breaker.state(30.1) is BreakerState.CLOSED


def test_a_failed_probe_opens_it_again() -> None:
    breaker = opened()
    assert breaker.admit(30.0)
    breaker.failure(31.0)
    assert breaker.state(60.9) is BreakerState.OPEN
    assert breaker.state(61.0) is BreakerState.HALF_OPEN


def test_probe_without_a_result_makes_room_for_another() -> None:
    breaker = opened()
    assert breaker.admit(30.0)
    breaker.neither()
    assert breaker.admit(30.0)


@pytest.mark.parametrize(
    "wrong", [{"failure_threshold": 0}, {"open_duration_seconds": 0}, {"min_failure_ratio": 2}]
)
def test_bad_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        BreakerSettings(**wrong)  # type: ignore[arg-type]


def test_backoff_doubles_to_its_cap_with_full_jitter() -> None:
    backoff = Backoff(1, 16)
    assert [backoff.bound(n) for n in range(1, 8)] == [1, 2, 4, 8, 16, 16, 16]
    rng = random.Random(1)
    delays = [backoff.delay(5, rng) for _ in range(1000)]
    assert min(delays) < 1 and max(delays) > 15 and max(delays) <= 16


def test_bucket_allows_the_burst_then_the_rate() -> None:
    bucket = Bucket(10, 20, now=0.0)
    assert [bucket.take(0.0) for _ in range(20)] == [0.0] * 20
    assert bucket.take(0.0) == pytest.approx(0.1)
    assert bucket.take(0.1) == 0.0
    assert bucket.take(0.1) > 0


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("", None),
        ("0", 0),
        ("7", 7),
        ("3601", 3600),
        ("9" * 400, 3600),
        ("-1", None),
        ("1.5", None),
        ("soon", None),
        ("\N{SUPERSCRIPT TWO}", None),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 60),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 60),
        ("Sun Nov  6 08:49:37 1994", 60),
        ("Sun, 06 Nov 1994 08:48:36 GMT", 0),
        ("Sun, 06 Nov 2094 08:48:36 GMT", 3600),
        ("Sun, 06 Nov 1994 08:49:37 CET", None),
        ("Sun, 31 Feb 1994 08:49:37 GMT", None),
        ("1994-11-06T08:49:37Z", None),
    ],
)
def test_a_server_is_believed_when_to_come_again_for_an_hour_at_most(
    header: str, seconds: float | None
) -> None:
    assert retry_after_seconds(header, now=784111717.0) == seconds
