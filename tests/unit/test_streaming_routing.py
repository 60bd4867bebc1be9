"""Routing: which provider answers, what follows a failure, and every clock of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import telemetry
from holdfast.errors import BadSetting
from holdfast.streaming.provider_stream import failure_of_status
from holdfast.streaming.providers.contract import ProviderChunk, ProviderFailed, ProviderRequest
from holdfast.streaming.providers.routing import RoutedStream, Routing, open_routing
from holdfast.streaming.providers.script import ScriptSettings
from holdfast.streaming.providers.scripted import ScriptedProvider
from holdfast.streaming.reply import FailureCode, Payer, ReplyError, ReplyFailed, ReplyUsage
from holdfast.streaming.settings import (
    ModelSettings,
    ProviderSettings,
    QueueFailoverSettings,
    ReplyClocks,
    StreamingSettings,
)
from proof.virtual_loop import LoopClock

ALIVE = ProviderChunk(b"")
ROLE = ProviderChunk(b"role")
FINISH = ProviderChunk(b"finish", finish=True)
USAGE = ProviderChunk(b"", usage=ReplyUsage(1, 2, chunk=b"usage"))
FOREVER = 10_000.0
SEED = 7
ANN = Payer("acme", "ann")


def token(text: str) -> ProviderChunk:
    return ProviderChunk(text.encode(), content=True)


def broken(code: FailureCode) -> ProviderFailed:
    return ProviderFailed(ReplyError(code, f"it is {code}"))


NO_ROOM = failure_of_status(429)
REFUSED = failure_of_status(400, b'{"error":{"message":"bad"}}')
DOWN = broken("upstream_unavailable")
WHOLE = (ROLE, token("a"), token("b"), FINISH, USAGE)

Step = ProviderChunk | float | ProviderFailed
"""A chunk, seconds to wait, or how it fails."""
Plan = Sequence[Step] | ProviderFailed | float
"""The steps of a stream; or it fails, or waits so long, before its headers."""


@dataclass
class PlannedProvider:
    """Follows one plan for each request; the last one stays."""

    name: str
    plans: list[Plan]
    pool: str = "default"
    asked_at: list[float] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    open: int = 0

    @asynccontextmanager
    async def stream(
        self, request: ProviderRequest
    ) -> AsyncIterator[AsyncIterator[Sequence[ProviderChunk]]]:
        self.asked_at.append(asyncio.get_running_loop().time())
        self.models.append(request.model)
        del request  # as real ones do: it may be megabytes
        plan = self.plans.pop(0) if len(self.plans) > 1 else self.plans[0]
        self.open += 1
        try:
            if isinstance(plan, ProviderFailed):
                raise plan
            if isinstance(plan, float):
                await asyncio.sleep(plan)
                plan = ()
            yield self._chunks(plan)
        finally:
            self.open -= 1

    async def _chunks(self, plan: Sequence[Step]) -> AsyncIterator[Sequence[ProviderChunk]]:
        for step in plan:
            if isinstance(step, ProviderFailed):
                raise step
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                yield [step]

    async def close(self) -> None:
        self.plans.clear()


def provider(name: str, *plans: Plan, pool: str = "default") -> PlannedProvider:
    return PlannedProvider(name, list(plans), pool)


@dataclass
class PlannedLease:
    """A lease that waits ``seconds`` for another pool."""

    pool: str = "default"
    seconds: float = 0.0
    failure: ReplyFailed | None = None
    moves: list[str] = field(default_factory=list)

    async def move(self, pool: str) -> None:
        await asyncio.sleep(self.seconds)
        if self.failure is not None:
            raise self.failure
        self.pool = pool
        self.moves.append(pool)


def routing(
    *providers: PlannedProvider,
    clocks: ReplyClocks | None = None,
    retries: int = 5,
    base_ms: float = 100,
    max_ms: float = 5000,
) -> Routing:
    model = ModelSettings("m", tuple(f"{each.name}:{each.name}-m" for each in providers), clocks)
    failover = QueueFailoverSettings(
        max_retries=retries, base_delay_ms=base_ms, max_delay_ms=max_ms
    )
    rng = random.Random(SEED)
    return Routing(providers, [model], ReplyClocks(), failover, LoopClock(), rng)


def start(route: Routing, lease: PlannedLease | None = None, user: str = "ann") -> RoutedStream:
    request = ProviderRequest("m", {}, "r1", Payer("acme", user))
    return route.stream(request, lease or PlannedLease())


async def read(stream: RoutedStream) -> list[ProviderChunk]:
    chunks = list[ProviderChunk]()
    await stream.pour(chunks.extend)
    return chunks


@asynccontextmanager
async def reading(stream: RoutedStream) -> AsyncIterator[asyncio.Task[None]]:
    """The block begins at the first token; leaving it cancels the reader."""
    has_token = asyncio.Event()
    task = asyncio.create_task(stream.pour(lambda _: has_token.set()))
    await has_token.wait()
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def failure(
    route: Routing, lease: PlannedLease | None = None, user: str = "ann"
) -> ProviderFailed:
    with pytest.raises(ProviderFailed) as caught:
        await read(start(route, lease, user))
    return caught.value


def now() -> float:
    return asyncio.get_running_loop().time()


def attempts(name: str, outcome: str) -> float:
    labels = {"provider": name, "outcome": outcome}
    metric = "holdfast_reply_provider_attempts_total"
    return telemetry.REGISTRY.get_sample_value(metric, labels) or 0.0


def dependency_up(name: str) -> float | None:
    return telemetry.REGISTRY.get_sample_value(
        "holdfast_dependency_up", {"dependency": f"provider:{name}"}
    )


# The first provider answers


async def test_reply_has_the_chunks_of_its_provider_and_its_name_of_the_model() -> None:
    one = provider("one", WHOLE)
    before = attempts("one", "done")
    stream = start(routing(one))
    assert stream.provider == ""
    assert await read(stream) == list(WHOLE)
    assert stream.provider == "one"
    assert one.models == ["one-m"]
    assert one.open == 0
    assert attempts("one", "done") == before + 1


async def test_signs_of_life_stay_in_routing() -> None:
    one = provider("one", (ALIVE, ROLE, ALIVE, token("a"), ALIVE, FINISH, ALIVE))
    assert await read(start(routing(one))) == [ROLE, token("a"), FINISH]


async def test_nothing_is_asked_before_the_first_read() -> None:
    one = provider("one", WHOLE)
    start(routing(one))
    await asyncio.sleep(1)
    assert one.asked_at == []


async def test_request_is_freed_at_the_first_token() -> None:
    freed = asyncio.Event()

    class Fields(dict[str, bytes]):
        def __del__(self) -> None:
            freed.set()

    one = provider("one", (token("a"), 5.0, FINISH))
    stream = routing(one).stream(ProviderRequest("m", Fields(), "r1", ANN), PlannedLease())
    async with reading(stream):
        assert freed.is_set()


async def test_stream_that_only_ends_is_an_empty_reply() -> None:
    assert await read(start(routing(provider("one", (ROLE,))))) == [ROLE]


# Failures before the first token


@pytest.mark.parametrize(
    "plan",
    [
        DOWN,
        broken("upstream_garbage"),
        (broken("upstream_truncated"),),
        (ROLE, broken("upstream_lost")),
        (ROLE, ALIVE, broken("upstream_error")),
        NO_ROOM,
    ],
    ids=["refused", "html", "truncated", "reset", "error inside", "429"],
)
async def test_failure_before_the_first_token_goes_to_the_next_provider_at_once(
    plan: Plan,
) -> None:
    one, two = provider("one", plan), provider("two", WHOLE)
    stream = start(routing(one, two))
    assert await read(stream) == list(WHOLE)  # and nothing of the first one
    assert stream.provider == "two"
    assert two.asked_at == [0.0]
    assert one.open == two.open == 0


async def test_no_headers_in_15_s_goes_to_the_next_provider() -> None:
    one, two = provider("one", FOREVER), provider("two", WHOLE)
    before = attempts("one", "timeout")
    await read(start(routing(one, two)))
    assert two.asked_at == [15.0]
    assert one.open == 0
    assert attempts("one", "timeout") == before + 1


async def test_no_token_in_60_s_goes_to_the_next_provider() -> None:
    alive: list[Step] = [step for _ in range(90) for step in (ALIVE, 1.0)]
    one, two = provider("one", alive), provider("two", WHOLE)
    await read(start(routing(one, two)))
    assert two.asked_at == [60.0]


async def test_first_token_clock_ends_at_120_s_over_all_attempts() -> None:
    names = ("one", "two", "three")
    providers = [provider(name, (ROLE, FOREVER)) for name in names]
    last = await failure(routing(*providers))
    assert now() == 120.0
    assert (last.error.code, last.error.status) == ("upstream_timeout", 504)
    assert providers[2].asked_at == []


async def test_last_attempt_ends_with_the_clock_of_all_attempts() -> None:
    one = provider("one", (ROLE, FOREVER))
    clocks = ReplyClocks(first_token_seconds=60, first_token_total_seconds=10)
    await failure(routing(one, clocks=clocks))
    assert now() == 10.0


async def test_clocks_of_a_model_are_its_own() -> None:
    one, two = provider("one", FOREVER), provider("two", (token("a"), FOREVER))
    route = routing(one, two, clocks=ReplyClocks(headers_seconds=2, gap_seconds=3))
    assert route.clocks("m").headers_seconds == 2
    await failure(route)
    assert two.asked_at == [2.0]
    assert now() == 5.0


@pytest.mark.covers("002 `QUEUE_FAILOVER_MAX_RETRIES`")
@pytest.mark.covers("002 `QUEUE_FAILOVER_BASE_DELAY_MS`")
@pytest.mark.parametrize(
    ("base_ms", "max_ms", "bounds"),
    [(100, 5000, [0.1, 0.2, 0.4]), (2000, 5000, [2, 4, 5]), (2000, 2500, [2, 2.5, 2.5])],
)
async def test_list_exhausted_begins_again_with_full_jitter_up_to_the_last_round(
    base_ms: float, max_ms: float, bounds: Sequence[float]
) -> None:
    one, two = provider("one", DOWN), provider("two", broken("upstream_garbage"))
    last = await failure(routing(one, two, retries=3, base_ms=base_ms, max_ms=max_ms))
    assert last.error.code == "upstream_garbage"
    assert len(one.asked_at) == len(two.asked_at) == 4
    assert one.asked_at == two.asked_at
    gaps = [b - a for a, b in pairwise(one.asked_at)]
    rng = random.Random(SEED)
    assert gaps == pytest.approx([rng.random() * bound for bound in bounds])


async def test_without_retries_one_round_is_all() -> None:
    one = provider("one", DOWN)
    assert (await failure(routing(one, retries=0))).error.status == 502
    assert one.asked_at == [0.0]


async def test_only_provider_that_fails_is_named_by_its_failure_not_by_its_breaker() -> None:
    one = provider("one", *[DOWN] * 6)
    ended = await failure(routing(one, retries=20))
    assert ended.error == (await failure(routing(provider("two", DOWN), retries=0))).error


async def test_provider_that_recovers_answers_in_a_later_round() -> None:
    one = provider("one", DOWN, DOWN, WHOLE)
    assert await read(start(routing(one))) == list(WHOLE)
    assert len(one.asked_at) == 3


async def test_refused_request_ends_at_once_with_the_providers_own_error() -> None:
    one, two = provider("one", REFUSED), provider("two", WHOLE)
    before = attempts("one", "refused")
    last = await failure(routing(one, two))
    assert (last.error.code, last.error.status) == ("upstream_refused", 400)
    assert last.error.body == b'{"message":"bad"}'
    assert two.asked_at == []
    assert attempts("one", "refused") == before + 1


async def test_chunks_without_end_before_the_first_token_are_garbage() -> None:
    role = ProviderChunk(b"r" * 1000)
    one, two = provider("one", [role] * 1100), provider("two", WHOLE)
    assert await read(start(routing(one, two))) == list(WHOLE)


# Capacity


@pytest.mark.parametrize("status", [429, 503, 529])
async def test_provider_without_room_pauses_until_its_retry_after(status: int) -> None:
    one = provider("one", failure_of_status(status, retry_after_seconds=3.0), WHOLE)
    route = routing(one)
    assert await read(start(route)) == list(WHOLE)
    assert 3.0 <= one.asked_at[1] <= 3.1


@pytest.mark.covers("002 `QUEUE_FAILOVER_MAX_DELAY_MS`")
@pytest.mark.parametrize("max_ms", [5000, 1500])
async def test_retry_after_pauses_a_provider_for_max_delay_at_most(max_ms: float) -> None:
    one = provider("one", failure_of_status(429, retry_after_seconds=3600.0), WHOLE)
    assert await read(start(routing(one, max_ms=max_ms))) == list(WHOLE)
    assert max_ms / 1000 <= one.asked_at[1] <= max_ms / 1000 + 0.1


async def test_pause_without_retry_after_grows() -> None:
    one = provider("one", NO_ROOM, NO_ROOM, NO_ROOM, WHOLE)
    await read(start(routing(one)))
    gaps = [b - a for a, b in pairwise(one.asked_at)]
    for gap, pause in zip(gaps, (0.1, 0.2, 0.4), strict=True):
        assert pause <= gap <= pause + 0.1


async def test_first_token_ends_the_growth_of_pauses() -> None:
    one = provider("one", NO_ROOM, NO_ROOM, WHOLE, NO_ROOM, WHOLE)
    route = routing(one)
    for _ in range(2):
        await read(start(route))
    assert 0.1 <= one.asked_at[4] - one.asked_at[3] <= 0.2


async def test_paused_provider_is_left_out_by_other_replies_too() -> None:
    one, two = provider("one", NO_ROOM, WHOLE), provider("two", WHOLE)
    route = routing(one, two)
    for _ in range(3):
        await read(start(route))
    assert len(one.asked_at) == 1
    assert len(two.asked_at) == 3
    await asyncio.sleep(0.1)
    await read(start(route))
    assert len(one.asked_at) == 2


async def test_capacity_is_not_counted_by_the_breaker_nor_as_a_round() -> None:
    full = failure_of_status(429, retry_after_seconds=1.0)
    one = provider("one", *[full] * 40, WHOLE)
    route = routing(one, retries=0)
    before = attempts("one", "capacity")
    assert await read(start(route)) == list(WHOLE)
    assert route.status()[0].breaker == "closed"
    assert attempts("one", "capacity") == before + 40


async def test_pauses_that_outlast_the_first_token_clock_end_in_503() -> None:
    full = failure_of_status(503, retry_after_seconds=4.0)
    last = await failure(routing(provider("one", full), provider("two", full)))
    assert 110 < now() <= 120
    assert (last.error.code, last.error.status) == ("upstream_unavailable", 503)
    assert last.retry_after_seconds == 4.0


async def test_failing_provider_beside_a_paused_one_waits_for_the_pause() -> None:
    one = provider("one", failure_of_status(429, retry_after_seconds=5.0), WHOLE)
    two = provider("two", DOWN)
    stream = start(routing(one, two, retries=1))
    await read(stream)
    assert stream.provider == "one"
    assert 5.0 <= now() <= 5.2


async def test_those_who_sleep_on_a_pause_do_not_all_come_back_at_once() -> None:
    full = failure_of_status(429, retry_after_seconds=1.0)
    one = provider("one", full, full, (0.5, token("a"), FINISH))
    route = routing(one)
    await asyncio.gather(*(read(start(route)) for _ in range(20)))
    assert len(set(one.asked_at)) > 10


# Breaker


async def test_breaker_leaves_out_a_provider_that_fails_often() -> None:
    one, two = provider("one", DOWN), provider("two", WHOLE)
    route = routing(one, two)
    for _ in range(10):
        await read(start(route))
    assert len(one.asked_at) == 5
    first = route.status()[0]
    assert (first.name, first.breaker, first.trouble) == ("one", "open", DOWN.error.message)
    assert dependency_up("one") == 0


async def test_reply_that_fails_in_every_round_counts_once_for_the_breaker() -> None:
    """Else one request that a provider cannot answer would close it for everybody."""
    one = provider("one", *[DOWN] * 24, broken("upstream_lost"))
    route = routing(one, retries=5)
    for _ in range(4):
        await failure(route)
    assert len(one.asked_at) == 24 and route.status()[0].breaker == "closed"
    assert (await failure(route)).error.code == "upstream_lost"
    assert len(one.asked_at) == 25 and route.status()[0].breaker == "open"


async def test_failures_of_one_user_close_a_provider_for_that_user_alone() -> None:
    """Such as prompts at which the provider drops the connection."""
    one = provider("one", *[DOWN] * 5, WHOLE)
    route = routing(one, retries=0)
    for _ in range(5):
        await failure(route)
    assert (await failure(route)).error.message == "the provider has failed too often"
    assert len(one.asked_at) == 5 and route.status()[0].breaker == "open"
    assert route.first_pool("m") == "default"
    assert await read(start(route, user="bob")) == list(WHOLE)
    assert route.status()[0].breaker == "closed", "it works"


async def test_failure_of_another_user_closes_a_provider_for_everybody() -> None:
    one = provider("one", DOWN)
    route = routing(one, retries=0)
    for user in ("ann", "ann", "ann", "ann", "ann", "bob"):
        await failure(route, user=user)
    for user in ("ann", "bob", "eve"):
        await failure(route, user=user)
    assert len(one.asked_at) == 6


async def test_five_failures_of_two_users_close_a_provider_for_everybody() -> None:
    one = provider("one", DOWN)
    route = routing(one, retries=0)
    for user in ("bob", "ann", "ann", "ann", "ann", "eve"):
        await failure(route, user=user)
    assert len(one.asked_at) == 5


async def test_failure_of_another_user_long_ago_does_not_count() -> None:
    one = provider("one", *[DOWN] * 6, WHOLE)
    route = routing(one, retries=0)
    await failure(route, user="bob")
    await asyncio.sleep(31)
    for _ in range(5):
        await failure(route)
    assert await read(start(route, user="bob")) == list(WHOLE)


async def test_user_whose_failures_alone_opened_the_breaker_is_let_in_as_a_probe() -> None:
    one = provider("one", *[(token("a"), broken("upstream_lost"))] * 5, DOWN, *[WHOLE] * 2)
    route = routing(one, retries=0)
    for _ in range(5):
        await failure(route)
    await asyncio.sleep(30)
    await failure(route)
    assert route.status()[0].breaker == "open"
    assert await read(start(route, user="bob")) == list(WHOLE), "the probe failed for one only"
    assert await read(start(route)) == list(WHOLE)


async def test_second_try_of_a_reply_that_is_a_probe_and_fails_opens_the_breaker_again() -> None:
    one, two = provider("one", *[DOWN] * 6, WHOLE), provider("two", *[WHOLE] * 4, 40.0, DOWN)
    route = routing(one, two, retries=1, clocks=ReplyClocks(headers_seconds=31))
    for _ in range(4):
        await read(start(route))
    await failure(route)
    assert len(one.asked_at) == 6, "the last one was the probe"
    assert route.status()[0].breaker == "open"


async def test_breaker_probes_after_its_rest_and_closes_at_the_first_token() -> None:
    one, two = provider("one", *[DOWN] * 5, (token("a"), 100.0, FINISH)), provider("two", WHOLE)
    route = routing(one, two, clocks=ReplyClocks(gap_seconds=200))
    for _ in range(6):
        await read(start(route))
    await asyncio.sleep(30)
    stream = start(route)
    async with reading(stream):
        assert stream.provider == "one"
        assert route.status()[0].breaker == "closed"
        assert dependency_up("one") == 1


@pytest.mark.parametrize("probe", [FOREVER, NO_ROOM])
async def test_probe_without_a_result_lets_the_next_one_probe(probe: Plan) -> None:
    one, two = provider("one", *[DOWN] * 5, probe, WHOLE), provider("two", WHOLE)
    route = routing(one, two)
    for _ in range(5):
        await read(start(route))
    await asyncio.sleep(30)
    asking = asyncio.create_task(read(start(route)))
    await asyncio.sleep(1)
    asking.cancel()
    await asyncio.wait([asking])
    stream = start(route)
    await read(stream)
    assert stream.provider == "one"


async def test_refused_probe_shows_that_the_provider_works() -> None:
    one, two = provider("one", *[DOWN] * 5, REFUSED), provider("two", WHOLE)
    route = routing(one, two)
    for _ in range(5):
        await read(start(route))
    await asyncio.sleep(30)
    await failure(route)
    assert route.status()[0].breaker == "closed"


async def test_all_breakers_open_is_unavailable_with_retry_after() -> None:
    one = provider("one", DOWN)
    route = routing(one, retries=0)
    for _ in range(5):
        await failure(route)
    last = await failure(route)
    assert len(one.asked_at) == 5
    assert (last.error.code, last.error.status) == ("upstream_unavailable", 502)
    assert last.retry_after_seconds is not None and last.retry_after_seconds > 1


async def test_streams_that_break_after_the_first_token_open_the_breaker() -> None:
    one = provider("one", (token("a"), broken("upstream_lost")))
    route = routing(one)
    for _ in range(5):
        await failure(route)
    assert route.status()[0].breaker == "open"


async def test_requests_that_are_refused_or_left_do_not_open_the_breaker() -> None:
    one = provider("one", *[REFUSED] * 6, FOREVER)
    route = routing(one)
    for _ in range(6):
        await failure(route)
    for _ in range(6):
        asking = asyncio.create_task(read(start(route)))
        await asyncio.sleep(1)
        asking.cancel()
        await asyncio.wait([asking])
    assert route.status()[0].breaker == "closed"
    assert one.open == 0


# After the first token


@pytest.mark.parametrize(
    "code", ["upstream_truncated", "upstream_lost", "upstream_error", "upstream_garbage"]
)
async def test_failure_after_the_first_token_is_terminal(code: FailureCode) -> None:
    one, two = provider("one", (token("a"), broken(code))), provider("two", WHOLE)
    before = attempts("one", "broken")
    stream = start(routing(one, two))
    seen = list[ProviderChunk]()
    with pytest.raises(ProviderFailed) as caught:
        await stream.pour(seen.extend)
    assert seen == [token("a")]
    assert caught.value.error.code == code
    assert two.asked_at == []
    assert attempts("one", "broken") == before + 1


async def test_capacity_inside_a_stream_is_terminal_too() -> None:
    one, two = provider("one", (token("a"), NO_ROOM)), provider("two", WHOLE)
    assert (await failure(routing(one, two))).error.code == "upstream_unavailable"
    assert two.asked_at == []


async def test_gap_of_60_s_is_a_timeout() -> None:
    one = provider("one", (token("a"), 1.0, token("b"), FOREVER))
    last = await failure(routing(one))
    assert (last.error.code, last.error.status) == ("upstream_timeout", 504)
    assert now() == 61.0
    assert one.open == 0


async def test_comment_or_empty_chunk_is_a_sign_of_life() -> None:
    alive: list[Step] = [step for _ in range(10) for step in (50.0, ALIVE)]
    one = provider("one", (token("a"), *alive, token("b"), FINISH))
    assert await read(start(routing(one))) == [token("a"), token("b"), FINISH]
    assert now() == 500.0


async def test_what_the_reader_raises_ends_the_stream() -> None:
    one = provider("one", (token("a"), 1.0, token("b"), FINISH))

    def take(chunks: Sequence[ProviderChunk]) -> None:
        if token("b") in chunks:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        await start(routing(one)).pour(take)
    assert one.open == 0


# After the finish


async def test_usage_and_end_are_awaited_2_s_after_the_finish() -> None:
    one = provider("one", (token("a"), FINISH, 1.5, USAGE, FOREVER))
    assert await read(start(routing(one))) == [token("a"), FINISH, USAGE]
    assert now() == 3.5
    assert one.open == 0


async def test_comments_after_the_finish_do_not_hold_the_reply_open() -> None:
    comments: list[Step] = [step for _ in range(50) for step in (1.0, ALIVE)]
    one = provider("one", (token("a"), FINISH, *comments))
    assert await read(start(routing(one))) == [token("a"), FINISH]
    assert now() == 2.0


@pytest.mark.parametrize("code", ["upstream_lost", "upstream_error", "upstream_truncated"])
async def test_failure_after_the_finish_changes_nothing(code: FailureCode) -> None:
    one = provider("one", (token("a"), FINISH, broken(code)))
    before = attempts("one", "done")
    assert await read(start(routing(one))) == [token("a"), FINISH]
    assert attempts("one", "done") == before + 1


async def test_text_behind_a_finish_is_not_cut_off() -> None:
    one = provider("one", (token("a"), FINISH, 1.5, token("b"), 1.5, FINISH))
    assert await read(start(routing(one))) == [token("a"), FINISH, token("b"), FINISH]


# Leaving


async def test_leaving_the_stream_closes_the_upstream_at_once() -> None:
    one = provider("one", (token("a"), FOREVER))
    async with reading(start(routing(one))):
        assert one.open == 1
    assert one.open == 0
    assert now() == 0.0


@pytest.mark.parametrize("plan", [FOREVER, (ROLE, FOREVER), (token("a"), FOREVER)])
async def test_cancelled_reader_closes_the_upstream_at_once(plan: Plan) -> None:
    one, two = provider("one", plan), provider("two", WHOLE)
    asking = asyncio.create_task(read(start(routing(one, two))))
    await asyncio.sleep(5)
    assert one.open == 1
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert one.open == 0
    assert two.asked_at == []
    assert now() == 5.0


# Pools


async def test_provider_with_its_own_pool_is_asked_with_a_lease_of_it() -> None:
    one, two = provider("one", DOWN), provider("two", WHOLE, pool="two")
    lease = PlannedLease()
    await read(start(routing(one, two), lease))
    assert lease.moves == ["two"]


async def test_lease_that_fits_stays() -> None:
    one, two = provider("one", DOWN, pool="one"), provider("two", WHOLE, pool="one")
    lease = PlannedLease("one")
    await read(start(routing(one, two), lease))
    assert lease.moves == []


async def test_waiting_for_a_lease_is_not_in_the_first_token_clock() -> None:
    one, two = provider("one", (50.0, DOWN)), provider("two", (59.0, *WHOLE), pool="two")
    lease = PlannedLease(seconds=100)
    await read(start(routing(one, two), lease))
    assert now() == 209.0


async def test_queue_timeout_at_another_pool_ends_the_reply() -> None:
    one, two = provider("one", DOWN), provider("two", WHOLE, pool="two")
    timeout = ReplyFailed(ReplyError("queue_timeout", "waited too long", 503))
    with pytest.raises(ReplyFailed):
        await read(start(routing(one, two), PlannedLease(failure=timeout)))
    assert two.asked_at == []


async def test_open_breaker_costs_no_lease_of_its_pool() -> None:
    one, two = provider("one", DOWN, pool="one"), provider("two", WHOLE)
    route = routing(one, two)
    for _ in range(5):
        await read(start(route))
    lease = PlannedLease()
    await read(start(route, lease))
    assert lease.moves == []


async def test_first_pool_is_that_of_the_provider_asked_first() -> None:
    one = provider("one", failure_of_status(429, retry_after_seconds=2), WHOLE, pool="one")
    two = provider("two", WHOLE)
    route = routing(one, two)
    assert route.first_pool("m") == "one"
    await read(start(route, PlannedLease("one")))
    assert route.first_pool("m") == "default"
    assert 1.9 < route.status()[0].paused_seconds <= 2.0
    await asyncio.sleep(2)
    assert route.first_pool("m") == "one"


# Anything

PLANS = st.sampled_from(
    [
        DOWN,
        NO_ROOM,
        REFUSED,
        FOREVER,
        (ROLE, FOREVER),
        (ALIVE, broken("upstream_truncated")),
        WHOLE,
        (ROLE, 3.0, token("a"), ALIVE, 61.0, token("b"), FINISH),
        (token("a"), 40.0, ALIVE, 40.0, token("b"), FINISH, FOREVER),
        (token("a"), broken("upstream_lost")),
        (token("a"), FINISH, broken("upstream_lost")),
    ]
)


@given(
    st.lists(st.lists(PLANS, min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.sampled_from(["default", "own"]), min_size=3, max_size=3),
)
async def test_reply_is_of_one_provider_ends_in_time_and_leaves_nothing_open(
    plans: list[list[Plan]], pools: list[str]
) -> None:
    pairs = list(zip(plans, pools, strict=False))
    providers = [PlannedProvider(f"p{i}", list(p), pool) for i, (p, pool) in enumerate(pairs)]
    route = routing(*providers)
    lease, seen, ended = PlannedLease(), list[ProviderChunk](), None
    stream = start(route, lease)
    try:
        await stream.pour(seen.extend)
    except ProviderFailed as failed:
        ended = failed
    assert all(each.open == 0 for each in providers)
    assert now() <= 120 + 61 + 80 + 2
    if not stream.provider:
        assert ended is not None and seen == []
        return
    answering = next(each for each in providers if each.name == stream.provider)
    assert lease.pool == answering.pool
    wanted = [
        [step for step in plan if isinstance(step, ProviderChunk) and (step.data or step.usage)]
        for plan in plans[int(stream.provider[1:])]
        if isinstance(plan, tuple)
    ]
    assert any(seen == whole[: len(seen)] for whole in wanted)
    assert any(chunk.finish for chunk in seen) == (ended is None)


# Opening


async def test_nothing_set_answers_with_what_the_user_wrote() -> None:
    route = open_routing(StreamingSettings(), {}, LoopClock(), random.Random(1))
    assert route.models() == ["scripted"]
    fields = {"messages": b'[{"role":"user","content":"Hello there"}]'}
    stream = route.stream(ProviderRequest("scripted", fields, "r1", ANN), PlannedLease())
    chunks = await read(stream)
    text = b"".join(chunk.data.split(b'"content":"')[1].split(b'"')[0] for chunk in chunks[:-2])
    assert text == b"You wrote: Hello there"
    assert stream.provider == "scripted"
    await route.close()


@pytest.mark.parametrize("environ", [{}, {"KEY": ""}, {"KEY": " \n"}, {"KEY": "a\nb"}])
def test_missing_key_variable_stops_the_start(environ: dict[str, str]) -> None:
    settings = StreamingSettings(
        providers=(ProviderSettings("openai", base_url="https://api.example", key_env="KEY"),),
        models=(ModelSettings("m", ("openai:x",)),),
    )
    with pytest.raises(BadSetting, match=r"streaming\.providers: openai: key_env .* KEY"):
        open_routing(settings, environ, LoopClock(), random.Random(1))


async def test_scripted_faults_behave_like_those_of_a_real_provider() -> None:
    clock = LoopClock()
    bad = ScriptedProvider("bad", "default", ScriptSettings(fault="no_headers"), clock)
    good = ScriptedProvider("good", "default", ScriptSettings(tokens=3), clock)
    model = ModelSettings("m", ("bad:a", "good:b"))
    rng = random.Random(1)
    route = Routing([bad, good], [model], ReplyClocks(), QueueFailoverSettings(), clock, rng)
    assert len(await read(start(route))) == 6
    assert 15.0 <= now() < 15.1
