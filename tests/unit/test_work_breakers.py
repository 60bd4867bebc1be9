"""One breaker per job type, and what a worker hears of the others'."""

from __future__ import annotations

from holdfast.clock import ManualClock
from holdfast.resilience import BreakerSettings
from holdfast.work.breakers import Breakers


def test_type_open_elsewhere_is_postponed_by_a_worker_that_never_ran_it() -> None:
    clock = ManualClock()
    breakers = Breakers(BreakerSettings(), clock)
    breakers.update_elsewhere({"mail": 5.0})
    assert breakers.postpone_seconds("mail") == 5.0 and breakers.paused_types() == (["mail"], [])
    assert breakers.postpone_seconds("order") is None, "another type is none of its business"
    clock.advance(5.0)
    assert breakers.postpone_seconds("mail") is None and breakers.paused_types() == ([], [])
