"""The parts of limits as the rest of Holdfast holds them, put together by the node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.limits.control import Control
from holdfast.limits.entrances import Entrances
from holdfast.limits.feed import Feed
from holdfast.limits.limiter import Limiter


@dataclass(frozen=True, slots=True)
class LimitsPlane:
    """``limiter`` answers, ``control`` changes, ``feed`` carries changes here, ``entrances`` asks for our own doors."""

    limiter: Limiter
    control: Control
    feed: Feed
    entrances: Entrances

    def status(self) -> dict[str, Any]:
        """For operators: is it whole, how fresh, how many, where."""
        return {
            "counters": "up" if self.limiter.healthy else "down",
            "region": self.limiter.settings.region,
            "nodes": self.limiter.nodes,
            "rules": len(self.limiter.rules.live()),
            "digest": self.limiter.rules.digest,
            "epoch": self.feed.cursor[0],
            "cursor": self.feed.cursor[1],
            "staleness_seconds": round(self.feed.staleness_seconds, 3),
            "stale": self.feed.stale,
            "from_disk": self.feed.from_disk,
        }
