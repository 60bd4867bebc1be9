"""Negative controls of checker 15: replies on the real writer and the log in memory.

One variant is correct, the others have one deliberate defect each. All run the same
seeded scenario: producers that stream, some of which die; a log whose calls fail or
lose their answers; readers on the producing node, on another node whose connection
breaks, and late ones. Only the correct variant keeps checker 15.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from holdfast.clock import Clock
from holdfast.errors import OutcomeUnknown, Unavailable
from holdfast.streaming.reply import (
    EntryId,
    ReplyBegin,
    ReplyDelta,
    ReplyDone,
    ReplyEntry,
    ReplyError,
)
from holdfast.streaming.reply_log.contract import Appended, LogAppend, LogPage
from holdfast.streaming.reply_log.memory import MemoryReplyLog
from holdfast.streaming.reply_log.writer import LogWriter
from holdfast.verify.history import Header, History, Recorder, ReplyMade, ReplySeen
from proof.virtual_loop import LoopClock, run

SEEDS = range(1, 9)
REPLIES = 8
LOST_SECONDS = 2.0
"""When a reader elsewhere takes a producer for dead."""
_KEPT_ENTRIES = 12


class FaultyLog(MemoryReplyLog):
    """A log whose appends fail, or whose answers are lost, now and then."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        super().__init__(clock)
        self.rng = rng

    async def append(self, appends: Sequence[LogAppend]) -> Sequence[Appended]:
        fate = self.rng.random()
        if fate < 0.1:
            raise Unavailable("by chance")
        answers = await super().append(appends)
        if fate < 0.2:
            raise OutcomeUnknown("by chance")
        return answers


class TrimmedLog(FaultyLog):
    """A stream with a maximum length: a living log loses its begin."""

    def _append(self, append: LogAppend) -> Appended:
        answer = super()._append(append)
        if (log := self._log(append.reply_id)) is not None:
            del log.entries[:-_KEPT_ENTRIES]
        return answer


class UncheckedLog(FaultyLog):
    """Appends without asking what is there: a batch that got lost leaves a hole."""

    def _append(self, append: LogAppend) -> Appended:
        log = self._log(append.reply_id)
        assert log is not None
        last = EntryId(append.first.epoch, append.first.n + len(append.entries) - 1)
        if self.rng.random() < 0.2 and not isinstance(append.entries[-1], ReplyDone):
            return Appended(last)
        numbered = enumerate(append.entries, append.first.n)
        log.entries += [(EntryId(append.first.epoch, n), entry) for n, entry in numbered]
        return Appended(last)


@dataclass(eq=False)
class ScriptedReply:
    """A reply in its producer's memory."""

    reply_id: str
    epoch: int = 0
    entries: list[ReplyEntry] = field(default_factory=list)
    visible: int = 0
    resumable: bool = True
    died: bool = False
    has_grown: asyncio.Event = field(default_factory=asyncio.Event)

    def show(self) -> None:
        self.visible = len(self.entries)
        self.wake()

    def wake(self) -> None:
        self.has_grown.set()
        self.has_grown = asyncio.Event()

    def on_superseded(self) -> None:
        raise AssertionError("nobody else makes this reply")

    def on_not_resumable(self, cause: str) -> None:
        self.resumable = False


@dataclass(frozen=True, slots=True)
class ReplyControl:
    """A variant; ``red``: the only checkers it must turn red.

    ``publishes``: a reader elsewhere gets what is published while it is connected.
    ``shows_end_first``: the end is shown before the log has it. ``checks``: a reader
    elsewhere ends with ``gap`` at a jump.
    """

    name: str
    red: frozenset[int] = frozenset({15})
    log: Callable[[Clock, random.Random], FaultyLog] = FaultyLog
    publishes: bool = False
    shows_end_first: bool = False
    checks: bool = True


WHOLE = ReplyControl("whole", frozenset())
REPLY_CONTROLS = (
    ReplyControl("tokens over pub/sub", publishes=True, checks=False),
    ReplyControl("end before the log", shows_end_first=True),
    ReplyControl("trimmed living log", log=TrimmedLog, checks=False),
    ReplyControl("a hole", log=UncheckedLog, checks=False),
)


def play_replies(seed: int, control: ReplyControl) -> History:
    """One run of the scenario."""
    history: History = run(ReplyScenario(seed, control).play())
    return history


class ReplyScenario:
    """One run: each reply has a producer and three readers."""

    def __init__(self, seed: int, control: ReplyControl) -> None:
        self._control = control
        self._rng = random.Random(seed)
        self._record = Recorder(Header(seed=seed, notes={"control": control.name}))

    async def play(self) -> History:
        self._clock = LoopClock()
        self._log = self._control.log(self._clock, self._rng)
        async with asyncio.TaskGroup() as tasks:
            for number in range(REPLIES):
                tasks.create_task(self._play_reply(ScriptedReply(f"reply_{number}"), number))
        return self._record.history()

    async def _play_reply(self, reply: ScriptedReply, number: int) -> None:
        reply.entries.append(ReplyBegin("t", "user", "ann", "native", "native", "m", "a", 0.0))
        writer = LogWriter(self._log)
        reply.epoch = await writer.begin(reply)
        async with asyncio.TaskGroup() as tasks:
            producer = asyncio.create_task(self._produce(reply, writer))
            tasks.create_task(self._read("here", reply, self._here(reply)))
            tasks.create_task(self._read("elsewhere", reply, self._elsewhere(reply)))
            late = self._rng.uniform(0.1, 2.0)
            tasks.create_task(self._read("late", reply, self._elsewhere(reply), late))
            if number % 2:
                await asyncio.sleep(self._rng.uniform(0.3, 1.1))
                reply.died = not producer.done()
                producer.cancel()
                reply.wake()
            with suppress(asyncio.CancelledError):
                await producer
        made = [str(entry) for entry in reply.entries if not isinstance(entry, ReplyDone)]
        is_done = isinstance(reply.entries[-1], ReplyDone)
        self._record.note(ReplyMade(reply.reply_id, reply.epoch, made, "done" if is_done else ""))

    async def _produce(self, reply: ScriptedReply, writer: LogWriter) -> None:
        writing = asyncio.create_task(writer.run())
        try:
            for token in range(30):
                await asyncio.sleep(self._rng.uniform(0.0, 0.06))
                reply.entries.append(ReplyDelta(b"%d" % token))
                writer.appended(reply)
                reply.show()
            reply.entries.append(ReplyDone())
            if self._control.shows_end_first:
                reply.show()
            await writer.end(reply)
            reply.show()
        finally:
            writing.cancel()

    async def _read(
        self,
        reader: str,
        reply: ScriptedReply,
        pages: AsyncIterator[Sequence[tuple[EntryId, ReplyEntry]]],
        after_seconds: float = 0,
    ) -> None:
        await asyncio.sleep(after_seconds)
        seen, ends = list[tuple[int, int, str]](), list[str]()
        async for page in pages:
            for (epoch, n), entry in page:
                if isinstance(entry, ReplyDone):
                    ends.append("done")
                elif isinstance(entry, ReplyError):
                    ends.append(entry.code)
                else:
                    seen.append((epoch, n, str(entry)))
        at = self._clock.monotonic()
        self._record.note(ReplySeen(reply.reply_id, reader, seen, ends, reply.resumable, at=at))

    async def _here(
        self, reply: ScriptedReply
    ) -> AsyncIterator[Sequence[tuple[EntryId, ReplyEntry]]]:
        n = 0
        while True:
            has_grown, visible = reply.has_grown, reply.visible
            page = [(EntryId(reply.epoch, at), reply.entries[at]) for at in range(n, visible)]
            n = max(n, visible)
            yield page
            if page and isinstance(page[-1][1], ReplyDone):
                return
            if reply.died and n == reply.visible:
                yield [(EntryId(reply.epoch, n), ReplyError("worker_lost", "its node died"))]
                return
            await has_grown.wait()

    async def _elsewhere(
        self, reply: ScriptedReply
    ) -> AsyncIterator[Sequence[tuple[EntryId, ReplyEntry]]]:
        """What the log has, over a connection that breaks; or what is published."""
        after: EntryId | None = None
        grew_at = self._clock.monotonic()
        while True:
            page = await self._next_page(reply, after)
            expected = EntryId(reply.epoch, after.n + 1 if after else 0)
            if page and self._control.checks and page[0][0] != expected:
                yield [(expected, ReplyError("gap", "entries are missing"))]
                return
            yield page
            if page:
                after, grew_at = page[-1][0], self._clock.monotonic()
                if isinstance(page[-1][1], ReplyDone | ReplyError):
                    return
            elif reply.died and self._clock.monotonic() > grew_at + LOST_SECONDS:
                yield [(expected, ReplyError("worker_lost", "its node died"))]
                return
            await asyncio.sleep(0.2 if self._rng.random() < 0.1 else 0.02)  # a cut, or a turn

    async def _next_page(
        self, reply: ScriptedReply, after: EntryId | None
    ) -> Sequence[tuple[EntryId, ReplyEntry]]:
        if self._control.publishes:
            first = max(reply.visible - 3, (after.n if after else -1) + 1)  # what is on its way
            entries = range(first, reply.visible)
            return [(EntryId(reply.epoch, n), reply.entries[n]) for n in entries]
        page: LogPage | None = await self._log.read(reply.reply_id, after, 1_000)
        return page.entries if page is not None else ()
