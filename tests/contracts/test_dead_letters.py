"""One suite for every store of dead letters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from cluster_database import another_node, first_node
from msgspec.structs import replace
from structlog.testing import capture_logs

from engines import Server
from holdfast import telemetry
from holdfast.fanout.dead_letters import (
    DATA_BYTES_MAX,
    DeadLetter,
    DeadLetters,
    DeadLetterSettings,
    RecentDeadLetters,
)
from holdfast.fanout.dead_letters.postgres import PostgresDeadLetters
from holdfast.fanout.dead_letters.sqlite import SqliteDeadLetters
from holdfast.store.sqlite import SqliteStore

OpenStore = Callable[[DeadLetterSettings], AbstractAsyncContextManager[DeadLetters]]
SETTINGS = DeadLetterSettings(alert_threshold_per_hour=2, max_letters=3)


@asynccontextmanager
async def recent(settings: DeadLetterSettings) -> AsyncIterator[DeadLetters]:
    yield RecentDeadLetters(settings)


@asynccontextmanager
async def postgres(url: str, settings: DeadLetterSettings) -> AsyncIterator[DeadLetters]:
    async with first_node(url) as database:
        yield await PostgresDeadLetters.open(database, settings)


@asynccontextmanager
async def sqlite(path: Path, settings: DeadLetterSettings) -> AsyncIterator[DeadLetters]:
    async with SqliteStore(path) as store:
        yield await SqliteDeadLetters.open(store, settings)


@pytest.fixture(params=["recent", "sqlite", "postgres"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """Opens an empty store of one kind."""
    if request.param == "recent":
        return recent
    if request.param == "sqlite":
        return partial(sqlite, tmp_path / "chats.db")
    return partial(postgres, request.getfixturevalue("postgres_server").url)


def letter(offset: int, at: str = "2026-01-01T10:00:00.000Z") -> DeadLetter:
    found = (3, offset, "undecodable", "not a message", b"\x00\xff", at)
    return DeadLetter(*found, "acme", "chat_1")


async def kept(store: DeadLetters, limit: int = 10) -> list[DeadLetter]:
    """What is read, without the numbers that the store gave."""
    return [replace(letter, number=0) for letter in await store.read(limit)]


async def test_newest_letters_are_read_first_and_the_oldest_are_forgotten(
    opened: OpenStore,
) -> None:
    async with opened(SETTINGS) as store:
        assert not await store.read(10)
        for offset in (7, 9, 8, 20, 10):
            await store.put(letter(offset))
        assert await kept(store) == [letter(10), letter(20), letter(8)]
        assert await kept(store, 1) == [letter(10)]
        assert kept_metric() == 3


async def test_pages_go_on_before_a_number_and_each_letter_is_found_by_its_own(
    opened: OpenStore,
) -> None:
    async with opened(SETTINGS) as store:
        for offset in (7, 8, 9):
            await store.put(letter(offset))
        newest, *older = await store.read(10)
        assert list(await store.read(10, newest.number)) == older
        assert await store.get(newest.number) == newest
        assert await store.get(newest.number + 1) is None


async def test_event_that_fails_twice_for_one_reason_is_one_letter(opened: OpenStore) -> None:
    async with opened(SETTINGS) as store:
        with capture_logs() as logged:
            for reason in ("undecodable", "undecodable", "defect"):
                await store.put(replace(letter(7), reason=reason))
        assert await store.counts() == {"undecodable": 1, "defect": 1} and len(logged) == 2


async def test_removed_letters_are_gone_and_counted_once(opened: OpenStore) -> None:
    async with opened(SETTINGS) as store:
        for offset in (7, 8, 9):
            await store.put(letter(offset))
        first, second, third = await store.read(10)
        assert await store.remove([first.number, third.number, third.number + 1000]) == 2
        assert list(await store.read(10)) == [second]
        assert await store.remove([first.number]) == 0
        assert kept_metric() == 1


async def test_data_that_names_an_erased_user_is_emptied(opened: OpenStore) -> None:
    async with opened(SETTINGS) as store:
        await store.put(replace(letter(1), data=b'\xff{"sender_id": "ann", "content": "secret"}'))
        await store.put(replace(letter(2), data=b'{"sender_id": "bob"}'))
        await store.forget_user("ann")
        assert [x.data for x in await store.read(10)] == [b'{"sender_id": "bob"}', b""]


async def test_letters_survive_a_restart(tmp_path: Path) -> None:
    async with sqlite(tmp_path / "chats.db", SETTINGS) as store:
        await store.put(letter(7))
    async with sqlite(tmp_path / "chats.db", SETTINGS) as store:
        assert await kept(store) == [letter(7)] and kept_metric() == 1


def kept_metric() -> float | None:
    return telemetry.REGISTRY.get_sample_value("holdfast_fanout_dlq_depth")


async def test_no_content_of_a_letter_keeps_it_from_being_put(opened: OpenStore) -> None:
    odd = replace(
        letter(2**62), reason="a\0b", message="half \ud800 a pair", data=b"\x00" * DATA_BYTES_MAX
    )
    async with opened(SETTINGS) as store:
        await store.put(odd)
        [found] = await store.read(10)
        assert (found.offset, found.data, found.message[:5]) == (2**62, odd.data, "half ")


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
        assert await kept(two) == [letter(7)] and len(logged) == 1
