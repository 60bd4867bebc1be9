"""One suite for every store of webhook endpoints and of the log of deliveries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from cluster_database import another_node, first_node
from msgspec.structs import replace

from engines import Server
from holdfast.clock import SystemClock, timestamp
from holdfast.errors import NotFound
from holdfast.webhooks.contract import (
    DELIVERIES_KEPT_PER_ENDPOINT,
    Delivery,
    WebhookEndpoint,
    WebhookEndpoints,
)
from holdfast.webhooks.postgres import PostgresEndpoints
from holdfast.webhooks.sqlite import WEBHOOKS, SqliteEndpoints

OpenStore = Callable[[], AbstractAsyncContextManager[WebhookEndpoints]]
NOTICED_SECONDS_MAX = 5.0
"""A second, and time for a slow machine."""


@asynccontextmanager
async def sqlite(folder: Path) -> AsyncIterator[WebhookEndpoints]:
    store = await SqliteEndpoints.open(folder / WEBHOOKS.name)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def postgres(url: str) -> AsyncIterator[WebhookEndpoints]:
    async with first_node(url) as database, PostgresEndpoints.opened(database) as store:
        yield store


@pytest.fixture(params=["sqlite", "postgres"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """Opens an empty store of one kind."""
    if request.param == "sqlite":
        return partial(sqlite, tmp_path)
    return partial(postgres, request.getfixturevalue("postgres_server").url)


def endpoint(name: str, created_at: str = "2026-01-01T00:00:00.000Z") -> WebhookEndpoint:
    return WebhookEndpoint(name, "acme", f"https://{name}.example", "whsec_x", "mine", created_at)


def delivery(name: str, sequence: int = 1, seconds: float = 0.25) -> Delivery:
    at = "2026-01-01T00:00:00.000Z"
    return Delivery(name, f"msg_{sequence}", "chat_1", sequence, 1, at, 503, seconds, "busy")


async def test_endpoints_are_listed_oldest_first_until_they_are_removed(opened: OpenStore) -> None:
    async with opened() as store:
        later, b, a = endpoint("c", "2026-01-02T00:00:00.000Z"), endpoint("b"), endpoint("a")
        for each in (later, b, a):
            await store.add(each)
        assert list(await store.all()) == [a, b, later]
        assert await store.get("b") == b
        assert not await store.removed("b")
        await store.remove("b")
        assert list(await store.all()) == [a, later]
        assert await store.removed("b") and not await store.removed("a")


async def test_verb_on_an_endpoint_that_does_not_exist_changes_nothing(opened: OpenStore) -> None:
    async with opened() as store:
        await store.add(endpoint("a"))
        version = store.version
        for verb in (
            store.get("gone"),
            store.enable("gone"),
            store.disable("gone", "why", "now"),
            store.remove("gone"),
        ):
            with pytest.raises(NotFound, match="no webhook endpoint gone"):
                await verb
        assert list(await store.all()) == [endpoint("a")] and not await store.removed("gone")
        assert store.version == version


async def test_disabled_endpoint_keeps_the_time_of_its_first_disabling(opened: OpenStore) -> None:
    async with opened() as store:
        await store.add(endpoint("a"))
        await store.add(endpoint("b"))
        await store.disable("a", "410 Gone", "t1")
        await store.disable("a", "by an operator", "t2")
        expected = replace(endpoint("a"), disabled="by an operator", disabled_at="t1")
        assert list(await store.all()) == [expected, endpoint("b")]
        await store.enable("a")
        assert await store.get("a") == endpoint("a")
        await store.disable("a", "again", "t3")
        assert (await store.get("a")).disabled_at == "t3"


async def test_deliveries_are_newest_first_and_bounded_for_each_endpoint(opened: OpenStore) -> None:
    async with opened() as store:
        await store.log(delivery("other"))
        count = DELIVERIES_KEPT_PER_ENDPOINT + 3
        for sequence in range(1, count + 1):
            await store.log(delivery("a", sequence))
        kept = await store.deliveries("a", count)
        assert [each.sequence for each in kept] == list(range(count, 3, -1))
        assert list(await store.deliveries("a", 2)) == [
            delivery("a", count),
            delivery("a", count - 1),
        ]
        assert list(await store.deliveries("other")) == [delivery("other")]


async def test_removed_endpoint_takes_its_deliveries_with_it(opened: OpenStore) -> None:
    async with opened() as store:
        for name in ("a", "b"):
            await store.add(endpoint(name))
            await store.log(delivery(name))
        await store.remove("a")
        assert not await store.deliveries("a")
        assert list(await store.deliveries("b")) == [delivery("b")]


async def test_last_duration_is_known_of_endpoints_that_had_a_delivery(opened: OpenStore) -> None:
    async with opened() as store:
        assert await store.last_seconds() == {}
        for name in ("a", "b", "never"):
            await store.add(endpoint(name))
        for name, seconds in (("a", 9.0), ("b", 0.5), ("a", 0.125), ("unknown", 1.0)):
            await store.log(delivery(name, seconds=seconds))
        assert await store.last_seconds() == {"a": 0.125, "b": 0.5}


async def test_delivery_whose_text_has_a_null_character_is_logged(opened: OpenStore) -> None:
    async with opened() as store:
        await store.add(replace(endpoint("a"), description="nu\0ll"))
        await store.disable("a", "its answer: \0", "t1")
        await store.log(replace(delivery("a"), error="bad \0"))
        [logged] = await store.deliveries("a")
        assert logged.error.startswith("bad ")
        found = await store.get("a")
        assert (found.description[:2], found.disabled[:11]) == ("nu", "its answer:")


async def test_version_differs_after_each_change_and_wakes_who_waits(opened: OpenStore) -> None:
    async with opened() as store, asyncio.timeout(20):
        versions = [store.version]

        async def change(verb: Callable[[], Awaitable[None]]) -> None:
            waiting = asyncio.create_task(store.changed(versions[-1]))
            await asyncio.sleep(0)
            assert not waiting.done()
            await verb()
            assert store.version != versions[-1], "at once"
            await waiting
            versions.append(store.version)

        await change(lambda: store.add(endpoint("a")))
        await change(lambda: store.disable("a", "why", "t1"))
        await change(lambda: store.enable("a"))
        await change(lambda: store.remove("a"))
        assert len(set(versions)) == len(versions)
        await store.log(delivery("a"))
        assert store.version == versions[-1], "a delivery changes no endpoint"


# --- of a cluster
# -------------------------------------------------------------------------------------


async def test_change_of_another_node_is_noticed(postgres_server: Server) -> None:
    url = postgres_server.url
    async with (
        first_node(url) as here,
        another_node(url) as there,
        PostgresEndpoints.opened(here) as one,
        PostgresEndpoints.opened(there) as two,
    ):
        assert one.server == two.server and len(one.server) == 32
        before = two.version
        waiting = asyncio.create_task(two.changed(before))
        await one.add(endpoint("a"))
        async with asyncio.timeout(NOTICED_SECONDS_MAX):
            await waiting
        assert two.version == one.version != before
        assert list(await two.all()) == [endpoint("a")]


async def test_stored_version_has_a_change_of_another_node_at_once(
    postgres_server: Server,
) -> None:
    url = postgres_server.url
    async with (
        first_node(url) as here,
        another_node(url) as there,
        PostgresEndpoints.opened(here) as one,
        PostgresEndpoints.opened(there, follow_seconds=3600) as two,
    ):
        await one.add(endpoint("a"))
        assert two.version != one.version
        assert await two.stored_version() == two.version == one.version


async def test_endpoint_of_a_node_whose_clock_is_ahead_has_the_servers_time(
    postgres_server: Server,
) -> None:
    async with postgres(postgres_server.url) as store:
        before = timestamp(SystemClock().now() - 1)
        await store.add(endpoint("a", created_at="2999-01-01T00:00:00.000Z"))
        assert before < (await store.get("a")).created_at < timestamp(SystemClock().now() + 1)


async def test_nodes_that_log_to_one_endpoint_at_once_keep_its_log_bounded(
    postgres_server: Server,
) -> None:
    async with postgres(postgres_server.url) as store:
        waiting = iter(range(1, DELIVERIES_KEPT_PER_ENDPOINT + 201))

        async def log() -> None:
            for sequence in waiting:
                await store.log(delivery("a", sequence))

        await asyncio.gather(*(log() for _ in range(4)))
        await store.log(delivery("a", 9999))
        kept = await store.deliveries("a", 9999)
        assert len(kept) == DELIVERIES_KEPT_PER_ENDPOINT and kept[0].sequence == 9999
