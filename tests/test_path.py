"""The life of one message, step by step, as ``holdfast/__init__.py`` lists it.

Read this test first. Every part is the real one, on memory adapters and virtual time;
only the two sockets are fake. Between the steps stands what one hands to the next.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
from gateway_rig import PLENTY, PROOFS, FakeSocket, RecordingPresence, principal, settle, verify

from holdfast import telemetry
from holdfast.clock import Ids, timestamp
from holdfast.eventlog.memory import MemoryEventLog
from holdfast.fanout.dead_letters import RecentDeadLetters
from holdfast.fanout.feed import FeedDeps, LogFeed
from holdfast.fanout.members import Members
from holdfast.gateway.contract import GatewayDeps
from holdfast.gateway.gateway import Gateway
from holdfast.gateway.settings import GatewaySettings
from holdfast.history.history import ChatHistory
from holdfast.ingest.admission import AdmissionControl
from holdfast.ingest.durability import EpochRaiser, StoreDurability
from holdfast.ingest.intake import Intake
from holdfast.ingest.watermarks import Watermarks
from holdfast.limits.counters.memory import MemoryCounters
from holdfast.limits.entry_points import EntryPoints
from holdfast.limits.entry_rules import DEFAULT_RULES
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.rules import RuleSet
from holdfast.message import LogEntry, User
from holdfast.store.commands import CommandContext, CreateChat
from holdfast.store.memory import MemoryStore
from holdfast.wire.codec import decode_client_frame
from holdfast.wire.frames import SendMessage
from proof.virtual_loop import LoopClock

ALICE, BOB = User("default", "alice"), User("default", "bob")
CHAT = "chat_1"


@dataclass
class Path:
    """The parts of the path, built from its end to its beginning."""

    store: MemoryStore
    log: MemoryEventLog
    intake: Intake
    entry_points: EntryPoints
    gateway: Gateway
    handed: HandedOver
    """What the feed has handed over; the gateway gets it in the last step."""

    async def connect(self, user: User) -> FakeSocket:
        """A client that has resumed and has everything there is: nothing."""
        socket = FakeSocket()
        socket.connection = self.gateway.accept(socket, principal(user.user_id), "phone")
        await settle()
        socket.say("resume", "r", cursors={CHAT: [1, 0]})
        await settle()
        assert [frame["type"] for frame in socket.take()] == ["connection_established", "resumed"]
        return socket


class HandedOver:
    """A gateway that keeps what the feed hands over."""

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []

    def deliver(self, entries: Sequence[LogEntry]) -> Sequence[LogEntry]:
        self.entries += entries
        return ()

    async def on_log_lost(self) -> None:
        pass


@asynccontextmanager
async def path() -> AsyncIterator[Path]:
    clock = LoopClock()
    rng = random.Random(1)
    ids = Ids(clock, rng)
    store, log = MemoryStore(), MemoryEventLog()
    store.on_commit(log.committed)
    durability = StoreDurability(store, clock)
    intake = Intake(durability, clock, ids)
    limiter = Limiter(MemoryCounters(clock), clock, rules=RuleSet.of(DEFAULT_RULES))
    entry_points = EntryPoints(limiter)
    deps = GatewayDeps(
        settings=GatewaySettings(),
        clock=clock,
        ids=ids,
        sends=AdmissionControl(intake, entry_points, clock),
        history=ChatHistory(store, EpochRaiser(durability, clock, ids), PROOFS, clock),
        watermarks=Watermarks(durability, lambda moved: None),
        proofs=PROOFS,
        verify=verify,
        rng=rng,
    )
    handed = HandedOver()
    feed_deps = FeedDeps(log, handed, Members(store.members), RecentDeadLetters())
    created = CommandContext(ALICE, timestamp(clock.now()), "msg_0")
    await store.change(CreateChat(created, CHAT, "group", "lobby", ("bob",)))
    ingest = asyncio.create_task(intake.run())
    feed = asyncio.create_task(LogFeed(feed_deps, clock).run())
    async with Gateway(deps, RecordingPresence(), PLENTY) as gateway:
        yield Path(store, log, intake, entry_points, gateway, handed)
        for connection in gateway.open_connections:
            connection.connection_lost()
    feed.cancel()
    intake.stop()
    await ingest


def send_frame(client_message_id: str) -> bytes:
    """``send_message`` as a client writes it."""
    body = {"chat_id": CHAT, "client_message_id": client_message_id, "content": "hello"}
    return msgspec.json.encode(
        {"type": "send_message", "request_id": client_message_id, "payload": body}
    )


STEPS = ("admit", "wait", "commit", "publish", "fan_out", "write")


def steps_measured() -> list[float]:
    name = "holdfast_message_step_seconds_count"
    return [telemetry.REGISTRY.get_sample_value(name, {"step": step}) or 0 for step in STEPS]


async def test_message_goes_from_one_client_to_the_other() -> None:
    before = steps_measured()
    async with path() as parts:
        alice, bob = await parts.connect(ALICE), await parts.connect(BOB)
        created = await parts.log.end()

        # 1. wire: bytes become a typed frame.
        data = send_frame("c1")
        assert isinstance(decode_client_frame(data), SendMessage)

        # 2. gateway: the connection reads the frame and asks its session.
        # 3. session: it may send, so the connection submits it; one request is open.
        alice.connection.frame_received(data)
        assert alice.connection.open_requests == 1

        # 4. ingest: admission asks the limits at the end of this turn of the loop, then
        #    the intake queues the send for the next commit.
        assert parts.intake.waiting == 0
        await asyncio.sleep(0)
        assert parts.intake.waiting + parts.intake.committing == 1
        assert await parts.log.end() == created and not alice.take(), "no answer before the commit"

        # 5. store: one commit numbers the message; only then the sender gets its ack.
        await settle()
        page = await parts.store.read_after(CHAT, 0, 10, 1 << 20, BOB)
        assert [(m.sequence, m.content) for m in page.messages] == [(1, "hello")]
        (ack,) = (frame for frame in alice.take() if frame["type"] == "message_ack")
        assert (ack["request_id"], ack["payload"]["sequence"]) == ("c1", 1)

        # 6. eventlog: the same commit is an entry, in the order all nodes agree on.
        (entry,), _ = await parts.log.read(created, 10)
        assert entry.what == page.messages[0]

        # 7. fanout: this node's feed has read the entry and hands it to its gateway.
        assert parts.handed.entries == [entry]

        # 8. and out again: the gateway finds both members on its roster, encodes the
        #    message once and gives it to each session; the wire has the same bytes.
        parts.gateway.deliver(parts.handed.entries)
        assert alice.writes == bob.writes
        (received,) = bob.take()
        assert (received["type"], received["payload"]["content"]) == ("message", "hello")
        assert received["payload"]["message_id"] == ack["payload"]["message_id"]
    assert all(now > then for now, then in zip(steps_measured(), before, strict=True))


async def test_send_beyond_the_default_rules_is_refused_before_the_intake() -> None:
    async with path() as parts:
        alice = await parts.connect(ALICE)
        created = await parts.log.end()

        # Alice has used up her burst, on this connection or on another.
        admitted, _ = parts.entry_points.admit_at_once("send", ALICE, 1_000)
        assert admitted == 500

        # The session lets one more send pass: its own rate is that of one connection.
        alice.connection.frame_received(send_frame("c1"))
        assert alice.connection.open_requests == 1

        # Admission refuses it, and neither the intake nor the store sees it.
        await settle()
        (refused,) = alice.take()
        assert (refused["request_id"], refused["payload"]["code"]) == ("c1", "RATE_LIMITED")
        assert refused["payload"]["outcome"] == "rejected"
        assert refused["payload"]["retry_after_seconds"] > 0
        assert await parts.log.end() == created
