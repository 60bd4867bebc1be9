"""One connection's trouble is its own: the others of its gateway go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from gateway_rig import Bench, FakeSocket, bench, entries, settle

from holdfast.errors import Unavailable
from holdfast.message import Cursor, EpochRaised, LogEntry, Page, User
from holdfast.store.memory import MemoryStore

USERS = frozenset({User("default", "alice"), User("default", "bob"), User("default", "carol")})


async def live(parts: Bench, user_id: str) -> FakeSocket:
    socket = parts.connect(user_id)
    await settle()
    socket.say("resume", "r", cursors={})
    await settle()
    socket.take()
    return socket


def break_writes(socket: FakeSocket) -> None:
    def write(data: bytes) -> None:
        raise RuntimeError("a defect")

    socket.connection.write = write


@pytest.mark.parametrize("chats", [1, 2], ids=["past the lanes", "by the flush"])
async def test_connection_that_cannot_be_written_is_aborted_and_others_are_served(
    chats: int,
) -> None:
    async with bench() as parts:
        made = [await parts.chat("alice", "bob", "carol") for _ in range(chats)]
        alice, bob, carol = [await live(parts, name) for name in ("alice", "bob", "carol")]
        break_writes(bob)
        parts.gateway.deliver([each for chat_id in made for each in entries(chat_id, 1)])
        await settle()
        assert bob.aborted
        assert [len(socket.take()) for socket in (alice, carol)] == [chats, chats]
        parts.gateway.deliver(entries(made[0], 2))
        await settle()
        assert [f["payload"]["sequence"] for f in carol.take()] == [2], "and so is what comes later"


class BrokenReads(MemoryStore):
    """Reads pages that no session can make sense of."""

    async def read_after(self, *_: Any, **__: Any) -> Page:
        return None  # type: ignore[return-value]


async def test_defect_while_a_page_is_read_ends_the_connection() -> None:
    async with bench(store=BrokenReads()) as parts:
        chat_id = await parts.chat("alice", "bob", "carol")
        alice = parts.connect("alice")
        await settle()
        alice.say("sync_request", "q", chat_id=chat_id, epoch=1, after_sequence=0)
        await settle()
        assert alice.aborted


class Unreachable(MemoryStore):
    async def memberships(self, users: Sequence[User]) -> Mapping[User, Mapping[str, Cursor]]:
        raise Unavailable("the store is unavailable")


async def test_clients_that_cannot_be_let_in_are_asked_back_at_times_of_their_own() -> None:
    async with bench(store=Unreachable()) as parts:
        sockets = [parts.connect(f"user_{n}") for n in range(20)]
        await settle()
        last = [socket.take()[-1]["payload"] for socket in sockets]
        assert {closing["reason"] for closing in last} == {"upstream_failure"}
        assert len({closing["reconnect_delay_ms"] for closing in last}) > 15


async def test_raised_epoch_resyncs_every_connected_member_at_once() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        alice, bob = await live(parts, "alice"), await live(parts, "bob")
        raised = LogEntry(0, 0, "default", chat_id, 2, EpochRaised(7))
        parts.gateway.deliver([raised])
        await settle()
        resync = [{"type": "resync", "payload": {"chats": [{"chat_id": chat_id, "head": 7}]}}]
        assert [alice.take(), bob.take()] == [resync, resync]
        parts.gateway.deliver([raised])
        await settle()
        assert alice.take() == [], "once"
