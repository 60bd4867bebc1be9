"""How many nodes share these counters, as one of them knows it: by heartbeats, and by what it kept on disk.

A node that starts while the counters are away has asked nobody, and if it took itself for the only one, as many nodes
as start then would each admit the whole limit. So it goes on with what it knew when it last ran, and that holds until
the counters have answered for a while (see ``membership``). A node that never had an answer from them knows of itself
alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.limits.counters.contract import Counters
from holdfast.limits.disk import load_nodes, save_nodes
from holdfast.limits.membership import Membership


class Nodes:
    """This node among the others. Without a ``file`` nothing is kept."""

    def __init__(
        self, counters: Counters, node: str, ttl_seconds: float, monotonic: Callable[[], float], file: Path | None
    ) -> None:
        self._counters = counters
        self._node = node
        self._ttl_seconds = ttl_seconds
        self._monotonic = monotonic
        self._file = file
        self._membership = Membership(ttl_seconds)
        self._kept = 0
        self._keeping = False

    @property
    def count(self) -> int:
        return self._membership.count

    async def recall(self) -> None:
        """Begin with what was known when this node last ran."""
        if self._file is not None and (kept := await asyncio.to_thread(load_nodes, self._file)):
            self._membership = Membership(self._ttl_seconds, kept)
            self._kept = kept

    async def announce(self) -> bool:
        """Say that this node lives, learn who else does. False if nobody answers; the last number known stays."""
        try:
            count = await self._counters.announce(self._node, self._ttl_seconds)
        except HoldfastError:
            self._membership.unseen()
            return False
        self._membership.seen(count, self._monotonic())
        return True

    async def keep(self) -> None:
        """Keep the number on disk if there is another; one that could not be kept is tried again with the next call."""
        count = self.count
        if self._file is None or self._keeping or count == self._kept:
            return
        self._keeping = True
        try:
            if await asyncio.to_thread(save_nodes, self._file, count):
                self._kept = count
        finally:
            self._keeping = False
