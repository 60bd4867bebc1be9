"""Which nodes share these counters, as one of them knows it: by heartbeats, and by what it kept on disk.

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
from holdfast.limits.counters.contract import NODE_NAMES_MAX, Counters, NodesAnnounced
from holdfast.limits.disk import SavedNodes, load_nodes, save_nodes
from holdfast.limits.membership import NodeMembership

ANNOUNCE_SECONDS = 1.0
"""How long a heartbeat waits for the counters: what it reports must not be late because they are."""


class NodeCount:
    """This node among the others. Without a ``file`` nothing is kept."""

    def __init__(
        self, counters: Counters, node: str, ttl_seconds: float, monotonic: Callable[[], float], file: Path | None
    ) -> None:
        self._counters = counters
        self._node = node
        self._ttl_seconds = ttl_seconds
        self._monotonic = monotonic
        self._file = file
        self._membership = NodeMembership(ttl_seconds, node)
        self._kept: SavedNodes | None = None
        self._keeping = False

    @property
    def known(self) -> SavedNodes:
        """How many there are, and who, if all are known."""
        names = self._membership.names
        return SavedNodes(self._membership.count, names if len(names) <= NODE_NAMES_MAX else ())

    async def recall(self) -> None:
        """Begin with what was known when this node last ran."""
        if self._file is not None and (kept := await asyncio.to_thread(load_nodes, self._file)):
            self._membership = NodeMembership(self._ttl_seconds, self._node, kept.nodes, kept.names)
            self._kept = kept

    async def announce(self) -> NodesAnnounced | None:
        """Say that this node lives, learn who else does. None if nobody answers; who was last known stays."""
        try:
            async with asyncio.timeout(ANNOUNCE_SECONDS):
                announced = await self._counters.announce(self._node, self._ttl_seconds)
        except (HoldfastError, TimeoutError):
            self._membership.unseen()
            return None
        self._membership.seen(announced.nodes, announced.names, self._monotonic())
        return announced

    async def keep(self) -> None:
        """Keep them on disk if there are others; what could not be kept is tried again with the next call."""
        known = self.known
        if self._file is None or self._keeping or known == self._kept:
            return
        self._keeping = True
        try:
            if await asyncio.to_thread(save_nodes, self._file, known):
                self._kept = known
        finally:
            self._keeping = False
