"""The four algorithms, by the numbers and by their bounds."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from holdfast.limits.algorithms import COUNTERS, Concurrency, Counter, LimitParams, hold, peek, take
from holdfast.limits.rules import Algorithm, RuleVersion

AMOUNTS: list[Algorithm] = ["token_bucket", "fixed_window", "sliding_window"]
T0 = 1_700_000_040_000.0  # the beginning of a minute


def params(
    algorithm: Algorithm, limit: int = 100, version: int = 1, window_ms: float = 60_000
) -> LimitParams:
    return LimitParams(algorithm, RuleVersion(1, version), limit, window_ms, limit)


def fresh(algorithm: Algorithm, limit: int = 100, window_ms: float = 60_000) -> Counter:
    return COUNTERS[algorithm](params(algorithm, limit, window_ms=window_ms))


@pytest.mark.parametrize("algorithm", AMOUNTS)
def test_limit_is_used_up_and_recovers(algorithm: Algorithm) -> None:
    counter, rule = fresh(algorithm, 10), params(algorithm, 10)
    for left in range(9, -1, -1):
        reading = take(counter, rule, T0, 1)
        assert (reading.admitted, reading.remaining) == (1, left)
    refused = take(counter, rule, T0, 1)
    assert (refused.admitted, refused.remaining) == (0, 0)
    assert refused.wait_ms > 0
    assert take(counter, rule, T0 + refused.wait_ms - 1, 1).admitted == 0
    assert take(counter, rule, T0 + refused.wait_ms + 0.001, 1).admitted == 1


@pytest.mark.covers("004 what was used when the limit changes")
@pytest.mark.parametrize("algorithm", AMOUNTS)
def test_used_amount_carries_over_to_a_changed_limit(algorithm: Algorithm) -> None:
    counter = fresh(algorithm)
    take(counter, params(algorithm, 100), T0, 80)
    assert take(counter, params(algorithm, 500, version=2), T0, 1).remaining == 419
    lowered = take(counter, params(algorithm, 50, version=3), T0, 1)
    assert (lowered.admitted, lowered.remaining) == (0, 0)
    assert (
        take(counter, params(algorithm, 50, version=3), T0 + lowered.wait_ms + 1, 1).admitted == 1
    )


@pytest.mark.parametrize("algorithm", [*AMOUNTS, "concurrency"])
def test_request_with_an_older_rule_is_decided_by_the_newer(algorithm: Algorithm) -> None:
    counter = COUNTERS[algorithm](params(algorithm, 5, version=8))
    reading = (
        take(counter, params(algorithm, 100, version=7), T0, 6)
        if algorithm != "concurrency"
        else None
    )
    if reading is None:
        assert isinstance(counter, Concurrency)
        readings = [hold(counter, params(algorithm, 100, version=7), T0, f"h{n}") for n in range(6)]
        reading = readings[-1]
    assert reading.admitted == 0
    assert (reading.limit, reading.stamp) == (5, RuleVersion(1, 8))


@pytest.mark.parametrize("algorithm", AMOUNTS)
def test_equal_costs_are_admitted_as_far_as_they_fit(algorithm: Algorithm) -> None:
    reading = take(fresh(algorithm, 10), params(algorithm, 10), T0, 3, times=5)
    assert (reading.admitted, reading.remaining) == (3, 1)
    assert reading.wait_ms > 0


@pytest.mark.parametrize("algorithm", AMOUNTS)
def test_lease_is_taken_only_far_from_the_limit(algorithm: Algorithm) -> None:
    counter, rule = fresh(algorithm), params(algorithm)
    assert take(counter, rule, T0, 1, want=10) == structs.replace(
        take(fresh(algorithm), rule, T0, 11), leased=10
    )
    assert take(counter, rule, T0, 75, want=10).leased == 0
    assert take(counter, rule, T0, 1, times=20, want=1).leased == 0


@pytest.mark.parametrize("algorithm", AMOUNTS)
def test_returned_tokens_can_be_used_again(algorithm: Algorithm) -> None:
    counter, rule = fresh(algorithm, 10), params(algorithm, 10)
    take(counter, rule, T0, 10)
    counter.give(T0, 4, T0)
    assert take(counter, rule, T0, 1, times=10).admitted == 4


@pytest.mark.parametrize("algorithm", AMOUNTS)
def test_drained_tokens_are_not_returned_again(algorithm: Algorithm) -> None:
    counter, rule = fresh(algorithm, 60), params(algorithm, 60)
    take(counter, rule, T0, 30)
    later = T0 + 60_000
    take(counter, rule, later, 60)
    room = counter.room(later)
    counter.give(later, 30, T0)
    assert counter.room(later) == room


@pytest.mark.parametrize("algorithm", AMOUNTS)
def test_corrected_window_takes_effect_soon(
    algorithm: Algorithm,
) -> None:
    counter = fresh(algorithm, 10, window_ms=86_400_000)
    take(counter, params(algorithm, 10, window_ms=86_400_000), T0, 10)
    shorter = params(algorithm, 10, version=2, window_ms=1000)
    refused = take(counter, shorter, T0, 1)
    assert refused.admitted == 0 and 0 < refused.wait_ms <= 2000, (
        "what was used is used in the new window"
    )
    assert take(counter, shorter, T0 + refused.wait_ms + 0.001, 1).admitted == 1
    assert take(counter, shorter, T0 + 10_000, 1, times=20).admitted == 10


def test_use_of_a_fixed_window_carries_over_to_a_longer_one() -> None:
    counter = fresh("fixed_window", 10, window_ms=1000)
    take(counter, params("fixed_window", 10, window_ms=1000), T0 + 30_000, 8)
    longer = params("fixed_window", 10, version=2)
    assert take(counter, longer, T0 + 30_500, 1, times=20).admitted == 2
    assert take(counter, longer, T0 + 59_000, 1).admitted == 0
    assert take(counter, longer, T0 + 60_000, 1, times=20).admitted == 10


def test_sliding_window_fades_and_survives_a_new_length() -> None:
    counter, rule = fresh("sliding_window"), params("sliding_window")
    take(counter, rule, T0, 100)
    assert take(counter, rule, T0 + 90_000, 1, times=100).admitted == 50
    longer = params("sliding_window", 100, version=2, window_ms=120_000)
    assert take(counter, longer, T0 + 90_000, 1).admitted == 0
    assert take(counter, longer, T0 + 400_000, 1, times=200).admitted == 100


def test_clock_step_back_neither_refills_nor_raises() -> None:
    for algorithm in AMOUNTS:
        counter, rule = fresh(algorithm, 10), params(algorithm, 10)
        take(counter, rule, T0, 10)
        refused = take(counter, rule, T0 - 3_600_000, 1)
        assert refused.admitted == 0 and refused.wait_ms <= 120_000
        later = T0 - 3_600_000 + refused.wait_ms + 0.001
        assert take(counter, rule, later, 1).admitted == 1, (
            "nobody waits for the clock to be where it was"
        )


def test_holds_are_granted_and_released() -> None:
    counter, rule = Concurrency(params("concurrency", 2)), params("concurrency", 2)
    assert (
        hold(counter, rule, T0, "a").admitted == hold(counter, rule, T0 + 1000, "b").admitted == 1
    )
    refused = hold(counter, rule, T0 + 2000, "c")
    assert (refused.admitted, refused.wait_ms) == (0, 58_000)
    assert hold(counter, rule, T0 + 2000, "a").admitted == 1, (
        "a holder that renews is never refused"
    )
    counter.release("b")
    assert hold(counter, rule, T0 + 2000, "c").admitted == 1
    assert hold(counter, rule, T0 + 2000 + 60_000, "d").remaining == 1, (
        "the silent ones are forgotten"
    )


def test_holds_expire_after_their_window_despite_clock_steps() -> None:
    counter, rule = Concurrency(params("concurrency", 1)), params("concurrency", 1)
    assert hold(counter, rule, T0, "a").admitted == 1
    back = T0 - 3_600_000
    refused = hold(counter, rule, back + 1000, "b")
    assert (refused.admitted, refused.wait_ms) == (0, 60_000), "from when this was noticed"
    assert hold(counter, rule, back + 60_000, "b").admitted == 0
    assert hold(counter, rule, back + 61_000, "b").admitted == 1


def test_peek_uses_nothing() -> None:
    counter, rule = fresh("token_bucket", 1), params("token_bucket", 1)
    assert peek(counter, rule, T0, 1)
    assert peek(counter, rule, T0, 1)
    take(counter, rule, T0, 1)
    assert not peek(counter, rule, T0, 1)


@pytest.mark.parametrize("algorithm", COUNTERS)
def test_counters_are_exempt_from_garbage_collection(algorithm: Algorithm) -> None:
    counter = fresh(algorithm)
    counter.settle(1000.0)
    assert not gc.is_tracked(counter)


@settings(max_examples=200, deadline=None)
@given(
    algorithm=st.sampled_from(AMOUNTS),
    limit=st.integers(1, 50),
    requests=st.lists(
        st.tuples(st.floats(0, 30_000), st.integers(1, 5), st.integers(1, 4)), max_size=60
    ),
)
def test_any_history_stays_within_its_bound(
    algorithm: Algorithm, limit: int, requests: list[tuple[float, int, int]]
) -> None:
    counter, rule = fresh(algorithm, limit), params(algorithm, limit)
    now, admitted = T0, [(T0, 0)]
    for pause, cost, count in requests:
        now += pause
        admitted.append((now, take(counter, rule, now, cost, count).admitted * cost))
    for begin in range(len(admitted)):
        total, first = 0, admitted[begin][0]
        for moment, amount in admitted[begin:]:
            total += amount
            assert total <= bound(algorithm, limit, moment - first) + 1e-6


@settings(max_examples=200, deadline=None)
@given(
    algorithm=st.sampled_from(AMOUNTS),
    limit=st.integers(1, 20),
    requests=st.lists(
        st.tuples(
            st.floats(0, 30_000),
            st.integers(1, 5),
            st.sampled_from([0, 0, 0, 1, 30_000, 3_600_000]),
        ),
        max_size=60,
    ),
)
def test_clock_steps_stay_within_the_bound(
    algorithm: Algorithm, limit: int, requests: list[tuple[float, int, float]]
) -> None:
    """In true time. A step that ends a fixed window early grants its limit again."""
    counter, rule = fresh(algorithm, limit), params(algorithm, limit)
    moment, behind, admitted = T0, 0.0, [(T0, 0, 0)]
    for pause, count, back in requests:
        moment += pause
        behind += back
        amount = take(counter, rule, moment - behind, 1, count).admitted
        admitted.append((moment, amount, back > 0))
    for begin in range(len(admitted)):
        total, steps, first = 0, 0, admitted[begin][0]
        for moment, amount, stepped in admitted[begin:]:
            total += amount
            steps += stepped
            again = steps * limit if algorithm == "fixed_window" else 0
            assert total <= bound(algorithm, limit, moment - first) + again + 1e-6


@settings(max_examples=200, deadline=None)
@given(
    algorithm=st.sampled_from(AMOUNTS),
    steps=st.lists(
        st.tuples(
            st.floats(0, 100_000),
            st.integers(1, 30),
            st.sampled_from([10, 15, 40]),
            st.sampled_from([1000.0, 60_000.0, 90_000.0]),
        ),
        max_size=30,
    ),
)
def test_changed_rule_leaves_its_limit_less_the_used_amount(
    algorithm: Algorithm, steps: list[tuple[float, int, int, float]]
) -> None:
    counter, now = fresh(algorithm), T0
    for version, (pause, count, limit, window_ms) in enumerate(steps, 2):
        now += pause
        counter.settle(now)
        used = counter.params.capacity - counter.room(now)
        changed = params(algorithm, limit, version, window_ms)
        reading = take(counter, changed, now, 1, count)
        assert reading.admitted <= max(0, limit - used) + 1e-6
        assert reading.admitted == min(count, max(0, int(limit - used + 1e-6)))


def bound(algorithm: Algorithm, limit: int, elapsed_ms: float) -> float:
    """The most that any stretch of this length can admit."""
    if algorithm == "token_bucket":
        return limit + limit * elapsed_ms / 60_000
    if algorithm == "fixed_window":
        return limit * (elapsed_ms // 60_000 + 2)
    return limit * (elapsed_ms / 60_000 + 2)


def admitted_in_a_span(
    algorithm: Algorithm, requests: list[tuple[float, int]], since: float = T0
) -> int:
    """The most admitted within a window's span, of requests at these moments."""
    counter, rule = fresh(algorithm), params(algorithm)
    admitted = [(now, take(counter, rule, now, 1, count).admitted) for now, count in requests]
    spans = [now for now, _ in admitted if now >= since]
    return max(
        sum(amount for now, amount in admitted if first <= now < first + 60_000) for first in spans
    )


@pytest.mark.parametrize("algorithm", AMOUNTS)
def test_window_span_admits_at_most_twice_the_limit_and_comes_close(
    algorithm: Algorithm,
) -> None:
    """All of one window at its end, then whatever fits, as the guide says."""
    greedy = [(T0 + 59_999, 100)] + [(T0 + 60_000 + 100 * n, 100) for n in range(600)]
    assert 195 <= admitted_in_a_span(algorithm, greedy) <= 200


def test_sliding_window_keeps_its_limit_under_even_use() -> None:
    """Unlike the others: constant requests get no more than the limit in any span."""
    always = [(T0 + 250 * n, 100) for n in range(4 * 480)]
    assert admitted_in_a_span("sliding_window", always, since=T0 + 120_000) <= 101
    assert admitted_in_a_span("fixed_window", [(T0 + 59_900, 100), (T0 + 60_100, 100)]) == 200


def test_refused_hold_reports_when_the_first_hold_ends() -> None:
    counter, rule = Concurrency(params("concurrency", 2)), params("concurrency", 2)
    for name, at in (("a", 0.0), ("b", 20_000.0)):
        assert hold(counter, rule, T0 + at, name).admitted
    assert hold(counter, rule, T0 + 45_000, "c").wait_ms == 15_000, "not a whole window"
    assert counter.release("a")
    assert hold(counter, rule, T0 + 45_000, "c").admitted
    assert hold(counter, rule, T0 + 45_000, "d").wait_ms == 35_000
