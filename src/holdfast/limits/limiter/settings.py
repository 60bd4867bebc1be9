"""How one node answers checks, and which node it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.limits.limiter.batch import BatchSettings


@dataclass(frozen=True, slots=True)
class LimiterSettings:
    """How one node answers checks."""

    keys_max: int = 65_536
    """Subjects whose denial, lease and last reading are remembered; the oldest is
    evicted. While the counters are unavailable, as many subjects have a share each; all
    others together have one more per rule."""
    lease_percent: float = 1.0
    """A lease of a rule with precision ``leased``, in percent of its capacity; each
    node may admit that much more."""
    lease_seconds: float = 5.0
    """When a lease ends; unspent tokens are then returned."""
    heartbeat_seconds: float = 1.0
    """How often the node announces itself and returns leases."""
    node_ttl_seconds: float = 5.0
    """A node that is silent for this long, and missing for as long again, no longer
    counts when limits are divided."""
    batch: BatchSettings = field(default_factory=BatchSettings)

    def __post_init__(self) -> None:
        if not 0 <= self.lease_percent <= 10:
            raise ValueError("lease_percent must be between 0 and 10")
        if self.keys_max < 1 or self.lease_seconds <= 0 or self.heartbeat_seconds <= 0:
            raise ValueError("keys_max, lease_seconds and heartbeat_seconds must be greater than 0")
        if self.node_ttl_seconds < 2 * self.heartbeat_seconds:
            raise ValueError("node_ttl_seconds must be at least two heartbeats")


class NodeIdentity(NamedTuple):
    """This node's name, and its region, which has its own counters."""

    name: str = "node"
    region: str = "local"
