"""One suite for every store of dead letters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import pytest
from cluster_database import another_node, first_node
from msgspec.structs import replace
from structlog.testing import capture_logs

from engines import Server
from holdfast.fanout.dead_letters import (
    DATA_BYTES_MAX,
    DeadLetter,
    DeadLetters,
    DeadLetterSettings,
    RecentDeadLetters,
)
from holdfast.fanout.dead_letters.postgres import PostgresDeadLetters

OpenStore = Callable[[DeadLetterSettings], AbstractAsyncContextManager[DeadLetters]]
SETTINGS = DeadLetterSettings(alert_threshold_per_hour=2, max_letters=3)


@asynccontextmanager
async def recent(settings: DeadLetterSettings) -> AsyncIterator[DeadLetters]:
    yield RecentDeadLetters(settings)


@asynccontextmanager
async def postgres(url: str, settings: DeadLetterSettings) -> AsyncIterator[DeadLetters]:
    async with first_node(url) as database:
        yield await PostgresDeadLetters.open(database, settings)


@pytest.fixture(params=["recent", "postgres"])
def opened(request: pytest.FixtureRequest) -> OpenStore:
    """Opens an empty store of one kind."""
    if request.param == "recent":
        return recent
    return partial(postgres, request.getfixturevalue("postgres_server").url)


def letter(offset: int, at: str = "2026-01-01T10:00:00.000Z") -> DeadLetter:
    return DeadLetter(3, offset, "undecodable", "not a message", b"\x00\xff", at)


async def test_newest_letters_are_read_first_and_the_oldest_are_forgotten(
    opened: OpenStore,
) -> None:
    async with opened(SETTINGS) as store:
        assert not await store.read(10)
        for offset in (7, 9, 8, 20, 10):
            await store.put(letter(offset))
        assert list(await store.read(10)) == [letter(10), letter(20), letter(8)]
        assert list(await store.read(1)) == [letter(10)]


async def test_no_content_of_a_letter_keeps_it_from_being_put(opened: OpenStore) -> None:
    odd = replace(
        letter(2**62), reason="a\0b", message="half \ud800 a pair", data=b"\x00" * DATA_BYTES_MAX
    )
    async with opened(SETTINGS) as store:
        await store.put(odd)
        [kept] = await store.read(10)
        assert (kept.offset, kept.data, kept.message[:5]) == (2**62, odd.data, "half ")


async def test_each_letter_is_logged_and_many_in_an_hour_alert_once(opened: OpenStore) -> None:
    async with opened(SETTINGS) as store:
        with capture_logs() as logged:
            for offset in range(5):
                await store.put(letter(offset))
            await store.put(letter(9, "2026-01-01T11:00:00.000Z"))
        events = [line["event"] for line in logged]
        assert events.count("fanout.event_dead_lettered") == 6
        assert events.count("fanout.dead_letters_exceeded") == 1


async def test_event_that_two_nodes_cannot_use_is_one_letter(postgres_server: Server) -> None:
    url = postgres_server.url
    async with first_node(url) as here, another_node(url) as there:
        one = await PostgresDeadLetters.open(here)
        two = await PostgresDeadLetters.open(there)
        with capture_logs() as logged:
            await one.put(letter(7))
            await two.put(letter(7, "2026-01-01T10:00:01.000Z"))
        assert list(await two.read(10)) == [letter(7)] and len(logged) == 1
