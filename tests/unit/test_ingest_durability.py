"""The durability plane over a failing store: breaker, deadline, honest answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scripted_durability import ANNA, BELA, CHAT, ScriptedStore, acks, create_chat
from store_rigs import act

from holdfast.errors import (
    ChatHalted,
    HoldfastError,
    InternalError,
    KeyReused,
    NotAMember,
    OutcomeUnknown,
    RateLimited,
    ServerBusy,
    StateCorrupted,
    Unavailable,
)
from holdfast.ingest.durability import ChangeSettings, StoreDurability
from holdfast.message import Acked, Draft, Outcome, Watermark
from holdfast.resilience import BreakerState
from holdfast.store.commands import AddMember, RemoveMember
from holdfast.store.memory import MemoryStore
from holdfast.telemetry import REGISTRY
from proof.virtual_loop import LoopClock


def shown_up() -> bool:
    return REGISTRY.get_sample_value("holdfast_dependency_up", {"dependency": "store"}) == 1


def drafts(count: int = 1) -> list[Draft]:
    return [
        Draft(ANNA, CHAT, f"key-{n}", "hello", "text/plain", f"msg_{n}", "2027-01-15T08:00:00.000Z")
        for n in range(count)
    ]


class Bench:
    def __init__(self, changes: ChangeSettings | None = None, lanes: int = 1) -> None:
        self.clock = LoopClock()
        self.store = ScriptedStore(lanes)
        store: Any = self.store
        self.plane = StoreDurability(store, self.clock, changes=changes)

    async def persist(self, count: int = 1, seconds: float = 5.0) -> list[Outcome]:
        return await self.plane.persist(drafts(count), self.clock.monotonic() + seconds)


def kinds(outcomes: list[Outcome]) -> set[type]:
    return {type(outcome) for outcome in outcomes}


@pytest.mark.covers("000 circuit breaker opens after threshold failures")
async def test_circuit_breaker_opens_after_threshold_failures() -> None:
    bench = Bench()
    bench.store.error = Unavailable("the disk is gone")
    for _ in range(5):
        assert bench.plane.breaker is BreakerState.CLOSED
        assert kinds(await bench.persist()) == {Unavailable}
    assert bench.plane.breaker is BreakerState.OPEN
    before = bench.clock.monotonic()
    (refusal,) = await bench.persist()
    assert bench.clock.monotonic() == before, "an open breaker answers at once"
    assert isinstance(refusal, Unavailable) and refusal.retry_after_seconds == pytest.approx(30)
    assert len(bench.store.groups) == 5, "the store is left in peace"


@pytest.mark.covers("000 persistent failures: detected within 10 s")
async def test_a_store_that_nobody_uses_is_tried_and_shown_as_it_is() -> None:
    bench = Bench()
    bench.store.error = Unavailable("the disk is gone")
    await bench.persist()
    bench.store.error = None
    assert not shown_up() and bench.plane.trouble == "the disk is gone"
    await bench.plane.probe()
    assert shown_up() and bench.plane.trouble is None, "without a send"
    bench.store.error = Unavailable("gone again")
    await bench.plane.probe()
    await bench.plane.probe()
    assert not shown_up(), "without a send too"


async def test_a_store_that_works_under_its_users_is_not_tried_beside_them() -> None:
    bench = Bench()
    await bench.persist()
    await bench.plane.probe()
    assert bench.store.touched == 0
    await bench.plane.probe()
    assert bench.store.touched == 1


async def test_trying_goes_through_the_breaker_and_closes_it_without_a_send() -> None:
    bench = Bench()
    bench.store.error = Unavailable("the disk is gone")
    for _ in range(8):
        await bench.plane.probe()
    assert bench.plane.breaker is BreakerState.OPEN and bench.store.touched == 5
    bench.store.error = None
    await asyncio.sleep(30)
    await bench.plane.probe()
    assert bench.plane.breaker is BreakerState.CLOSED and shown_up()


async def test_a_store_that_hangs_while_nobody_uses_it_is_seen_and_so_is_its_return() -> None:
    bench = Bench()
    bench.store.gate.clear()
    await bench.plane.probe()
    assert bench.clock.monotonic() < 5, "with the five seconds between two of them, within ten"
    assert not shown_up() and bench.plane.breaker is BreakerState.OPEN
    bench.store.gate.set()
    await asyncio.sleep(0.1)
    await bench.plane.probe()
    assert shown_up() and bench.plane.breaker is BreakerState.CLOSED


async def test_hang_of_a_store_of_many_nodes_is_seen_in_two_seconds() -> None:
    bench = Bench(lanes=16)
    bench.store.gate.clear()
    await bench.plane.probe()
    assert bench.clock.monotonic() == 2 and not shown_up()
    bench.store.gate.set()


@pytest.mark.parametrize(("lanes", "state"), [(1, BreakerState.OPEN), (16, BreakerState.CLOSED)])
async def test_store_that_others_restart_closes_the_breaker_when_it_is_back(
    lanes: int, state: BreakerState
) -> None:
    """An embedded store keeps its rest."""
    bench = Bench(lanes=lanes)
    bench.store.error = Unavailable("it restarts")
    for _ in range(5):
        await bench.persist()
    await bench.plane.check_recovery()
    assert bench.plane.breaker is BreakerState.OPEN, "it is not back"
    (refusal,) = await bench.persist()
    assert isinstance(refusal, Unavailable)
    assert refusal.retry_after_seconds == pytest.approx(30 if lanes == 1 else 1)
    bench.store.error = None
    await bench.plane.check_recovery()
    assert bench.plane.breaker is state
    assert shown_up() is (state is BreakerState.CLOSED)


@pytest.mark.covers("000 1.3 half-open: one probe")
async def test_after_its_rest_one_probe_decides() -> None:
    bench = Bench()
    bench.store.error = OutcomeUnknown("?")
    for _ in range(5):
        await bench.persist()
    await asyncio.sleep(30)
    assert bench.plane.breaker is BreakerState.HALF_OPEN
    await bench.persist()
    assert bench.plane.breaker is BreakerState.OPEN
    await asyncio.sleep(30)
    assert bench.plane.breaker_open_seconds == pytest.approx(60), (
        "a failed probe does not start the count again"
    )
    bench.store.error = None
    bench.store.gate.clear()
    probe = asyncio.create_task(bench.persist())
    await asyncio.sleep(0.1)
    assert kinds(await bench.persist()) == {Unavailable}, "one probe at a time"
    bench.store.gate.set()
    assert kinds(await probe) == {Acked}
    assert bench.plane.breaker is BreakerState.CLOSED
    assert bench.plane.breaker_open_seconds == 0


@pytest.mark.parametrize(
    "error",
    [NotAMember("no"), KeyReused("no"), ChatHalted("halted"), RateLimited("quota")],
    ids=lambda e: type(e).__name__,
)
async def test_refusals_a_full_quota_and_a_halted_chat_never_count_against_the_breaker(
    error: HoldfastError,
) -> None:
    bench = Bench()
    bench.store.answer = lambda group: [error] * len(group)
    for _ in range(20):
        assert await bench.persist() == [error]
    bench.store.error = error
    for _ in range(20):
        assert await bench.persist() == [error]
    assert bench.plane.breaker is BreakerState.CLOSED


async def test_a_group_of_which_one_send_got_through_is_no_failure() -> None:
    bench = Bench()
    bench.store.answer = lambda group: [
        *acks(group[:1]),
        *[Unavailable("throttled")] * (len(group) - 1),
    ]
    for _ in range(20):
        assert kinds(await bench.persist(3)) == {Acked, Unavailable}
    assert bench.plane.breaker is BreakerState.CLOSED
    bench.store.answer = lambda group: [Unavailable("throttled")] * len(group)
    for _ in range(40):
        await bench.persist(3)
    assert bench.plane.breaker is BreakerState.OPEN


@pytest.mark.covers("000 breaker, one call that hangs")
async def test_a_commit_that_hangs_holds_the_breaker_open_until_it_ends() -> None:
    """Nothing is sent after it, so nothing else fails: operators would see a store that
    works and refuses everybody.
    """
    bench = Bench()
    bench.store.gate.clear()
    await bench.persist(seconds=5)
    assert bench.plane.breaker is BreakerState.OPEN
    await asyncio.sleep(60)
    (refusal,) = await bench.persist()
    assert isinstance(refusal, Unavailable) and refusal.retry_after_seconds == 1
    assert bench.plane.breaker is BreakerState.OPEN, "no probe goes out behind it"
    assert bench.plane.breaker_open_seconds == pytest.approx(60)
    bench.store.gate.set()
    await asyncio.sleep(0.01)
    assert (bench.plane.breaker, bench.plane.breaker_open_seconds) == (BreakerState.CLOSED, 0)


@pytest.mark.covers("000 gateway to durability 5 s")
async def test_a_hanging_commit_is_unknown_at_its_deadline_and_goes_on_to_its_end() -> None:
    bench = Bench()
    bench.store.gate.clear()
    outcomes = await bench.persist(3, seconds=5)
    assert bench.clock.monotonic() == pytest.approx(5)
    assert kinds(outcomes) == {OutcomeUnknown}
    assert bench.plane.overdue == 1
    (refusal,) = await bench.persist()
    assert isinstance(refusal, Unavailable), "nothing is sent after a write that has not ended"
    assert len(bench.store.groups) == 1
    bench.store.gate.set()
    await asyncio.sleep(0.01)
    assert (bench.store.ended, bench.plane.overdue) == (1, 0)
    assert kinds(await bench.persist()) == {Acked}, "it serves again as soon as the write has ended"


@pytest.mark.covers("000 upstream slow: the breaker opens, fast reject")
async def test_timeouts_open_the_breaker() -> None:
    bench = Bench()
    for _ in range(5):
        bench.store.gate.clear()
        assert kinds(await bench.persist(seconds=1)) == {OutcomeUnknown}
        bench.store.gate.set()
        await asyncio.sleep(0.01)
    assert bench.plane.breaker is BreakerState.OPEN


async def test_past_the_deadline_nothing_is_tried() -> None:
    bench = Bench()
    (refusal,) = await bench.persist(seconds=0)
    assert isinstance(refusal, Unavailable)
    assert bench.store.groups == []


@pytest.mark.covers("000 2.1 ValidationException: immediate error")
@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (ZeroDivisionError("a defect"), OutcomeUnknown),
        (InternalError("a defect"), OutcomeUnknown),
        (asyncio.CancelledError(), OutcomeUnknown),
        (RateLimited("throttled"), RateLimited),
        (StateCorrupted("damaged"), Unavailable),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
async def test_persist_never_raises(error: BaseException, answer: type) -> None:
    bench = Bench()
    bench.store.error = error
    outcomes = await bench.persist(2)
    assert kinds(outcomes) == {answer}
    assert all(o.retryable for o in outcomes if isinstance(o, HoldfastError))


async def test_a_store_that_loses_count_is_answered_as_unknown() -> None:
    bench = Bench()
    bench.store.answer = lambda group: acks(group[1:])
    assert kinds(await bench.persist(3)) == {OutcomeUnknown}


async def test_a_cancelled_caller_leaves_its_write_running_and_the_breaker_untouched() -> None:
    bench = Bench()
    for ended in range(1, 11):
        bench.store.gate.clear()
        caller = asyncio.create_task(bench.persist())
        await asyncio.sleep(0.1)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert bench.plane.overdue == 0, "it is within its time: others go on"
        bench.store.gate.set()
        await asyncio.sleep(0.01)
        assert bench.store.ended == ended
    assert bench.plane.breaker is BreakerState.CLOSED


async def test_changes_pass_through_the_same_breaker_and_deadline() -> None:
    bench = Bench()
    command = AddMember(act(ANNA), CHAT, "bela")
    bench.store.gate.clear()
    with pytest.raises(OutcomeUnknown):
        await bench.plane.change(command, bench.clock.monotonic() + 1)
    with pytest.raises(Unavailable):
        await bench.plane.change(command, bench.clock.monotonic() + 1)
    bench.store.error = Unavailable("down")
    bench.store.gate.set()
    await asyncio.sleep(0.01)
    for _ in range(4):
        with pytest.raises(Unavailable):
            await bench.plane.change(command, bench.clock.monotonic() + 1)
    assert bench.plane.breaker is BreakerState.OPEN


@pytest.mark.parametrize(("changes", "limit"), [(None, 100), (ChangeSettings(max_at_once=3), 3)])
async def test_changes_in_flight_are_bounded(changes: ChangeSettings | None, limit: int) -> None:
    bench = Bench(changes)
    bench.store.gate.clear()
    command = AddMember(act(ANNA), CHAT, "bela")
    flying = [asyncio.create_task(bench.plane.change(command, 5.0)) for _ in range(limit)]
    await asyncio.sleep(0.1)
    with pytest.raises(ServerBusy) as busy:
        await bench.plane.change(command, 5.0)
    assert busy.value.details == {"limit": limit}
    results = await asyncio.gather(*flying, return_exceptions=True)
    assert {type(r) for r in results} == {OutcomeUnknown}
    bench.store.error = Unavailable("down")
    bench.store.gate.set()
    await asyncio.sleep(0.1)
    assert bench.plane.overdue == 0


async def test_a_change_reaches_the_store_and_a_refusal_comes_back() -> None:
    store = MemoryStore()
    await create_chat(store, ANNA)
    plane = StoreDurability(store, LoopClock())
    changed = await plane.change(AddMember(act(ANNA), CHAT, "bela"), 5.0)
    assert changed.event is not None and changed.event.sequence == 1
    with pytest.raises(NotAMember):
        await plane.change(RemoveMember(act(BELA._replace(user_id="dora")), CHAT, "anna"), 5.0)


async def test_marks_are_best_effort_and_say_whether_they_were_stored() -> None:
    bench = Bench()
    marks = [Watermark(ANNA, "phone", CHAT, 1, 3, 0)]
    assert await bench.plane.mark(marks) is True
    bench.store.error = Unavailable("down")
    assert await bench.plane.mark(marks) is False
    assert bench.store.marked == [marks, marks]
