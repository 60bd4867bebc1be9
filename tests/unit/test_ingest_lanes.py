"""Several lanes of one store: groups side by side, one lane that hangs, fair turns."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from scripted_durability import ANNA, BELA, Answers, ScriptedStore, acks, body, create_chat
from store_rigs import act

from holdfast import telemetry
from holdfast.clock import Ids
from holdfast.errors import NotAMember, OutcomeUnknown, ServerBusy, Unavailable
from holdfast.ingest.durability import ChangeSettings, StoreDurability
from holdfast.ingest.intake import Intake
from holdfast.ingest.send_queue import IntakeSettings
from holdfast.message import Acked, Draft, Outcome, User, Watermark
from holdfast.resilience import BreakerState
from holdfast.store.commands import AddMember
from holdfast.store.memory import MemoryStore
from proof.faults import FaultPlan, Odds, faulty
from proof.virtual_loop import LoopClock, run

MARKS = [Watermark(ANNA, "phone", "chat_1", 1, 3, 0)]


class Bench:
    """An intake over a scripted store in which ``chat_n`` is in lane n."""

    def __init__(self, lanes: int, at_once: int, settings: IntakeSettings | None = None) -> None:
        self.clock = LoopClock()
        self.store = ScriptedStore(lanes, at_once)
        self.answers = Answers()
        changes = ChangeSettings(max_at_once=8)
        self.plane = StoreDurability(self.store, self.clock, changes=changes)  # type: ignore[arg-type]
        self.intake = Intake(
            self.plane,
            self.clock,
            Ids(self.clock, random.Random(1)),
            settings,
            grouping=self.store.grouping,
            lane=self.store.lane,
        )
        self.task = asyncio.create_task(self.intake.run())

    def send(self, key: str, lane: int, source: str = "conn_1", seconds: float = 5.0) -> None:
        deadline = self.clock.monotonic() + seconds
        answer = self.answers.to(key)
        self.intake.submit(body(key, f"chat_{lane}"), ANNA, source, deadline, answer)

    async def persist(self, lane: int, seconds: float = 5.0) -> Outcome:
        """One send through the plane alone."""
        draft = Draft(ANNA, f"chat_{lane}", "k", "hello", "text/plain", "msg_k", "now")
        (outcome,) = await self.plane.persist([draft], self.clock.monotonic() + seconds)
        return outcome

    async def change(self, lane: int, seconds: float = 5.0) -> None:
        command = AddMember(act(ANNA), f"chat_{lane}", "bela")
        await self.plane.change(command, self.clock.monotonic() + seconds)

    @property
    def groups(self) -> list[list[str]]:
        return [[draft.client_message_id for draft in group] for group in self.store.groups]


@asynccontextmanager
async def running(
    lanes: int = 4, at_once: int = 2, settings: IntakeSettings | None = None
) -> AsyncIterator[Bench]:
    bench = Bench(lanes, at_once, settings)
    await asyncio.sleep(0)
    yield bench
    bench.intake.stop()
    await bench.task


# --- intake
# ------------------------------------------------------------------------------------


async def test_lanes_commit_side_by_side_up_to_the_number_at_once() -> None:
    async with running(lanes=4, at_once=2) as bench:
        bench.store.hold(0, 1, 2)
        for lane in (0, 1, 2):
            bench.send(f"lane {lane}", lane)
        bench.send("second of lane 0", 0)
        await asyncio.sleep(0.01)
        assert bench.groups == [["lane 0", "second of lane 0"], ["lane 1"]]
        bench.send("third of lane 0", 0)
        bench.store.release(1)
        await asyncio.sleep(0.01)
        assert bench.groups[2:] == [["lane 2"]], "one group of a lane at a time"
        assert bench.answers.codes() == {"lane 1": "ACK"}, "each as soon as it is settled"
        assert bench.intake.committing == 3
        bench.store.release(0, 2)


async def test_send_to_a_free_lane_leaves_at_once_while_another_commits() -> None:
    async with running() as bench:
        bench.store.hold(0)
        bench.send("a", 0)
        await asyncio.sleep(1)
        bench.send("b", 1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bench.groups == [["a"], ["b"]]
        await asyncio.sleep(0.001)
        assert bench.answers.codes() == {"b": "ACK"}
        bench.store.release(0)


async def test_lane_that_was_committing_goes_on_when_no_other_has_sends() -> None:
    """The other loop sleeps meanwhile: nobody but this one can find them."""
    async with running() as bench:
        bench.store.hold(0)
        bench.send("a", 0)
        await asyncio.sleep(0.01)
        bench.send("b", 0)
        bench.store.release(0)
        await asyncio.sleep(0.01)
        assert bench.answers.order == ["a", "b"]


async def test_full_lane_delays_another_by_one_group_at_most() -> None:
    async with running(lanes=2, at_once=1, settings=IntakeSettings(max_group_sends=2)) as bench:
        bench.store.gate.clear()
        bench.send("first", 0)
        await asyncio.sleep(0.01)
        for n in range(100):
            bench.send(f"full {n}", 0, source=str(n))
        bench.send("other", 1)
        bench.store.gate.set()
        await asyncio.sleep(0.01)
        assert bench.groups[:3] == [["first"], ["full 0", "full 1"], ["other"]]
        assert bench.groups[3] == ["full 2", "full 3"], "and the lanes keep their own order"


async def test_hanging_lane_is_unknown_at_its_deadline_and_others_never_notice() -> None:
    async with running() as bench:
        bench.store.hold(1)
        bench.send("hangs", 1)
        for second in range(8):
            await asyncio.sleep(1)
            bench.send(f"other {second}", 2)
            await asyncio.sleep(0.001)
            assert isinstance(bench.answers.by_key[f"other {second}"], Acked)
        assert isinstance(bench.answers.by_key["hangs"], OutcomeUnknown)
        bench.send("refused", 1)
        await asyncio.sleep(0.001)
        refusal = bench.answers.by_key["refused"]
        assert isinstance(refusal, Unavailable) and refusal.retry_after_seconds == 1
        bench.store.release(1)
        await asyncio.sleep(0.001)
        bench.send("served again", 1)
        await asyncio.sleep(0.001)
        assert bench.answers.codes()["served again"] == "ACK"


@pytest.mark.parametrize("error", [Unavailable("down"), OutcomeUnknown("?")])
async def test_followers_of_a_failed_send_are_those_of_its_chat_only(error: Exception) -> None:
    async with running() as bench:
        bench.store.answer = lambda drafts: [
            error if draft.client_message_id == "a" else acks([draft])[0] for draft in drafts
        ]
        bench.store.hold(0, 1)
        bench.send("a", 0)
        bench.send("b", 1)
        await asyncio.sleep(0.01)
        bench.send("follower", 0)
        bench.send("other connection", 0, source="conn_2")
        bench.send("other lane", 1)
        bench.store.release(0, 1)
        await asyncio.sleep(0.01)
        assert bench.answers.by_key["a"] is bench.answers.by_key["follower"] is error
        acked = {key for key, code in bench.answers.codes().items() if code == "ACK"}
        assert acked == {"b", "other connection", "other lane"}


async def test_send_behind_a_busy_lane_is_answered_at_its_deadline_or_age() -> None:
    async with running() as bench:
        bench.store.hold(0)
        bench.send("hangs", 0)
        await asyncio.sleep(0.01)
        bench.send("short", 0, source="2", seconds=1.0)
        bench.send("old", 0, source="3")
        await asyncio.sleep(0.99)
        assert bench.answers.codes() == {}
        await asyncio.sleep(0.02)
        assert bench.answers.codes() == {"short": "SERVICE_UNAVAILABLE"}
        await asyncio.sleep(0.98)
        assert "old" not in bench.answers.by_key
        await asyncio.sleep(0.02)
        assert bench.answers.codes()["old"] == "SERVER_BUSY"
        assert bench.groups == [["hangs"]], "neither was tried"
        bench.store.release(0)


async def test_stop_with_several_groups_open_answers_them_and_what_waits() -> None:
    bench = Bench(lanes=4, at_once=3)
    bench.store.hold(0, 1)
    for key, lane in (("a", 0), ("b", 1), ("c", 2)):
        bench.send(key, lane)
    await asyncio.sleep(0.01)
    bench.send("behind a", 0)
    bench.intake.stop()
    bench.store.release(1)
    await asyncio.sleep(0.01)
    assert not bench.task.done(), "a lane is still open"
    assert set(bench.answers.by_key) == {"b", "c"}
    bench.store.release(0)
    await bench.task
    assert set(bench.answers.codes().values()) == {"ACK"} and len(bench.answers.by_key) == 4


async def test_cancelled_intake_answers_open_groups_as_unknown_and_the_rest_as_untried() -> None:
    bench = Bench(lanes=4, at_once=2)
    bench.store.hold(0, 1)
    for key, lane in (("a", 0), ("b", 1), ("c", 2)):
        bench.send(key, lane)
    await asyncio.sleep(0.01)
    bench.send("behind a", 0)
    bench.task.cancel()
    await asyncio.gather(bench.task, return_exceptions=True)
    outcomes = {key: error.outcome for key, error in bench.answers.by_key.items()}
    assert outcomes == {"a": "unknown", "b": "unknown", "c": "rejected", "behind a": "rejected"}
    bench.store.release(0, 1)


@pytest.mark.parametrize("seed", range(20))
def test_every_send_is_answered_once_and_in_order_whatever_the_lanes_do(seed: int) -> None:
    async def scenario() -> None:
        clock, rng, answers = LoopClock(), random.Random(seed), Answers()
        memory = MemoryStore(shards=3)
        chats = [f"chat_{n}" for n in range(6)]
        for chat_id in chats:
            await create_chat(memory, ANNA, BELA, chat_id=chat_id)
        odds = Odds(delay=0.3, late_reply=0.2, lost_reply=0.1, seconds_max=0.05)
        store = faulty(memory, FaultPlan(rng, {"append": odds}))
        watched = _Watched(StoreDurability(store, clock), memory)
        ids = Ids(clock, rng)
        intake = Intake(watched, clock, ids, grouping=memory.grouping, lane=memory.lane)  # type: ignore[arg-type]
        task = asyncio.create_task(intake.run())
        sent: dict[tuple[str, str], list[str]] = {}

        async def sender(user: User, source: str) -> None:
            for n in range(30):
                key, chat_id = f"{source}-{n}", rng.choice(chats)
                sent.setdefault((source, chat_id), []).append(key)
                deadline = clock.monotonic() + 5
                intake.submit(body(key, chat_id), user, source, deadline, answers.to(key))
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() / 50)

        await asyncio.gather(sender(ANNA, "1"), sender(BELA, "2"), sender(ANNA, "3"))
        intake.stop()
        await task
        assert len(answers.by_key) == 90 and watched.most > 1
        for keys in sent.values():
            sequences = [
                o.message.sequence for k in keys if isinstance(o := answers.by_key[k], Acked)
            ]
            assert sequences == sorted(sequences)

    run(scenario(), seed=seed)


class _Watched:
    """A plane that fails if a lane has two groups open."""

    def __init__(self, plane: StoreDurability, store: MemoryStore) -> None:
        self._plane = plane
        self._store = store
        self._open: Counter[int] = Counter()
        self.most = 0

    async def persist(self, drafts: Sequence[Draft], deadline: float) -> list[Outcome]:
        lanes = {self._store.lane(draft.chat_id) for draft in drafts}
        self._open.update(lanes)
        assert len(lanes) == 1 and set(self._open.values()) <= {0, 1}
        self.most = max(self.most, self._open.total())
        try:
            return await self._plane.persist(drafts, deadline)
        finally:
            self._open.subtract(lanes)


# --- durability
# ------------------------------------------------------------------------------------


async def test_overdue_write_takes_its_lane_until_it_ends_and_no_other() -> None:
    async with running(lanes=4, at_once=2) as bench:
        bench.store.hold(1)
        assert isinstance(await bench.persist(1), OutcomeUnknown)
        assert (bench.plane.overdue, bench.plane.breaker) == (1, BreakerState.CLOSED)
        assert telemetry.REGISTRY.get_sample_value("holdfast_durability_overdue_lanes") == 1
        before = bench.clock.monotonic()
        assert isinstance(await bench.persist(1), Unavailable)
        with pytest.raises(Unavailable):
            await bench.change(1)
        assert bench.clock.monotonic() == before and len(bench.store.groups) == 1
        assert isinstance(await bench.persist(2), Acked)
        assert bench.plane.trouble is None, "the last write succeeded"
        assert bench.plane.breaker_open_seconds == 0
        bench.store.release(1)
        await asyncio.sleep(0.01)
        assert isinstance(await bench.persist(1), Acked) and bench.plane.overdue == 0
        assert telemetry.REGISTRY.get_sample_value("holdfast_durability_overdue_lanes") == 0


async def test_lane_with_two_overdue_writes_is_taken_until_both_have_ended() -> None:
    async with running(lanes=4, at_once=2) as bench:
        bench.store.hold(1, "changes")
        writes = (bench.persist(1), bench.change(1))
        await asyncio.gather(*writes, return_exceptions=True)
        assert bench.plane.overdue == 2
        bench.store.release(1)
        await asyncio.sleep(0.01)
        assert bench.plane.overdue == 1
        assert isinstance(await bench.persist(1), Unavailable)
        bench.store.error = NotAMember("an answer of a store that works")
        bench.store.release("changes")
        await asyncio.sleep(0.01)
        assert isinstance(await bench.persist(1), NotAMember)


async def test_as_many_overdue_lanes_as_commit_at_once_hold_the_breaker_open() -> None:
    async with running(lanes=4, at_once=2) as bench:
        bench.store.hold(1, 2)
        await bench.persist(1)
        assert bench.plane.breaker is BreakerState.CLOSED
        await bench.persist(2)
        assert bench.plane.breaker is BreakerState.OPEN
        assert isinstance(await bench.persist(3), Unavailable), "nothing would get through"
        await asyncio.sleep(60)
        assert bench.plane.breaker_open_seconds == pytest.approx(60)
        bench.store.release(2)
        await asyncio.sleep(0.01)
        assert bench.plane.breaker is BreakerState.CLOSED
        assert isinstance(await bench.persist(3), Acked)
        bench.store.release(1)


async def test_one_lane_that_is_always_late_never_opens_the_breaker_of_the_others() -> None:
    """Hardly anything else is written: its failures are most of the calls."""
    async with running(lanes=4, at_once=4) as bench:
        for _ in range(20):
            bench.store.hold(1)
            assert isinstance(await bench.persist(1), OutcomeUnknown)
            bench.store.release(1)
            await asyncio.sleep(0.1)
            assert bench.plane.breaker is BreakerState.CLOSED
        assert isinstance(await bench.persist(2), Acked)


async def test_as_many_late_lanes_as_commit_at_once_are_a_late_store() -> None:
    async with running(lanes=2, at_once=2) as bench:
        for n in range(5):
            assert bench.plane.breaker is BreakerState.CLOSED
            bench.store.hold(n % 2)
            assert isinstance(await bench.persist(n % 2, seconds=1), OutcomeUnknown)
            bench.store.release(n % 2)
            await asyncio.sleep(0.01)
        assert bench.plane.breaker is BreakerState.OPEN


async def test_late_lane_counts_again_after_a_success_in_time() -> None:
    async with running(lanes=4, at_once=4) as bench:
        for _ in range(5):
            assert bench.plane.breaker is BreakerState.CLOSED
            assert isinstance(await bench.persist(1), Acked)
            bench.store.hold(1)
            assert isinstance(await bench.persist(1, seconds=1), OutcomeUnknown)
            bench.store.release(1)
            await asyncio.sleep(0.01)
        assert bench.plane.breaker is BreakerState.OPEN, "five of ten calls"


async def test_five_late_lanes_open_the_breaker_like_any_five_failures() -> None:
    async with running(lanes=16, at_once=8) as bench:
        for lane in range(5):
            assert bench.plane.breaker is BreakerState.CLOSED
            bench.store.hold(lane)
            assert isinstance(await bench.persist(lane, seconds=1), OutcomeUnknown)
            bench.store.release(lane)
            await asyncio.sleep(0.01)
        assert bench.plane.breaker is BreakerState.OPEN


async def test_probe_that_meets_a_late_lane_leaves_the_breaker_half_open() -> None:
    async with running(lanes=16, at_once=8) as bench:
        for lane in range(5):
            bench.store.hold(lane)
            await bench.persist(lane, seconds=1)
        bench.store.release(*range(5))
        await asyncio.sleep(30)
        assert bench.plane.breaker is BreakerState.HALF_OPEN
        bench.store.hold(4)
        assert isinstance(await bench.persist(4, seconds=1), OutcomeUnknown)
        assert bench.plane.breaker is BreakerState.HALF_OPEN
        assert isinstance(await bench.persist(9), Acked)
        assert bench.plane.breaker is BreakerState.CLOSED
        bench.store.release(4)


async def test_hanging_lane_stops_neither_marks_nor_probes_and_they_stop_no_lane() -> None:
    async with running(lanes=4, at_once=2) as bench:
        bench.store.hold(0)
        await bench.persist(0)
        assert await bench.plane.mark(MARKS) is True
        await bench.plane.probe()
        await bench.plane.probe()
        assert bench.store.touched == 1 and bench.plane.trouble is None
        bench.store.release(0)
        bench.store.hold("marks")
        assert await bench.plane.mark(MARKS) is False
        assert await bench.plane.mark(MARKS) is False and len(bench.store.marked) == 2
        assert isinstance(await bench.persist(0), Acked)
        bench.store.release("marks")


async def test_changes_of_a_hanging_lane_leave_the_other_lanes_their_part() -> None:
    async with running(lanes=4, at_once=2) as bench:
        bench.store.hold(1)
        hanging = [asyncio.create_task(bench.change(1)) for _ in range(4)]
        await asyncio.sleep(0.01)
        with pytest.raises(ServerBusy) as busy:
            await bench.change(1)
        assert busy.value.details == {"limit": 4}, "half of eight, where two lanes commit at once"
        bench.store.error = NotAMember("an answer of a store that works")
        with pytest.raises(NotAMember):
            await bench.change(2)
        await asyncio.gather(*hanging, return_exceptions=True)
        assert bench.plane.overdue == 4
        assert bench.plane.breaker is BreakerState.CLOSED, "they are one lane"
        bench.store.release(1)
        await asyncio.sleep(0.01)
        for _ in range(9):
            with pytest.raises(NotAMember):
                await bench.change(1)
