"""What every engine's leases promise, at times that the test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple

import asyncpg
import pytest
from store_rigs import PostgresRig, without_triggers

from engines import Server
from holdfast.clock import ManualClock
from holdfast.store.leases.contract import Fence, Leases
from holdfast.store.leases.memory import MemoryLeases

NAME = "the lease"


class Rig(NamedTuple):
    """The leases as two nodes reach them; ``pass_time`` lets seconds pass."""

    one: Leases
    two: Leases
    pass_time: Callable[[float], Awaitable[None]]


@asynccontextmanager
async def memory(_server: Server | None) -> AsyncIterator[Rig]:
    clock = ManualClock()
    leases = MemoryLeases(clock)

    async def pass_time(seconds: float) -> None:
        clock.advance(seconds)

    yield Rig(leases, leases, pass_time)


@asynccontextmanager
async def postgres(server: Server | None) -> AsyncIterator[Rig]:
    assert server is not None

    async def pass_time(seconds: float) -> None:
        await without_triggers(
            server.url,
            "UPDATE holdfast_chats.lease SET"
            f" expires_at = expires_at - make_interval(secs => {seconds})",
        )

    async with PostgresRig(server.url).open() as store:
        one, two = store.leases("one"), store.leases("two")
        yield Rig(one, two, pass_time)
        one.close()
        two.close()


Open = Callable[[Server | None], AbstractAsyncContextManager[Rig]]
RIGS: dict[str, tuple[Open, str | None]] = {
    "memory": (memory, None),
    "postgres": (postgres, "postgres_server"),
}
Opened = AbstractAsyncContextManager[Rig]


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest) -> Opened:
    opened, engine = RIGS[request.param]
    return opened(None if engine is None else request.getfixturevalue(engine))


async def acquired(leases: Leases, seconds: float = 5.0, name: str = NAME) -> Fence:
    fence = await leases.acquire(name, seconds)
    assert fence is not None
    return fence


async def test_lease_has_one_holder_and_others_get_none(rig: Opened) -> None:
    async with rig as (one, two, _):
        await acquired(one)
        assert await two.acquire(NAME, 5.0) is None
        assert await one.acquire(NAME, 5.0) is None, "nor does the holder get it twice"
        await acquired(two, name="another lease")


async def test_lease_that_ended_is_free_and_the_fence_rises(rig: Opened) -> None:
    async with rig as (one, two, pass_time):
        first = await acquired(one)
        await pass_time(4.9)
        assert await two.acquire(NAME, 5.0) is None
        await pass_time(0.2)
        second = await acquired(two)
        assert second > first
        assert not await one.renew(NAME, first, 5.0)
        await one.release(NAME, first)
        assert await two.renew(NAME, second, 5.0), "an old holder's release changes nothing"


async def test_renewal_counts_from_its_own_moment(rig: Opened) -> None:
    async with rig as (one, two, pass_time):
        fence = await acquired(one)
        for _ in range(3):
            await pass_time(4.0)
            assert await one.renew(NAME, fence, 5.0)
            assert await two.acquire(NAME, 5.0) is None
        await pass_time(5.1)
        assert (await acquired(two)) > fence


async def test_lease_that_ended_is_not_renewed_even_if_nobody_took_it(rig: Opened) -> None:
    async with rig as (one, _, pass_time):
        fence = await acquired(one)
        await pass_time(5.1)
        assert not await one.renew(NAME, fence, 5.0)
        assert (await acquired(one)) > fence


async def test_released_lease_is_free_at_once_and_the_fence_still_rises(rig: Opened) -> None:
    async with rig as (one, two, _):
        first = await acquired(one)
        for _ in range(2):
            await one.release(NAME, first)
        assert not await one.renew(NAME, first, 5.0)
        assert (await acquired(two)) > first


async def test_of_many_who_ask_together_one_gets_it(rig: Opened) -> None:
    async with rig as (one, two, pass_time):
        fences: list[Fence] = []
        for _ in range(5):
            asked = await asyncio.gather(
                *(leases.acquire(NAME, 5.0) for leases in (one, two) for _ in range(5))
            )
            fences += [fence for fence in asked if fence is not None]
            await pass_time(5.1)
        assert len(fences) == 5
        assert fences == sorted(set(fences))


async def set_base(server: Server, base: int) -> None:
    await without_triggers(server.url, f"UPDATE holdfast_chats.cluster SET epoch_base = {base}")


class TestPostgres:
    """What only an engine with an epoch base can show."""

    async def test_raised_base_ends_a_lease_that_is_held_and_the_fence_rises(
        self, postgres_server: Server
    ) -> None:
        async with postgres(postgres_server) as (one, _, pass_time):
            fence = await acquired(one)
            try:
                await set_base(postgres_server, 7)
                assert not await one.renew(NAME, fence, 5.0)
                await pass_time(5.1)
                assert await acquired(one) == Fence(7, fence.number + 1)
            finally:
                await set_base(postgres_server, 0)

    async def test_row_names_the_holder(self, postgres_server: Server) -> None:
        async with postgres(postgres_server) as (_, two, _):
            await acquired(two)
            connection = await asyncpg.connect(postgres_server.url)
            row = await connection.fetchrow("SELECT name, holder FROM holdfast_chats.lease")
            await connection.close()
            assert tuple(row) == (NAME, "two")
