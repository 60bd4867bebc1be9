"""The parts of limits as the rest of Holdfast holds them, put together by ``opening``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.drivers.redis_url import check_redis_url
from holdfast.limits.control import RuleAdmin
from holdfast.limits.counters.contract import CountersTrouble
from holdfast.limits.entrances import EntryPoints
from holdfast.limits.feed import FeedSettings, RuleFeed
from holdfast.limits.limiter import Limiter
from holdfast.limits.limiter_settings import LimiterSettings
from holdfast.limits.rulestore.contract import RetentionSettings


@dataclass(frozen=True, slots=True)
class LimitsSettings:
    """Where limits count and where their rules live."""

    counters_url: str = "memory:"
    """``memory:`` for one node alone, or for all nodes of a region ``redis://…``, ``rediss://…`` (TLS), ``unix://…`` or
    ``redis+sentinel://host:port,host:port/service/db`` (``rediss+sentinel://`` with TLS)."""
    rules_url: str = "sqlite:"
    """``sqlite:`` for a file in the state directory, or ``postgresql://…``."""
    replica_url: str = ""
    """A replica of ``rules_url`` that this node reads the rules from; changes still go to the primary."""
    region: str = "local"
    """In every decision; each region counts apart and grants the whole limit. Nodes that share a Redis share this name,
    all others have another: one node of each region publishes changes of rules to its Redis."""
    limiter: LimiterSettings = field(default_factory=LimiterSettings)
    feed: FeedSettings = field(default_factory=FeedSettings)
    retention: RetentionSettings = field(default_factory=RetentionSettings)

    def __post_init__(self) -> None:
        if self.counters_url != "memory:":
            try:
                check_redis_url(self.counters_url)
            except ValueError as error:
                raise ValueError(f"counters_url must be memory: or a URL of Redis: {error}") from None
        if self.rules_url != "sqlite:" and not self.rules_url.startswith(("postgresql://", "postgres://")):
            raise ValueError("rules_url must be sqlite: or a URL of PostgreSQL")
        if self.replica_url and self.rules_url == "sqlite:":
            raise ValueError("replica_url needs a rules_url of PostgreSQL")
        if not self.region:
            raise ValueError("region must not be empty")


class Notifications(Protocol):
    """How changes come by way of Redis."""

    @property
    def trouble(self) -> CountersTrouble | None:
        """Why they do not; None if they do."""
        ...


@dataclass(frozen=True, slots=True)
class LimitsParts:
    """``limiter`` answers, ``control`` changes, ``feed`` carries changes here, ``entrances`` asks for our own doors."""

    limiter: Limiter
    control: RuleAdmin
    feed: RuleFeed
    entrances: EntryPoints
    notifications: Notifications | None = None

    def dependencies(self) -> dict[str, str]:
        """What limiting would like to have and goes on without: shown, and no reason not to be ready."""
        return {"counters": self.limiter.counters_state, "rules": "stale" if self.feed.stale else "up"}

    async def health(self) -> dict[str, str]:
        """Whether rules can be changed, how this node limits (``degraded``: without the shared counters), both in the
        seed's words, and where; ``rules`` only while they are stale here."""
        limiting = "healthy" if self.limiter.counters_state == "up" else "degraded"
        health = {**await self.control.health(), "rate_limiting": limiting, "region": self.limiter.place.region}
        return {**health, "rules": "stale"} if self.feed.stale else health

    def status(self) -> dict[str, Any]:
        """For operators: is it whole, how fresh (None: it never knew), how many, where."""
        age = self.feed.staleness_seconds
        trouble = self.notifications.trouble if self.notifications is not None else None
        return {
            "counters": self.limiter.counters_state,
            **self.limiter.health.status(),
            "notifications": "up" if trouble is None else f"{trouble.reason}: {trouble.detail}",
            "region": self.limiter.place.region,
            "nodes": self.limiter.nodes,
            "rules": len(self.limiter.rules.live()),
            "digest": self.limiter.rules.digest,
            "epoch": self.feed.cursor[0],
            "cursor": self.feed.cursor[1],
            "staleness_seconds": None if math.isinf(age) else round(age, 3),
            "stale": self.feed.stale,
            "from_disk": self.feed.from_disk,
        }
