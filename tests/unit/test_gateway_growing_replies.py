"""Growing replies reach the sessions of their chat, at most ten times per second."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from gateway_rig import Bench, FakeSocket, bench, entry, message, settle

from holdfast.gateway.growing_replies import INTERVAL_SECONDS, SILENT_SECONDS_MAX
from holdfast.message import User
from holdfast.session.growing_reply import GrowingReply

ALICE, BOB = User("default", "alice"), User("default", "bob")


async def live(parts: Bench, user_id: str) -> FakeSocket:
    socket = parts.connect(user_id)
    await settle()
    socket.say("resume", "r", cursors={})
    await settle()
    return socket


def replies_of(socket: FakeSocket) -> list[dict[str, Any]]:
    return [f["payload"] for f in socket.take() if f["type"] in ("reply_delta", "reply_state")]


def begin(parts: Bench, chat_id: str, epoch: int = 1) -> GrowingReply:
    return parts.gateway.replies.begin(chat_id, "reply_1", "bot", epoch)


def grow(parts: Bench, growing: GrowingReply, text: str) -> None:
    growing.append(growing.next_entry, text)
    parts.gateway.replies.on_grown(growing)


async def test_a_reply_of_a_hundred_tokens_a_second_makes_ten_frames_a_second() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bot")
        alice = await live(parts, "alice")
        growing = begin(parts, chat_id)
        for _ in range(200):
            grow(parts, growing, "x")
            await asyncio.sleep(0.01)
        parts.gateway.replies.end(chat_id, "reply_1", "done")
        await settle()
        frames = replies_of(alice)
        assert 20 <= len(frames) <= 22
        assert frames[0]["state"] == "running"
        assert frames[-1]["state"] == "done"
        assert frames[-1]["text"] == "x" * 200
        assert "".join(frame["text"] for frame in frames[:-1]) in frames[-1]["text"]
        for before, after in pairwise(frames[:-1]):
            assert after["from"] == before["to"]


async def test_the_first_token_after_a_pause_is_shown_at_once() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bot")
        alice = await live(parts, "alice")
        growing = begin(parts, chat_id)
        await asyncio.sleep(INTERVAL_SECONDS)
        replies_of(alice)
        grow(parts, growing, "hello")
        await settle()
        assert [frame["text"] for frame in replies_of(alice)] == ["hello"]


async def test_a_session_that_opens_gets_the_text_so_far_without_a_new_token() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bot")
        growing = begin(parts, chat_id)
        grow(parts, growing, "so far")
        alice = await live(parts, "alice")
        (shown,) = replies_of(alice)
        assert (shown["text"], shown["from"], shown["sender_id"]) == ("so far", 0, "bot")


async def test_a_member_who_joins_gets_the_text_so_far_and_one_who_leaves_nothing_more() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bot")
        alice, bob = await live(parts, "alice"), await live(parts, "bob")
        growing = begin(parts, chat_id)
        grow(parts, growing, "one ")
        await asyncio.sleep(INTERVAL_SECONDS)
        replies_of(alice)
        assert replies_of(bob) == []
        added = await parts.add(chat_id, "bob")
        left = '{"event":"member_removed","user_id":"alice"}'
        parts.gateway.deliver([added, entry(message(chat_id, 2, kind="event", content=left))])
        await asyncio.sleep(0.1)
        grow(parts, growing, "two")
        await asyncio.sleep(INTERVAL_SECONDS)
        assert [frame["text"] for frame in replies_of(bob)] == ["one two"]
        assert replies_of(alice) == []


async def test_a_paused_socket_gets_one_frame_with_all_it_missed() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bot")
        alice = await live(parts, "alice")
        growing = begin(parts, chat_id)
        await settle()
        replies_of(alice)
        alice.connection.writing_paused()
        for _ in range(30):
            grow(parts, growing, "x")
            await asyncio.sleep(INTERVAL_SECONDS)
        assert alice.writes == []
        assert alice.connection.waiting_bytes == 0
        alice.connection.writing_resumed()
        await settle()
        assert [frame["text"] for frame in replies_of(alice)] == ["x" * 30]


async def test_a_new_epoch_begins_with_its_own_state() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bot")
        alice = await live(parts, "alice")
        first = begin(parts, chat_id)
        grow(parts, first, "lost")
        await asyncio.sleep(INTERVAL_SECONDS)
        second = begin(parts, chat_id, epoch=2)
        grow(parts, first, "never shown")
        grow(parts, second, "again")
        await asyncio.sleep(INTERVAL_SECONDS)
        shown = [(frame["epoch"], frame.get("state"), frame["text"]) for frame in replies_of(alice)]
        assert shown == [(1, "running", "lost"), (2, "running", "again")]


async def test_replies_that_have_ended_are_forgotten() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bot")
        growing = begin(parts, chat_id)
        grow(parts, growing, "x")
        parts.gateway.replies.end(chat_id, "reply_1", "failed")
        parts.gateway.replies.end(chat_id, "reply_1", "done")
        assert growing.state == "failed"
        alice = await live(parts, "alice")
        await asyncio.sleep(1)
        assert replies_of(alice) == []
        replies = parts.gateway.replies
        assert not (replies._by_chat or replies._timers or replies._published_at)


async def test_reply_without_an_end_is_forgotten_in_time() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bot")
        begin(parts, chat_id)
        await asyncio.sleep(SILENT_SECONDS_MAX + 1)
        parts.gateway.replies.begin(chat_id, "reply_2", "bot", 1)
        alice = await live(parts, "alice")
        assert [frame["reply_id"] for frame in replies_of(alice)] == ["reply_2"]
