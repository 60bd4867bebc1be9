"""The work rate of one connection: what it may cause, when its socket is not read, and
when it is closed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.session.settings import InboundSettings
from holdfast.session.work_rate import WorkRate

INBOUND = InboundSettings()
BURST, RATE = INBOUND.work_rate_limit_burst, INBOUND.work_rate_limit_per_second
TICK = 0.25
READ_MAX = 682


def test_a_burst_is_read_and_one_frame_more_pauses_reading() -> None:
    work = WorkRate(INBOUND, 0.0)
    assert not work.spend(BURST, 0.0)
    assert not work.paused
    assert work.spend(1, 0.0), "reported once, when it begins"
    assert work.paused
    assert not work.spend(1, 0.0)


def test_reading_goes_on_when_what_was_read_is_paid_for() -> None:
    work = WorkRate(INBOUND, 0.0)
    work.spend(BURST + 100, 0.0)
    assert not work.resume(100 / RATE - 0.01)
    assert work.resume(100 / RATE)
    assert not work.paused
    assert not work.resume(1.0), "it is not paused"


def test_a_client_within_the_rate_is_never_paused() -> None:
    work = WorkRate(INBOUND, 0.0)
    assert not any(work.spend(1, n / RATE) for n in range(10_000))


def closed_at(arrivals: Callable[[float], float], seconds: float) -> float:
    """When a client is closed of whom ``arrivals(now)`` frames come at each tick and
    wait to be read; or inf.
    """
    work = WorkRate(INBOUND, 0.0)
    now, waiting = 0.0, 0.0
    while now < seconds:
        waiting += arrivals(now)
        if work.is_exceeded(now):
            return now
        work.resume(now)
        while waiting >= 1 and not work.paused:
            read = min(int(waiting), READ_MAX)
            waiting -= read
            work.spend(read, now)
        now += TICK
    return float("inf")


def test_a_flood_is_closed_after_ten_seconds_without_reading() -> None:
    assert 10 <= closed_at(lambda now: 1_000_000, 60) <= 14


def test_a_client_that_stays_a_little_above_the_rate_is_closed_in_the_end() -> None:
    assert 10 < closed_at(lambda now: RATE * 1.2 * TICK, 300) < 120


def test_bursts_that_the_rate_makes_up_for_are_slowed_and_not_closed() -> None:
    assert closed_at(lambda now: 900 if now % 10 == 0 else 0, 300) == float("inf")


def test_pauses_before_the_window_are_forgotten() -> None:
    work = WorkRate(INBOUND, 0.0)
    work.spend(int(BURST + 9 * RATE), 0.0)
    assert work.resume(9.0)
    work.spend(int(BURST + RATE * 2), 29.0)
    assert not work.is_exceeded(29.9)
    assert work.is_exceeded(30.0), "9 s then and 1 s now"
    assert work.resume(31.0)
    assert not work.is_exceeded(37.0), (
        "3 s of the first pause and 2 s of the second are within the last 30 s"
    )


def test_old_pauses_do_not_count_in_the_window() -> None:
    work = WorkRate(INBOUND, 0.0)
    work.spend(int(BURST + 9 * RATE), 0.0)
    assert work.resume(9.0)
    work.spend(int(BURST + 11 * RATE), 100.0)
    assert not work.is_exceeded(109.9)
    assert work.is_exceeded(110.0)


@given(st.lists(st.tuples(st.integers(1, READ_MAX), st.floats(0, 2)), max_size=200))
def test_work_never_exceeds_burst_rate_and_one_read(reads: list[tuple[int, float]]) -> None:
    work = WorkRate(INBOUND, 0.0)
    now, total = 0.0, 0
    for size, wait in reads:
        now += wait
        work.resume(now)
        if not work.paused:
            total += size
            work.spend(size, now)
        assert total <= BURST + RATE * now + READ_MAX


@pytest.mark.parametrize(
    "wrong",
    [
        {"work_rate_limit_per_second": 59},
        {"rate_limit_per_second": 151},
        {"work_rate_limit_burst": 119},
        {"work_pause_seconds_max": 31},
        {"work_pause_window_seconds": 0},
    ],
)
def test_a_work_rate_below_the_rates_it_includes_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="work_"):
        InboundSettings(**wrong)  # type: ignore[arg-type]
