"""Pieces of a reply that are written where they arise: in the producer's turn while the
client reads, by the answer's own task otherwise, and never out of order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from holdfast.api.reply_calls import YIELD_ENTRIES, EventPieces
from holdfast.streaming.attached import attach_live
from holdfast.streaming.dialects.chat import ChatEvents
from holdfast.streaming.live_reply import KEPT_BYTES_MAX, LiveReply
from holdfast.streaming.reader import GAP
from holdfast.streaming.reply import EntryId, ReplyBegin, ReplyDelta, ReplyDone, ReplyEntry


class Writer:
    """A client's connection; what was written to it."""

    def __init__(self) -> None:
        self.is_writable = True
        self.written_at = 0.0
        self.written: list[bytes] = []

    def can_write(self) -> bool:
        return self.is_writable

    def write_piece(self, piece: bytes) -> None:
        self.written.append(piece)


class Reading:
    """A reply, and a client whose answer has begun."""

    def __init__(self, renderer: ChatEvents | None = None) -> None:
        begin = ReplyBegin("acme", "user", "alice", "plain", "chat", "m", "n1", 0.0)
        self.live = LiveReply("r1", begin, 1)
        self.writer = Writer()
        self.pieces = EventPieces(attach_live(self.live), renderer or ChatEvents(""))
        self.pulled: list[bytes] = []
        self.task = asyncio.create_task(self._pull())

    async def begin(self) -> None:
        self.say("first")
        await asyncio.sleep(0)
        self.pieces.write_at_once(self.writer)
        await asyncio.sleep(0)
        assert len(self.pulled) == 1 and not self.writer.written

    async def _pull(self) -> None:
        async for piece in self.pieces:
            self.pulled.append(piece)

    def say(self, *texts: str) -> None:
        self.live.append([ReplyDelta(text.encode()) for text in texts])


async def test_piece_is_written_in_the_turn_of_its_token() -> None:
    reading = Reading()
    await reading.begin()
    reading.say("a")
    reading.say("b", "c")
    assert reading.writer.written == [b"data: a\n\n", b"data: b\n\ndata: c\n\n"]
    reading.live.show_end(GAP)
    await reading.task
    assert len(reading.pulled) == 2, "the first token and the end"


async def test_client_that_does_not_read_gets_its_pieces_in_order_later() -> None:
    reading = Reading()
    await reading.begin()
    reading.say("a")
    reading.writer.is_writable = False
    reading.say("b")
    reading.writer.is_writable = True
    reading.say("c")  # its task has been woken and has not run yet
    await asyncio.sleep(0)
    reading.say("d")
    assert reading.writer.written == [b"data: a\n\n", b"data: d\n\n"]
    assert b"".join(reading.pulled[1:]) == b"data: b\n\ndata: c\n\n"
    await reading.pieces.aclose()
    reading.task.cancel()


async def test_large_batch_is_followed_by_what_is_left_of_it() -> None:
    reading = Reading()
    await reading.begin()
    reading.say(*map(str, range(YIELD_ENTRIES * 10)))
    reading.live.append([ReplyDone()])
    reading.live.show_end(GAP)
    await reading.task
    shown = b"".join([*reading.writer.written, *reading.pulled[1:]])
    assert shown.split() == [
        word for n in range(YIELD_ENTRIES * 10) for word in (b"data:", b"%d" % n)
    ] + [b"data:", b"[DONE]"]


class BrokenEvents(ChatEvents):
    def render(self, entries: Sequence[tuple[EntryId, ReplyEntry]]) -> bytes:
        if any(isinstance(e, ReplyDelta) and e.chunk == b"bad" for _, e in entries):
            raise ValueError("a defect")
        return super().render(entries)


async def test_defect_of_rendering_fails_its_reader_and_not_the_reply() -> None:
    reading = Reading(BrokenEvents(""))
    await reading.begin()
    reading.say("bad")
    reading.say("more")
    assert reading.live.readers == 0
    with pytest.raises(ValueError, match="a defect"):
        await reading.task
    assert not reading.writer.written


async def test_reader_behind_dropped_entries_ends_with_a_gap() -> None:
    reading = Reading()
    await reading.begin()
    reading.say(*["x" * (KEPT_BYTES_MAX // 4)] * 6)
    await reading.task
    assert b'"gap"' in b"".join(reading.writer.written)
