"""Following a log that only this process writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from weakref import WeakValueDictionary

from holdfast.clock import wait_at_most
from holdfast.streaming.reply import EntryId
from holdfast.streaming.reply_log.contract import LogPage

PAGE_ENTRIES = 1000
ReadPage = Callable[[str, EntryId | None, int], Awaitable[LogPage | None]]


class LocalFollowers:
    """Wakes who follows a log. An event lives as long as somebody waits for it."""

    def __init__(self, follow_seconds: float) -> None:
        self._follow_seconds = follow_seconds
        self._growth: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()

    def on_growth(self, reply_id: str) -> None:
        """The log has grown or was deleted."""
        event = self._growth.pop(reply_id, None)
        if event is not None:
            event.set()

    async def follow(
        self, read: ReadPage, reply_id: str, after: EntryId | None
    ) -> AsyncGenerator[LogPage, None]:
        while True:
            has_grown = self._growth.get(reply_id)
            if has_grown is None:
                has_grown = self._growth[reply_id] = asyncio.Event()
            page = await read(reply_id, after, PAGE_ENTRIES)
            if page is None:
                return
            yield page
            if page.entries:
                after = page.entries[-1][0]
            if after is None or after >= page.last:
                await wait_at_most(has_grown, self._follow_seconds)
