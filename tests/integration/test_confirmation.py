"""What both messaging documents say will confirm them, where no other test carries the
item.

The documents' bounds on latency are judged on virtual time, with a disk of a known
speed: what the path adds to it is ours, whatever the machine. On the real path, from
intake to a synced SQLite file, latencies are measured and shown.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from result_counts import tally
from supervisor import percentile

from holdfast import telemetry
from holdfast.clock import Clock, Ids, SystemClock
from holdfast.errors import KeyReused
from holdfast.ingest.durability import StoreDurability
from holdfast.ingest.intake import Intake
from holdfast.message import Acked, Draft, Outcome, User
from holdfast.store.commands import CommandContext, CreateChat
from holdfast.store.contract import ChatStore
from holdfast.store.memory import MemoryStore
from holdfast.store.sqlite import SqliteStore
from holdfast.wire.frames import SendBody
from proof.faults import FaultPlan, Odds, faulty
from proof.results import Row
from proof.virtual_loop import LoopClock

ANN = User("default", "ann")
TURNS = 5


async def found(store: ChatStore) -> None:
    await store.change(CreateChat(CommandContext(ANN, "now", "msg_0"), "c", "group", "a chat", []))


class Writers:
    """Users who send to one chat through the intake, each after its last answer."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self.seconds: list[float] = []
        self.answers: list[Outcome] = []

    async def send(self, key: str) -> Outcome:
        answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        clock = asyncio.get_running_loop().time
        began = clock()
        deadline = began + 5
        self._intake.submit(SendBody(key, "c", "hello"), ANN, key, deadline, answered.set_result)
        answer = await answered
        self.seconds.append(clock() - began)
        self.answers.append(answer)
        return answer

    async def all(self, writers: int, each: int, turn: int = 0) -> None:
        async def one(name: int) -> None:
            for number in range(each):
                await self.send(f"{turn}-{writers}-{name}-{number}")

        await asyncio.gather(*(one(name) for name in range(writers)))


@asynccontextmanager
async def writing(path: Path) -> AsyncIterator[Writers]:
    async with SqliteStore(path / "chats.db") as store, intake_of(store, SystemClock()) as writers:
        yield writers


@asynccontextmanager
async def intake_of(store: ChatStore, clock: Clock) -> AsyncIterator[Writers]:
    await found(store)
    intake = Intake(StoreDurability(store, clock), clock, Ids(clock))
    running = asyncio.create_task(intake.run())
    yield Writers(intake)
    intake.stop()
    await running


@pytest.mark.covers("001 100 concurrent writers, through ingest")
async def test_a_hundred_concurrent_writers_receive_a_hundred_unique_sequences(
    tmp_path: Path,
) -> None:
    async with writing(tmp_path) as writers:
        await writers.all(100, 1)
    numbers = [answer.message.sequence for answer in writers.answers if isinstance(answer, Acked)]
    assert sorted(numbers) == list(range(1, 101))


@pytest.mark.covers("001 transaction fails correctly when the key exists")
async def test_a_key_that_exists_answers_as_the_first_time_or_refuses_other_content() -> None:
    store = MemoryStore()
    await found(store)
    draft = Draft(ANN, "c", "k", "hello", "text/plain", "msg_1", "now")
    other = Draft(ANN, "c", "k", "other", "text/plain", "msg_2", "now")
    first, again, reused = [(await store.append([each]))[0] for each in (draft, draft, other)]
    assert isinstance(first, Acked) and isinstance(again, Acked)
    assert (again.message, again.deduplicated) == (first.message, True)
    assert isinstance(reused, KeyReused)
    assert (await store.inspect("c")).counter == 1


class Disk(MemoryStore):
    """A store whose commit takes as long as the documents allow an allocation."""

    COMMIT_SECONDS = 0.049

    async def append(self, group: Sequence[Draft]) -> list[Outcome]:
        await asyncio.sleep(self.COMMIT_SECONDS)
        return await super().append(group)


class Observed:
    """What a latency histogram of ours has counted since this was made."""

    def __init__(self, name: str) -> None:
        self._name = f"holdfast_{name}_seconds"
        self._before = {le: self._at(le) for le in ("0.05", "0.1", "0.5", "+Inf")}

    def within(self, le: str) -> int:
        return int(self._at(le) - self._before[le])

    @property
    def count(self) -> int:
        return self.within("+Inf")

    def _at(self, le: str) -> float:
        return telemetry.REGISTRY.get_sample_value(f"{self._name}_bucket", {"le": le}) or 0.0


@pytest.mark.covers("001 sequence allocation P99 < 50 ms")
@pytest.mark.covers("001 total persist path P99 < 100 ms")
@pytest.mark.covers("001 latency degradation under 10×, 100× contention")
@pytest.mark.virtual_time
@pytest.mark.parametrize("contention", [1, 10, 100])
async def test_the_path_adds_no_more_than_one_commit_to_an_allocation_at_any_contention(
    contention: int,
) -> None:
    """Stronger: all of them, not 99 %, and the same bounds under a hundredfold
    contention.

    Allocation is part of the commit and has a histogram of its own. Whoever comes while
    a commit is open waits for it and is in the next one, because groups grow and queues
    do not: so a disk that allocates within 50 ms persists within 100 ms.
    """
    allocation, persist = (
        Observed("sequence_allocation_latency"),
        Observed("durability_persist_latency"),
    )
    async with intake_of(Disk(), LoopClock()) as writers:
        await writers.all(contention, 20)
    assert all(isinstance(answer, Acked) for answer in writers.answers)
    assert allocation.count >= 20 and allocation.within("0.05") == allocation.count
    assert persist.count == allocation.count and persist.within("0.1") == persist.count
    assert max(writers.seconds) < 0.1


@pytest.mark.covers("000 measure persist latency P99 under load")
@pytest.mark.covers("001 total 25-63 ms, under contention 27-90 ms")
async def test_persist_latency_on_a_real_disk_is_measured_and_within_its_objective(
    tmp_path: Path,
) -> None:
    """The objective is that of the document, 500 ms; the figures go into the results.

    In most of the turns: one moment in which the machine does something else is not how
    long we take.
    """
    figures, slow, sends = {}, 0, 0
    async with writing(tmp_path) as writers:
        for contention, each in ((1, 12), (10, 4), (100, 1)):
            allocation, turns = Observed("sequence_allocation_latency"), list[float]()
            for turn in range(TURNS):
                writers.seconds.clear()
                await writers.all(contention, each, turn)
                turns.append(percentile(writers.seconds, 0.99))
                sends += len(writers.seconds)
            p99 = statistics.median(turns)
            share = allocation.within("0.05") / allocation.count
            figures[f"{contention} writers"] = (
                f"p99 {p99 * 1000:.1f} ms ({share:.0%} allocated within 50 ms)"
            )
            slow += p99 >= 0.5
    tally(
        Row(
            name="persist latency",
            how=(
                f"intake to a synced SQLite file, one chat, writers at once; the median of {TURNS}"
                " turns"
            ),
            runs=sends,
            failures=slow,
            requirement="p99 < 500 ms",
            figures=figures,
        )
    )
    assert all(isinstance(answer, Acked) for answer in writers.answers)


@pytest.mark.covers("001 gaps occur only when expected")
@pytest.mark.covers("001 gap rate < 1 % under normal operation")
@pytest.mark.covers("001 gap rate correlates with the failure injection rate")
@pytest.mark.virtual_time
@pytest.mark.parametrize("failing", [0.0, 0.1, 0.5])
async def test_there_is_no_gap_at_any_rate_of_failures(failing: float) -> None:
    """Stronger: the gap rate is 0, whatever fails; there is nothing to correlate."""
    store = MemoryStore()
    await found(store)
    odds = Odds(fail=failing / 2, lost_reply=failing / 2)
    broken = faulty(store, FaultPlan(random.Random(7), odds={"append": odds}))
    durability = StoreDurability(broken, LoopClock())
    for number in range(200):
        draft = Draft(ANN, "c", f"k{number}", "hello", "text/plain", f"msg_{number}", "now")
        await durability.persist([draft], asyncio.get_running_loop().time() + 5)
        await asyncio.sleep(31)  # longer than a breaker rests
    inspected = await store.inspect("c")
    assert (
        inspected.count > 20 and inspected.counter == inspected.count and list(inspected.gaps) == []
    )
