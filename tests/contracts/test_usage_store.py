"""What every store of usage promises: memory and each adapter alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from holdfast.clock import ManualClock
from holdfast.streaming.reply_log.sqlite import REPLIES, RepliesFile, SqliteUsage
from holdfast.streaming.usage_store.contract import (
    COUNTED_SECONDS,
    RunUsage,
    UsageKey,
    UsageQuery,
    UsageRow,
    UsageStore,
)
from holdfast.streaming.usage_store.memory import MemoryUsage

ALL_DAYS = UsageQuery("2000-01-01", "2099-12-31")
KEY = UsageKey("2026-11-17", "acme", "ann", "gpt", "scripted")


@asynccontextmanager
async def opened(adapter: str, folder: Path) -> AsyncIterator[UsageStore]:
    if adapter == "memory":
        yield MemoryUsage()
        return
    file = await RepliesFile.open(folder / REPLIES.name, ManualClock())
    yield SqliteUsage(file)
    await file.close()


def on_every_store(scenario: Callable[[UsageStore], Awaitable[None]]) -> Any:
    @pytest.mark.parametrize("adapter", ["memory", "sqlite"])
    @wraps(scenario)
    async def test(adapter: str, tmp_path: Path) -> None:
        async with opened(adapter, tmp_path) as store:
            await scenario(store)

    del test.__wrapped__  # type: ignore[attr-defined]
    return test


def run(run_id: str, tokens: int = 10, key: UsageKey = KEY, estimated: bool = False) -> RunUsage:
    return RunUsage(run_id, key, 2 * tokens, tokens, estimated)


@on_every_store
async def test_row_sums_the_runs_of_its_key(store: UsageStore) -> None:
    other = KEY._replace(provider="other")
    await store.count([run("a"), run("b", 5, estimated=True), run("c", 1, other)])
    await store.count([run("d", 100)])
    assert await store.rows(ALL_DAYS) == [
        UsageRow(other, 1, 2, 1, 0),
        UsageRow(KEY, 3, 230, 115, 1),
    ]


@on_every_store
async def test_run_counts_once_however_often_it_is_sent(store: UsageStore) -> None:
    await store.count([run("a"), run("a")])
    await store.count([run("a")])
    assert await store.rows(ALL_DAYS) == [UsageRow(KEY, 1, 20, 10, 0)]


@on_every_store
async def test_noted_run_counts_at_its_end_with_its_last_numbers(store: UsageStore) -> None:
    await store.note([run("a", 1, estimated=True)])
    await store.note([run("a", 2, estimated=True)])
    assert await store.rows(ALL_DAYS) == []
    await store.count([run("a", 3)])
    await store.note([run("a", 2)])
    await store.count([run("a", 9)])
    assert await store.rows(ALL_DAYS) == [UsageRow(KEY, 1, 6, 3, 0)]


@on_every_store
async def test_rows_are_chosen_by_day_tenant_and_user_in_pages(store: UsageStore) -> None:
    keys = [
        UsageKey(day, tenant, user, "gpt", "scripted")
        for day in ("2026-11-15", "2026-11-16", "2026-11-17")
        for tenant in ("acme", "beta")
        for user in ("ann", "bob")
    ]
    await store.count([run(str(n), 1, key) for n, key in enumerate(keys)])

    async def found(**query: Any) -> list[UsageKey]:
        return [row.key for row in await store.rows(ALL_DAYS._replace(**query))]

    assert await found() == keys
    assert await found(first_day="2026-11-16", last_day="2026-11-16") == keys[4:8]
    assert await found(tenant="beta") == [key for key in keys if key.tenant == "beta"]
    assert await found(tenant="acme", user="bob") == keys[1::4]
    assert await found(rows_max=5) == keys[:5]
    assert await found(rows_max=5, after=keys[4]) == keys[5:10]
    assert await found(after=keys[-1]) == []


@on_every_store
async def test_erased_user_leaves_the_sums_without_the_name(store: UsageStore) -> None:
    bob, beta = KEY._replace(user="bob"), KEY._replace(tenant="beta")
    runs = [run("1"), run("2", 1, KEY._replace(user="")), run("3", 2, bob), run("4", 3, beta)]
    await store.count(runs)
    await store.note([run("5", 4)])
    await store.forget_user("acme", "ann")
    assert await store.rows(ALL_DAYS) == [
        UsageRow(KEY._replace(user=""), 2, 22, 11, 0),
        UsageRow(bob, 1, 4, 2, 0),
        UsageRow(beta, 1, 6, 3, 0),
    ]
    await store.forget_user("acme", "ann")


async def test_next_process_counts_runs_that_were_noted_but_had_not_ended(tmp_path: Path) -> None:
    clock = ManualClock()
    for _ in range(2):
        async with opened_at(tmp_path, clock) as store:
            await store.note([run("left", 7, estimated=True), run("ended", 1)])
            await store.count([run("ended", 2)])
    async with opened_at(tmp_path, clock) as store:
        assert await store.rows(ALL_DAYS) == [UsageRow(KEY, 2, 18, 9, 1)]


async def test_counted_run_is_forgotten_after_an_hour(tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened_at(tmp_path, clock) as store:
        await store.count([run("a", 1)])
        clock.advance(COUNTED_SECONDS + 1)
        await store._file._delete_expired()
        await store.count([run("a", 1)])
        assert (await store.rows(ALL_DAYS))[0].replies == 2


@asynccontextmanager
async def opened_at(folder: Path, clock: ManualClock) -> AsyncIterator[SqliteUsage]:
    file = await RepliesFile.open(folder / REPLIES.name, clock)
    yield SqliteUsage(file)
    await file.close()
