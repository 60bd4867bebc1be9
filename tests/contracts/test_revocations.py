"""What every store of revocations promises; memory and each adapter alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import apsw
import pytest
from cluster_database import first_node
from msgspec.structs import replace

from holdfast.access.revocations.contract import (
    ENTRIES_MAX,
    Revocation,
    RevocationKind,
    Revocations,
)
from holdfast.access.revocations.in_force import RevocationsInForce
from holdfast.access.revocations.memory import MemoryRevocations
from holdfast.access.revocations.postgres import PostgresRevocations
from holdfast.access.revocations.sqlite import ACCESS, SqliteRevocations
from holdfast.clock import Clock, ManualClock
from holdfast.drivers.sqlite.database import SqliteSettings, open_and_migrate
from holdfast.errors import Forbidden, NotFound
from holdfast.message import User

START = 1_000_000.0
Scenario = Callable[[Revocations, ManualClock], Awaitable[None]]
OpenStore = Callable[[Clock, int], AbstractAsyncContextManager[Revocations]]


@asynccontextmanager
async def memory(clock: Clock, entries_max: int) -> AsyncIterator[Revocations]:
    yield MemoryRevocations(clock, entries_max)


@asynccontextmanager
async def sqlite(folder: Path, clock: Clock, entries_max: int) -> AsyncIterator[Revocations]:
    store = await SqliteRevocations.open(folder / ACCESS.name, clock, entries_max=entries_max)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def postgres(url: str, clock: Clock, entries_max: int) -> AsyncIterator[Revocations]:
    async with first_node(url) as database:
        yield await PostgresRevocations.open(database, clock, entries_max)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """Opens an empty store of one kind."""
    if request.param == "memory":
        return memory
    if request.param == "sqlite":
        return partial(sqlite, tmp_path)
    return partial(postgres, request.getfixturevalue("postgres_server").url)


def on_every_store(scenario: Scenario) -> Any:
    @wraps(scenario)
    async def test(opened: OpenStore) -> None:
        clock = ManualClock(START)
        async with opened(clock, ENTRIES_MAX) as store:
            await scenario(store, clock)

    del test.__wrapped__  # type: ignore[attr-defined]
    return test


def entry(
    kind: RevocationKind = "user", user_id: str = "alice", item: str = "", **fields: Any
) -> Revocation:
    return Revocation(
        kind,
        "acme",
        user_id,
        item,
        **{"issued_before": START, "made_at": "t", "ends_at": None, **fields},
    )


@on_every_store
async def test_entries_are_listed_as_they_were_added_until_they_are_removed(
    store: Revocations, clock: Any
) -> None:
    kinds: list[RevocationKind] = ["token", "user", "device", "ban", "mute", "tenant"]
    added = [
        await store.add(
            entry(
                kind,
                "" if kind == "tenant" else "alice",
                "x" if kind in ("token", "device") else "",
            )
        )
        for kind in kinds
    ]
    assert [one.number for one in added] == [1, 2, 3, 4, 5, 6]
    assert [one.kind for one in await store.all()] == kinds and list(await store.all()) == added
    assert await store.remove(2) == added[1]
    assert list(await store.all()) == [added[0], *added[2:]]
    for number in (2, 7, 0):
        with pytest.raises(NotFound, match="nothing was changed"):
            await store.remove(number)
    again = await store.add(entry("user"))
    assert again.number == 7, "a number is never given twice"


@on_every_store
async def test_entry_of_the_same_key_is_merged_and_refuses_no_less(
    store: Revocations, clock: Any
) -> None:
    first = await store.add(entry(issued_before=START + 10, ends_at=START + 100, made_at="one"))
    second = await store.add(entry(issued_before=START + 5, ends_at=START + 200, made_at="two"))
    assert second == replace(first, made_at="two", ends_at=START + 200)
    assert list(await store.all()) == [second]
    token = await store.add(entry("token", "", "jti-1", issued_before=0))
    known = await store.add(entry("token", "bob", "jti-1", issued_before=0))
    assert (known.number, known.user_id) == (token.number, "bob"), (
        "a token is one, whoever it belongs to"
    )
    assert (await store.add(entry("token", "", "jti-1", issued_before=0))).user_id == "bob"
    await store.add(entry("device", item="phone"))
    await store.add(entry("device", item="tablet"))
    await store.add(entry("device", "bob", item="phone"))
    await store.add(replace(entry(), tenant="other"))
    assert len(await store.all()) == 6


@on_every_store
async def test_version_rises_by_one_with_every_change_and_with_nothing_else(
    store: Revocations, clock: Any
) -> None:
    before = await store.version()
    await store.add(entry())
    await store.add(entry())
    await store.remove(1)
    assert await store.version() == before + 3
    with pytest.raises(NotFound):
        await store.remove(1)
    await store.all()
    assert await store.version() == before + 3


@on_every_store
async def test_entry_that_has_ended_is_gone_and_makes_room(
    store: Revocations, clock: ManualClock
) -> None:
    await store.add(entry(ends_at=START + 10))
    stays = await store.add(entry("ban"))
    clock.advance(10)
    assert list(await store.all()) == [stays]
    with pytest.raises(NotFound):
        await store.remove(1)
    assert (await store.add(entry(ends_at=START + 30, issued_before=START))).number == 3


async def test_full_store_refuses_the_next_entry_and_drops_none(opened: OpenStore) -> None:
    clock = ManualClock(START)
    async with opened(clock, 3) as store:
        for name in ("a", "b"):
            await store.add(entry(user_id=name))
        await store.add(entry(user_id="c", ends_at=START + 10))
        version = await store.version()
        with pytest.raises(Forbidden, match=r"3 revocations.*lift some first") as caught:
            await store.add(entry(user_id="d"))
        assert caught.value.details["limit"] == 3
        assert [one.user_id for one in await store.all()] == ["a", "b", "c"]
        assert await store.version() == version
        await store.add(entry(user_id="a", issued_before=START + 1))
        clock.advance(10)
        await store.add(entry(user_id="d"))
        assert [one.user_id for one in await store.all()] == ["a", "b", "d"]


@on_every_store
async def test_two_nodes_see_each_others_changes_when_they_refresh(
    store: Revocations, clock: ManualClock
) -> None:
    one, two = RevocationsInForce(store, clock), RevocationsInForce(store, clock)
    await one.refresh()
    await two.refresh()
    ban, mute = await one.add(entry("ban")), await two.add(entry("mute"))
    for node in (one, two):
        await node.refresh()
        assert list(node.page(0, 10, lambda each: True)) == [ban, mute]
    await two.remove(ban.number)
    await one.refresh()
    assert list(one.page(0, 10, lambda each: True)) == [mute]


@on_every_store
async def test_tokens_and_devices_of_an_erased_user_are_condensed_into_one_entry(
    store: Revocations, clock: ManualClock
) -> None:
    node = RevocationsInForce(store, clock)
    await node.refresh()
    for named in (
        entry("token", item="jti", ends_at=START + 10),
        entry("device", item="phone", ends_at=START + 20),
        entry("ban"),
        entry("device", "bob", "phone", ends_at=START + 20),
    ):
        await node.add(named)
    for _ in range(2):
        await node.condense(User("acme", "alice"))
        held = [(each.kind, each.user_id, each.item) for each in await store.all()]
        assert held == [
            ("ban", "alice", ""), ("device", "bob", "phone"), ("user", "alice", "")
        ]  # fmt: skip


async def test_entries_and_version_outlive_the_process(tmp_path: Path) -> None:
    async with sqlite(tmp_path, ManualClock(START), ENTRIES_MAX) as store:
        await store.add(entry("token", "", "j", ends_at=START + 0.5))
        before = list(await store.all()), await store.version()
    async with sqlite(tmp_path, ManualClock(START), ENTRIES_MAX) as store:
        assert (list(await store.all()), await store.version()) == before


async def test_file_of_version_1_keeps_its_entries_and_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / ACCESS.name
    open_and_migrate(path, SqliteSettings(), ACCESS.migrations[:1]).close()
    with apsw.Connection(str(path)) as db:
        for number, kind in enumerate(("ban", "user", "mute", "device"), 1):
            row = (
                number,
                kind,
                "acme",
                "alice",
                "alice",
                "",
                START,
                "t",
                START + 9 if kind == "user" else None,
            )
            db.execute("INSERT INTO revocations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        db.execute("DELETE FROM revocations WHERE number > 2")
        db.execute("UPDATE version SET value = 7")
    store = await SqliteRevocations.open(path, ManualClock(START))
    try:
        assert await store.version() == 7
        assert await store.all() == [
            entry("ban", number=1),
            entry("user", ends_at=START + 9, number=2),
        ]
        assert (await store.add(entry("tenant", ""))).number == 5, "3 and 4 were given before"
    finally:
        await store.close()
