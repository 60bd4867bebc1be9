"""Looks whether the store serves, beside the requests: one that nobody uses, and one
whose breakers rest.

Writes and reads are looked at apart: one that hangs does not delay the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from holdfast.history.history import ChatHistory
from holdfast.ingest.durability import StoreDurability
from holdfast.store.contract import ChatStore

RECOVERY_SECONDS = 0.5
"""How often a store is asked while its breaker rests."""
SHARED_PROBE_SECONDS = 0.5
"""How often to look whether a store of many nodes was used. One that nobody uses is
asked every other time. The file of one node is not: every look writes to its disk.
"""


class StoreWatch:
    """Two background tasks of a node. ``probe_seconds``: how often to look whether the
    store of one node was used.
    """

    def __init__(
        self,
        durability: StoreDurability,
        history: ChatHistory,
        chats: ChatStore,
        probe_seconds: float,
    ) -> None:
        self._durability = durability
        self._history = history
        self._probe_seconds = SHARED_PROBE_SECONDS if chats.grouping.is_shared else probe_seconds

    async def probe(self) -> None:
        """Try an idle store, so that a failure or recovery shows without a send."""
        await _each(self._probe_seconds, self._durability.probe, self._history.probe)

    async def check_recovery(self) -> None:
        """Look again and again whether a store that was restarted serves."""
        await _each(RECOVERY_SECONDS, self._durability.check_recovery, self._history.check_recovery)


async def _each(seconds: float, *looks: Callable[[], Awaitable[None]]) -> None:
    """Call each of them again and again, with this pause."""

    async def again(look: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            await look()

    async with asyncio.TaskGroup() as group:
        for look in looks:
            group.create_task(again(look))
