"""Follows any number of Redis Streams over one connection.

One ``XREAD`` names all streams: hundreds of growing streams cost one call every
``PAUSE_SECONDS``. When nothing grows the call blocks, so a quiet node costs nothing. To
name another stream then, the blocked call must end: the node wakes itself by a stream
of its own. That cannot be lost, whichever of the two calls Redis serves first.

What arrives here is raw and may have holes for a follower that joined late or did not
keep up. Each follower knows its own place, and reads by itself what it missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from holdfast import telemetry
from holdfast.errors import HoldfastError
from holdfast.streaming.reply import EntryId

BLOCK_SECONDS = 1.0
PAUSE_SECONDS = 0.01
"""Between two calls: what grew meanwhile comes with one of them."""
RECONNECT_SECONDS = 0.2
ENTRIES_PER_STREAM_MAX = 500
INBOX_ENTRIES_MAX = 5_000
"""What a follower may leave unread; then it reads again from its place."""

_XREAD = ("XREAD", "COUNT", ENTRIES_PER_STREAM_MAX)
_BLOCK = ("BLOCK", int(BLOCK_SECONDS * 1000))
RawEntry = tuple[EntryId, bytes]


class StreamInbox:
    """What has arrived for one follower."""

    def __init__(self, behind: bool) -> None:
        self._entries: list[RawEntry] = []
        self._quiet = False
        self._has_news = asyncio.Event()
        if behind:
            self._has_news.set()

    def put(self, entries: Sequence[RawEntry]) -> None:
        if len(self._entries) + len(entries) > INBOX_ENTRIES_MAX:
            self._entries.clear()  # the follower sees the hole, and reads the log
        self._entries += entries
        self._quiet = False
        self._has_news.set()

    def on_tick(self) -> None:
        if self._quiet:
            self._has_news.set()
        self._quiet = True

    async def take(self, after: EntryId) -> Sequence[RawEntry]:
        """The entries that continue ``after`` without a hole; none after a while
        without news, or if something is missing here: then read the log.
        """
        await self._has_news.wait()
        self._has_news.clear()
        arrived, self._entries = self._entries, []
        entries = [entry for entry in arrived if entry[0] > after]
        return entries if entries and entries[0][0].follows(after) else ()


class _Followed:
    """A stream, the last id that was asked for, and who follows it."""

    def __init__(self, last: EntryId) -> None:
        self.last = last
        self.last_id = str(last).encode()
        self.inboxes: set[StreamInbox] = set()

    def on_growth(self, found: Any) -> None:
        entries = raw_entries(found)
        self.last, self.last_id = entries[-1][0], found[-1][0]
        for inbox in self.inboxes:
            inbox.put(entries)


class StreamFollower:
    """One reader for all followers of a node. It connects while there are any."""

    def __init__(
        self,
        connect: Callable[[], AbstractConnection],
        wake_key: bytes,
        wake: Callable[[], Awaitable[None]],
        on_trouble: Callable[[Exception], None],
        follow_seconds: float,
    ) -> None:
        """``wake`` lets ``wake_key`` grow. A follower without news goes on within
        ``follow_seconds``.
        """
        self._tick_seconds = follow_seconds / 2
        self._connect = connect
        self._wake_key = wake_key
        self._wake = wake
        self._on_trouble = on_trouble
        self._streams: dict[bytes, _Followed] = {}
        self._woken_at = b"0"
        self._blocked = False
        self._ticking: asyncio.TimerHandle | None = None
        self._waking: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def inbox(self, key: bytes, after: EntryId) -> AsyncIterator[StreamInbox]:
        """What the stream grows by after this entry, while the block runs."""
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Followed(after)
            self._on_new_stream()
        inbox = StreamInbox(behind=stream.last > after)
        stream.inboxes.add(inbox)
        try:
            yield inbox
        finally:
            stream.inboxes.discard(inbox)
            if not stream.inboxes and self._streams.get(key) is stream:
                del self._streams[key]

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        tasks = [task for task in (self._reading, self._waking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_new_stream(self) -> None:
        if self._ticking is None:
            self._tick()
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._run(), name="holdfast-replies-follower")
        elif self._blocked and (self._waking is None or self._waking.done()):
            self._waking = asyncio.create_task(self._wake_up())

    def _tick(self) -> None:
        for stream in self._streams.values():
            for inbox in stream.inboxes:
                inbox.on_tick()
        loop = asyncio.get_running_loop()
        self._ticking = loop.call_later(self._tick_seconds, self._tick) if self._streams else None

    async def _wake_up(self) -> None:
        try:
            await self._wake()
        except HoldfastError:
            pass  # the blocked call ends by itself after a second

    async def _run(self) -> None:
        while self._streams:
            connection = self._connect()
            try:
                await connection.connect()  # type: ignore[no-untyped-call]
                has_grown = False
                while self._streams:
                    has_grown = await self._read(connection, wait=not has_grown)
                    await asyncio.sleep(PAUSE_SECONDS)
            except (RedisError, OSError) as error:
                self._on_trouble(error)
                await asyncio.sleep(RECONNECT_SECONDS)
            except Exception as error:  # all followers of this node depend on this task
                telemetry.defect("streaming", error)
                await asyncio.sleep(RECONNECT_SECONDS)
            finally:
                self._blocked = False
                await connection.disconnect(nowait=True)

    async def _read(self, connection: AbstractConnection, *, wait: bool) -> bool:
        """One call; returns whether a stream has grown.

        A call that waits is answered with the first stream that grows, alone, and costs
        Redis more: it is made only when nothing grew.
        """
        ids = [stream.last_id for stream in self._streams.values()]
        command: Any = (*_XREAD, *(_BLOCK if wait else ()), "STREAMS", self._wake_key)
        command += (*self._streams, self._woken_at, *ids)
        # redis-py would pack each of the names in Python, ten times as slow.
        await connection.send_packed_command(hiredis.pack_command(command))
        self._blocked = wait
        answer = await connection.read_response()
        self._blocked = False
        for key, found in answer or ():
            if key == self._wake_key:
                self._woken_at = found[-1][0]
            elif (stream := self._streams.get(key)) is not None:
                stream.on_growth(found)
        return bool(answer)


def raw_entries(found: Any) -> list[RawEntry]:
    """Entries as Redis answers them: the id, and one field with its value."""
    return [(entry_id(name), fields[1]) for name, fields in found]


def entry_id(name: bytes) -> EntryId:
    epoch, _, n = name.partition(b"-")
    return EntryId(int(epoch), int(n))
