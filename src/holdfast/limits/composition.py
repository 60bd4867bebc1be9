"""Running limits, with adapters chosen by URL, for a node and for any other program::

    async with open_limits(LimitsSettings(), Path("state")) as limits:
        decision = await limits.limiter.check("acme", "/api/search", "user-7")

This is the one module of limits that chooses adapters. ``LimitsSettings`` is what an
operator sets, ``open_limits`` builds and connects the parts, and ``LimitsParts`` is
what the rest of Holdfast gets.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from holdfast import telemetry
from holdfast.clock import Clock, Ids, SystemClock
from holdfast.drivers.cluster import check_postgres_url
from holdfast.drivers.redis_url import check_redis_url
from holdfast.errors import OutcomeUnknown, Unavailable, extra
from holdfast.limits.admin import RuleAdmin
from holdfast.limits.counters.contract import CHECK_AGAIN_SECONDS, Counters, CountersTrouble
from holdfast.limits.counters.memory import MemoryCounters
from holdfast.limits.entry_points import EntryPoints
from holdfast.limits.feed import FeedSettings, RuleFeed
from holdfast.limits.limiter.counter_health import WINDOW_SECONDS
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.limiter.settings import LimiterSettings, NodeIdentity
from holdfast.limits.rules import Rule
from holdfast.limits.rulestore.contract import (
    CHANNEL,
    TICK_SECONDS,
    ChangeNotifications,
    RetentionSettings,
    RuleReader,
    RuleStore,
)
from holdfast.limits.rulestore.notifications import end_tasks
from holdfast.limits.rulestore.sqlite import LIMITS, SqliteRuleStore
from holdfast.limits.snapshot_file import identity
from holdfast.message import check_id

if TYPE_CHECKING:
    from holdfast.limits.rulestore.redis import RedisNotifications

__all__ = ["RULES_NAME", "LimitsParts", "LimitsSettings", "LimitsTuning", "open_limits"]

RULES_NAME = "rules.json"
NODES_NAME = "nodes.json"
RULES_CONNECTIONS_MAX = 2
"""To PostgreSQL, for changes and reads; beside them one listens and one follows."""


LOCAL = "local"


@dataclass(frozen=True, slots=True)
class LimitsSettings:
    """Where limits count and where their rules live."""

    counters_url: str = ""
    """``memory:`` for one node alone, or for all nodes of a region ``redis://…``,
    ``rediss://…`` (TLS), ``unix://…`` or
    ``redis+sentinel://host:port,host:port/service/db`` (``rediss+sentinel://`` with
    TLS). Left empty: ``cluster.redis`` if that is set, else ``memory:``.
    """
    rules_url: str = ""
    """``sqlite:`` for a file in the state directory, or ``postgresql://…``. Left empty:
    ``cluster.postgres`` if that is set, else ``sqlite:``.
    """
    replica_url: str = ""
    """A replica of ``rules_url`` to read the rules from; changes go to the primary."""
    region: str = LOCAL
    """Nodes of one region share counters, and each region grants the whole limit, on
    one Redis or several. It is shown in every decision. One node per region publishes
    rule changes to its Redis, so nodes with different Redises need different regions.
    """
    limiter: LimiterSettings = field(default_factory=LimiterSettings)
    feed: FeedSettings = field(default_factory=FeedSettings)
    retention: RetentionSettings = field(default_factory=RetentionSettings)

    def __post_init__(self) -> None:
        if self.counters_url not in ("", "memory:"):
            try:
                check_redis_url(self.counters_url)
            except ValueError as error:
                raise ValueError(
                    f"counters_url must be memory: or a URL of Redis: {error}"
                ) from None
        if not self.is_embedded:
            check_postgres_url("rules_url", self.rules_url)
        if self.replica_url and self.rules_url == "sqlite:":
            raise ValueError("replica_url needs a rules_url of PostgreSQL")
        if self.replica_url:
            check_postgres_url("replica_url", self.replica_url)
        if problem := check_id(self.region, "region"):
            raise ValueError(problem)

    @property
    def is_embedded(self) -> bool:
        """The rules are in a file of this node."""
        return self.rules_url in ("", "sqlite:")


@dataclass(frozen=True, slots=True)
class LimitsTuning:
    """Intervals that an operator need not set."""

    health_window_seconds: float = WINDOW_SECONDS
    """The period over which the health of the counters is a ratio."""
    redis_check_seconds: float = CHECK_AGAIN_SECONDS
    """How often a heartbeat checks that Redis is still fit to keep counters."""
    follower_tick_seconds: float = TICK_SECONDS
    """How often a follower reads the log for changes that no notification brought."""


class Notifications(Protocol):
    """Rule changes by way of Redis."""

    @property
    def trouble(self) -> CountersTrouble | None:
        """Why they do not arrive; None if they do."""
        ...


@dataclass(frozen=True, slots=True)
class LimitsParts:
    """Running limits.

    ``limiter`` answers checks, ``control`` changes rules, ``feed`` brings changes to
    this node, and ``entry_points`` makes the checks of Holdfast's own entry points.
    """

    limiter: Limiter
    control: RuleAdmin
    feed: RuleFeed
    entry_points: EntryPoints
    notifications: Notifications | None = None

    def dependencies(self) -> dict[str, str]:
        """The state of optional dependencies: reported, but not needed to be ready."""
        return {
            "counters": self.limiter.counters_state,
            "rules": "stale" if self.feed.stale else "up",
        }

    async def health(self) -> dict[str, str]:
        """Whether rules can be changed, how this node limits, and its region.

        ``degraded`` means without the shared counters. ``rules`` appears only while
        they are stale. The words are those of the design document.
        """
        limiting = "healthy" if self.limiter.counters_state == "up" else "degraded"
        health = {
            **await self.control.health(),
            "rate_limiting": limiting,
            "region": self.limiter.node.region,
        }
        return {**health, "rules": "stale"} if self.feed.stale else health

    def status(self) -> dict[str, Any]:
        """For operators: counters, notifications, nodes, and how fresh the rules are.

        ``staleness_seconds`` is None if this node never knew all rules.
        """
        age = self.feed.staleness_seconds
        trouble = self.notifications.trouble if self.notifications is not None else None
        return {
            "counters": self.limiter.counters_state,
            **self.limiter.health.status(),
            "notifications": "up" if trouble is None else f"{trouble.reason}: {trouble.detail}",
            "region": self.limiter.node.region,
            "nodes": self.limiter.nodes,
            "rules": len(self.limiter.rules.live()),
            "digest": self.limiter.rules.digest,
            "epoch": self.feed.cursor[0],
            "cursor": self.feed.cursor[1],
            "staleness_seconds": None if math.isinf(age) else round(age, 3),
            "stale": self.feed.stale,
            "from_disk": self.feed.from_disk,
        }


@asynccontextmanager
async def open_limits(
    chosen: LimitsSettings,
    state: Path,
    node_id: str = "",
    starts_with: Sequence[Rule] = (),
    clock: Clock | None = None,
    tuning: LimitsTuning | None = None,
) -> AsyncIterator[LimitsParts]:
    """Start limits; they start and keep running while external engines are down.

    ``state`` is a directory that no other process uses. It keeps the rules and nodes
    last known, or the rules themselves if they are embedded. ``node_id`` distinguishes
    the nodes that share counters; if empty, one is generated and kept in ``state``. The
    rules of ``starts_with`` are created unless a rule of that name ever existed, and
    apply while no others are known.
    """
    clock, tuning = clock or SystemClock(), tuning or LimitsTuning()
    state.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - once, before anything else runs
    async with AsyncExitStack() as stack:
        counters, notifications = await _counters_of(chosen, tuning, clock, stack)
        node = NodeIdentity(
            node_id or await asyncio.to_thread(identity, state, Ids(clock)), chosen.region
        )
        # counters in this process have one node
        nodes_file = None if counters.in_process else state / NODES_NAME
        window = tuning.health_window_seconds
        limiter = Limiter(
            *(counters, clock, chosen.limiter, None, node), lambda: feed.nudge(), nodes_file, window
        )
        rules = await _rules_of(chosen, tuning, state, clock, notifications, stack)
        # embedded rules are on this disk already
        kept = state / RULES_NAME if rules.follower is not None else None
        read = "rules_replica" if rules.is_replica_read else "rules"
        feed = RuleFeed(
            rules.reader, rules.sources, limiter.use, clock, kept, chosen.feed, starts_with, read
        )
        control = RuleAdmin(rules.store, clock, rules.database)

        async def settle() -> None:
            """What one node does for all, before any follows: tables, default rules."""
            if rules.prepare is not None:
                await rules.prepare()
            await control.ensure(starts_with)

        try:
            await settle()
        except (Unavailable, OutcomeUnknown) as error:
            if rules.follower is None:
                raise  # no follower would make up for it later
            telemetry.log.warning("limits.primary_unavailable", reason=error.message)
        await stack.enter_async_context(limiter)
        await stack.enter_async_context(feed)
        if rules.follower is not None:
            await stack.enter_async_context(rules.follower(settle))
            await stack.enter_async_context(_primary_watched(rules, control, chosen.feed))
        yield LimitsParts(limiter, control, feed, EntryPoints(limiter), notifications)


@asynccontextmanager
async def _primary_watched(
    rules: _Rules, control: RuleAdmin, settings: FeedSettings
) -> AsyncIterator[None]:
    """Show whether the primary answers, on a node that reads the rules elsewhere."""
    if not rules.is_replica_read:
        yield
        return

    async def watch() -> None:
        while True:
            try:
                up = await control.is_reachable()
            except Exception as error:  # whatever it is, look again later
                telemetry.defect("limits", error)
                up = False
            telemetry.dependency_up("rules", up)
            await asyncio.sleep(settings.sync_seconds if up else settings.retry_seconds)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        await end_tasks([task])


class _Rules(NamedTuple):
    """Where the rules live, how this node reads them, and what notifies it."""

    store: RuleStore
    reader: RuleReader
    sources: list[ChangeNotifications]
    database: str
    prepare: Callable[[], Awaitable[None]] | None = None
    follower: (
        Callable[[Callable[[], Awaitable[None]]], AbstractAsyncContextManager[object]] | None
    ) = None
    """Publishes changes for its region, if it is the one that does. Its argument is
    what one node does for all."""

    @property
    def is_replica_read(self) -> bool:
        return self.reader is not self.store


async def _counters_of(
    chosen: LimitsSettings, tuning: LimitsTuning, clock: Clock, stack: AsyncExitStack
) -> tuple[Counters, RedisNotifications | None]:
    if chosen.counters_url in ("", "memory:"):
        return MemoryCounters(clock), None
    with extra("redis"):
        from holdfast.limits.counters.redis import RedisCounters, RedisSettings
        from holdfast.limits.rulestore.redis import RedisNotifications
    url = chosen.counters_url
    settings = RedisSettings(
        url,
        prefix=_of_region("rl", chosen.region),
        check_again_seconds=tuning.redis_check_seconds,
    )
    counters = RedisCounters(settings)
    notifications = RedisNotifications(url, _of_region(CHANNEL, chosen.region))
    stack.push_async_callback(counters.aclose)
    stack.push_async_callback(notifications.aclose)
    await counters.check()
    return counters, notifications


def _of_region(name: str, region: str) -> str:
    """A key or channel of Redis; those of ``local``, the default, have no suffix."""
    return name if region == LOCAL else f"{name}:{region}"


async def _rules_of(
    chosen: LimitsSettings,
    tuning: LimitsTuning,
    state: Path,
    clock: Clock,
    notifications: RedisNotifications | None,
    stack: AsyncExitStack,
) -> _Rules:
    if chosen.is_embedded:
        embedded = await stack.enter_async_context(
            SqliteRuleStore(state / LIMITS.name, clock, retention=chosen.retention)
        )
        return _Rules(embedded, embedded, [embedded], "embedded")
    with extra("postgres"):
        from holdfast.limits.rulestore import postgres
    primary = postgres.PostgresSettings(chosen.rules_url, connections_max=RULES_CONNECTIONS_MAX)
    store = await stack.enter_async_context(postgres.PostgresRuleStore(primary, chosen.retention))
    sources: list[ChangeNotifications] = [notifications] if notifications else []
    reader: RuleReader = store
    if chosen.replica_url:
        replica = postgres.PostgresRuleReader(postgres.PostgresSettings(chosen.replica_url))
        reader = await stack.enter_async_context(replica)
        await replica.check()
    else:
        sources.append(postgres.PostgresNotifications(primary))
    follower = partial(
        postgres.LogFollower,
        primary,
        notifications.publish if notifications else None,
        region=chosen.region,
        tick_seconds=tuning.follower_tick_seconds,
    )
    return _Rules(store, reader, sources, "postgres", store.prepare, follower)
