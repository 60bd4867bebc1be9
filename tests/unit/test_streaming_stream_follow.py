"""The one reader of all streams that a node follows, on a connection made up."""

from __future__ import annotations

import asyncio
from typing import Any

from holdfast.streaming.reply import EntryId
from holdfast.streaming.reply_log.stream_follow import StreamFollower

STREAM = b"replies:log:r1"
GROWN = [[STREAM, [(b"1-1", [b"e", b"token"])]]]


class FakeConnection:
    """Answers each read with the next of these, then with nothing, a second each."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    async def connect(self) -> None:
        pass

    async def disconnect(self, nowait: bool = False) -> None:
        pass

    async def send_packed_command(self, command: bytes) -> None:
        pass

    async def read_response(self) -> Any:
        await asyncio.sleep(0 if self._answers else 1)
        return self._answers.pop(0) if self._answers else None


async def no_wake() -> None:
    pass


async def test_answer_that_cannot_be_read_does_not_end_the_reader() -> None:
    unreadable = [[STREAM, [(b"no id", [b"e", b"token"])]]]
    connection = FakeConnection(unreadable, GROWN)
    follower = StreamFollower(lambda: connection, b"wake", no_wake, print, 10.0)  # type: ignore[arg-type,return-value]
    async with follower.inbox(STREAM, EntryId(1, 0)) as inbox:
        assert await inbox.take(EntryId(1, 0)) == [(EntryId(1, 1), b"token")]
    await follower.close()
