"""What a node tells the others of itself, from its start on and while it lives."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence

from holdfast import __version__, telemetry
from holdfast.errors import BadSetting, HoldfastError
from holdfast.settings import Settings, differences
from holdfast.store.nodes.contract import RENEW_SECONDS, LivingNode, NodeRecord, Nodes

LEAVE_SECONDS_MAX = 1.0


def record_of(settings: Settings, name: str, connections: int) -> NodeRecord:
    """``connections``: of the database, at most. No client is connected yet."""
    shared = {
        path: str(value)
        for path, value, _ in differences(settings)
        if not path.startswith("server.")  # each node has its own address and name
    }
    digest = hashlib.blake2b(repr(sorted(shared.items())).encode(), digest_size=8).hexdigest()
    server = settings.server
    return NodeRecord(
        name,
        __version__,
        server.roles,
        server.url,
        connections,
        clients=0,
        lag=0,
        settings=shared,
        digest=digest,
    )


def replies_apart(settings: Settings, living: Sequence[LivingNode]) -> str | None:
    """What several nodes with AI replies lack if they share no Redis."""
    count = sum("streaming" in each.record.roles for each in living)
    if count < 2 or settings.streaming.replies_url not in ("", "sqlite:"):
        return None
    return (
        f"{count} nodes have the role streaming and share no Redis: a reply can be read, resumed"
        " and found by its Idempotency-Key only at the node that makes it, and pool, queue and"
        " limits are of one node each; set cluster.redis, or give one node the role"
    )


async def leave(nodes: Nodes) -> None:
    """A planned stop, or a start that was refused: the node is not gone."""
    try:
        async with asyncio.timeout(LEAVE_SECONDS_MAX):
            await nodes.leave()
    except (HoldfastError, TimeoutError):
        return  # it counts as gone


class RecordRenewal:
    """``run`` renews the record until cancelled."""

    def __init__(
        self,
        nodes: Nodes,
        record: Callable[[], NodeRecord],
        renew_seconds: float = RENEW_SECONDS,
    ) -> None:
        self._nodes = nodes
        self._record = record
        self._renew_seconds = renew_seconds
        self._warned = ""
        """What was logged last, so that it is logged once."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._renew_seconds)
            await self._renew()

    async def _renew(self) -> None:
        record = self._record()
        try:
            total = await self._nodes.renew(record)
        except BadSetting as error:
            self._warn("node.name_lost", name=record.name, reason=error.message)
            return
        except HoldfastError:
            return  # the store's own dependency says so
        if total is not None and total.wanted > total.available:
            self._warn("node.connections_too_few", **total._asdict())
        else:
            self._warned = ""

    def _warn(self, event: str, **facts: object) -> None:
        if self._warned != event:
            telemetry.log.error(event, **facts)
        self._warned = event
