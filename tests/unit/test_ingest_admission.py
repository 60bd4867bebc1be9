"""A send asks limits before it goes to the intake; none waits for the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast import telemetry
from holdfast.clock import ManualClock
from holdfast.errors import InternalError, RateLimited
from holdfast.ingest.admission import AdmissionControl
from holdfast.limits.counters.memory import MemoryCounters
from holdfast.limits.entry_points import EntryPoints
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.rules import Rule, RuleSet
from holdfast.message import Outcome, User
from holdfast.wire.frames import SendBody


class Intake:
    """Records the sends that were admitted; fails for those of ``broken``."""

    def __init__(self, broken: str = "") -> None:
        self.admitted: list[str] = []
        self._broken = broken

    def submit(
        self,
        body: SendBody,
        sender: User,
        source: str,
        deadline: float,
        answer: Callable[[Outcome], None],
    ) -> None:
        if sender.user_id == self._broken:
            raise RuntimeError("a defect of the intake")
        self.admitted.append(body.client_message_id)


def entry_points(*rules: Rule) -> EntryPoints:
    clock = ManualClock()
    return EntryPoints(Limiter(MemoryCounters(clock), clock, rules=RuleSet.of(rules)))


async def send(
    admission: AdmissionControl, *sends: tuple[str, str]
) -> list[tuple[str, type[Outcome]]]:
    """Submit sends, as (user, id), in one turn of the loop; who got which answer."""
    answered: list[tuple[str, type[Outcome]]] = []
    for user_id, message_id in sends:

        def answer(outcome: Outcome, message_id: str = message_id) -> None:
            answered.append((message_id, type(outcome)))

        body = SendBody(message_id, "chat", "hello")
        admission.submit(body, User("acme", user_id), "socket", 1.0, answer)
    await asyncio.sleep(0)
    return answered


ONE_PER_USER = Rule("*", "send:user", "fixed_window", 1, 60.0)


async def test_refused_send_is_answered_and_does_not_reach_the_intake() -> None:
    intake = Intake()
    admission = AdmissionControl(intake, entry_points(ONE_PER_USER), ManualClock())
    answered = await send(admission, ("ann", "a1"), ("ann", "a2"), ("bob", "b1"))
    assert intake.admitted == ["a1", "b1"]
    assert answered == [("a2", RateLimited)]


async def test_admitted_sends_keep_their_order_across_senders() -> None:
    intake = Intake()
    admission = AdmissionControl(
        intake, entry_points(Rule("*", "send:user", "fixed_window", 9, 60)), ManualClock()
    )
    sends = [("ann", "1"), ("bob", "2"), ("ann", "3"), ("ann", "4"), ("bob", "5")]
    assert await send(admission, *sends) == []
    assert intake.admitted == ["1", "2", "3", "4", "5"]


async def test_defect_for_one_send_leaves_the_others_their_answers() -> None:
    intake = Intake(broken="bob")
    admission = AdmissionControl(intake, entry_points(ONE_PER_USER), ManualClock())
    answered = await send(admission, ("bob", "b1"), ("ann", "a1"), ("ann", "a2"))
    assert intake.admitted == ["a1"]
    assert answered == [("a2", RateLimited)]


class BrokenLimits(EntryPoints):
    """Cannot decide about the sends of one user."""

    def admit_at_once(self, entry_point, who, count, address=""):  # type: ignore[no-untyped-def]
        if who.user_id == "bob":
            raise RuntimeError("a defect of limits")
        return super().admit_at_once(entry_point, who, count, address)


async def test_defect_of_limits_refuses_only_the_sender_it_concerns() -> None:
    intake, clock = Intake(), ManualClock()
    limiter = Limiter(MemoryCounters(clock), clock, rules=RuleSet.of([ONE_PER_USER]))
    admission = AdmissionControl(intake, BrokenLimits(limiter), ManualClock())
    before = metric("ingest_sends_turned_away_total", reason="defect")
    answered = await send(admission, ("bob", "b1"), ("ann", "a1"))
    assert intake.admitted == ["a1"]
    assert answered == [("b1", InternalError)]
    assert metric("ingest_sends_turned_away_total", reason="defect") - before == 1


async def test_send_above_a_limit_is_its_senders_own_mistake_and_admission_is_timed() -> None:
    intake, clock = Intake(), ManualClock()
    admission = AdmissionControl(intake, entry_points(ONE_PER_USER), clock)
    refused = metric("ingest_sends_total", answer="refused")
    steps = metric("message_step_seconds_count", step="admit")
    await send(admission, ("ann", "a1"), ("ann", "a2"))
    assert metric("ingest_sends_total", answer="refused") - refused == 1
    assert metric("message_step_seconds_count", step="admit") - steps == 1


def metric(name: str, **labels: str) -> float:
    return telemetry.REGISTRY.get_sample_value(f"holdfast_{name}", labels) or 0.0
