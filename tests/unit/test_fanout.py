"""Fanout on virtual time: reads, bounded retries, skips, clear failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence, Set
from contextlib import asynccontextmanager

import pytest
from registry_rig import connect, disconnect
from scripted_durability import ANNA, BELA, CHAT, CLEO, create_chat
from store_rigs import act

from holdfast import telemetry
from holdfast.access.proofs import CursorProofs
from holdfast.errors import Unauthorized, Unavailable, UnreadableEvent
from holdfast.eventlog.contract import START, Position
from holdfast.eventlog.memory import MemoryEventLog
from holdfast.fanout.contract import Envelope
from holdfast.fanout.dead_letters import DeadLetter, DeadLetterSettings, RecentDeadLetters
from holdfast.fanout.fanout import Fanout, FanoutDeps
from holdfast.fanout.members import Members
from holdfast.fanout.memory import LocalLink
from holdfast.fanout.registry.memory import MemoryRegistry
from holdfast.message import Cursor, Draft, LogEntry, Member, User
from holdfast.store.commands import AddMember, RemoveMember
from holdfast.store.memory import MemoryStore
from proof.virtual_loop import LoopClock, run


def metric(name: str, **labels: str) -> float:
    return telemetry.REGISTRY.get_sample_value(f"holdfast_{name}", labels) or 0.0


class Link(LocalLink):
    """Fails as scripted, and records each try."""

    def __init__(self) -> None:
        super().__init__()
        self.tries: list[tuple[str, float]] = []
        self.fail: dict[str, Exception | float] = {}
        self.failures: int | None = None

    async def deliver(self, gateway: str, envelope: Envelope) -> None:
        self.tries.append((gateway, asyncio.get_running_loop().time()))
        fault = self.fail.get(gateway)
        if isinstance(fault, Exception) and (self.failures is None or self.failures > 0):
            self.failures = None if self.failures is None else self.failures - 1
            raise fault
        if isinstance(fault, float):
            await asyncio.sleep(fault)
        await super().deliver(gateway, envelope)


class Registry(MemoryRegistry):
    down: Exception | None = None

    async def gateways_of(self, users: Iterable[User]) -> Mapping[str, Set[User]]:
        if self.down is not None:
            raise self.down
        return await super().gateways_of(users)


class Log(MemoryEventLog):
    """A log that can be unavailable, or hold an entry that cannot be decoded."""

    error: Exception | None = None
    bad: int | None = None

    async def read(self, after: Position, limit: int) -> tuple[Sequence[LogEntry], Position]:
        if self.error is not None:
            raise self.error
        if self.bad is not None and after.offset(0) < self.bad:
            before = [e for e in (await super().read(after, limit))[0] if e.offset < self.bad]
            if not before:
                raise UnreadableEvent("not JSON", 0, self.bad, b"\xff")
            return before, Position((before[-1].offset,))
        return await super().read(after, limit)


class Bench:
    """A memory store with its log, one fanout, gateways that note what they get."""

    def __init__(self, read_entries_max: int = 500) -> None:
        self.store, self.log = MemoryStore(), Log()
        self.store.on_commit(self.log.committed)
        self.registry, self.link = Registry(LoopClock()), Link()
        self.letters = RecentDeadLetters()
        self.loads: list[str] = []
        self.load_fails: Exception | None = None
        self.members = Members(self.load)
        self.got: dict[str, list[tuple[str, int]]] = {"east": [], "west": []}
        for gateway in self.got:
            self.link.connect(gateway, lambda envelope, to=gateway: self.note(to, envelope))
        around = FanoutDeps(
            self.log,
            self.members,
            self.registry,
            self.link,
            self.letters,
            CursorProofs(b"test"),
            "east",
        )
        self.fanout = Fanout(
            around, LoopClock(), random.Random(1), read_entries_max=read_entries_max
        )

    async def load(self, chat_id: str) -> Sequence[Member]:
        self.loads.append(chat_id)
        if self.load_fails is not None:
            raise self.load_fails
        return await self.store.members(chat_id)

    def note(self, gateway: str, envelope: Envelope) -> None:
        self.got[gateway] += [(m.chat_id, m.sequence) for s in envelope.runs for m in s.messages]

    async def send(self, *keys: str, chat_id: str = CHAT) -> None:
        await self.store.append(
            [
                Draft(
                    ANNA, chat_id, key, "hi", "text/plain", f"msg_{key}", "2027-01-15T08:00:00.000Z"
                )
                for key in keys
            ]
        )


@asynccontextmanager
async def running(read_entries_max: int = 500) -> AsyncIterator[Bench]:
    bench = Bench(read_entries_max)
    await create_chat(bench.store, ANNA, BELA)
    await connect(bench.registry, "east", ANNA)
    await connect(bench.registry, "west", BELA)
    task = asyncio.create_task(bench.fanout.run())
    await asyncio.sleep(0.01)
    yield bench
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_is_committed_reaches_every_gateway_with_a_member() -> None:
    async with running() as bench:
        await bench.send("a", "b")
        await asyncio.sleep(0.01)
        assert bench.got == {"east": [(CHAT, 1), (CHAT, 2)], "west": [(CHAT, 1), (CHAT, 2)]}
        assert bench.fanout.position == await bench.log.end() == Position((3,))


async def test_each_message_is_delivered_with_the_proof_of_its_cursor() -> None:
    async with running() as bench:
        proofs: list[object] = []
        bench.link.connect(
            "east",
            lambda envelope: proofs.extend(m.proof for s in envelope.runs for m in s.messages),
        )
        await bench.send("a", "b")
        await asyncio.sleep(0.01)
        epoch = (await bench.store.heads([CHAT]))[CHAT].epoch
        assert proofs == [
            CursorProofs(b"test").of(ANNA.tenant, CHAT, Cursor(epoch, n)) for n in (1, 2)
        ]


async def test_members_are_loaded_once_and_follow_the_log() -> None:
    async with running() as bench:
        await bench.send("a")
        await asyncio.sleep(0.01)
        await bench.store.change(RemoveMember(act(ANNA), CHAT, "bela"))
        await bench.send("b")
        await asyncio.sleep(0.01)
        await bench.store.change(AddMember(act(ANNA), CHAT, "bela"))
        await bench.send("c")
        await asyncio.sleep(0.01)
        assert bench.got["west"] == [(CHAT, 1), (CHAT, 2), (CHAT, 4), (CHAT, 5)]
        assert bench.got["east"] == [(CHAT, n) for n in range(1, 6)]
        assert bench.loads == [CHAT]


@pytest.mark.covers("000 graceful_fanout")
@pytest.mark.covers("000 3.1 transient: retry, at most 3")
@pytest.mark.covers("000 3.2 gateway unreachable: skip")
async def test_graceful_fanout_at_most_three_tries_then_skip() -> None:
    async with running() as bench:
        skipped, retried = (
            metric("fanout_delivery_skipped_total", reason="unreachable"),
            metric("fanout_retries_total"),
        )
        bench.link.fail["west"] = Unavailable("connection reset")
        await bench.send("a")
        await asyncio.sleep(10)
        tries = [at for gateway, at in bench.link.tries if gateway == "west"]
        assert len(tries) == 3
        assert tries[1] - tries[0] <= 0.1 and tries[2] - tries[1] <= 0.2
        assert bench.got["east"] == [(CHAT, 1)]
        assert metric("fanout_delivery_skipped_total", reason="unreachable") == skipped + 1
        assert metric("fanout_retries_total") == retried + 2
        bench.link.fail.clear()
        await bench.send("b")
        await asyncio.sleep(10)
        assert bench.got["west"] == [(CHAT, 2)], "what was skipped is not queued for later"
        assert bench.fanout.position == Position((3,))


async def test_a_transient_error_that_passes_costs_nothing() -> None:
    async with running() as bench:
        bench.link.fail["west"], bench.link.failures = Unavailable("reset"), 2
        await bench.send("a")
        await asyncio.sleep(1)
        assert bench.got["west"] == [(CHAT, 1)]


@pytest.mark.covers("000 3.2 send timeout: skip")
async def test_a_send_that_hangs_is_skipped_and_not_tried_again() -> None:
    async with running() as bench:
        skipped = metric("fanout_delivery_skipped_total", reason="timeout")
        bench.link.fail["west"] = 60.0
        await bench.send("a")
        await asyncio.sleep(1.1)
        assert [gateway for gateway, _ in bench.link.tries] == ["east", "west"]
        assert bench.fanout.position == Position((2,))
        assert metric("fanout_delivery_skipped_total", reason="timeout") == skipped + 1


async def test_recipients_who_are_offline_are_skipped_without_a_try() -> None:
    async with running() as bench:
        skipped = metric("fanout_delivery_skipped_total", reason="offline")
        await disconnect(bench.registry, "east", ANNA)
        await disconnect(bench.registry, "west", BELA)
        await bench.send("a", "b")
        await asyncio.sleep(0.01)
        assert bench.link.tries == []
        assert metric("fanout_delivery_skipped_total", reason="offline") == skipped + 2


@pytest.mark.covers("000 Redis lookup: graceful")
async def test_without_the_registry_local_connections_are_served() -> None:
    async with running() as bench:
        errors = metric("registry_errors_total")
        bench.registry.down = Unavailable("redis is unavailable")
        await bench.send("a")
        await asyncio.sleep(0.01)
        assert bench.got == {"east": [(CHAT, 1)], "west": []}
        assert metric("registry_errors_total") == errors + 1
        assert metric("dependency_up", dependency="registry") == 0
        bench.registry.down = None
        await bench.send("b")
        await asyncio.sleep(0.01)
        assert bench.got["west"] == [(CHAT, 2)]
        assert metric("dependency_up", dependency="registry") == 1


@pytest.mark.covers("000 3.1 poison pill: send to DLQ, continue")
async def test_undecodable_entry_becomes_a_dead_letter_and_reading_continues() -> None:
    async with running() as bench:
        bench.log.bad = 3
        await bench.send("a", "b", "c")
        await asyncio.sleep(0.01)
        assert bench.got["east"] == [(CHAT, 1), (CHAT, 3)]
        (letter,) = await bench.letters.read(10)
        assert (letter.offset, letter.reason, letter.data) == (3, "undecodable", b"\xff")


async def test_dead_letters_are_bounded_and_the_newest_stay() -> None:
    letters = RecentDeadLetters(DeadLetterSettings(max_letters=2))
    for position in range(5):
        await letters.put(DeadLetter(0, position, "undecodable", "", b"", "now"))
    assert [letter.offset for letter in await letters.read(10)] == [4, 3]


@pytest.mark.covers("000 3.1 transient: retry, at most 3")
async def test_fanout_waits_for_an_unavailable_log() -> None:
    async with running() as bench:
        bench.log.error = Unavailable("kafka is unavailable")
        await bench.send("a")
        await asyncio.sleep(60)
        assert bench.got["east"] == []
        assert metric("dependency_up", dependency="eventlog") == 0
        bench.log.error = None
        await asyncio.sleep(1.1)
        assert bench.got["east"] == [(CHAT, 1)]


@pytest.mark.covers("000 3.1 fatal: let Kubernetes restart")
@pytest.mark.parametrize("where", ["log", "link", "registry"])
async def test_a_fatal_error_ends_fanout_clearly_and_is_counted(where: str) -> None:
    bench = Bench()
    await create_chat(bench.store, ANNA)
    await connect(bench.registry, "east", ANNA)
    fatal = Unauthorized("the credentials were revoked")
    if where == "log":
        bench.log.error = fatal
    elif where == "link":
        bench.link.fail["east"] = fatal
    else:
        bench.registry.down = fatal
    await bench.send("a")
    restarts = metric("fanout_consumer_restarts_total")
    with pytest.raises(Unauthorized):
        await bench.fanout.run(after=START)
    assert metric("fanout_consumer_restarts_total") == restarts + 1
    assert bench.fanout.position == Position((0,)), (
        "what was not attempted is read again after the restart"
    )


@pytest.mark.covers("000 3.1 fatal: let Kubernetes restart")
async def test_restarted_fanout_continues_where_it_ended_even_at_the_log_start() -> None:
    bench = Bench()
    await create_chat(bench.store, ANNA)
    await connect(bench.registry, "east", ANNA)
    bench.link.fail["east"] = Unauthorized("the credentials were revoked")
    first = asyncio.create_task(bench.fanout.run())
    await asyncio.sleep(1)
    await bench.send("a")
    with pytest.raises(Unauthorized):
        await first
    bench.link.fail.clear()
    again = asyncio.create_task(bench.fanout.run())
    await asyncio.sleep(1)
    assert bench.got["east"] == [(CHAT, 1)]
    again.cancel()


async def test_an_event_that_trips_a_defect_of_ours_is_put_aside_alone() -> None:
    async with running() as bench:
        gateways_of = bench.registry.gateways_of

        async def trips(users: Iterable[User]) -> Mapping[str, Set[User]]:
            if User("default", "cleo") in set(users):
                raise ZeroDivisionError("a defect")
            return await gateways_of(users)

        bench.registry.gateways_of = trips  # type: ignore[method-assign]
        await create_chat(bench.store, ANNA, CLEO, chat_id="poison")
        bench.log.error = Unavailable("wait until all are in one batch")
        await bench.send("a")
        await bench.send("b", chat_id="poison")
        await bench.send("c")
        bench.log.error = None
        await asyncio.sleep(2)
        assert bench.got["west"] == [(CHAT, 1), (CHAT, 2)]
        (letter,) = await bench.letters.read(10)
        assert (letter.offset, letter.reason) == (4, "defect")
        assert bench.fanout.position == Position((5,))


async def test_failed_member_load_delays_a_batch_once_and_never_known_chats() -> None:
    async with running() as bench:
        await bench.send("a")
        await asyncio.sleep(0.01)
        for n in range(20):
            await create_chat(bench.store, ANNA, chat_id=f"cold-{n}")
        bench.load_fails = Unavailable("the store is unavailable")
        skipped = metric("fanout_delivery_skipped_total", reason="members_unknown")
        for n in range(20):
            await bench.send("k", chat_id=f"cold-{n}")
        await bench.send("b")
        await asyncio.sleep(0.01)
        assert bench.got["west"] == [(CHAT, 1), (CHAT, 2)]
        assert len(bench.loads) == 2
        assert metric("fanout_delivery_skipped_total", reason="members_unknown") == skipped + 20
        bench.load_fails = None
        await asyncio.sleep(1)
        await bench.send("k2", chat_id="cold-3")
        await asyncio.sleep(0.01)
        assert bench.got["east"][-1] == ("cold-3", 2)


@pytest.mark.covers("000 Kafka consumer lag high: scale consumers, alert")
async def test_a_full_batch_shows_how_far_behind_the_reader_is() -> None:
    async with running(read_entries_max=10) as bench:
        bench.link.fail["west"] = 0.5
        await bench.send(*(str(n) for n in range(25)))
        await asyncio.sleep(0.6)
        assert metric("fanout_lag") == 15
        await asyncio.sleep(2)
        assert metric("fanout_lag") == 0


async def test_members_learned_during_a_load_are_not_overwritten_by_it() -> None:
    gate = asyncio.Event()
    states = [
        [Member("anna", "owner", "now")],
        [Member("anna", "owner", "now"), Member("bela", "member", "now")],
    ]

    async def load(chat_id: str) -> Sequence[Member]:
        state = states.pop(0)
        await gate.wait()
        return state

    members = Members(load)
    loading = asyncio.create_task(members.of("default", CHAT))
    await asyncio.sleep(0.01)
    members.forget(CHAT)
    gate.set()
    assert await loading == {ANNA, BELA}, "the load began before the change and was done again"


async def test_the_members_kept_are_bounded_and_the_least_used_go_first() -> None:
    async def load(chat_id: str) -> Sequence[Member]:
        return [Member(f"user-{n}", "member", "now") for n in range(4)]

    members = Members(load, max_members=10)
    for chat_id in ("a", "b"):
        await members.of("default", chat_id)
    await members.of("default", "a")
    await members.of("default", "c")
    assert ("a" in members, "b" in members, "c" in members) == (True, False, True)
    assert members.count == 8


@pytest.mark.parametrize("seed", range(10))
def test_under_random_faults_nobody_gets_a_message_twice_in_a_row_or_out_of_order(
    seed: int,
) -> None:
    async def scenario() -> None:
        bench, rng = Bench(), random.Random(seed)
        await create_chat(bench.store, ANNA, BELA)
        await connect(bench.registry, "east", ANNA)
        await connect(bench.registry, "west", BELA)
        task = asyncio.create_task(bench.fanout.run(after=START))
        for n in range(40):
            fault = rng.choice([None, None, Unavailable("reset"), 2.0])
            bench.link.fail = {} if fault is None else {rng.choice(["east", "west"]): fault}
            await bench.send(f"key-{n}")
            await asyncio.sleep(rng.random())
        bench.link.fail.clear()
        await bench.send("last")
        await asyncio.sleep(5)
        for got in bench.got.values():
            assert got == sorted(got) and got[-1] == (CHAT, 41)
        assert bench.fanout.position == Position((42,))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(scenario(), seed=seed)
