"""What a node does besides checks: announce itself, charge pending use, return leases.

``NodeHeartbeat`` runs once a second and whenever the counters answer while something is
pending. Charging runs beside the heartbeat, because it can take longer than the
interval.

``NodeCount`` announces this node and learns which others are alive. A node that starts
without the counters must not assume that it is alone, or every node starting then would
admit the whole limit. It continues with the nodes it saved in its last run until the
counters have answered for a while (see ``fallback.NodeMembership``). A node that never
reached the counters knows only itself.

``Reconciler`` settles accounts. It charges what the local share admitted during an
outage, amounts and holds, as soon as the counters answer, and at shutdown; and it
returns what is left of leases. Neither is sent twice: a call with unknown outcome
counts as made. The end of a hold is repeated until it is confirmed, because ending it
twice does no harm.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path

from holdfast import telemetry
from holdfast.errors import HoldfastError, Unavailable
from holdfast.limits.counters.contract import (
    KEYS_PER_CALL_MAX,
    NODE_NAMES_MAX,
    Adjustment,
    Counters,
    NodesAnnounced,
)
from holdfast.limits.limiter.cache import TokenLeases
from holdfast.limits.limiter.fallback import FallbackLimiter, NodeMembership
from holdfast.limits.snapshot_file import SavedNodes, load_nodes, save_nodes

RELEASES_MAX = 10_000
"""Unconfirmed ends of holds. The oldest are dropped; those end with their window."""


class Reconciler:
    """Charges and returns between this node and the shared counters."""

    def __init__(
        self,
        counters: Counters,
        share: FallbackLimiter,
        leases: TokenLeases,
        monotonic: Callable[[], float],
    ) -> None:
        self._counters = counters
        self._share = share
        self._leases = leases
        self._monotonic = monotonic
        self._settling = False
        self._releases: deque[Adjustment] = deque(maxlen=RELEASES_MAX)

    @property
    def due(self) -> bool:
        """Something is pending and no ``settle`` is running."""
        return (self._share.has_pending or bool(self._releases)) and not self._settling

    async def settle(self) -> None:
        """Charge pending use; keep what is refused, drop what may have been taken."""
        if self._settling:
            return
        self._settling = True
        try:
            while self._share.has_pending:
                pending = self._share.take_pending(self._monotonic() * 1000, KEYS_PER_CALL_MAX)
                try:
                    await self._adjust(pending)
                except Unavailable:
                    self._share.put_back(pending)
                    return
                except HoldfastError as error:
                    _lost(pending, error)
                    return
            await self._end_holds()
        finally:
            self._settling = False

    async def _end_holds(self) -> None:
        while self._releases:
            ended = [
                self._releases.popleft() for _ in range(min(len(self._releases), KEYS_PER_CALL_MAX))
            ]
            try:
                await self._adjust(ended)
            except HoldfastError:
                self._releases.extendleft(reversed(ended))
                return

    async def give_back(self, all_of_them: bool = False) -> None:
        """Return what is left of ended leases. A failed return stays charged."""
        left_over = self._leases.ended(self._monotonic(), all_of_them)
        for at in range(0, len(left_over), KEYS_PER_CALL_MAX):
            try:
                await self._adjust(left_over[at : at + KEYS_PER_CALL_MAX])
            except HoldfastError as error:
                _lost(left_over[at:], error)
                return

    async def release(self, adjustment: Adjustment) -> bool:
        """End a hold; True if the counters confirm it. Without an answer, retry."""
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
"""How long a heartbeat waits for the counters, so that its report is in time."""


class NodeCount:
    """This node among the others. Without ``file`` nothing is saved."""

    def __init__(
        self,
        counters: Counters,
        node: str,
        ttl_seconds: float,
        monotonic: Callable[[], float],
        file: Path | None,
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
        """The number of nodes, and their names if all are known."""
        names = self._membership.names
        return SavedNodes(self._membership.count, names if len(names) <= NODE_NAMES_MAX else ())

    async def recall(self) -> None:
        """Start with what was known when this node last ran."""
        if self._file is not None and (kept := await asyncio.to_thread(load_nodes, self._file)):
            self._membership = NodeMembership(self._ttl_seconds, self._node, kept.nodes, kept.names)
            self._kept = kept

    async def announce(self) -> NodesAnnounced | None:
        """Announce this node and learn which are alive; None if there is no answer."""
        try:
            async with asyncio.timeout(ANNOUNCE_SECONDS):
                announced = await self._counters.announce(self._node, self._ttl_seconds)
        except (HoldfastError, TimeoutError):
            self._membership.on_no_answer()
            return None
        self._membership.on_answer(announced.nodes, announced.names, self._monotonic())
        return announced

    async def keep(self) -> None:
        """Save the nodes if they changed; a failed save is retried by the next call."""
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
    """Runs from ``begin`` to ``end``.

    Each heartbeat calls ``report`` with whether the counters answered, and ``forget``
    with the counters that were reset.
    """

    def __init__(
        self,
        nodes: NodeCount,
        share: FallbackLimiter,
        reconciler: Reconciler,
        heartbeat_seconds: float,
        report: Callable[[bool], None],
        forget: Callable[[Collection[bytes]], None],
    ) -> None:
        self._nodes = nodes
        self._share = share
        self.reconciler = reconciler
        self._heartbeat_seconds = heartbeat_seconds
        self._report = report
        self._forget = forget
        self._background: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        """Returns after the first heartbeat, answered or not."""
        await self._nodes.recall()
        await self._beat()
        self._in_background(self._beat_on())

    async def end(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def on_counters_answered(self) -> None:
        """The counters answered: charge them with what was admitted without them."""
        if self.reconciler.due:
            self._in_background(self.reconciler.settle())

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            await self._beat()

    async def _beat(self) -> None:
        """Never raises: a node whose heartbeat stops loses its share to the others."""
        try:
            announced = await self._nodes.announce()
            known = self._nodes.known
            self._share.share_among(known.nodes, known.names)
            self._report(announced is not None)
            if announced is None:
                return
            if announced.resets:
                self._forget(announced.resets)
            self.on_counters_answered()
            self._in_background(self._nodes.keep())
            await self.reconciler.give_back()
        except Exception as error:
            telemetry.defect("limits", error)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
