"""Nodes that write replies to one log which pauses, fails over, is flushed and loses
answers, and readers elsewhere: checker 15, and what each writer was promised.

The log stores bytes as the Redis adapter does, each node encodes with what it knows,
and a call that a node gave up may still arrive: seconds later, behind its repetition.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from result_counts import tally

from holdfast.errors import HoldfastError, OutcomeUnknown, Unavailable
from holdfast.streaming.entry_codec import END, Decoder, encode_entry
from holdfast.streaming.reply import (
    EntryId,
    ReplyBegin,
    ReplyDelta,
    ReplyDone,
    ReplyEntry,
    ReplyError,
)
from holdfast.streaming.reply_log.contract import Appended, LogAppend, LogEnded, LogPage
from holdfast.streaming.reply_log.memory import MemoryReplyLog
from holdfast.streaming.reply_log.open_logs import EncodedAppend, OpenLogs
from holdfast.streaming.reply_log.writer import LogWriter, NotResumableCause
from holdfast.verify.checkers.replies import reply_is_whole
from holdfast.verify.history import Header, Recorder, ReplyMade, ReplySeen
from proof.results import Row
from proof.virtual_loop import LoopClock, run

T = TypeVar("T")
SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "1000")) // 40
REPLIES, TOKENS = 12, 60
ANSWER_SECONDS = 2.0
RUN_SECONDS = 40.0


class StoredLog:
    """The server: streams of bytes, and what may happen to them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.streams: dict[str, list[tuple[EntryId, bytes]]] = {}
        self.is_ready = asyncio.Event()
        self.is_ready.set()
        self.begun = dict[tuple[str, int], bytes]()
        self.happened: Counter[str] = Counter()

    def begin(self, reply_id: str, stored: bytes) -> tuple[int, int] | None:
        stream = self.streams.setdefault(reply_id, [])
        if stream and stream[-1][1][:1] == END:
            return None
        now_ms = int(LoopClock().now() * 1000)
        epoch = max(now_ms, stream[-1][0].epoch + 1 if stream else 0)
        stream.append((EntryId(epoch, 0), stored))
        self.begun[reply_id, epoch] = stored
        return epoch, len(stream) - 1

    def append(self, appends: Sequence[EncodedAppend]) -> list[EntryId | bool | None]:
        return [self._append(append) for append in appends]

    def _append(self, append: EncodedAppend) -> EntryId | bool | None:
        stream = self.streams.get(append.reply_id)
        if not stream:
            return None
        (epoch, n), last = append.first, stream[-1]
        if last[0] != EntryId(epoch, n - 1) or last[1][:1] == END:
            self.happened["an append was refused"] += 1
            return last[0]
        stream += [(EntryId(epoch, at), stored) for at, stored in enumerate(append.stored, n)]
        return True

    async def misbehave(self) -> None:
        """Pause, fail over or be flushed, every few seconds."""
        while True:
            await asyncio.sleep(self.rng.uniform(0.5, 6.0))
            match self.rng.choice(["pause", "fail over", "fail over", "flush"]):
                case "pause":
                    self.is_ready.clear()
                    await asyncio.sleep(self.rng.uniform(3.0, 20.0))
                    self.is_ready.set()
                    self.happened["pause"] += 1
                case "fail over":
                    for stream in self.streams.values():
                        if stream[-1][1][:1] != END:  # the end is what a replica had last
                            del stream[max(1, len(stream) - self.rng.randrange(6)) :]
                    self.happened["fail over"] += 1
                case _ if self.rng.random() < 0.2:
                    self.streams.clear()
                    self.happened["flush"] += 1


class NodeLog(MemoryReplyLog):
    """One node's way to the log, over a network that loses and delays calls."""

    def __init__(self, server: StoredLog) -> None:
        super().__init__(LoopClock())
        self._server = server
        self._open_logs = OpenLogs()
        self._calls = set[asyncio.Task[Any]]()

    async def begin(self, reply_id: str, begin: ReplyBegin) -> int:
        found = await self._call(lambda: self._server.begin(reply_id, encode_entry(begin)))
        if found is None:
            raise LogEnded(reply_id)
        self._open_logs.begin(reply_id, *found)
        return found[0]

    async def append(self, appends: Sequence[LogAppend]) -> Sequence[Appended]:
        encoded = [self._open_logs.encode(append) for append in appends]
        answers = await self._call(lambda: self._server.append(encoded))
        return [
            self._open_logs.on_taken(append) if answer is True else Appended(answer or None)
            for append, answer in zip(encoded, answers, strict=True)
        ]

    async def read(self, reply_id: str, after: EntryId | None, entries_max: int) -> LogPage | None:
        stream = await self._call(lambda: list(self._server.streams.get(reply_id, ())))
        if not stream:
            return None
        by_id, decoder, entries = dict(stream), Decoder(), []
        after = after or EntryId(stream[-1][0].epoch, -1)
        for each, stored in [each for each in stream if each[0] > after][:entries_max]:
            template_n = decoder.missing(each, stored)
            if template_n is not None:
                template = EntryId(each.epoch, template_n)
                decoder.decode(template, by_id[template])
            entries.append((each, decoder.decode(each, stored)))
        return LogPage(entries, stream[-1][0])

    async def _call(self, act: Callable[[], T]) -> T:
        rng, server = self._server.rng, self._server
        if rng.random() < 0.03:
            raise Unavailable("no connection")
        call = asyncio.create_task(self._carry_out(act))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        await asyncio.wait([call], timeout=ANSWER_SECONDS)
        if not call.done() or rng.random() < 0.05:
            server.happened["an answer was lost"] += 1
            raise OutcomeUnknown("no answer")
        return call.result()

    async def _carry_out(self, act: Callable[[], T]) -> T:
        rng = self._server.rng
        await asyncio.sleep(rng.uniform(0.0, 3.0) if rng.random() < 0.03 else 0.001)
        await self._server.is_ready.wait()
        return act()


class MadeReply:
    """A reply in its producer's memory, and what the writer reported."""

    def __init__(self, reply_id: str) -> None:
        self.reply_id = reply_id
        self.epoch = 0
        self.entries: list[ReplyEntry] = [
            ReplyBegin("acme", "user", "ann", "native", "native", "m", reply_id, 1.0)
        ]
        self.reports: list[str] = []
        self.end_logged: bool | None = None
        self.is_over = False

    def on_superseded(self) -> None:
        self.reports.append("superseded")

    def on_not_resumable(self, cause: NotResumableCause) -> None:
        self.reports.append(cause)


class World:
    """One run."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.recorder = Recorder(Header(seed=seed))
        self.made: list[MadeReply] = []

    async def play(self) -> None:
        self.server = StoredLog(self._rng)
        faults = asyncio.create_task(self.server.misbehave())
        tasks = [
            asyncio.create_task(self._play_reply(f"reply {number}")) for number in range(REPLIES)
        ]
        await asyncio.sleep(RUN_SECONDS)
        faults.cancel()
        self.server.is_ready.set()
        async with asyncio.timeout(120):  # everything ends once the log is well again
            await asyncio.gather(*tasks)
        for reply in self.made:
            digests = [str(entry) for entry in reply.entries if not isinstance(entry, ReplyDone)]
            end = "done" if isinstance(reply.entries[-1], ReplyDone) else ""
            self.recorder.note(ReplyMade(reply.reply_id, reply.epoch, digests, end))
        known = {(reply.reply_id, reply.epoch) for reply in self.made}
        for (reply_id, epoch), stored in self.server.begun.items():
            if (reply_id, epoch) not in known:  # its node never learned of it, and gave up
                begin = str(Decoder().decode(EntryId(epoch, 0), stored))
                self.recorder.note(ReplyMade(reply_id, epoch, [begin]))

    async def _play_reply(self, name: str) -> None:
        """A producer and its readers; some are taken over by another node."""
        log = NodeLog(self.server)
        writer = LogWriter(log)
        running = asyncio.create_task(writer.run())
        try:
            reply = await self._begin(writer, name)
        except HoldfastError:
            running.cancel()
            return  # the client gets 503
        readers = [asyncio.create_task(self._read(reply, f"reader {n}")) for n in range(2)]
        producer = asyncio.create_task(self._produce(writer, reply))
        if self._rng.random() < 0.3:
            await asyncio.sleep(self._rng.uniform(0.5, 5.0))
            await self._take_over(reply)
        await producer
        reply.is_over = True
        await asyncio.gather(*readers)
        running.cancel()

    async def _begin(self, writer: LogWriter, name: str) -> MadeReply:
        reply = MadeReply(name)
        reply.epoch = await writer.begin(reply)
        self.made.append(reply)
        return reply

    async def _take_over(self, older: MadeReply) -> None:
        """Another node makes the reply again, in a newer epoch, to its end."""
        writer = LogWriter(NodeLog(self.server))
        running = asyncio.create_task(writer.run())
        try:
            await self._produce(writer, await self._begin(writer, older.reply_id))
        except LogEnded:
            pass  # the older one was faster
        except HoldfastError:
            self.server.happened["a begin failed"] += 1
        running.cancel()

    async def _produce(self, writer: LogWriter, reply: MadeReply) -> None:
        for token in range(TOKENS):
            await asyncio.sleep(self._rng.uniform(0.0, 0.3))
            if "superseded" in reply.reports:
                return
            text = f'{{"id":"{reply.reply_id}","choices":[{{"delta":"{token}"}}]}}'
            reply.entries.append(ReplyDelta(text.encode()))
            writer.appended(reply)
        reply.entries.append(ReplyDone())
        reply.end_logged = await writer.end(reply)
        if reply.end_logged:
            stored = self.server.streams.get(reply.reply_id, ())
            same = [each for each in stored if each[0].epoch == reply.epoch]
            lost = self.server.happened["flush"] and not stored
            assert len(same) == len(reply.entries) or lost, "an end that the log does not have"

    async def _read(self, reply: MadeReply, reader: str) -> None:
        """As a reader on another node: continues wherever the log does."""
        log, last = NodeLog(self.server), None
        seen, ends = list[tuple[int, int, str]](), list[str]()
        await asyncio.sleep(self._rng.uniform(0.0, 4.0))
        quiet = 0
        while not ends:
            page = await self._next_page(log, reply.reply_id, last)
            if page is None:
                return  # flushed: 404 on resume
            for entry_id, entry in page.entries:
                following = last is None or entry_id in (
                    EntryId(last.epoch, last.n + 1),
                    EntryId(max(entry_id.epoch, last.epoch + 1), 0),
                )
                if not following:
                    ends.append("gap")
                    break
                last = entry_id
                if isinstance(entry, ReplyDone | ReplyError):
                    ends.append("done")
                else:
                    seen.append((*entry_id, str(entry)))
            quiet = 0 if page.entries else quiet + 1
            if reply.is_over and quiet > 20:
                break  # nobody writes any more: worker_lost
            await asyncio.sleep(0.2)
        at = LoopClock().monotonic()
        self.recorder.note(ReplySeen(reply.reply_id, reader, seen, ends or None, at=at))

    async def _next_page(
        self, log: NodeLog, reply_id: str, after: EntryId | None
    ) -> LogPage | None:
        while True:
            try:
                return await log.read(reply_id, after, 50)
            except HoldfastError:
                await asyncio.sleep(0.3)


def judge(seed: int) -> tuple[bool, str, Counter[str]]:
    world = World(seed)
    run(world.play(), seed)
    verdict = reply_is_whole(world.recorder.history())
    wrong = [f"seed {seed}: {verdict}"] if not verdict.ok else []
    for reply in world.made:
        begun = [epoch for reply_id, epoch in world.server.begun if reply_id == reply.reply_id]
        newer = max(begun) > reply.epoch
        if "superseded" in reply.reports and not newer:
            wrong.append(f"seed {seed}: {reply.reply_id} was superseded by nobody")
        if reply.end_logged is False and not reply.reports:
            wrong.append(f"seed {seed}: {reply.reply_id} has no end in the log and no report")
        lossy = world.server.happened["flush"] or world.server.happened["fail over"]
        if "lost" in reply.reports and not lossy:
            wrong.append(f"seed {seed}: the log of {reply.reply_id} was never lost")
    happened = world.server.happened + Counter(r for reply in world.made for r in reply.reports)
    return not wrong, "\n".join(wrong), happened


def test_replies_stay_whole_among_pauses_failovers_flushes_and_lost_answers() -> None:
    began_at = time.perf_counter()
    results = [judge(seed) for seed in range(SEEDS)]
    failures = [text for ok, text, _ in results if not ok]
    happened = sum((each for *_, each in results), Counter[str]())
    print("\n".join(failures[:5]))
    tally(
        Row(
            "simulation of the log of replies",
            "12 nodes, a log with pauses of 3-20 s, failovers, flushes, lost and late calls",
            SEEDS,
            len(failures),
            "checker 15 green; no entry lost, repeated or of an old epoch; true ends",
            f"0..{SEEDS - 1}",
            seconds=time.perf_counter() - began_at,
        )
    )
    for what in ("pause", "fail over", "flush", "an answer was lost", "an append was refused"):
        assert happened[what], f"{what} never happened"
    for what in ("superseded", "lost", "late"):
        assert happened[what], f"{what} was never reported"


def test_simulation_with_the_same_seed_is_the_same() -> None:
    assert judge(7) == judge(7)
