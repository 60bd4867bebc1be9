"""The limits of a node: adapters chosen by URL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
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
from holdfast.limits.rulestore.sqlite import LIMITS, SqliteRuleStore
from holdfast.node.extras import extra

if TYPE_CHECKING:
    from holdfast.limits.rulestore.redis import RedisBell

RULES_NAME = "rules.json"


@asynccontextmanager
async def limiting(chosen: LimitsSettings, node_id: str, state: Path, clock: Clock) -> AsyncIterator[LimitsPlane]:
    """Running limits. They start, and go on, while every engine but the embedded ones is away."""
    async with AsyncExitStack() as stack:
        counters, bell = _counters_of(chosen, clock, stack)
        place = Place(node_id, chosen.region)
        limiter = Limiter(counters, clock, chosen.limiter, place=place, on_behind=lambda: feed.nudge())
        rules = await _rules_of(chosen, state, clock, bell, stack)
        feed = Feed(rules.reader, rules.bells, limiter.use, clock, state / RULES_NAME, chosen.feed)
        control = Control(rules.store, clock, lambda: feed.rules, rules.database)
        await stack.enter_async_context(limiter)
        await stack.enter_async_context(feed)
        await _lead(rules, control, chosen, bell, stack)
        yield LimitsPlane(limiter, control, feed, Entrances(limiter))


class _Rules(NamedTuple):
    """Where the rules live, how this node reads them, and what rings when they change."""

    store: RuleStore
    reader: RuleReader
    bells: list[Doorbell]
    database: str
    prepare: Callable[[], Awaitable[None]] | None = None


def _counters_of(chosen: LimitsSettings, clock: Clock, stack: AsyncExitStack) -> tuple[Counters, RedisBell | None]:
    if chosen.counters_url == "memory:":
        return MemoryCounters(clock), None
    with extra("redis"):
        from holdfast.limits.counters.redis import RedisCounters, RedisSettings
        from holdfast.limits.rulestore.redis import RedisBell
    counters, bell = RedisCounters(RedisSettings(chosen.counters_url)), RedisBell(chosen.counters_url)
    stack.push_async_callback(counters.aclose)
    stack.push_async_callback(bell.aclose)
    return counters, bell


async def _rules_of(
    chosen: LimitsSettings, state: Path, clock: Clock, bell: RedisBell | None, stack: AsyncExitStack
) -> _Rules:
    if chosen.rules_url == "sqlite:":
        embedded = await stack.enter_async_context(
            SqliteRuleStore(state / LIMITS.name, clock, retention=chosen.retention)
        )
        return _Rules(embedded, embedded, [embedded], "embedded")
    with extra("postgres"):
        from holdfast.limits.rulestore import postgres
    primary = postgres.PostgresSettings(chosen.rules_url)
    store = await stack.enter_async_context(postgres.PostgresRuleStore(primary, chosen.retention))
    try:
        await store.prepare()
    except Unavailable as error:
        telemetry.log.warning("limits.primary_away_at_start", reason=error.message)
    bells: list[Doorbell] = [bell] if bell else []
    reader: RuleReader = store
    if chosen.replica_url:
        replica = postgres.PostgresSettings(chosen.replica_url)
        reader = await stack.enter_async_context(postgres.PostgresRuleReader(replica))
    else:
        bells.append(postgres.PostgresBell(primary))
    return _Rules(store, reader, bells, "postgres", store.prepare)


async def _lead(
    rules: _Rules, control: Control, chosen: LimitsSettings, bell: RedisBell | None, stack: AsyncExitStack
) -> None:
    """What is done once for all nodes: the tables, the default rules, and ringing for each change."""
    if rules.prepare is None:
        await control.ensure_defaults()
        return
    from holdfast.limits.rulestore import postgres

    prepare = rules.prepare

    async def settle() -> None:
        await prepare()
        await control.ensure_defaults()

    try:
        await settle()
    except HoldfastError as error:
        telemetry.log.warning("limits.defaults_not_written", reason=error.message)
    primary = postgres.PostgresSettings(chosen.rules_url)
    await stack.enter_async_context(postgres.LogFollower(primary, bell.publish if bell else None, settle))
