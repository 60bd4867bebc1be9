"""The eight failure points of the sequencing document (001 section 10), each by name,
on the real parts.

There, two phases and a publish make five places to crash, two of which leave a gap.
Here counter, key and message are one commit and the log is its order, so that only two
places are left: before the commit, and after it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from supervisor import START_SECONDS_MAX, Person, Supervisor

from holdfast import telemetry
from holdfast.errors import ChatHalted, Unavailable
from holdfast.ingest.durability import StoreDurability
from holdfast.message import Acked, Draft, Outcome, User
from holdfast.node.state_dir import held
from holdfast.store.commands import CommandContext, CreateChat, RecoverChat
from holdfast.store.contract import Inspection
from holdfast.store.memory import MemoryStore
from holdfast.store.sqlite import SqliteStore
from holdfast.store.sqlite.database import CHATS
from holdfast.verify.checkers import check, red
from holdfast.verify.history import Recorder
from proof.controls import only_faults
from proof.faults import Fault, FaultPlan, Odds, faulty
from proof.simulation import Parts, play
from proof.virtual_loop import LoopClock


@asynccontextmanager
async def prepared(tmp_path: Path) -> AsyncIterator[tuple[Supervisor, str, Path]]:
    supervisor = Supervisor(tmp_path, Recorder(), 1)
    chat_id = await supervisor.prepare("ann", "bob")
    async with asyncio.timeout(3 * START_SECONDS_MAX):
        yield supervisor, chat_id, tmp_path


async def inspected(supervisor: Supervisor, chat_id: str) -> Inspection:
    with held(supervisor.state_dir) as state:
        async with SqliteStore(state / CHATS.name) as store:
            return await store.inspect(chat_id)


async def die_at(supervisor: Supervisor, chat_id: str, directory: Path, point: str) -> Person:
    """Ann sends one message; the server dies at the point of its commit. Ann is offline
    then, her message unsent.
    """
    await supervisor.spawn(f"{point}:1")
    assert await supervisor.serving()
    ann = Person(supervisor, "ann", directory)
    async with ann.online():
        saying = asyncio.create_task(ann.say(chat_id, "once"))
        await supervisor.dead(30)
        saying.cancel()
        await asyncio.wait([saying])
    await supervisor.kill()
    return ann


async def retried(supervisor: Supervisor, chat_id: str, directory: Path) -> Person:
    """The server is back, and Ann's device sends what it still has by itself."""
    await supervisor.spawn()
    assert await supervisor.serving()
    ann = Person(supervisor, "ann", directory)
    async with ann.online():
        await ann.has(chat_id, 1)
    return ann


@pytest.mark.covers("001 crash before step 3")
async def test_crash_before_allocation(tmp_path: Path) -> None:
    """As written: nothing was written, the client retries from scratch."""
    async with prepared(tmp_path) as (supervisor, chat_id, directory):
        await die_at(supervisor, chat_id, directory, "commit.before")
        before = await inspected(supervisor, chat_id)
        assert (before.counter, before.count) == (0, 0)
        ann = await retried(supervisor, chat_id, directory)
        assert [sequence for sequence, _ in ann.copy[chat_id]] == [1]
        await supervisor.stop()


@pytest.mark.covers("001 crash after step 3, before step 4")
async def test_crash_after_allocation_before_persistence(tmp_path: Path) -> None:
    """Stronger: the number is allocated inside the commit that is lost, so there is no
    gap; the retry gets 1.
    """
    async with prepared(tmp_path) as (supervisor, chat_id, directory):
        await die_at(supervisor, chat_id, directory, "commit.before")
        await retried(supervisor, chat_id, directory)
        await supervisor.stop()
        after = await inspected(supervisor, chat_id)
        assert (after.counter, after.count, list(after.gaps)) == (1, 1, [])


@pytest.mark.covers("001 crash during step 4")
async def test_crash_during_the_transaction(tmp_path: Path) -> None:
    """Stronger: a whole group of sends is rolled back together, again without a gap."""
    async with prepared(tmp_path) as (supervisor, chat_id, directory):
        await supervisor.spawn("commit.before:2")
        assert await supervisor.serving()
        people = [Person(supervisor, user, directory) for user in ("ann", "bob")]
        async with people[0].online(), people[1].online():
            saying = [
                asyncio.create_task(person.say(chat_id, "hello"))
                for person in people
                for _ in range(3)
            ]
            await supervisor.dead(30)
            await supervisor.kill()
            await supervisor.spawn()
            assert await supervisor.serving()
            await asyncio.gather(*saying)
            await asyncio.gather(*(person.has(chat_id, 6) for person in people))
        await supervisor.stop()
        after = await inspected(supervisor, chat_id)
        assert (after.counter, after.count, list(after.gaps)) == (6, 6, [])


@pytest.mark.covers("001 crash after step 4, before step 5")
async def test_crash_after_persistence_before_the_ack(tmp_path: Path) -> None:
    """As written: the message is stored, and the retry is answered from its key."""
    async with prepared(tmp_path) as (supervisor, chat_id, directory):
        await supervisor.spawn("commit.after:1")
        assert await supervisor.serving()
        ann = Person(supervisor, "ann", directory)
        async with ann.online():
            saying = asyncio.create_task(ann.say(chat_id, "once"))
            await supervisor.dead(30)
            await supervisor.kill()
            assert (await inspected(supervisor, chat_id)).count == 1
            await supervisor.spawn()
            assert await supervisor.serving()
            await saying
            await ann.has(chat_id, 1)
        acks = list(supervisor.record.history().acks())
        assert [(ok.deduplicated, acked.sequence) for _, ok, acked in acks] == [(True, 1)]
        await supervisor.stop()
        assert (await inspected(supervisor, chat_id)).count == 1


@pytest.mark.covers("000 contract 5: a publish that fails is an error")
@pytest.mark.covers("001 crash during step 5")
async def test_crash_during_the_publish(tmp_path: Path) -> None:
    """Stronger: what is committed is in the log: Bob gets it without Ann's retry."""
    async with prepared(tmp_path) as (supervisor, chat_id, directory):
        await die_at(supervisor, chat_id, directory, "commit.after")
        await supervisor.spawn()
        assert await supervisor.serving()
        bob = Person(supervisor, "bob", directory)
        async with bob.online():
            await bob.has(chat_id, 1)
        assert bob.texts[chat_id] == ["once"]
        await supervisor.stop()


ANN = User("default", "ann")


def draft(key: str) -> Draft:
    return Draft(ANN, "c", key, "hello", "text/plain", f"msg_{key}", "now")


async def chat() -> MemoryStore:
    store = MemoryStore()
    await store.change(CreateChat(CommandContext(ANN, "now", "msg_0"), "c", "group", "a chat", []))
    return store


def corruptions() -> float:
    return (
        telemetry.REGISTRY.get_sample_value("holdfast_durability_counter_corruption_total") or 0.0
    )


@pytest.mark.covers("001 DynamoDB unavailable")
@pytest.mark.virtual_time
async def test_store_unavailable() -> None:
    """As written: every operation fails, nothing is allocated, a retry succeeds when
    the store is back.
    """
    store, plan = (
        await chat(),
        FaultPlan(random.Random(1), script={"append": [Fault.FAIL, Fault.FAIL]}),
    )
    durability = StoreDurability(faulty(store, plan), LoopClock())
    answers: list[Outcome] = []
    for _ in range(3):
        answers += await durability.persist([draft("k")], asyncio.get_running_loop().time() + 5)
    assert [type(answer) for answer in answers] == [Unavailable, Unavailable, Acked]
    assert (await store.inspect("c")).counter == 1


@pytest.mark.covers("000 Kafka publish: fail-fast")
@pytest.mark.covers("001 Kafka unavailable")
def test_log_unavailable() -> None:
    """Stronger: sends are acknowledged all the while, and everybody has everything soon
    after the log is back, whether or not anybody retries.
    """
    history = play(3, Parts(options=only_faults(fanout=Odds(fail=0.95))))
    sends = [operation for operation in history.operations if operation.invoke.verb == "send"]
    assert sends and len(list(history.acks())) == len(sends)
    assert red(check(history)) == set()


@pytest.mark.covers("000 2.3 restoration: `max_sequence + 1`")
@pytest.mark.covers("001 counter item missing")
async def test_counter_missing() -> None:
    """Stronger: SEV-1, the chat alone halts, and recovery restores the highest stored
    number under a new epoch.
    """
    store = await chat()
    await store.append([draft("before")])
    store._chats["c"].counter = None  # as a bad restore would leave it
    alarms = corruptions()
    [refused] = await store.append([draft("k")])
    assert isinstance(refused, ChatHalted)
    assert corruptions() == alarms + 1, "SEV-1 on the first one"
    assert (await store.inspect("c")).counter is None
    operator = CommandContext(ANN, "now", "msg_r", operator=True, reason="the counter was lost")
    recovered = await store.change(RecoverChat(operator, "c"))
    assert recovered.chat.epoch == 2
    [acked] = await store.append([draft("k")])
    assert isinstance(acked, Acked) and acked.message.sequence == 2
