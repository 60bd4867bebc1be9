"""The life of one message, step by step, as ``holdfast/__init__.py`` tells it: read
this test first.

Every part is the real one, on memory adapters and virtual time; between the steps
stands what one hands to the next.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
from gateway_rig import decode_frames

from holdfast.access.principal import USER_SCOPES, Principal
from holdfast.clock import Ids, timestamp
from holdfast.eventlog.contract import START
from holdfast.eventlog.memory import MemoryEventLog
from holdfast.fanout.routing import envelopes, legs, recipients
from holdfast.ingest.durability import StoreDurability
from holdfast.ingest.intake import Intake
from holdfast.message import Cursor, Outcome, ResumeRead, User
from holdfast.session.effects import FetchResume, Submit, Wake
from holdfast.session.session import Session
from holdfast.session.settings import SessionSettings
from holdfast.store.commands import CommandContext, CreateChat
from holdfast.store.memory import MemoryStore
from holdfast.wire.codec import EncodedRun, decode_client_frame
from holdfast.wire.frames import CursorClaim, Resume, ResumeBody, SendMessage
from proof.virtual_loop import LoopClock

ALICE, BOB = User("default", "alice"), User("default", "bob")


def session_of(user: User, chat_id: str) -> Session:
    """A client that is connected, has resumed, and had everything there was: nothing."""
    session = Session(
        SessionSettings(),
        f"conn_{user.user_id}",
        Principal(*user, USER_SCOPES, "user"),
        "phone",
        now=0,
    )
    session.establish({chat_id: Cursor(1, 0)}, "2026-01-01T00:00:00.000Z")
    (fetch,) = session.receive(
        Resume(request_id="r", payload=ResumeBody({chat_id: CursorClaim(1, 0)})), now=0
    )
    assert isinstance(fetch, FetchResume)
    session.on_page(fetch.token, ResumeRead([], [], [], {chat_id: Cursor(1, 0)}), now=0)
    assert [frame["type"] for frame in written(session)] == ["connection_established", "resumed"]
    return session


def written(session: Session) -> list[dict[str, Any]]:
    """What its gateway would write now."""
    return decode_frames(
        b"".join(chunk for chunks in iter(lambda: session.take(1 << 20), []) for chunk in chunks)
    )


async def test_the_life_of_a_message() -> None:
    clock = LoopClock()
    ids = Ids(clock, random.Random(1))
    store, log = MemoryStore(), MemoryEventLog()
    store.on_commit(log.committed)
    intake = Intake(StoreDurability(store, clock), clock, ids)
    ingest = asyncio.create_task(intake.run())
    await store.change(
        CreateChat(
            CommandContext(ALICE, timestamp(clock.now()), "msg_0"),
            "chat_1",
            "group",
            "lobby",
            ("bob",),
        )
    )
    alice, bob = session_of(ALICE, "chat_1"), session_of(BOB, "chat_1")

    # 1. wire: bytes become a typed frame.
    body = {"chat_id": "chat_1", "client_message_id": "c1", "content": "hello"}
    frame = decode_client_frame(
        msgspec.json.encode({"type": "send_message", "request_id": "r", "payload": body})
    )
    assert isinstance(frame, SendMessage)

    # 3. session (called by 2, the gateway, which owns the socket): what may this client
    #    do? It may send.
    (submit,) = alice.receive(frame, clock.monotonic())
    assert isinstance(submit, Submit)

    # 4. ingest and 5. store: one commit gives it its number, and only then there is an
    #    outcome.
    answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    intake.submit(
        submit.body, ALICE, alice.connection_id, clock.monotonic() + 5, answered.set_result
    )
    assert await log.end() == START and not answered.done(), "nothing is said before the commit"
    outcome = await answered
    page = await store.read_after("chat_1", 0, 10, 1 << 20, BOB)
    assert [(m.sequence, m.content) for m in page.messages] == [(1, "hello")]

    # The ack goes back to the sender.
    assert list(alice.on_send_result(submit.token, outcome, clock.monotonic())) == [Wake()]
    (ack,) = written(alice)
    assert (ack["type"], ack["request_id"], ack["payload"]["sequence"]) == ("message_ack", "r", 1)

    # 6. eventlog: the same commit is an entry, in the order on which every node agrees.
    (entry,), _ = await log.read(START, 10)
    assert entry.message == page.messages[0]

    # 7. fanout: who is to get it, and through which gateway.
    cut = legs([entry], {"chat_1": frozenset({ALICE, BOB})}).legs
    assert recipients(cut) == {ALICE, BOB}
    (stretch,) = envelopes(cut, {"node": {ALICE, BOB}})["node"].stretches

    # 8. and out again: encoded once, owed by each session, written by its gateway.
    assert list(bob.deliver(EncodedRun(stretch.messages), clock.monotonic())) == [Wake()]
    (received,) = written(bob)
    assert (received["type"], received["payload"]["sequence"], received["payload"]["content"]) == (
        "message",
        1,
        "hello",
    )
    assert received["payload"]["message_id"] == ack["payload"]["message_id"]

    intake.stop()
    await ingest
