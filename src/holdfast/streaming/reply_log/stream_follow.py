"""Follows any number of Redis Streams over one connection.

One ``XREAD BLOCK`` names all streams, so a quiet node costs nothing, and hundreds of
growing streams cost one call every ``PAUSE_SECONDS``. To name another stream, the
blocked call must end: the node wakes itself by a stream of its own. That cannot be
lost, whichever of the two calls Redis serves first.

What arrives here is raw and may have holes for a follower that joined late or did not
keep up. Each follower knows its own place, and reads by itself what it missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from holdfast.clock import wait_at_most
from holdfast.errors import HoldfastError
from holdfast.streaming.reply import EntryId

BLOCK_SECONDS = 1.0
PAUSE_SECONDS = 0.01
"""Between two calls: what grew meanwhile comes with one of them."""
RECONNECT_SECONDS = 0.2
ENTRIES_PER_STREAM_MAX = 500
INBOX_ENTRIES_MAX = 5_000
"""What a follower may leave unread; then it reads again from its place."""

RawEntry = tuple[EntryId, bytes]


class StreamInbox:
    """What has arrived for one follower."""

    def __init__(self, behind: bool) -> None:
        self._entries: list[RawEntry] = []
        self._behind = behind
        self._has_news = asyncio.Event()

    def put(self, entries: Sequence[RawEntry]) -> None:
        if len(self._entries) + len(entries) > INBOX_ENTRIES_MAX:
            self._entries.clear()
            self._behind = True
        else:
            self._entries += entries
        self._has_news.set()

    async def take(self, after: EntryId, seconds: float) -> Sequence[RawEntry]:
        """The entries that continue ``after`` without a hole; none if nothing came in
        time or something is missing here: then read from the log.
        """
        if not self._behind:
            await wait_at_most(self._has_news, seconds)
        self._has_news.clear()
        arrived, self._entries, self._behind = self._entries, [], False
        entries = [entry for entry in arrived if entry[0] > after]
        return entries if entries and _continues(entries[0][0], after) else ()


def _continues(entry_id: EntryId, after: EntryId) -> bool:
    if entry_id.epoch == after.epoch:
        return entry_id.n == after.n + 1
    return entry_id.n == 0


class _Followed:
    """A stream, the last id that was asked for, and who follows it."""

    def __init__(self, last: EntryId) -> None:
        self.last = last
        self.inboxes: set[StreamInbox] = set()


class StreamFollower:
    """One reader for all followers of a node. It connects while there are any."""

    def __init__(
        self,
        connect: Callable[[], AbstractConnection],
        wake_key: bytes,
        wake: Callable[[], Awaitable[None]],
        on_trouble: Callable[[Exception], None],
    ) -> None:
        self._connect = connect
        self._wake_key = wake_key
        self._wake = wake
        self._on_trouble = on_trouble
        self._streams: dict[bytes, _Followed] = {}
        self._woken_at = b"0"
        self._blocked = False
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
        tasks = [task for task in (self._reading, self._waking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_new_stream(self) -> None:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._run(), name="holdfast-replies-follower")
        elif self._blocked and (self._waking is None or self._waking.done()):
            self._waking = asyncio.create_task(self._wake_up())

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
                while self._streams:
                    self._deliver(await self._read(connection))
                    await asyncio.sleep(PAUSE_SECONDS)
            except (RedisError, OSError) as error:
                self._on_trouble(error)
                await asyncio.sleep(RECONNECT_SECONDS)
            finally:
                self._blocked = False
                await connection.disconnect(nowait=True)

    async def _read(self, connection: AbstractConnection) -> Any:
        keys = [self._wake_key, *self._streams]
        ids = [self._woken_at, *(str(stream.last).encode() for stream in self._streams.values())]
        options = ("COUNT", ENTRIES_PER_STREAM_MAX, "BLOCK", int(BLOCK_SECONDS * 1000))
        await connection.send_command("XREAD", *options, "STREAMS", *keys, *ids)
        self._blocked = True
        answer = await connection.read_response()
        self._blocked = False
        return answer

    def _deliver(self, answer: Any) -> None:
        for key, found in answer or ():
            if key == self._wake_key:
                self._woken_at = found[-1][0]
            elif (stream := self._streams.get(key)) is not None:
                entries = raw_entries(found)
                stream.last = entries[-1][0]
                for inbox in stream.inboxes:
                    inbox.put(entries)


def raw_entries(found: Any) -> list[RawEntry]:
    """Entries as Redis answers them: the id, and one field with its value."""
    return [(entry_id(name), fields[1]) for name, fields in found]


def entry_id(name: bytes) -> EntryId:
    epoch, _, n = name.partition(b"-")
    return EntryId(int(epoch), int(n))
