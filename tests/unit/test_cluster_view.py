"""The status of a cluster as a node tells it while something does not answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from holdfast.fanout.presence import PresenceReporter
from holdfast.fanout.registry.contract import Registry
from holdfast.node.cluster_view import cluster_status
from holdfast.settings import Settings
from holdfast.store.nodes.contract import LivingNode
from holdfast.store.nodes.memory import MemoryNodes


class SilentNodes(MemoryNodes):
    async def living(self) -> Sequence[LivingNode]:
        raise TimeoutError


class FullRegistry:
    """What the reporter of a gateway knows of a registry that refuses writes."""

    registry_trouble = "OOM command not allowed"


async def test_reason_is_named_where_a_call_only_took_too_long() -> None:
    reporter, registry = cast(PresenceReporter, FullRegistry()), cast(Registry, None)
    found = await cluster_status("here", Settings(), SilentNodes(), registry, reporter)
    assert found.problems[0] == "PostgreSQL does not answer (no answer in time): no node is known"
    assert (found.registry.state, found.registry.detail) == ("down", "OOM command not allowed")
