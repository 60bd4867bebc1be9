"""Notifications within this process. They are hints: a slow listener loses some."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from holdfast.limits.rulestore.contract import ChangeNotification

WAITING_MAX = 1_000
"""Queued per listener. Beyond it the oldest are dropped; the next sync makes up for
it."""

END_AGAIN_SECONDS = 1.0
"""How long a cancelled task may take before it is cancelled again."""

LISTENING = ChangeNotification(0, 0)


class LocalNotifications:
    """Notifies all listeners. ``notify`` never waits."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[ChangeNotification | None]] = set()

    def notify(self, notification: ChangeNotification) -> None:
        for queue in self._listeners:
            _put(queue, notification)

    def close(self) -> None:
        """End every listener's iteration."""
        for queue in self._listeners:
            _put(queue, None)

    async def notifications(self) -> AsyncIterator[ChangeNotification]:
        queue: asyncio.Queue[ChangeNotification | None] = asyncio.Queue(WAITING_MAX)
        self._listeners.add(queue)
        try:
            yield LISTENING
            while (notification := await queue.get()) is not None:
                yield notification
        finally:
            self._listeners.discard(queue)


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel each task until it has ended: a Redis client may lose a cancellation."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        left = (await asyncio.wait(left, timeout=END_AGAIN_SECONDS))[1]


def _put(
    queue: asyncio.Queue[ChangeNotification | None], notification: ChangeNotification | None
) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(notification)
