"""The eleven named invariants of the sequencing document, after seeded workloads on
every store.

The workload sends concurrently and in groups, retries, reuses keys, loses replies after
the commit, joins, leaves, redacts, and has an operator recover a damaged chat. The
invariants are the ones users run (``holdfast.verify``).
"""

from __future__ import annotations

import asyncio
import random
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from store_rigs import (
    ANN,
    BOB,
    CARL,
    EMBEDDED,
    RIGS,
    MemoryRig,
    PostgresRig,
    Rig,
    SqliteRig,
    act,
    create,
    draft,
    operator,
)

from holdfast.errors import HoldfastError, OutcomeUnknown
from holdfast.eventlog.contract import START
from holdfast.eventlog.postgres import PostgresEventLog
from holdfast.message import Acked, Draft, LogEntry, Message
from holdfast.store.commands import AddMember, RecoverChat, Redact, RemoveMember
from holdfast.verify.history import (
    ChatAtEnd,
    ClientSeen,
    CommitSeen,
    Fail,
    History,
    KeySeen,
    Ok,
    Recorder,
    Sighting,
    Unknown,
    digest,
)
from proof.faults import FaultPlan, Odds, faulty
from proof.invariants import INVARIANTS

SEEDS = range(5)
CHATS = ("chat_a", "chat_b", "chat_c")


class Workload:
    """One seeded run on one store, recorded as a history."""

    def __init__(self, store: Any, rig: Rig, seed: int) -> None:
        self.rng = random.Random(seed)
        self.inner = store
        self.rig = rig
        self.store = faulty(store, FaultPlan(random.Random(seed), {"append": Odds(lost_reply=0.2)}))
        self.recorder = Recorder()
        self.ticks = count()
        self.sent: list[Draft] = []
        if hasattr(store, "on_commit"):
            store.on_commit(self.committed)
            self.log = None
        else:
            self.log, self.position = PostgresEventLog(store), START

    def now(self) -> float:
        return float(next(self.ticks))

    def committed(self, entries: list[LogEntry]) -> None:
        for entry in entries:
            if isinstance(entry.what, Message):
                sequence = entry.what.sequence
                self.recorder.note(
                    CommitSeen(at=self.now(), chat_id=entry.chat_id, sequence=sequence)
                )

    async def read_log(self) -> None:
        """Note the commits of a store that does not announce them."""
        while self.log is not None:
            entries, self.position = await self.log.read(self.position, 100)
            self.committed(list(entries))
            if not entries:
                return

    async def run(self) -> History:
        for user in (ANN, BOB, CARL):
            self.recorder.note(
                ClientSeen(
                    client=user.user_id, tenant="default", user_id=user.user_id, device_id="d"
                )
            )
        for chat_id in CHATS:
            await create(self.inner, "bob", chat_id=chat_id)
        for _ in range(30):
            groups = [self.group() for _ in range(self.rng.randint(1, 4))]
            await asyncio.gather(*(self.send(group) for group in groups))
            await self.command()
            await self.read_log()
        self.rig.lose_counter("chat_b")
        await self.send(self.group())
        await self.inner.change(RecoverChat(operator(), "chat_b"))
        await self.send(self.group())
        await self.read_log()
        for chat_id in CHATS:
            self.recorder.note(await self.at_end(chat_id))
        return self.recorder.history()

    def group(self) -> list[Draft]:
        made = [self.draft() for _ in range(self.rng.randint(1, 6))]
        self.sent += made
        return made

    def draft(self) -> Draft:
        if self.sent and self.rng.random() < 0.3:
            again = self.rng.choice(self.sent)
            if self.rng.random() < 0.8:
                return again
            return draft(again.client_message_id, "other", again.sender, again.chat_id)
        sender = self.rng.choice((ANN, BOB, CARL))
        return draft(
            f"k{self.rng.getrandbits(40)}", f"text {len(self.sent)}", sender, self.rng.choice(CHATS)
        )

    async def send(self, group: list[Draft]) -> None:
        operations = [
            self.recorder.invoke(
                self.now(), d.sender.user_id, "send", d.chat_id, key=d.client_message_id,
                digest=digest(d.content, d.content_type),
            )
            for d in group
        ]  # fmt: skip
        try:
            outcomes = await self.store.append(group)
        except OutcomeUnknown as error:
            outcomes = [error] * len(group)
        for operation, outcome in zip(operations, outcomes, strict=True):
            self.recorder.note(self.answer(operation, outcome))

    def answer(self, operation: int, outcome: Acked | HoldfastError) -> Ok | Unknown | Fail:
        if isinstance(outcome, Acked):
            seen = Sighting(outcome.message.sequence, outcome.message.message_id)
            return Ok(at=self.now(), op=operation, acked=seen, deduplicated=outcome.deduplicated)
        if isinstance(outcome, OutcomeUnknown):
            return Unknown(at=self.now(), op=operation, reason="answered", code=outcome.code)
        return Fail(at=self.now(), op=operation, code=outcome.code)

    async def command(self) -> None:
        chat_id = self.rng.choice(CHATS)
        head = (await self.inner.chat(chat_id)).head
        members = {m.user_id for m in await self.inner.members(chat_id)}
        change = (
            RemoveMember(act(), chat_id, "carl")
            if "carl" in members
            else AddMember(act(), chat_id, "carl")
        )
        await self.inner.change(change)
        page = await self.inner.read_before(chat_id, head + 1, 1, 1 << 20)
        if page.messages and page.messages[0].kind == "text" and self.rng.random() < 0.3:
            await self.inner.change(Redact(act(), chat_id, page.messages[0].sequence))

    async def at_end(self, chat_id: str) -> ChatAtEnd:
        page = await self.inner.read_after(chat_id, 0, 10_000, 1 << 30)
        inspection = await self.inner.inspect(chat_id)
        redactions = [
            r.target
            for r in (await self.inner.audit(None, 1_000)).records
            if r.action == "message.redact"
        ]
        stored = {(chat_id, m.sender_id, m.client_message_id) for m in page.messages}
        keys = []
        for again in [d for d in self.sent if d.key in stored]:
            outcome = (await self.inner.append([again]))[0]
            if isinstance(outcome, Acked):
                message = outcome.message
                keys.append(
                    KeySeen(
                        again.sender.user_id,
                        again.client_message_id,
                        message.sequence,
                        message.message_id,
                    )
                )
        return ChatAtEnd(
            chat_id=chat_id,
            tenant="default",
            epoch=inspection.chat.epoch,
            counter=inspection.counter,
            messages=[Sighting.of(m) for m in page.messages],
            keys=keys,
            redacted=[int(t.split("/")[1]) for t in redactions if t.split("/")[0] == chat_id],
            holes=[tuple(gap) for gap in inspection.recorded_gaps],
        )


@cache
def histories(adapter: str) -> list[History]:
    """The histories of all seeds on one adapter; made once for all invariants.
    PostgreSQL is named by its address.
    """
    made = []
    for seed in SEEDS if adapter in EMBEDDED else SEEDS[4:5]:  # each commit is a round trip
        with TemporaryDirectory() as directory:
            rig: Rig = SqliteRig(Path(directory))
            if adapter != "sqlite":
                rig = MemoryRig() if adapter == "memory" else PostgresRig(adapter)

            async def run(store: Any, rig: Rig = rig, seed: int = seed) -> None:
                made.append(await Workload(store, rig, seed).run())

            rig.run(run)
    return made


def holds(name: str, adapter: str) -> None:
    for history in histories(adapter):
        verdict = INVARIANTS[name](history)
        assert verdict.ok, verdict
        assert verdict.examined, f"{name} had nothing to look at"


@pytest.fixture(params=RIGS)
def adapter(request: pytest.FixtureRequest) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_server").url)
    return str(request.param)


@pytest.mark.covers("001 counter_must_exist")
def test_counter_must_exist(adapter: str) -> None:
    """Stronger: it is made with its chat, a trigger refuses its deletion, and without
    it nothing is sent.
    """
    holds("counter_must_exist", adapter)


@pytest.mark.covers("001 sequence_uniqueness")
def test_sequence_uniqueness(adapter: str) -> None:
    holds("sequence_uniqueness", adapter)


@pytest.mark.covers("001 allocation_monotonicity")
def test_allocation_monotonicity(adapter: str) -> None:
    """Stronger: an allocation is a commit, so no reader sees a later number first."""
    holds("allocation_monotonicity", adapter)


@pytest.mark.covers("001 counter_is_last_allocated")
def test_counter_is_last_allocated(adapter: str) -> None:
    """Stronger: it is also the last stored sequence, as only commits allocate."""
    holds("counter_is_last_allocated", adapter)


@pytest.mark.covers("001 sequence_monotonicity")
def test_sequence_monotonicity(adapter: str) -> None:
    holds("sequence_monotonicity", adapter)


@pytest.mark.covers("001 counter_lower_bound")
def test_counter_lower_bound(adapter: str) -> None:
    """Stronger: without recorded holes and retention, count and counter are equal."""
    holds("counter_lower_bound", adapter)
    for history in histories(adapter):
        assert all(len(chat.messages) == chat.counter for chat in history.chats.values())


@pytest.mark.covers("001 idempotency_sequence_consistency")
def test_idempotency_sequence_consistency(adapter: str) -> None:
    """Stronger: the key is an index of the message itself; they cannot differ."""
    holds("idempotency_sequence_consistency", adapter)


@pytest.mark.covers("001 ack_implies_persistence")
def test_ack_implies_persistence(adapter: str) -> None:
    holds("ack_implies_persistence", adapter)


@pytest.mark.covers("001 no_zero_sequence")
def test_no_zero_sequence(adapter: str) -> None:
    holds("no_zero_sequence", adapter)


@pytest.mark.covers("001 gap_is_allocation_without_persistence")
def test_gap_is_allocation_without_persistence(adapter: str) -> None:
    """Stronger: there is no gap at all; nothing is allocated without being stored."""
    holds("gap_is_allocation_without_persistence", adapter)


@pytest.mark.covers("001 add_operation_atomicity")
def test_add_operation_atomicity(adapter: str) -> None:
    holds("add_operation_atomicity", adapter)


def test_the_workload_met_what_it_is_for(adapter: str) -> None:
    """Retries that hit a key, lost replies, refusals and redactions did occur."""
    events = [event for history in histories(adapter) for event in history.events]
    assert any(isinstance(e, Ok) and e.deduplicated for e in events)
    assert any(isinstance(e, Unknown) for e in events)
    assert {e.code for e in events if isinstance(e, Fail)} >= {
        "NOT_A_MEMBER",
        "IDEMPOTENCY_KEY_REUSED",
        "CHAT_HALTED",
    }
    assert any(isinstance(e, ChatAtEnd) and e.redacted for e in events)
