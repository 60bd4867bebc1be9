"""The slow-consumer machine against all that was ever seen of the buffer, in whatever
order it fills and drains.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.session.settings import OutboundSettings
from holdfast.session.slow_consumer import Flow, SlowConsumer, SlowConsumerAction

OUTBOUND = OutboundSettings()
WARNING, CRITICAL = OUTBOUND.warning_threshold_percent, OUTBOUND.critical_threshold_percent


class SlowModel(RuleBasedStateMachine):
    """A buffer of 100 that a session fills and a reader drains. What is expected is
    computed from the whole past.
    """

    @initialize()
    def begin(self) -> None:
        self.machine = SlowConsumer(OUTBOUND)
        self.now = self.fill = 0.0
        self.warned_at: float | None = None
        self.seen: list[tuple[float, float]] = []
        """While slow: every moment at which the machine looked, with the fill."""
        self.logged = self.closed = False

    @precondition(lambda self: self.warned_at is None and not self.closed)
    @rule(amount=st.sampled_from([1, 7, 30, 60]))
    def queue(self, amount: int) -> None:
        """As the session does: what would go above critical is not queued; it is warned
        of if the buffer is full.
        """
        if self.fill + amount > CRITICAL:
            if self.fill >= WARNING:
                assert (
                    self.machine.rose_above_critical(self.fill, self.now) is SlowConsumerAction.WARN
                )
                self.warned_at, self.seen = self.now, [(self.now, self.fill)]
            return
        self.fill += amount
        if self.fill > WARNING:
            said = self.machine.rose_above_warning()
            assert said is (
                SlowConsumerAction.NOTHING if self.logged else SlowConsumerAction.LOG
            ), "logged once until it has been empty"
            self.logged = True

    @precondition(lambda self: self.fill)
    @rule(amount=st.sampled_from([1, 4, 5, 6, 100]))
    def drain(self, amount: int) -> None:
        self.fill = max(0.0, self.fill - amount)
        said = self.machine.drained(self.fill)
        recovers = self.warned_at is not None and self.fill < WARNING
        assert said is (SlowConsumerAction.RECOVER if recovers else SlowConsumerAction.NOTHING)
        if recovers:
            self.warned_at, self.logged = None, True
        elif self.warned_at is None and not self.fill and not self.closed:
            self.logged = False
            assert self.machine.flow is Flow.FLOWING

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.9, 5.0, 5.1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.warned_at is None:
            return
        self.seen.append((self.now, self.fill))
        said = self.machine.passed(self.fill, self.now)
        assert said is (
            SlowConsumerAction.CLOSE
            if self.now >= self.expected_deadline()
            else SlowConsumerAction.NOTHING
        )
        if said is SlowConsumerAction.CLOSE:
            self.closed, self.warned_at = True, None

    @precondition(lambda self: self.warned_at is not None and self.fill - 5 >= WARNING)
    @rule()
    def drain_steadily(self) -> None:
        """Without it chance would seldom drain in time and still stay slow."""
        self.now += 4.0
        self.drain(5)
        if self.warned_at is not None:
            self.wait(0.0)

    def expected_deadline(self) -> float:
        """Five seconds from the last new low, sixty from the warning."""
        assert self.warned_at is not None
        low, since = self.seen[0][1], self.warned_at
        for at, fill in self.seen:
            if fill <= low - OUTBOUND.new_low_percent:
                low, since = fill, at
        return min(
            since + OUTBOUND.grace_period_seconds, self.warned_at + OUTBOUND.grace_total_seconds
        )

    @invariant()
    def it_is_slow_from_its_warning_to_its_recovery_or_its_end(self) -> None:
        if hasattr(self, "machine"):
            assert self.machine.slow is (self.warned_at is not None)
            assert (self.machine.flow is Flow.OVER) is self.closed
            if self.machine.slow:
                assert self.machine.deadline == self.expected_deadline()


TestSlow = SlowModel.TestCase
TestSlow.settings = settings(max_examples=40, deadline=None)
