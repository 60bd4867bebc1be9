"""What ``/admin/status`` begins with: what is wrong, and which page to open; and how it
asks the parts that may not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from holdfast import telemetry
from holdfast.api.deps import DeadByReason, Disk
from holdfast.errors import HoldfastError
from holdfast.store.contract import HaltedChats
from holdfast.store.nodes.contract import Nodes
from holdfast.telemetry.notices import AlertView
from holdfast.work.contract import WorkStore
from holdfast.work.inspection import by_name

T = TypeVar("T")

PART_SECONDS_MAX = 1.0
"""How long a status waits for one of its parts; it asks all of them at once."""
HALTED_SHOWN = 10
_GAUGES = ("state_disk_bytes", "state_disk_free_bytes")


def wrong_first(
    alerts: Sequence[AlertView],
    halted: HaltedChats | None,
    dead_events: Mapping[str, int] | None,
    dead_jobs: Mapping[str, int] | None,
) -> dict[str, Any]:
    """The first fields of a NodeStatus. ``dead_…``: dead letters by reason. None: the
    store does not say.
    """
    samples = telemetry.samples(_GAUGES)
    firing = [alert for alert in alerts if alert.state == "firing"]
    size, free = (int(samples.get(name, {}).get((), 0)) for name in _GAUGES)
    return {
        "ok": not firing,
        "alerts": firing,
        "pending": [alert for alert in alerts if alert.state == "pending"],
        "halted_chats": halted,
        "dead_by_reason": DeadByReason(dead_events, dead_jobs),
        "disk": Disk(size, free),
    }


async def dead_jobs_of(jobs: WorkStore) -> Mapping[str, int]:
    """Dead letters of jobs, by reason."""
    return by_name(await jobs.dead_counts())


async def living_nodes(nodes: Nodes) -> Mapping[str, Any]:
    """By name."""
    return {
        record.name: {"version": record.version, "roles": record.roles, "lag": record.lag}
        for record in (each.record for each in await nodes.living())
    }


async def soon(part: Coroutine[Any, Any, T]) -> T | None:
    """What a part of the status says; None if it fails or does not answer in time: a
    status must tell of that trouble too.
    """
    try:
        async with asyncio.timeout(PART_SECONDS_MAX):
            return await part
    except (HoldfastError, TimeoutError):
        return None
