"""What a node does beside its checks: it says that it lives, charges what it owes, gives back what it leased.

Once a second, and whenever the counters have answered while something was owed. What is owed is charged beside the
heartbeat and not within it: there may be more of it than fits between two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine

from holdfast import telemetry
from holdfast.limits.accounts import Reconciler
from holdfast.limits.nodes import NodeCount
from holdfast.limits.share import FallbackLimiter


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
