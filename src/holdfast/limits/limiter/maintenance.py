"""What a node does beside its checks: it says that it lives, charges what it owes, gives back what it leased.

Once a second, and whenever the counters have answered while something was owed. What is owed is charged beside the
heartbeat and not within it: there may be more of it than fits between two.

Which nodes share these counters, as one of them knows it: by heartbeats, and by what it kept on disk.

A node that starts while the counters are away has asked nobody, and if it took itself for the only one, as many nodes
as start then would each admit the whole limit. So it goes on with what it knew when it last ran, and that holds until
the counters have answered for a while (see ``membership``). A node that never had an answer from them knows of itself
alone.

What a node owes the shared counters, and what it has to give back to them.

Owed is what its local share admitted while they were away, amounts and holds; it is charged as soon as they answer,
with the heartbeat, and when the node leaves. Given back is what is left of leases. Neither is sent twice: a call whose
outcome is unknown counts as made. The end of a hold is told until it is heard: twice is once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path

from holdfast import telemetry
from holdfast.errors import HoldfastError, Unavailable
from holdfast.limits.counters.contract import KEYS_PER_CALL_MAX, NODE_NAMES_MAX, Adjustment, Counters, NodesAnnounced
from holdfast.limits.limiter.cache import Leases
from holdfast.limits.limiter.fallback import FallbackLimiter, NodeMembership
from holdfast.limits.snapshot_file import SavedNodes, load_nodes, save_nodes

RELEASES_MAX = 10_000
"""Ends of holds that the counters were not told yet; the oldest are dropped, and end with their window."""


class Reconciler:
    def __init__(
        self, counters: Counters, share: FallbackLimiter, leases: Leases, monotonic: Callable[[], float]
    ) -> None:
        self._counters = counters
        self._share = share
        self._leases = leases
        self._monotonic = monotonic
        self._settling = False
        self._releases: deque[Adjustment] = deque(maxlen=RELEASES_MAX)

    @property
    def due(self) -> bool:
        """Something is owed, and nobody is about to settle it."""
        return (self._share.owes or bool(self._releases)) and not self._settling

    async def settle(self) -> None:
        """Charge what is owed. What the counters did not take stays on the books; what they may have taken does not."""
        if self._settling:
            return
        self._settling = True
        try:
            while self._share.owes:
                owed = self._share.pending(self._monotonic() * 1000, KEYS_PER_CALL_MAX)
                try:
                    await self._adjust(owed)
                except Unavailable:
                    self._share.owe(owed)
                    return
                except HoldfastError as error:
                    _lost(owed, error)
                    return
            await self._end_holds()
        finally:
            self._settling = False

    async def _end_holds(self) -> None:
        while self._releases:
            ended = [self._releases.popleft() for _ in range(min(len(self._releases), KEYS_PER_CALL_MAX))]
            try:
                await self._adjust(ended)
            except HoldfastError:
                self._releases.extendleft(reversed(ended))
                return

    async def give_back(self, all_of_them: bool = False) -> None:
        """Best effort: what is lost stays charged until it drains."""
        left_over = self._leases.ended(self._monotonic(), all_of_them)
        for at in range(0, len(left_over), KEYS_PER_CALL_MAX):
            try:
                await self._adjust(left_over[at : at + KEYS_PER_CALL_MAX])
            except HoldfastError as error:
                _lost(left_over[at:], error)
                return

    async def release(self, adjustment: Adjustment) -> bool:
        """End a hold; whether the counters say that it was one and is over. If they are silent they are told again."""
        try:
            return await self._counters.adjust([adjustment]) > 0
        except HoldfastError:
            self.release_soon(adjustment)
            return False

    def release_soon(self, adjustment: Adjustment) -> None:
        """End a hold with the next ``settle``."""
        self._releases.append(adjustment)

    async def _adjust(self, adjustments: Sequence[Adjustment]) -> None:
        if adjustments:
            await self._counters.adjust(adjustments)


def _lost(adjustments: Sequence[Adjustment], error: HoldfastError) -> None:
    telemetry.log.warning("limits.adjustment_lost", count=len(adjustments), reason=error.message)


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


class NodeHeartbeat:
    """Runs from ``begin`` to ``end``. ``report`` is told with each heartbeat whether the counters answered it, and
    ``forget`` which of them were reset."""

    def __init__(
        self,
        nodes: NodeCount,
        share: FallbackLimiter,
        accounts: Reconciler,
        heartbeat_seconds: float,
        report: Callable[[bool], None],
        forget: Callable[[Collection[bytes]], None],
    ) -> None:
        self._nodes = nodes
        self._share = share
        self._accounts = accounts
        self._heartbeat_seconds = heartbeat_seconds
        self._report = report
        self._forget = forget
        self._background: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        """The first heartbeat is over when it returns, answered or not."""
        await self._nodes.recall()
        await self._beat()
        self._in_background(self._beat_on())

    async def end(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def recovered(self) -> None:
        """The counters answered: charge them with what was admitted without them."""
        if self._accounts.due:
            self._in_background(self._accounts.settle())

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            await self._beat()

    async def _beat(self) -> None:
        """It never raises: a node that stops loses its share to the others."""
        try:
            announced = await self._nodes.announce()
            known = self._nodes.known
            self._share.share_among(known.nodes, known.names)
            self._report(announced is not None)
            if announced is None:
                return
            if announced.resets:
                self._forget(announced.resets)
            self.recovered()
            self._in_background(self._nodes.keep())
            await self._accounts.give_back()
        except Exception as error:
            telemetry.defect("limits", error)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
