"""The limits of a node: adapters chosen by URL. A part of what ``node`` does, apart for its size."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.errors import HoldfastError, Unavailable
from holdfast.limits.control import Control
from holdfast.limits.counters.contract import Counters
from holdfast.limits.counters.memory import MemoryCounters
from holdfast.limits.entrances import Entrances
from holdfast.limits.feed import Feed
from holdfast.limits.limiter import Limiter, Place
from holdfast.limits.plane import LimitsPlane, LimitsSettings
from holdfast.limits.rulestore.contract import Doorbell, RuleReader, RuleStore
from holdfast.limits.rulestore.sqlite import SqliteRuleStore

if TYPE_CHECKING:
    from holdfast.limits.rulestore.redis import RedisBell

LIMITS_NAME = "limits.db"
RULES_NAME = "rules.json"


@asynccontextmanager
async def limiting(chosen: LimitsSettings, node_id: str, state: Path, clock: Clock) -> AsyncIterator[LimitsPlane]:
    """Running limits. They start, and go on, while every engine but the embedded ones is away."""
    async with AsyncExitStack() as stack:
        counters: Counters = MemoryCounters(clock)
        redis_bell: RedisBell | None = None
        if chosen.counters_url != "memory:":
            from holdfast.limits.counters.redis import RedisCounters, RedisSettings
            from holdfast.limits.rulestore.redis import RedisBell

            counters = RedisCounters(RedisSettings(chosen.counters_url))
            redis_bell = RedisBell(chosen.counters_url)
            stack.push_async_callback(counters.aclose)
            stack.push_async_callback(redis_bell.aclose)
        place = Place(node_id, chosen.region)
        limiter = Limiter(counters, clock, chosen.limiter, place=place, on_behind=lambda: feed.nudge())
        rules, bells = await _rules_of(chosen, state, clock, redis_bell, stack)
        feed = Feed(rules.reader, bells, limiter.use, clock, state / RULES_NAME, chosen.feed)
        control = Control(rules.store, clock, lambda: feed.rules, rules.database)
        await stack.enter_async_context(limiter)
        await stack.enter_async_context(feed)
        try:
            await control.ensure_defaults()
        except HoldfastError as error:
            telemetry.log.warning("limits.defaults_not_written", reason=error.message)
        yield LimitsPlane(limiter, control, feed, Entrances(limiter))


class _Rules(NamedTuple):
    store: RuleStore
    reader: RuleReader
    database: str


async def _rules_of(
    chosen: LimitsSettings, state: Path, clock: Clock, redis_bell: RedisBell | None, stack: AsyncExitStack
) -> tuple[_Rules, list[Doorbell]]:
    """Where the rules live, and what rings when they change."""
    if chosen.rules_url == "sqlite:":
        embedded = await stack.enter_async_context(SqliteRuleStore(state / LIMITS_NAME, clock))
        return _Rules(embedded, embedded, "embedded"), [embedded]
    from holdfast.limits.rulestore import postgres

    primary = postgres.PostgresSettings(chosen.rules_url)
    store = await stack.enter_async_context(postgres.PostgresRuleStore(primary))
    try:
        await store.prepare()
    except Unavailable as error:
        telemetry.log.warning("limits.primary_away_at_start", reason=error.message)
    bells: list[Doorbell] = [redis_bell] if redis_bell else []
    reader: RuleReader = store
    if chosen.replica_url:
        replica = postgres.PostgresSettings(chosen.replica_url)
        reader = await stack.enter_async_context(postgres.PostgresRuleReader(replica))
    else:
        bells.append(postgres.PostgresBell(primary))
    publish = redis_bell.publish if redis_bell else None
    await stack.enter_async_context(postgres.LogFollower(primary, publish))
    return _Rules(store, reader, "postgres"), bells
