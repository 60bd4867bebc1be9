"""The writer of reply logs: every entry once, whatever the log answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from holdfast.clock import ManualClock
from holdfast.errors import OutcomeUnknown, Unavailable
from holdfast.streaming.reply import (
    EntryId,
    ReplyBegin,
    ReplyDelta,
    ReplyDone,
    ReplyEntry,
    ReplyError,
)
from holdfast.streaming.reply_log import contract, writer
from holdfast.streaming.reply_log.contract import Appended, LogAppend, LogEnded
from holdfast.streaming.reply_log.memory import MemoryReplyLog
from holdfast.streaming.reply_log.writer import LogWriter

BEGIN = ReplyBegin("acme", "user", "ann", "native", "native", "m", "node-1", 1.0)


class Reply:
    """A reply in memory that remembers what the writer reported."""

    def __init__(self, reply_id: str = "r1") -> None:
        self.reply_id = reply_id
        self.epoch = 0
        self.entries: list[ReplyEntry] = [BEGIN]
        self.reports: list[str] = []

    def on_superseded(self) -> None:
        self.reports.append("superseded")

    def on_not_resumable(self, cause: writer.NotResumableCause) -> None:
        self.reports.append(cause)

    def grow(self, *texts: str) -> None:
        self.entries += [ReplyDelta(text.encode()) for text in texts]


class FaultyLog(MemoryReplyLog):
    """Counts calls; fails as told before or after the log did its work."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.calls: list[list[LogAppend]] = []
        self.before: Exception | None = None
        self.after: Exception | None = None
        self.hang = False

    async def append(self, appends: Sequence[LogAppend]) -> Sequence[Appended]:
        self.calls.append(list(appends))
        if self.hang:
            await asyncio.Event().wait()
        if self.before is not None:
            raise self.before
        answers = await super().append(appends)
        if self.after is not None:
            raise self.after
        return answers

    async def whole(self, reply_id: str = "r1") -> list[ReplyEntry]:
        page = await self.read(reply_id, None, 100_000)
        assert page is not None
        assert [each[0].n for each in page.entries] == list(range(len(page.entries)))
        return [entry for _, entry in page.entries]


@asynccontextmanager
async def writing(log: MemoryReplyLog) -> AsyncIterator[LogWriter]:
    subject = LogWriter(log)
    running = asyncio.create_task(subject.run())
    yield subject
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def begun(subject: LogWriter, reply_id: str = "r1") -> Reply:
    reply = Reply(reply_id)
    reply.epoch = await subject.begin(reply)
    return reply


async def test_entries_of_all_replies_are_written_with_one_call_every_25_ms() -> None:
    log = FaultyLog()
    async with writing(log) as subject:
        replies = [await begun(subject, f"r{n}") for n in range(10)]
        began_at = asyncio.get_running_loop().time()
        for _ in range(3):
            for reply in replies:
                reply.grow("a")
                subject.appended(reply)
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        assert [len(call) for call in log.calls] == [10]
        assert all(len(append.entries) == 3 for append in log.calls[0])
        assert asyncio.get_running_loop().time() - began_at < 0.05


async def test_end_is_written_at_once_with_what_came_before_it() -> None:
    log = FaultyLog()
    async with writing(log) as subject:
        reply = await begun(subject)
        reply.grow("a", "b")
        subject.appended(reply)
        reply.entries.append(ReplyDone())
        began_at = asyncio.get_running_loop().time()
        assert await subject.end(reply) is True
        assert asyncio.get_running_loop().time() == began_at
        assert await log.whole() == reply.entries
        assert reply.reports == []


@pytest.mark.parametrize("lost", ["before", "after"])
async def test_call_whose_answer_is_lost_writes_no_entry_twice(lost: str) -> None:
    log = FaultyLog()
    async with writing(log) as subject:
        reply = await begun(subject)
        setattr(log, lost, OutcomeUnknown("no answer"))
        reply.grow("a", "b")
        subject.appended(reply)
        await asyncio.sleep(0.08)
        setattr(log, lost, None)
        reply.grow("c")
        subject.appended(reply)
        reply.entries.append(ReplyDone())
        assert await subject.end(reply) is True
        assert await log.whole() == reply.entries
        assert len(log.calls) > 1


async def test_tail_that_a_failover_lost_is_sent_again_from_memory() -> None:
    log = FaultyLog()
    async with writing(log) as subject:
        reply = await begun(subject)
        reply.grow("a", "b", "c")
        subject.appended(reply)
        await asyncio.sleep(0.1)
        del log._logs["r1"].entries[2:]
        reply.grow("d")
        reply.entries.append(ReplyDone())
        assert await subject.end(reply) is True
        assert await log.whole() == reply.entries


async def test_reply_with_a_newer_epoch_elsewhere_must_stop() -> None:
    log = FaultyLog()
    async with writing(log) as subject:
        reply = await begun(subject)
        newer = await log.begin("r1", BEGIN)
        reply.grow("late")
        subject.appended(reply)
        await asyncio.sleep(0.1)
        assert reply.reports == ["superseded"]
        assert await subject.end(reply) is False
        assert await log.whole() == [BEGIN]
        page = await log.read("r1", None, 10)
        assert page is not None
        assert page.last == EntryId(newer, 0)


@pytest.mark.parametrize("older", [False, True])
async def test_reply_whose_log_is_lost_goes_on_as_not_resumable(older: bool) -> None:
    log = FaultyLog()
    async with writing(log) as subject:
        await log.begin("r1", BEGIN)
        reply = await begun(subject)
        if older:
            log._logs["r1"].entries.pop()
        else:
            await log.delete(["r1"])
        reply.grow("a")
        subject.appended(reply)
        await asyncio.sleep(0.1)
        assert reply.reports == ["lost"]
        reply.entries.append(ReplyDone())
        assert await subject.end(reply) is False
        assert reply.reports == ["lost"]


async def test_reply_whose_log_somebody_else_ended_is_not_resumable() -> None:
    log = FaultyLog()
    async with writing(log) as subject:
        reply = await begun(subject)
        await log.append([LogAppend("r1", EntryId(reply.epoch, 1), [ReplyDone()])])
        reply.grow("a")
        subject.appended(reply)
        await asyncio.sleep(0.1)
        reply.grow("b")
        subject.appended(reply)
        await asyncio.sleep(0.1)
        assert reply.reports == ["lost"]
        assert len(log.calls) == 3


async def test_end_that_the_log_does_not_take_is_late_after_a_second() -> None:
    log = FaultyLog()
    async with writing(log) as subject:
        reply = await begun(subject)
        log.before = Unavailable("down")
        reply.entries.append(ReplyDone())
        began_at = asyncio.get_running_loop().time()
        assert await subject.end(reply) is False
        assert asyncio.get_running_loop().time() - began_at == pytest.approx(1.0)
        assert reply.reports == ["late"]
        log.before = None
        await asyncio.sleep(0.2)
        assert await log.whole() == reply.entries


async def test_end_that_stays_late_is_forgotten_after_30_s() -> None:
    log = FaultyLog()
    async with writing(log) as subject:
        reply = await begun(subject)
        log.before = Unavailable("down")
        reply.entries.append(ReplyDone())
        await subject.end(reply)
        await asyncio.sleep(30)
        log.before = None
        await asyncio.sleep(1)
        assert await log.whole() == [BEGIN]
        assert not subject._replies


async def test_log_that_hangs_does_not_hold_up_the_end_of_a_reply() -> None:
    log = FaultyLog()
    async with writing(log) as subject:
        reply = await begun(subject)
        log.hang = True
        reply.entries.append(ReplyDone())
        assert await subject.end(reply) is False


@pytest.mark.parametrize("bound", ["LOG_ENTRIES_MAX", "LOG_BYTES_MAX"])
@pytest.mark.parametrize("answer_lost", [False, True])
async def test_log_at_its_bounds_ends_with_gap_and_the_reply_goes_on(
    bound: str, answer_lost: bool
) -> None:
    log = FaultyLog()
    chunk = "x" * (1 if bound == "LOG_ENTRIES_MAX" else 5000)
    async with writing(log) as subject:
        reply = await begun(subject)
        while not reply.reports:
            reply.grow(*[chunk] * 500)
            subject.appended(reply)
            log.after = OutcomeUnknown("no answer") if answer_lost else None
            await asyncio.sleep(0.09)
            log.after = None
            await asyncio.sleep(0.2)
        assert reply.reports == ["bounds"]
        reply.entries.append(ReplyDone())
        assert await subject.end(reply) is False
    logged = await log.whole()
    assert isinstance(logged[-1], ReplyError)
    assert logged[-1].code == "gap"
    assert logged[:-1] == reply.entries[: len(logged) - 1]
    assert len(logged) <= contract.LOG_ENTRIES_MAX
    assert sum(len(e.chunk) for e in logged if isinstance(e, ReplyDelta)) <= contract.LOG_BYTES_MAX


async def test_reply_of_a_whole_log_cannot_begin_again() -> None:
    log = FaultyLog()
    async with writing(log) as subject:
        reply = await begun(subject)
        reply.entries.append(ReplyDone())
        await subject.end(reply)
        with pytest.raises(LogEnded):
            await begun(subject)


async def test_forgotten_reply_is_written_no_more() -> None:
    log = FaultyLog()
    async with writing(log) as subject:
        reply = await begun(subject)
        reply.grow("a")
        subject.appended(reply)
        subject.forget(reply)
        await asyncio.sleep(1)
        assert await log.whole() == [BEGIN]


async def test_begin_gives_up_on_a_silent_log_after_a_second() -> None:
    class Silent(MemoryReplyLog):
        async def begin(self, reply_id: str, begin: ReplyBegin) -> int:
            await asyncio.Event().wait()
            raise AssertionError

    writer = LogWriter(Silent(ManualClock()))
    assert writer.trouble is None
    with pytest.raises(OutcomeUnknown):
        await begun(writer)
    assert writer.trouble == "the log of replies does not answer"  # status shows it


async def test_call_holds_at_most_2000_entries_and_the_rest_follows() -> None:
    log = FaultyLog()
    async with writing(log) as subject:
        reply = await begun(subject)
        reply.grow(*["x"] * 4500)
        reply.entries.append(ReplyDone())
        assert await subject.end(reply) is True
        assert [len(call[0].entries) for call in log.calls] == [2000, 2000, 501]
        assert await log.whole() == reply.entries
