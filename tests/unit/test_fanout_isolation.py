"""Seed 000: the isolation rules and the failure taxonomy, row by row, over the real
parts of the planes.

Ingest, fanout, store and log are the product's own, on memory adapters and virtual
time; what fails is injected at our own edge of each dependency.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from scripted_durability import ANNA, BELA, CHAT, Answers, body, create_chat
from store_rigs import MemoryRig

from holdfast import telemetry
from holdfast.access.proofs import CursorProofs
from holdfast.clock import Ids
from holdfast.eventlog.memory import MemoryEventLog
from holdfast.fanout.dead_letters import RecentDeadLetters
from holdfast.fanout.feed import FeedDeps, LogFeed
from holdfast.fanout.members import Members
from holdfast.history.history import ChatHistory
from holdfast.ingest.durability import EpochRaiser, StoreDurability
from holdfast.ingest.intake import Intake
from holdfast.message import Acked, Cursor, LogEntry, Message, User
from holdfast.resilience import BreakerState
from holdfast.store.memory import MemoryStore
from proof.faults import Fault, FaultPlan, Odds, faulty
from proof.virtual_loop import LoopClock

METRICS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"


def metric(name: str, **labels: str) -> float:
    return telemetry.REGISTRY.get_sample_value(f"holdfast_{name}", labels) or 0.0


class Gateway:
    """A gateway that notes what its feed hands it; ``fails`` at every batch."""

    def __init__(self) -> None:
        self.got: list[Message] = []
        self.fails = False

    def deliver(self, entries: Sequence[LogEntry]) -> Sequence[LogEntry]:
        if self.fails:
            raise ZeroDivisionError("a defect")
        self.got += [entry.what for entry in entries if isinstance(entry.what, Message)]
        return ()

    async def on_log_lost(self) -> None:
        pass


class Planes:
    """All three planes, with two gateways that read one log; ``store_faults`` and
    ``log_faults`` break their edges.
    """

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.store, self.log = MemoryStore(), MemoryEventLog()
        self.store.on_commit(self.log.committed)
        rng = random.Random(1)
        self.store_faults, self.log_faults = FaultPlan(rng), FaultPlan(rng)
        self.durability = StoreDurability(faulty(self.store, self.store_faults), self.clock)
        self.intake = Intake(self.durability, self.clock, Ids(self.clock, rng))
        self.history = ChatHistory(self.store, self.never, CursorProofs(b"test"), self.clock)
        self.answers = Answers()
        self.gateways = {name: Gateway() for name in ("east", "west")}
        log, members = faulty(self.log, self.log_faults), Members(self.store.members)
        self.feeds = {
            name: LogFeed(FeedDeps(log, gateway, members, RecentDeadLetters()), self.clock)
            for name, gateway in self.gateways.items()
        }

    async def never(self, user: User, chat_id: str, epoch: int) -> None:
        raise AssertionError("no rollback here")

    def send(self, key: str, chat: str = CHAT, source: str = "conn_1", user: User = ANNA) -> None:
        self.intake.submit(
            body(key, chat), user, source, self.clock.monotonic() + 5, self.answers.to(key)
        )

    def code(self, key: str) -> str | None:
        return self.answers.codes().get(key)

    def seen(self, gateway: str) -> list[str | None]:
        return [message.client_message_id for message in self.gateways[gateway].got]

    async def synced(self, user: User, chat: str = CHAT) -> list[str | None]:
        """What a client of the user has after it synced from nothing."""
        page = await self.history.sync(user, chat, Cursor(0, 0), 500)
        return [message.client_message_id for message in page.messages]


@asynccontextmanager
async def running(crashed: str = "") -> AsyncIterator[Planes]:
    planes = Planes()
    planes.feeds.pop(crashed, None)
    await create_chat(planes.store, ANNA, BELA)
    await create_chat(planes.store, ANNA, BELA, chat_id="other")
    feeds = {name: asyncio.create_task(feed.run()) for name, feed in planes.feeds.items()}
    tasks = [asyncio.create_task(planes.intake.run()), *feeds.values()]
    await asyncio.sleep(0.01)
    yield planes
    for task in tasks:
        assert not task.done(), "a plane died"
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.covers("000 connection (flooding client) to durability")
async def test_a_client_that_floods_one_chat_leaves_others_their_turn() -> None:
    async with running() as planes:
        planes.store_faults.script["append"] = [Fault.DELAY]
        planes.send("in-flight")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for n in range(600):
            planes.send(f"flood-{n}", source="flooder")
        planes.send("else", chat="other", source="conn_2", user=BELA)
        assert planes.code("flood-599") == "SERVER_BUSY"
        assert planes.code("else") is None
        await asyncio.sleep(2)
        assert planes.code("else") == "ACK"


@pytest.mark.covers("000 connection (gateway crash) to durability")
@pytest.mark.covers("000 gateway crash")
@pytest.mark.covers("000 3.2 gateway unreachable: skip")
@pytest.mark.covers("000 3.2 send timeout: skip")
@pytest.mark.covers("000 3.2 Redis lookup fails: skip")
@pytest.mark.covers("000 Redis lookup: graceful")
@pytest.mark.covers("000 Redis cluster unavailable")
@pytest.mark.covers("000 Redis connection reset")
async def test_a_gateway_that_crashes_costs_its_own_connections_and_nothing_else() -> None:
    """No gateway, registry or link is asked for a delivery: each reads the log."""
    async with running(crashed="west") as planes:
        planes.send("a")
        await asyncio.sleep(2)
        assert planes.code("a") == "ACK"
        assert (planes.seen("east"), planes.seen("west")) == (["a"], [])
        assert await planes.synced(BELA) == ["a"], "its clients reconnect elsewhere and sync"


@pytest.mark.covers("000 durability (DynamoDB down) to connection")
@pytest.mark.covers("000 DynamoDB unavailable")
@pytest.mark.covers("000 kill DynamoDB: fast error")
async def test_a_store_that_is_down_is_answered_fast_and_detected_within_ten_seconds() -> None:
    async with running() as planes:
        planes.store_faults.odds = {"append": Odds(fail=1.0)}
        for n in range(6):
            started = planes.clock.monotonic()
            planes.send(f"k{n}", source=f"conn_{n}")
            await asyncio.sleep(0.01)
            assert planes.code(f"k{n}") == "SERVICE_UNAVAILABLE"
            assert planes.clock.monotonic() - started < 0.1
        assert planes.durability.breaker is BreakerState.OPEN
        assert planes.clock.monotonic() < 10
        assert metric("dependency_up", dependency="store") == 0
        assert metric("circuit_breaker_state", dependency="store", state="open") == 1
        planes.store_faults.heal()
        await asyncio.sleep(30)
        planes.send("again")
        await asyncio.sleep(0.01)
        assert planes.code("again") == "ACK"
        assert metric("dependency_up", dependency="store") == 1
        assert metric("circuit_breaker_state", dependency="store", state="open") == 0


@pytest.mark.covers("000 durability (Kafka down) to connection")
@pytest.mark.covers("000 Kafka cluster down")
@pytest.mark.covers("000 kill Kafka: request failure, not hang")
async def test_a_log_that_is_down_delays_delivery_and_no_answer() -> None:
    """In the embedded server the log is the store's own commit order: an ack does not
    wait for its readers.
    """
    async with running() as planes:
        planes.log_faults.odds = {"read": Odds(fail=1.0)}
        planes.send("a")
        await asyncio.sleep(5)
        assert planes.code("a") == "ACK"
        assert planes.seen("west") == []
        assert metric("dependency_up", dependency="eventlog") == 0
        assert await planes.synced(BELA) == ["a"], "sync heals"
        planes.log_faults.heal()
        await asyncio.sleep(1.1)
        assert planes.seen("west") == ["a"]


@pytest.mark.covers("000 durability (any failure) to fanout")
async def test_fanout_goes_on_with_what_is_in_the_log_while_nothing_can_be_stored() -> None:
    async with running() as planes:
        planes.log_faults.script["read"] = [Fault.DELAY] * 2
        planes.log_faults.odds = {"read": Odds(seconds_max=0.9)}
        planes.send("a")
        planes.send("b")
        await asyncio.sleep(0.001)
        planes.store_faults.odds = {"*": Odds(hang=1.0)}
        planes.send("never", source="conn_9")
        await asyncio.sleep(2)
        assert planes.seen("west") == ["a", "b"]
        await asyncio.sleep(4)
        assert planes.code("never") == "SERVICE_UNAVAILABLE"
        planes.store_faults.heal()


@pytest.mark.covers("000 fanout (consumer lag) to durability")
async def test_a_fanout_that_lags_does_not_slow_a_send() -> None:
    async with running() as planes:
        planes.log_faults.odds = {"read": Odds(hang=1.0)}
        for n in range(100):
            started = planes.clock.monotonic()
            planes.send(f"k{n}")
            await asyncio.sleep(0.001)
            assert planes.code(f"k{n}") == "ACK"
            assert planes.clock.monotonic() - started < 0.01
        assert planes.feeds["east"].position.offset(0) < 100
        planes.log_faults.heal()


@pytest.mark.covers("000 fanout (delivery fails) to connection")
async def test_a_delivery_that_fails_is_skipped_and_the_other_gateways_get_theirs() -> None:
    async with running() as planes:
        planes.gateways["west"].fails = True
        planes.send("a")
        await asyncio.sleep(0.5)
        assert planes.seen("east") == ["a"]
        planes.gateways["west"].fails = False
        planes.send("b")
        await asyncio.sleep(0.5)
        assert planes.seen("west") == ["b"], "no retry queue"
        assert await planes.synced(BELA) == ["a", "b"]


@pytest.mark.covers("000 DynamoDB throttling")
async def test_a_throttled_store_is_a_retryable_answer_and_no_reason_to_stop_asking() -> None:
    async with running() as planes:
        throttled = metric("durability_store_throttles_total")
        planes.store_faults.odds = {"append": Odds(throttle=1.0)}
        for n in range(10):
            planes.send(f"k{n}", source=f"conn_{n}")
            await asyncio.sleep(0.01)
            assert planes.answers.by_key[f"k{n}"].retryable
        assert metric("durability_store_throttles_total") == throttled + 10
        assert planes.durability.breaker is BreakerState.CLOSED
        planes.store_faults.heal()
        planes.send("after")
        await asyncio.sleep(0.01)
        assert planes.code("after") == "ACK"


@pytest.mark.covers("000 counter corruption")
async def test_a_chat_without_its_counter_halts_alone() -> None:
    async with running() as planes:
        found = metric("durability_counter_corruption_total")
        rig = MemoryRig()
        rig.store = planes.store
        rig.lose_counter(CHAT)
        for n in range(10):
            planes.send(f"k{n}", source=f"conn_{n}")
            planes.send(f"fine-{n}", chat="other", source=f"conn_{n}")
            await asyncio.sleep(0.01)
            assert planes.code(f"k{n}") == "CHAT_HALTED"
            assert planes.code(f"fine-{n}") == "ACK"
        assert metric("durability_counter_corruption_total") == found + 1
        assert planes.durability.breaker is BreakerState.CLOSED


@pytest.mark.covers("000 tier 1 metrics alert correctly")
async def test_every_tier_1_metric_meets_its_alert_when_it_must_and_not_before() -> None:
    """Counters move at the first occurrence; a gauge is down for as long as its alert
    waits, and up afterwards.
    """
    page = METRICS_PAGE.read_text()
    tier_1 = re.findall(
        r"^\| `holdfast_(\w+)`", page.split("## Tier 1")[1].split("## Tier 2")[0], re.MULTILINE
    )
    alerts = [
        f"durability_{what}_total"
        for what in ("counter_corruption", "duplicate_sequence", "rollbacks_proven")
    ]
    assert tier_1 == [*alerts, "epochs_raised_total", "chats_halted", "dependency_up"]

    def counted() -> list[float]:
        return [metric(name) for name in alerts]

    async def stays_down(planes: Planes, dependency: str, seconds: int) -> None:
        for second in range(seconds + 1):
            planes.send(f"{dependency}-{second}", chat="fine", source=str(second))
            await asyncio.sleep(1)
            assert metric("dependency_up", dependency=dependency) == 0, second

    async with running() as planes:
        rig, before = MemoryRig(), counted()
        rig.store = planes.store
        await create_chat(planes.store, ANNA, chat_id="fine")
        for chat in (CHAT, "other", "fine"):
            planes.send(f"first in {chat}", chat=chat)
        await asyncio.sleep(0.01)
        assert counted() == before
        assert [metric("dependency_up", dependency=name) for name in ("store", "eventlog")] == [
            1,
            1,
        ]

        rig.lose_counter(CHAT)
        planes.send("without a counter")
        await asyncio.sleep(0.01)
        assert counted() == [before[0] + 1, *before[1:]]
        rig.set_counter("other", 0)
        planes.send("a taken number", chat="other")
        await asyncio.sleep(0.01)
        assert counted() == [before[0] + 1, before[1] + 1, before[2]]
        proofs, ahead = CursorProofs(b"test"), Cursor(1, 99)
        raiser = EpochRaiser(planes.durability, planes.clock, Ids(planes.clock, random.Random(2)))
        history = ChatHistory(planes.store, raiser, proofs, planes.clock)
        await history.sync(ANNA, "fine", ahead, 10, proof=proofs.of(ANNA.tenant, "fine", ahead))
        assert counted() == [number + 1 for number in before]

        planes.store_faults.odds = {"append": Odds(fail=1.0)}
        await stays_down(planes, "store", 10)
        planes.store_faults.heal()
        await asyncio.sleep(30)
        planes.log_faults.odds = {"read": Odds(fail=1.0)}
        await stays_down(planes, "eventlog", 30)
        planes.log_faults.heal()
        await asyncio.sleep(10)
        assert [metric("dependency_up", dependency=name) for name in ("store", "eventlog")] == [
            1,
            1,
        ]
        assert counted() == [number + 1 for number in before], (
            "an unavailable entry is not a damaged one"
        )


@pytest.mark.covers("000 idempotency collision")
async def test_a_retry_is_answered_as_the_first_time_and_delivered_once() -> None:
    async with running() as planes:
        hits = metric("durability_idempotency_hits_total")
        planes.store_faults.script["append"] = [Fault.LOST_REPLY]
        planes.intake.submit(
            body("key"), ANNA, "conn_1", planes.clock.monotonic() + 5, planes.answers.to("first")
        )
        await asyncio.sleep(0.01)
        assert planes.answers.by_key["first"].outcome == "unknown"
        planes.intake.submit(
            body("key"), ANNA, "conn_1", planes.clock.monotonic() + 5, planes.answers.to("retry")
        )
        await asyncio.sleep(0.01)
        again = planes.answers.by_key["retry"]
        assert isinstance(again, Acked) and again.deduplicated
        assert planes.seen("west") == ["key"]
        assert metric("durability_idempotency_hits_total") == hits + 1
