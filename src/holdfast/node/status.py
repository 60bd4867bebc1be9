"""What ``/admin/status`` begins with: what is wrong, and which page to open; and how it
asks the parts that may not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import to_builtins

from holdfast.errors import HoldfastError
from holdfast.store.contract import HaltedChats
from holdfast.store.nodes.contract import Nodes
from holdfast.telemetry.judge import Samples
from holdfast.telemetry.notices import AlertView

T = TypeVar("T")

PART_SECONDS_MAX = 1.0
"""How long a status waits for one of its parts; it asks all of them at once."""
HALTED_SHOWN = 10
GAUGES_SHOWN = ("state_disk_bytes", "state_disk_free_bytes")


def wrong_first(
    alerts: Sequence[AlertView],
    halted: HaltedChats | None,
    dead_by_reason: Mapping[str, Mapping[str, int] | None],
    samples: Samples,
) -> dict[str, Any]:
    """``dead_by_reason``: of fanout and of jobs. None instead of ``halted`` or of the
    counts: the store does not say. ``samples``: of ``GAUGES_SHOWN``.
    """
    firing = [alert for alert in alerts if alert.state == "firing"]
    size, free = (int(samples.get(name, {}).get((), 0)) for name in GAUGES_SHOWN)
    return {
        "ok": not firing,
        "alerts": to_builtins(firing),
        "pending": to_builtins([alert for alert in alerts if alert.state == "pending"]),
        "halted_chats": to_builtins(halted),
        "dead_by_reason": to_builtins(dead_by_reason),
        "disk": {"bytes": size, "free_bytes": free},
    }


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
