"""The record of a node that is alone."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.store.nodes.contract import GoneNode, LeaseView, LivingNode, NodeRecord


class MemoryNodes:
    """See ``contract.Nodes``."""

    def __init__(self) -> None:
        self._record: NodeRecord | None = None

    async def join(self, record: NodeRecord) -> None:
        self._record = record

    async def renew(self, record: NodeRecord) -> None:
        self._record = record

    async def leave(self) -> None:
        self._record = None

    async def living(self) -> Sequence[LivingNode]:
        return [] if self._record is None else [LivingNode(self._record, 0.0)]

    async def gone(self) -> Sequence[GoneNode]:
        return []

    async def leases(self) -> Sequence[LeaseView]:
        return []

    async def database(self) -> None:
        return None
