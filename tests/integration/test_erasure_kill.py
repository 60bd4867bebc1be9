"""An erasure whose process is killed at any commit is completed by the next one."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from store_rigs import AT, BOB, acked, create, send

from holdfast import telemetry
from holdfast.clock import SystemClock
from holdfast.ingest.durability import StoreDurability
from holdfast.ingest.erasure import Eraser, Erasure
from holdfast.message import User
from holdfast.store.commands import CommandContext
from holdfast.store.leases.memory import MemoryLeases
from holdfast.store.sqlite import SqliteStore

CHATS = ("chat_a", "chat_b")


async def erase(path: Path) -> Erasure:
    clock = SystemClock()
    async with SqliteStore(path) as store:
        eraser = Eraser(store, store, StoreDurability(store, clock), MemoryLeases(clock), clock)
        made = iter(range(1_000))

        def act() -> CommandContext:
            message_id = f"msg_op_{os.getpid()}_{next(made)}"
            return CommandContext(User("default", "op"), AT, message_id, operator=True, reason="x")

        return await eraser.erase(BOB, act, None, clock.monotonic() + 30)


@pytest.mark.parametrize("point", ["chats.commit.before", "chats.commit.after"])
@pytest.mark.parametrize("nth", range(1, 7))
def test_erasure_killed_at_any_commit_is_completed_by_the_next(
    point: str, nth: int, tmp_path: Path
) -> None:
    path = tmp_path / "chats.db"

    async def prepare() -> None:
        async with SqliteStore(path) as store:
            for chat_id in CHATS:
                await create(store, "bob", chat_id=chat_id)
                acked(await send(store, "k", "secret", BOB, chat_id))
                acked(await send(store, "k", "ann's own", chat_id=chat_id))

    asyncio.run(prepare())
    pid = os.fork()
    if pid == 0:
        left = nth

        def reached(name: str) -> None:
            nonlocal left
            left -= name == point
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        telemetry.on_mark(reached)
        try:
            asyncio.run(erase(path))
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL

    async def look() -> None:
        async with SqliteStore(path) as store:
            for chat_id in CHATS:
                messages = (await store.read_after(chat_id, 0, 100, 1 << 20)).messages
                assert [m.content for m in messages if m.kind == "text"] == ["", "ann's own"]
                assert [m.user_id for m in await store.members(chat_id)] == ["ann"]
                removals = [
                    m for m in messages if m.kind == "event" and "member_removed" in m.content
                ]
                assert len(removals) == 1, "left once"

    assert asyncio.run(erase(path)).done
    asyncio.run(look())
