"""What every registry promises, at times that the test chooses. A new adapter is one
more rig.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple

import pytest
from cluster_database import another_node, first_node
from redis.asyncio import Redis
from registry_rig import DEVICES_MAX, connect, device, disconnect
from scripted_durability import ANNA, BELA, CLEO

from engines import Server
from holdfast.clock import ManualClock
from holdfast.errors import HoldfastError
from holdfast.fanout.registry.contract import LIVE_SECONDS, Displacement, Registry
from holdfast.fanout.registry.memory import MemoryRegistry
from holdfast.fanout.registry.postgres import PostgresRegistry
from holdfast.fanout.registry.redis import RedisRegistry
from holdfast.message import User

PREFIXES = itertools.count()


class WallClock(ManualClock):
    """The registry's clock, which an operator may set."""

    def step(self, seconds: float) -> None:
        self._start += seconds

    def now_us(self) -> int:
        return int(self.now() * 1_000_000)


class Rig(NamedTuple):
    """One registry as two gateways reach it; east has users when west has none."""

    east: Registry
    west: Registry
    clock: WallClock


@asynccontextmanager
async def memory(_server: Server | None) -> AsyncIterator[Rig]:
    clock = WallClock()
    registry = MemoryRegistry(clock)
    yield Rig(registry, registry, clock)


@asynccontextmanager
async def redis(server: Server | None) -> AsyncIterator[Rig]:
    assert server is not None
    clock, prefix = WallClock(), f"registry-{next(PREFIXES)}:"
    east, west = (RedisRegistry(server.url, prefix=prefix, clock_us=clock.now_us) for _ in range(2))
    yield Rig(east, west, clock)
    await east.close()
    await west.close()


@asynccontextmanager
async def postgres(server: Server | None) -> AsyncIterator[Rig]:
    assert server is not None
    clock = WallClock()
    async with first_node(server.url) as first, another_node(server.url) as second:
        east, west = [await PostgresRegistry.open(each, clock.now_us) for each in (first, second)]
        yield Rig(east, west, clock)


Open = Callable[[Server | None], AbstractAsyncContextManager[Rig]]
RIGS: dict[str, tuple[Open, str | None]] = {
    "memory": (memory, None),
    "redis": (redis, "redis_server"),
    "postgres": (postgres, "postgres_server"),
}


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Rig]:
    opened, engine = RIGS[request.param]
    return opened(None if engine is None else request.getfixturevalue(engine))


Opened = AbstractAsyncContextManager[Rig]


async def test_nobody_is_online_at_first(rig: Opened) -> None:
    async with rig as (east, west, _):
        assert await east.gateways_of([ANNA]) == {}
        assert await west.connections_of("west") == []
        assert await west.sweep() == {}


async def test_a_user_is_found_at_each_of_its_gateways(rig: Opened) -> None:
    async with rig as (east, west, _):
        await connect(east, "east", ANNA, BELA)
        await connect(west, "west", ANNA)
        found = await west.gateways_of([ANNA, BELA, CLEO])
        assert found == {"east": {ANNA, BELA}, "west": {ANNA}}
        assert await east.gateways_of(frozenset({BELA})) == {"east": {BELA}}
        assert await east.gateways_of([]) == {}
        assert await east.gateways_of([User("other", ANNA.user_id)]) == {}
        await disconnect(east, "east", ANNA)
        assert found == {"east": {ANNA, BELA}, "west": {ANNA}}, "an answer does not change"


async def test_first_connection_anywhere_is_online_and_the_last_one_offline(rig: Opened) -> None:
    async with rig as (east, west, clock):
        first = await connect(east, "east", ANNA)
        assert list(first.online) == [ANNA]
        assert first.online[ANNA] >= clock.now_us()
        assert (await connect(west, "west", ANNA)).online == {}
        phone = device(ANNA, "east", "of east")
        assert await east.unregister("east", [phone, phone]) == {}
        gone = await west.unregister("west", [device(ANNA, "west", "of west")])
        assert list(gone) == [ANNA]
        assert gone[ANNA] > first.online[ANNA]
        again = await west.unregister("west", [device(ANNA, "west", "of west")])
        assert list(again) == [ANNA], "also if the first answer was lost"
        assert await east.gateways_of([ANNA]) == {}


async def test_newer_connection_of_a_device_displaces_the_older_one(rig: Opened) -> None:
    async with rig as (east, west, _):
        await east.register("east", [device(ANNA, "east")], DEVICES_MAX)
        moved = await west.register("west", [device(ANNA, "west")], DEVICES_MAX)
        assert moved.displaced == [Displacement("east", "east:anna:phone")]
        assert moved.online == {}
        assert await east.gateways_of([ANNA]) == {"west": {ANNA}}
        for _ in range(2):  # listed until the gateway has closed it
            assert (await east.renew("east")).displaced == ["east:anna:phone"]
        assert await east.unregister("east", [device(ANNA, "east")]) == {}
        assert (await east.renew("east")).displaced == []
        assert await east.gateways_of([ANNA]) == {"west": {ANNA}}


async def test_device_more_than_the_bound_displaces_the_oldest(rig: Opened) -> None:
    async with rig as (east, west, _):
        for n in range(3):
            await east.register("east", [device(ANNA, "east", f"device {n}")], 3)
        made = await west.register(
            "west", [device(ANNA, "west", "device 3"), device(BELA, "west", "device 3")], 3
        )
        assert made.displaced == [Displacement("east", "east:anna:device 0")]
        held = {each.device_id for each in await east.connections_of("east")}
        assert held == {"device 1", "device 2"}


async def test_time_of_a_connection_rises_although_the_clock_goes_back(rig: Opened) -> None:
    async with rig as (east, west, clock):
        first = await east.register("east", [device(ANNA, "east")], DEVICES_MAX)
        clock.step(-3600)
        second = await west.register("west", [device(ANNA, "west")], DEVICES_MAX)
        assert second.since["west:anna:phone"] > first.since["east:anna:phone"]
        assert second.displaced == [Displacement("east", "east:anna:phone")]


async def test_time_is_above_all_that_the_node_was_given_before_a_flush(rig: Opened) -> None:
    async with rig as (east, west, clock):
        first = await east.register("east", [device(ANNA, "east")], DEVICES_MAX)
        await west.leave("east")
        clock.step(-3600)
        renewal = await east.renew("east")
        second = await east.register("east", [device(BELA, "east")], DEVICES_MAX)
        assert second.since["east:bela:phone"] > renewal.at > first.since["east:anna:phone"]


async def test_connection_registered_again_keeps_its_time_and_the_newer_one_wins(
    rig: Opened,
) -> None:
    async with rig as (east, west, clock):
        old = device(ANNA, "east")
        since = (await east.register("east", [old], DEVICES_MAX)).since[old.connection_id]
        clock.advance(1)
        again = await east.register("east", [old._replace(since=since)], DEVICES_MAX)
        assert again.since == {old.connection_id: since}
        assert (again.displaced, again.online) == ([], {})
        assert await east.connections_of("east") == [old._replace(since=since)]

        new = device(ANNA, "west")
        await west.leave("east")  # as a flush does
        await west.register("west", [new], DEVICES_MAX)
        late = await east.register("east", [old._replace(since=since)], DEVICES_MAX)
        assert late.displaced == [Displacement("east", old.connection_id)]
        assert await east.gateways_of([ANNA]) == {"west": {ANNA}}
        assert (await east.renew("east")).displaced == [old.connection_id]


async def test_registration_that_was_under_way_for_long_displaces_no_newer_connection(
    rig: Opened,
) -> None:
    async with rig as (east, west, clock):
        old = device(ANNA, "east", opened=clock.now_us())
        clock.advance(1)
        new = device(ANNA, "west", opened=clock.now_us())
        clock.advance(1)
        made = await west.register("west", [new], DEVICES_MAX)
        assert made.since == {new.connection_id: new.opened}
        clock.advance(1)
        late = await east.register("east", [old], DEVICES_MAX)
        assert late.since == {old.connection_id: old.opened}
        assert late.displaced == [Displacement("east", old.connection_id)]
        assert await east.gateways_of([ANNA]) == {"west": {ANNA}}
        assert (await east.renew("east")).displaced == [old.connection_id]


@pytest.mark.parametrize("behind", ["the registry", "the node"])
async def test_newer_connection_wins_although_a_clock_has_gone_back(
    rig: Opened, behind: str
) -> None:
    async with rig as (east, west, clock):
        await east.register("east", [device(ANNA, "east", opened=clock.now_us())], DEVICES_MAX)
        clock.step(-3600)
        opened = clock.now_us() + (3_600_000_000 if behind == "the registry" else -1)
        moved = await west.register("west", [device(ANNA, "west", opened=opened)], DEVICES_MAX)
        assert moved.displaced == [Displacement("east", "east:anna:phone")]


async def test_bound_keeps_the_newest_devices_when_an_old_one_is_registered_again(
    rig: Opened,
) -> None:
    async with rig as (east, west, _):
        old = device(ANNA, "east", "old")
        since = (await east.register("east", [old], 2)).since[old.connection_id]
        await west.leave("east")
        await west.register("west", [device(ANNA, "west", "a"), device(ANNA, "west", "b")], 2)
        late = await east.register("east", [old._replace(since=since)], 2)
        assert late.displaced == [Displacement("east", old.connection_id)]
        assert await east.gateways_of([ANNA]) == {"west": {ANNA}}


async def test_changes_are_counted_so_that_a_loss_shows(rig: Opened) -> None:
    async with rig as (east, west, _):
        assert (await east.renew("east")).changes == 0
        await connect(east, "east", ANNA)
        await disconnect(east, "east", ANNA)
        await connect(west, "west", ANNA)
        assert (await east.renew("east")).changes == 2
        await east.leave("east")
        assert (await east.renew("east")).changes == 0


async def test_gateway_that_does_not_renew_is_swept_and_the_others_are_not(rig: Opened) -> None:
    async with rig as (east, west, clock):
        await connect(east, "east", ANNA, BELA)
        await connect(west, "west", BELA)
        assert (await west.renew("west")).gateways == 2
        clock.advance(LIVE_SECONDS - 0.1)
        assert await west.sweep() == {}
        await west.renew("west")
        clock.advance(0.2)
        assert await west.gateways_of([ANNA]) == {"east": {ANNA}}, "until it is swept"
        gone = await west.sweep()
        assert list(gone) == [ANNA]
        assert await west.gateways_of([ANNA, BELA]) == {"west": {BELA}}
        assert await west.sweep() == {}
        answer = await east.renew("east")
        assert (answer.changes, answer.gateways) == (0, 2), "it was paused, and compares"


async def test_clock_that_went_back_delays_a_sweep_by_no_more_than_a_life(rig: Opened) -> None:
    async with rig as (east, west, clock):
        await connect(east, "east", ANNA)
        clock.step(-3600)
        await west.sweep()
        clock.advance(LIVE_SECONDS)
        assert list(await west.sweep()) == [ANNA]


async def test_everything_of_a_large_gateway_is_listed_and_removed(rig: Opened) -> None:
    users = [User("default", f"user-{n}") for n in range(1_200)]
    async with rig as (east, west, _):
        for start in range(0, len(users), 400):
            await connect(east, "east", *users[start : start + 400])
        assert {each.user for each in await east.connections_of("east")} == set(users)
        assert await west.gateways_of(users) == {"east": set(users)}
        assert set(await west.leave("east")) == set(users)
        assert await west.gateways_of(users) == {}
        assert await west.connections_of("east") == []


async def test_names_are_not_confused_whatever_they_contain(rig: Opened) -> None:
    async with rig as (east, _, _):
        users = [User("a", "b c"), User("a b", "c"), User("a:b", "c"), User("ä", "{}[]'\"\\")]
        for user in users:
            await connect(east, "east:0", user)
            assert await east.gateways_of([user]) == {"east:0": {user}}
        assert await east.gateways_of(users) == {"east:0": set(users)}


class TestRedis:
    """What can happen to keys in a Redis that others use too."""

    @pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x93\xa1a\xa1b\xa1c", b"\x01"])
    async def test_garbage_under_a_users_key_is_removed_and_stops_nobody(
        self, redis_server: Server, garbage: bytes
    ) -> None:
        async with redis(redis_server) as (east, _, _), Redis.from_url(redis_server.url) as client:
            assert isinstance(east, RedisRegistry)
            key = f"{east._prefix}devices:{ANNA.tenant}\0{ANNA.user_id}"
            await client.hset(key, "phone", garbage)
            assert await east.gateways_of([ANNA]) == {}
            await client.set(key, garbage)
            assert list((await connect(east, "east", ANNA, BELA)).online) == [ANNA, BELA]
            assert await east.gateways_of([ANNA, BELA]) == {"east": {ANNA, BELA}}

    async def test_key_of_another_type_is_a_named_failure(self, redis_server: Server) -> None:
        async with redis(redis_server) as (east, _, _), Redis.from_url(redis_server.url) as client:
            assert isinstance(east, RedisRegistry)
            await client.set(f"{east._prefix}renewed", "garbage")
            with pytest.raises(HoldfastError):
                await connect(east, "east", ANNA)
            assert east.trouble is not None
            assert east.trouble[0] in ("wrong_type", "script")
            await client.delete(f"{east._prefix}renewed")
            await connect(east, "east", ANNA)
