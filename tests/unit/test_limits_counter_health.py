"""The health of shared counters is a ratio over a window; a change of state is logged
once, with its reason.
"""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from holdfast.limits.counters.contract import CountersTrouble
from holdfast.limits.limiter.counter_health import CounterHealth

FULL = CountersTrouble("full", "OOM command not allowed")


def beat(health: CounterHealth, *, counted: int = 0, local: int = 0, alive: bool = True) -> None:
    health.observe(
        {"counters": [0, counted, 0], "local_share": [0, local, 0], "no_rule": [0, 1000, 0]},
        alive,
        None,
    )


def test_counters_that_answer_41_of_100_checks_are_not_up() -> None:
    """Redis Cluster: calls with one key succeed, those with several slots do not."""
    health = CounterHealth(1.0)
    for _ in range(20):
        beat(health, counted=41, local=59)
    assert health.state == "degraded"
    assert health.ratio == pytest.approx(0.584, abs=0.001)


def test_one_lost_heartbeat_of_ten_is_up_and_two_are_not() -> None:
    health = CounterHealth(1.0)
    for alive in [True] * 9 + [False]:
        beat(health, alive=alive)
    assert health.state == "up"
    beat(health, alive=False)
    assert health.state == "down"
    beat(health)
    assert health.state == "degraded", "the last one was answered"


def test_counters_that_never_answered_are_down_at_once() -> None:
    health = CounterHealth(1.0)
    beat(health, alive=False)
    assert (health.state, health.ratio) == ("down", 1.0)


def test_change_of_state_is_logged_once_by_reason_and_once_at_its_end() -> None:
    health = CounterHealth(1.0)
    with capture_logs() as lines:
        for trouble in (FULL, FULL, None, CountersTrouble("timeout", "silent"), FULL, None):
            health.observe({"local_share": [5, 5, 0]}, False, trouble)
        assert (health.trouble, health.status()["counters_reason"]) == (FULL, "full")
        for _ in range(30):
            beat(health, counted=100)
    assert [(line["event"], line.get("reason")) for line in lines] == [
        ("limits.counters_unavailable", "full"),
        ("limits.counters_unavailable", "timeout"),
        ("limits.counters_available", None),
    ]
    assert (health.state, health.trouble, health.status()["counters_reason"]) == ("up", None, "")


def test_trouble_without_a_reason_is_a_timeout() -> None:
    health = CounterHealth(1.0)
    with capture_logs() as lines:
        beat(health, local=10)
    assert [line["reason"] for line in lines] == ["timeout"]
