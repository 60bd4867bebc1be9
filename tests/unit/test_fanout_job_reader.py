"""A reader that makes jobs of the log: nothing is left out when the log is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from store_rigs import ANN, create

from holdfast import telemetry
from holdfast.clock import Clock, timestamp
from holdfast.errors import Unavailable
from holdfast.eventlog.contract import LogLost, Position
from holdfast.eventlog.memory import MemoryEventLog
from holdfast.fanout.job_reader import BATCH, CLOCKS_DIFFER_SECONDS, REST_SECONDS, JobReader
from holdfast.message import Draft, LogEntry, Message, Page
from holdfast.store.memory import MemoryStore
from holdfast.work.inspection import Query
from holdfast.work.job import JobDraft
from holdfast.work.sqlite.store import MemoryWork
from proof.virtual_loop import LoopClock


class SetClock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at = 1_800_000_000.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at


class Log(MemoryEventLog):
    """A log that can lose everything, under another base."""

    base = 0
    reads = 0

    async def end(self) -> Position:
        return Position((await super().end()).offsets, self.base)

    async def read(self, after: Position, limit: int) -> tuple[Sequence[LogEntry], Position]:
        self.reads += 1
        if after.base != self.base:
            raise LogLost
        return await super().read(after, limit)


class Store(MemoryStore):
    """``fails``: how many reads of pages fail, after the next ``works``."""

    works, fails = 0, 0

    async def read_after(self, *asked: Any, **more: Any) -> Page:
        self.works -= 1
        if self.works < 0 and self.fails:
            self.fails -= 1
            raise Unavailable("injected")
        return await super().read_after(*asked, **more)


class Reader(JobReader):
    """Makes a job of each text."""

    reader = "webhooks"

    async def drafts(self, entries: Sequence[LogEntry], position: Position) -> list[JobDraft]:
        return [
            JobDraft("text", f"{entry.chat_id}/{entry.what.sequence}".encode())
            for entry in entries
            if isinstance(entry.what, Message) and entry.what.kind == "text"
        ]


class Rig:
    def __init__(self, clock: Clock | None = None) -> None:
        self.clock, self.store, self.log, self.jobs = (
            clock or SetClock(),
            Store(),
            Log(),
            MemoryWork(),
        )
        self.store.on_commit(self.log.committed)

    def reader(self) -> Reader:
        return Reader(self.log, self.jobs, self.store, self.clock)

    async def send(self, chat: str, *keys: str) -> None:
        at = timestamp(self.clock.now())
        drafts = [Draft(ANN, chat, key, "hi", "text/plain", f"msg_{key}", at) for key in keys]
        await self.store.append(drafts)

    async def made(self) -> list[str]:
        return [job.payload.decode() for job in await self.jobs.find(Query(), 10_000)]


async def caught_up(reader: Reader, position: Position) -> Position:
    while (reached := await reader.advance(position)) != position:
        position = reached
    return position


def losses() -> float:
    name, part = "holdfast_log_losses_total", {"part": "webhooks"}
    return telemetry.REGISTRY.get_sample_value(name, part) or 0.0


async def rig_with_a_past() -> tuple[Rig, Reader, Position]:
    """Three chats, whose messages became jobs hours ago."""
    rig = Rig()
    reader = rig.reader()
    position = await reader.begin()
    for chat in ("chat_a", "chat_b", "chat_quiet"):
        await create(rig.store, chat_id=chat)
        await rig.send(chat, "old")
    position = await caught_up(reader, position)
    rig.clock.at += 3600
    await rig.send("chat_a", "last")
    position = await caught_up(reader, position)
    rig.clock.at += 3600
    return rig, reader, await caught_up(reader, position)


async def test_lost_log_is_made_up_for_chat_by_chat_and_then_read_on() -> None:
    rig, reader, position = await rig_with_a_past()
    before, had = losses(), await rig.made()
    for key in ("1", "2"):
        await rig.send("chat_b", key)
        await rig.send("chat_a", key)
    rig.log.base = 7
    position = await caught_up(reader, position)
    assert position == await rig.log.end()
    assert losses() == before + 1
    made = (await rig.made())[len(had) :]
    assert made == ["chat_a/3", "chat_a/4", "chat_b/2", "chat_b/3"], "nothing older again"
    await rig.send("chat_a", "3")
    position = await caught_up(reader, position)
    assert (await rig.made())[-1] == "chat_a/5"

    again = rig.reader()
    assert await again.begin() == position, "its next name, and the base, are stored"
    assert await caught_up(again, position) == position and losses() == before + 1


async def test_messages_within_the_difference_of_clocks_may_become_jobs_twice() -> None:
    rig, reader, position = await rig_with_a_past()
    rig.clock.at -= CLOCKS_DIFFER_SECONDS / 2
    await rig.send("chat_b", "from a slow clock")
    position = await caught_up(reader, position)
    rig.log.base = 7
    had = await rig.made()
    await caught_up(reader, position)
    assert (await rig.made())[len(had) :] == ["chat_b/2"]


async def test_reader_goes_on_with_a_loss_where_a_failing_store_stopped_it() -> None:
    rig, reader, position = await rig_with_a_past()
    had = await rig.made()
    for chat in ("chat_a", "chat_b", "chat_quiet"):
        await rig.send(chat, "1")
    rig.log.base, rig.store.works, rig.store.fails = 7, 1, 2
    for _ in range(2):
        with pytest.raises(Unavailable):
            await reader.advance(position)
        position = await reader.begin()
    await rig.send("chat_a", "2")
    position = await caught_up(reader, position)
    made = (await rig.made())[len(had) :]
    assert made == ["chat_a/3", "chat_b/2", "chat_quiet/2", "chat_a/4"]


async def test_messages_whose_jobs_could_not_be_stored_are_made_up_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, reader, position = await rig_with_a_past()
    had = await rig.made()
    await rig.send("chat_a", "1")
    await rig.send("chat_b", "1")
    rig.log.base = 7

    async def fail(*asked: Any) -> list[int]:
        raise Unavailable("injected")

    with monkeypatch.context() as outage:
        outage.setattr(rig.jobs, "enqueue", fail)
        for _ in range(3):
            with pytest.raises(Unavailable):
                await reader.advance(position)
    await caught_up(reader, position)
    assert (await rig.made())[len(had) :] == ["chat_a/3", "chat_b/2"]


async def test_reader_killed_while_it_makes_up_for_a_loss_begins_it_again() -> None:
    rig, reader, position = await rig_with_a_past()
    for chat in ("chat_a", "chat_b"):
        await rig.send(chat, "1")
    rig.log.base, rig.store.works, rig.store.fails = 7, 1, 1
    with pytest.raises(Unavailable):
        await reader.advance(position)
    restarted = rig.reader()
    await caught_up(restarted, await restarted.begin())
    made = await rig.made()
    assert made.count("chat_a/3") == 2 and made.count("chat_b/2") == 1


async def test_log_restored_from_an_older_backup_is_read_on_under_the_next_name() -> None:
    rig, reader, position = await rig_with_a_past()
    rig.log._entries, rig.log._offsets = rig.log._entries[:-2], rig.log._offsets[:-2]
    had = await rig.made()
    end = await caught_up(reader, position)
    assert end == await rig.log.end() and not end.is_beyond(position)
    assert await rig.made() == had
    assert await rig.jobs.reader_offset("webhooks.1") == end.offset(0)


async def test_long_chat_is_made_up_for_from_its_first_missed_message() -> None:
    rig, reader, position = await rig_with_a_past()
    had = await rig.made()
    await rig.send("chat_a", *(str(n) for n in range(2 * BATCH + 7)))
    rig.log.base = 7
    await caught_up(reader, position)
    made = (await rig.made())[len(had) :]
    assert made == [f"chat_a/{n}" for n in range(3, 2 * BATCH + 10)]


async def test_reader_does_not_read_again_to_learn_that_it_is_at_the_end() -> None:
    """Each of its reads is a statement of the server that all nodes share."""
    rig = Rig()
    await create(rig.store)
    task = asyncio.create_task(rig.reader().run())
    for messages, reads in ((1, 1), (BATCH, 2), (BATCH + 1, 2)):
        await _quiet()
        made, rig.log.reads = len(await rig.made()), 0
        await rig.send("chat_a", *(f"{messages}-{n}" for n in range(messages)))
        await _quiet()
        assert len(await rig.made()) == made + messages
        assert rig.log.reads == reads
    task.cancel()


async def _quiet() -> None:
    """Until nothing moves, not even a reader that rests."""
    await asyncio.sleep(2 * REST_SECONDS)


async def test_moment_does_not_move_while_the_reader_lags() -> None:
    """Else what another shard has not shown yet would be left out after a loss."""
    rig, reader, position = await rig_with_a_past()
    began = int(rig.clock.now() * 1000)
    rig.clock.at += 100
    await rig.send("chat_a", *(str(n) for n in range(BATCH + 1)))
    position = await reader.advance(position)
    assert await rig.jobs.reader_offset("webhooks.moment") == began
    await reader.advance(position)
    assert await rig.jobs.reader_offset("webhooks.moment") == int(rig.clock.now() * 1000)


async def test_busy_log_is_read_in_batches_and_a_quiet_one_at_once() -> None:
    rig = Rig(LoopClock())
    await create(rig.store, chat_id="chat_a")
    reader = rig.reader()
    running = asyncio.create_task(reader.run())
    await asyncio.sleep(1)
    before = rig.log.reads
    for n in range(200):
        await rig.send("chat_a", f"busy-{n}")
        await asyncio.sleep(0.001)
    await asyncio.sleep(1)
    assert rig.log.reads - before <= 10, "200 commits in 0.2 s"
    assert len(await rig.made()) == 200
    await rig.send("chat_a", "quiet")
    await asyncio.sleep(0.001)
    assert len(await rig.made()) == 201
    running.cancel()
