"""What ``/admin/status`` begins with: what is wrong, and which page to open. (Pure.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import to_builtins

from holdfast.store.contract import HaltedChats
from holdfast.telemetry.judge import Samples
from holdfast.telemetry.notices import AlertView

HALTED_SHOWN = 10
GAUGES_SHOWN = ("work_dead_letters", "state_disk_bytes", "state_disk_free_bytes")


def wrong_first(
    alerts: Sequence[AlertView],
    halted: HaltedChats | None,
    dead_letters: Mapping[str, int],
    samples: Samples,
) -> dict[str, Any]:
    """``halted``: None if the store does not say; ``dead_letters``: of fanout, by
    reason; ``samples``: of ``GAUGES_SHOWN``.
    """
    firing = [alert for alert in alerts if alert.state == "firing"]
    jobs, size, free = (int(samples.get(name, {}).get((), 0)) for name in GAUGES_SHOWN)
    return {
        "ok": not firing,
        "alerts": to_builtins(firing),
        "pending": to_builtins([alert for alert in alerts if alert.state == "pending"]),
        "halted_chats": to_builtins(halted),
        "dead_by_reason": {"fanout": dict(dead_letters), "jobs": jobs},
        "disk": {"bytes": size, "free_bytes": free},
    }
