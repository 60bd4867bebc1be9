"""Alerts about the node itself: its disk, its defects, the alerts. (Pure.)"""

from __future__ import annotations

from holdfast.telemetry.alert import (
    FIVE_MINUTES,
    Alert,
    Severity,
    above,
    below,
    risen,
)
from holdfast.telemetry.expressions import Ratio, Series

_DISK_LEFT = Ratio(Series("state_disk_free_bytes"), Series("state_disk_bytes"))

NODE = (
    Alert(
        "HoldfastDiskFull",
        Severity.SEV2,
        below(_DISK_LEFT, 0.05),
        "The disk of the state directory is almost full: soon nothing can be stored.",
        "runbooks/disk-full.md",
        warning=below(_DISK_LEFT, 0.1),
        explains=(
            "HoldfastStoreDown",
            "HoldfastBreakerOpen",
            "HoldfastStoreReopened",
            "HoldfastWritesOverdue",
            "HoldfastAllocationErrors",
            "HoldfastJobStoreDown",
            "HoldfastRepliesDown",
        ),
    ),
    Alert(
        "HoldfastAlertsUndelivered",
        Severity.SEV3,
        above(
            risen(
                "alert_notices", FIVE_MINUTES, ("kind", "outcome"), (("outcome", "=", "failed"),)
            ),
            0,
        ),
        "A sink of alerts does not take them; `holdfast alerts ls` says why.",
        "runbooks/alerts-undelivered.md",
    ),
    Alert(
        "HoldfastDefect",
        Severity.SEV3,
        above(risen("defects", FIVE_MINUTES, ("part",)), 0),
        "An error of Holdfast itself was contained; the log has its cause, please report it.",
        "runbooks/defect.md",
        explains=("HoldfastFanoutRestarted",),
    ),
)
