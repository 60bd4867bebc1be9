"""The seven scenarios of the sequencing document, on the sequencing it describes.

That sequencing ships as a negative control: these tests show that the control is
faithful to the document, and the last ones show what the scenarios do not ask: the
defects for which this design left it. The same scenarios on our own store, where gaps
cannot arise, are in ``tests/contracts``.
"""

from __future__ import annotations

import asyncio

import pytest

from holdfast.errors import Unavailable
from holdfast.message import Acked, Draft, User
from proof.controls.two_phase import CounterMissing, Tables, TwoPhaseIngest

ANN, BOB = User("default", "ann"), User("default", "bob")


def draft(key: str, sender: User = ANN, content: str = "hello") -> Draft:
    return Draft(sender, "A", key, content, "text/plain", f"msg_{sender.user_id}_{key}", "now")


def tables(counter: int | None) -> Tables:
    made = Tables(members={("A", "ann"), ("A", "bob")})
    if counter is not None:
        made.counters["A"] = counter
    return made


def sequences(made: Tables) -> list[int]:
    return sorted(n for _, n in made.messages)


class Gate:
    """Holds chosen sends before chosen steps until they are let through."""

    def __init__(self, *held: tuple[str, str]) -> None:
        self._held = {pair: asyncio.Event() for pair in held}
        self._reached = {pair: asyncio.Event() for pair in held}

    async def __call__(self, step: str, send: Draft) -> None:
        pair = (step, send.message_id)
        if pair in self._held:
            self._reached[pair].set()
            await self._held[pair].wait()

    async def reached(self, step: str, message_id: str) -> None:
        await self._reached[step, message_id].wait()

    def open(self, step: str, message_id: str) -> None:
        self._held[step, message_id].set()


class Crash(Exception):
    """The process dies here."""


@pytest.mark.covers("001 scenario 1: basic sequence allocation")
async def test_scenario_1_basic_sequence_allocation() -> None:
    made = tables(10)
    answer = await TwoPhaseIngest(made).persist(draft("uuid-1"))
    assert made.counters["A"] == 11
    assert answer.message.sequence == 11
    assert made.messages["A", 11].client_message_id == "uuid-1"
    assert made.keys["A", "uuid-1"] == (11, answer.message.message_id)


@pytest.mark.covers("001 scenario 2: idempotent retry")
async def test_scenario_2_idempotent_retry() -> None:
    made = tables(10)
    ingest = TwoPhaseIngest(made)
    await ingest.persist(draft("uuid-1"))
    again = await ingest.persist(draft("uuid-1"))
    assert made.counters["A"] == 11
    assert (again.message.sequence, again.deduplicated) == (11, True)
    assert sequences(made) == [11] and len(made.keys) == 1


@pytest.mark.covers("001 scenario 3: concurrent writers")
async def test_scenario_3_concurrent_writers() -> None:
    made = tables(10)
    ingest = TwoPhaseIngest(made)
    answers = await asyncio.gather(*(ingest.persist(draft(f"uuid-{n}")) for n in (1, 2, 3)))
    assert made.counters["A"] == 13
    assert sorted(answer.message.sequence for answer in answers) == [11, 12, 13]
    assert sequences(made) == [11, 12, 13]


@pytest.mark.covers("001 scenario 4: race on a key")
async def test_scenario_4_race_condition_on_idempotency() -> None:
    made = tables(10)
    first, second = (
        draft("uuid-1"),
        Draft(ANN, "A", "uuid-1", "hello", "text/plain", "msg_retry", "now"),
    )
    gate = Gate(("persist", first.message_id))
    ingest = TwoPhaseIngest(made, gate)
    slow = asyncio.create_task(ingest.persist(first))
    await gate.reached("persist", first.message_id)
    fast = await ingest.persist(second)
    gate.open("persist", first.message_id)
    assert made.counters["A"] == 12
    assert sequences(made) == [12]
    assert (fast.message.sequence, (await slow).message.sequence) == (12, 12)


@pytest.mark.covers("001 scenario 5: failure after allocation")
async def test_scenario_5_failure_after_allocation() -> None:
    made = tables(10)

    async def crash_before_persist(step: str, _send: Draft) -> None:
        if step == "persist":
            raise Crash

    with pytest.raises(Crash):
        await TwoPhaseIngest(made, crash_before_persist).persist(draft("uuid-1"))
    assert made.counters["A"] == 11 and sequences(made) == []
    retry = await TwoPhaseIngest(made).persist(draft("uuid-1"))
    assert retry.message.sequence == 12
    assert made.counters["A"] == 12 and sequences(made) == [12]


@pytest.mark.covers("001 scenario 6: first message")
async def test_scenario_6_new_chat_first_message() -> None:
    made = tables(0)
    answer = await TwoPhaseIngest(made).persist(draft("uuid-1"))
    assert made.counters["A"] == 1
    assert answer.message.sequence == 1 and sequences(made) == [1]


@pytest.mark.covers("001 scenario 7: counter missing")
async def test_scenario_7_counter_missing() -> None:
    made = tables(None)
    ingest = TwoPhaseIngest(made)
    with pytest.raises(CounterMissing):
        await ingest.persist(draft("uuid-1"))
    assert made.counters == {} and sequences(made) == []
    assert made.alerts == ["SEV-2: A has no counter"]
    ingest.recover_counter("A")
    assert (await ingest.persist(draft("uuid-1"))).message.sequence == 1


@pytest.mark.covers("001 two-phase (not atomic end to end)")
async def test_two_phases_show_43_before_42_without_any_failure() -> None:
    made = tables(41)
    gate = Gate(("persist", draft("slow").message_id))
    ingest = TwoPhaseIngest(made, gate)
    slow = asyncio.create_task(ingest.persist(draft("slow")))
    await gate.reached("persist", draft("slow").message_id)
    await ingest.persist(draft("fast"))
    assert sequences(made) == [43]  # a reader that syncs now moves its cursor to 43
    gate.open("persist", draft("slow").message_id)
    assert (await slow).message.sequence == 42  # and never sees 42


async def test_two_phases_publish_nothing_on_a_retry_after_a_failed_publish() -> None:
    made = tables(0)

    async def log_down(step: str, _send: Draft) -> None:
        if step == "publish":
            raise Unavailable("the log is down")

    with pytest.raises(Unavailable):
        await TwoPhaseIngest(made, log_down).persist(draft("uuid-1"))
    assert (await TwoPhaseIngest(made).persist(draft("uuid-1"))).deduplicated
    assert made.published == []


async def test_two_phases_swallow_a_message_with_another_member_s_key() -> None:
    made = tables(0)
    ingest = TwoPhaseIngest(made)
    await ingest.persist(draft("1", ANN, "ann's"))
    answer: Acked = await ingest.persist(draft("1", BOB, "bob's"))
    assert answer.message.content == "ann's" and len(made.messages) == 1


async def test_two_phases_overwrite_an_acknowledged_message_after_a_counter_repair() -> None:
    made = tables(0)
    gate = Gate(("persist", draft("late").message_id))
    ingest = TwoPhaseIngest(made, gate)
    late = asyncio.create_task(ingest.persist(draft("late")))
    await gate.reached("persist", draft("late").message_id)
    del made.counters["A"]  # the operational error
    ingest.recover_counter("A")
    acked = await ingest.persist(draft("acked"))
    gate.open("persist", draft("late").message_id)
    assert (await late).message.sequence == acked.message.sequence == 1
    assert made.messages["A", 1].client_message_id == "late"  # the acknowledged one is gone
