"""The intake loop on virtual time: grouping, answers, bounds in time, stopping."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from scripted_durability import ANNA, BELA, CHAT, Answers, ScriptedStore, acks, body, create_chat

from holdfast.clock import Ids
from holdfast.errors import ChatHalted, NotAMember, OutcomeUnknown, Unavailable
from holdfast.ingest.durability import StoreDurability
from holdfast.ingest.intake import Intake
from holdfast.ingest.send_queue import IntakeSettings
from holdfast.message import Acked, Draft, Outcome, User, Watermark
from holdfast.resilience import BreakerState
from holdfast.store.commands import Command, CommandResult
from holdfast.store.memory import MemoryStore
from holdfast.wire.frames import SendBody
from proof.virtual_loop import LoopClock, run


class Bench:
    """An intake over a scripted store."""

    def __init__(self, settings: IntakeSettings | None = None) -> None:
        clock = LoopClock()
        self.clock = clock
        self.store = ScriptedStore()
        self.answers = Answers()
        self.durability = StoreDurability(self.store, clock)  # type: ignore[arg-type]
        self.intake = Intake(self.durability, clock, Ids(clock, random.Random(1)), settings)

    def send(
        self, key: str, chat: str = CHAT, source: str = "conn_1", seconds: float = 5.0
    ) -> None:
        deadline = self.clock.monotonic() + seconds
        self.intake.submit(body(key, chat), ANNA, source, deadline, self.answers.to(key))

    @property
    def groups(self) -> list[list[str]]:
        return [[draft.client_message_id for draft in group] for group in self.store.groups]


@asynccontextmanager
async def running(settings: IntakeSettings | None = None) -> AsyncIterator[Bench]:
    bench = Bench(settings)
    task = asyncio.create_task(bench.intake.run())
    yield bench
    bench.store.gate.set()
    bench.intake.stop()
    await task


async def test_a_send_that_finds_nothing_in_flight_leaves_at_once_alone() -> None:
    async with running() as bench:
        bench.send("a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bench.groups == [["a"]]
        await asyncio.sleep(0.001)
        assert bench.answers.codes() == {"a": "ACK"}
        assert bench.clock.monotonic() < 0.01


@pytest.mark.covers("001 batch sequence allocation")
async def test_sends_gather_while_a_commit_is_in_flight() -> None:
    async with running() as bench:
        bench.store.gate.clear()
        bench.send("a")
        await asyncio.sleep(0.01)
        for key in "bcd":
            bench.send(key)
        await asyncio.sleep(0.01)
        assert bench.groups == [["a"]], "one group is in flight at a time"
        bench.store.gate.set()
        await asyncio.sleep(0.01)
        assert bench.groups == [["a"], ["b", "c", "d"]]
        assert bench.answers.order == ["a", "b", "c", "d"]


@pytest.mark.covers("000 failfast_persistence")
@pytest.mark.covers("001 before ACK: no client-visible effect")
async def test_failfast_persistence_no_ack_before_the_commit() -> None:
    async with running() as bench:
        bench.store.gate.clear()
        bench.send("a")
        await asyncio.sleep(4.9)
        assert bench.answers.codes() == {}
        bench.store.gate.set()
        await asyncio.sleep(0.01)
        assert bench.store.ended == 1
        assert bench.answers.codes() == {"a": "ACK"}


@pytest.mark.covers("001 message_id: a ULID with the prefix `msg_`")
async def test_a_group_has_one_moment_and_rising_ids() -> None:
    async with running() as bench:
        for key in "abc":
            bench.send(key)
        await asyncio.sleep(0.01)
        (group,) = bench.store.groups
        assert len({draft.created_at for draft in group}) == 1
        ids = [draft.message_id for draft in group]
        assert ids == sorted(set(ids)) and all(i.startswith("msg_") for i in ids)
        assert group[0].sender == ANNA


async def test_what_waits_two_seconds_is_busy_at_that_moment() -> None:
    async with running() as bench:
        bench.store.gate.clear()
        bench.send("in flight")
        await asyncio.sleep(0.5)
        bench.send("early", source="2")
        await asyncio.sleep(1.0)
        bench.send("later", source="3")
        await asyncio.sleep(0.99)
        assert bench.answers.codes() == {}
        await asyncio.sleep(0.02)
        assert bench.answers.codes() == {"early": "SERVER_BUSY"}
        await asyncio.sleep(1.0)
        assert bench.answers.codes() == {"early": "SERVER_BUSY", "later": "SERVER_BUSY"}
        assert bench.answers.by_key["early"].retry_after_seconds == 1
        bench.store.gate.set()
        await asyncio.sleep(0.01)
        assert bench.answers.codes()["in flight"] == "ACK"
        assert bench.groups == [["in flight"]]


@pytest.mark.covers("000 1.1 order of refusals, the breaker after the queue")
async def test_a_full_queue_refuses_before_an_open_breaker_does() -> None:
    async with running(IntakeSettings(max_waiting=2)) as bench:
        bench.store.error = Unavailable("the disk is gone")
        for n in range(5):
            bench.send(f"k{n}")
            await asyncio.sleep(0.01)
        assert bench.durability.breaker is BreakerState.OPEN
        for key in "abc":
            bench.send(key, source=key)
        assert bench.answers.order[5:] == ["c"], "at once"
        await asyncio.sleep(0.01)
        answered = {
            key: (o.code, o.retry_after_seconds)
            for key, o in bench.answers.by_key.items()
            if key in "abc"
        }
        refused = ("SERVICE_UNAVAILABLE", pytest.approx(30, abs=0.1))
        assert answered == {"a": refused, "b": refused, "c": ("SERVER_BUSY", 1)}


async def test_a_full_queue_is_busy_at_once() -> None:
    async with running(IntakeSettings(max_waiting=1)) as bench:
        bench.store.gate.clear()
        bench.send("in flight")
        await asyncio.sleep(0.01)
        bench.send("waits")
        bench.send("too many")
        assert bench.answers.codes() == {"too many": "SERVER_BUSY"}
        assert bench.answers.by_key["too many"].retryable


@pytest.mark.parametrize("error", [Unavailable("down"), OutcomeUnknown("?"), ChatHalted("halted")])
async def test_followers_of_a_retryable_failure_get_the_same_answer(error: Exception) -> None:
    async with running() as bench:
        bench.store.answer = lambda drafts: [
            error if d.client_message_id == "a" else acks([d])[0] for d in drafts
        ]
        bench.store.gate.clear()
        bench.send("a")
        await asyncio.sleep(0.01)
        bench.send("follower")
        bench.send("other chat", chat="chat_2")
        bench.send("other connection", source="conn_2")
        bench.store.gate.set()
        await asyncio.sleep(0.01)
        assert bench.answers.by_key["a"] is error
        assert bench.answers.by_key["follower"] is error
        assert bench.answers.codes()["other chat"] == "ACK"
        assert bench.answers.codes()["other connection"] == "ACK"
        assert bench.groups == [["a"], ["other chat", "other connection"]]


async def test_followers_of_a_refusal_go_their_way() -> None:
    async with running() as bench:
        refusal = NotAMember("no")
        bench.store.answer = lambda drafts: [
            refusal if d.client_message_id == "a" else acks([d])[0] for d in drafts
        ]
        bench.store.gate.clear()
        bench.send("a")
        await asyncio.sleep(0.01)
        bench.send("follower")
        bench.store.gate.set()
        await asyncio.sleep(0.01)
        assert bench.answers.codes() == {"a": "NOT_A_MEMBER", "follower": "ACK"}


async def test_a_commit_that_hangs_is_unknown_at_the_deadline_and_answered_once() -> None:
    async with running() as bench:
        bench.store.gate.clear()
        bench.send("a")
        await asyncio.sleep(4.99)
        assert bench.answers.codes() == {}
        await asyncio.sleep(0.02)
        assert isinstance(bench.answers.by_key["a"], OutcomeUnknown)
        bench.store.gate.set()
        await asyncio.sleep(1)
        assert bench.store.ended == 1, "the commit went on to its end"
        assert bench.durability.overdue == 0
        bench.send("b")
        await asyncio.sleep(0.01)
        assert bench.answers.codes()["b"] == "ACK"


async def test_one_broken_listener_does_not_cost_others_their_answers() -> None:
    async with running() as bench:

        def broken(_outcome: object) -> None:
            raise RuntimeError("a defect in a session")

        bench.intake.submit(body("x"), ANNA, "conn_0", 5.0, broken)
        bench.send("a")
        await asyncio.sleep(0.01)
        assert bench.answers.codes() == {"a": "ACK"}


async def test_a_group_that_is_refused_at_once_does_not_cost_the_one_before_it_its_answers() -> (
    None
):
    class Refusing:
        def __init__(self) -> None:
            self.go = asyncio.Event()

        async def persist(self, drafts: Sequence[Draft], deadline: float) -> list[Outcome]:
            if self.go.is_set():
                return [Unavailable("the breaker is open")] * len(drafts)
            await self.go.wait()
            return acks(drafts)

    clock, answers, plane = LoopClock(), Answers(), Refusing()
    intake = Intake(plane, clock, Ids(clock, random.Random(1)))  # type: ignore[arg-type]
    task = asyncio.create_task(intake.run())
    intake.submit(body("a"), ANNA, "1", 5.0, answers.to("a"))
    await asyncio.sleep(0.01)
    intake.submit(body("b"), ANNA, "2", 5.0, answers.to("b"))
    plane.go.set()
    await asyncio.sleep(0.01)
    assert answers.order == ["a", "b"]
    assert isinstance(answers.by_key["a"], Acked) and isinstance(answers.by_key["b"], Unavailable)
    intake.stop()
    await task


@pytest.mark.parametrize(
    "broken", [lambda drafts: 1 / 0, lambda drafts: []], ids=["raises", "loses count"]
)
async def test_a_durability_plane_that_breaks_its_promise_does_not_end_the_intake(
    broken: Callable[[list], list],
) -> None:
    class Broken:
        async def persist(self, drafts: list, deadline: float) -> list:
            return broken(drafts)

    clock, answers = LoopClock(), Answers()
    intake = Intake(Broken(), clock, Ids(clock, random.Random(1)))  # type: ignore[arg-type]
    task = asyncio.create_task(intake.run())
    for key in "ab":
        intake.submit(body(key), ANNA, key, 5.0, answers.to(key))
        await asyncio.sleep(0.01)
        assert isinstance(answers.by_key[key], OutcomeUnknown)
    intake.stop()
    await task


async def test_stopping_answers_what_was_taken_and_takes_no_more() -> None:
    bench = Bench()
    task = asyncio.create_task(bench.intake.run())
    bench.store.gate.clear()
    bench.send("a")
    await asyncio.sleep(0.01)
    bench.send("b")
    bench.intake.stop()
    bench.send("too late")
    assert bench.answers.codes() == {"too late": "SERVICE_UNAVAILABLE"}
    bench.store.gate.set()
    await task
    assert bench.answers.codes() == {"too late": "SERVICE_UNAVAILABLE", "a": "ACK", "b": "ACK"}


async def test_a_cancelled_intake_leaves_nobody_without_an_answer() -> None:
    bench = Bench()
    task = asyncio.create_task(bench.intake.run())
    bench.store.gate.clear()
    bench.send("in flight")
    await asyncio.sleep(0.01)
    bench.send("waiting")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bench.answers.by_key["in flight"].outcome == "unknown"
    assert bench.answers.by_key["waiting"].outcome == "rejected"
    assert bench.answers.by_key["waiting"].retryable
    bench.store.gate.set()


@pytest.mark.parametrize("seed", range(20))
def test_every_send_is_answered_once_whatever_the_interleaving(seed: int) -> None:
    async def scenario() -> None:
        clock, rng, answers = LoopClock(), random.Random(seed), Answers()
        store = MemoryStore()
        await create_chat(store, ANNA, BELA)
        intake = Intake(StoreDurability(store, clock), clock, Ids(clock, rng))
        task = asyncio.create_task(intake.run())

        async def sender(user: User, source: str) -> None:
            for n in range(20):
                key = f"{source}-{n}"
                intake.submit(body(key), user, source, clock.monotonic() + 5, answers.to(key))
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() / 100)

        await asyncio.gather(sender(ANNA, "1"), sender(BELA, "2"), sender(ANNA, "3"))
        intake.stop()
        await task
        assert len(answers.by_key) == 60
        assert all(isinstance(outcome, Acked) for outcome in answers.by_key.values())
        for source in "123":
            sequences = [answers.by_key[f"{source}-{n}"].message.sequence for n in range(20)]
            assert sequences == sorted(sequences), (
                "one connection's sends to one chat keep their order"
            )
        assert {o.message.sequence for o in answers.by_key.values()} == set(range(1, 61))

    run(scenario(), seed=seed)


async def test_a_group_is_answered_while_the_next_one_is_being_committed() -> None:
    class Slow:
        """Commits one group after another, each when it is let go."""

        def __init__(self) -> None:
            self.begun: list[int] = []
            self.go = [asyncio.Event() for _ in range(3)]

        async def persist(self, drafts: Sequence[Draft], deadline: float) -> list[Outcome]:
            number = len(self.begun)
            self.begun.append(len(drafts))
            await self.go[number].wait()
            return [OutcomeUnknown(f"group {number}")] * len(drafts)

        async def change(self, command: Command, deadline: float) -> CommandResult:
            raise AssertionError

        async def mark(self, watermarks: Sequence[Watermark]) -> bool:
            raise AssertionError

    clock, slow, answers = LoopClock(), Slow(), list[str]()
    intake = Intake(slow, clock, Ids(clock, random.Random(1)))
    running = asyncio.create_task(intake.run())

    def send(chat_id: str) -> None:
        body = SendBody(f"c-{chat_id}", chat_id, "hello")
        intake.submit(
            body, User("t", "u"), chat_id, clock.monotonic() + 5, lambda o: answers.append(str(o))
        )

    send("a")
    await asyncio.sleep(0.1)
    send("b")
    slow.go[0].set()
    await asyncio.sleep(0.1)
    assert slow.begun == [1, 1], "the next group is with the store"
    assert answers == ["group 0"], "and the one before it is answered meanwhile"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(answers) == 2, "nobody is left without an answer"
