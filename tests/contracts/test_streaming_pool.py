"""One suite for all pools, at times that the test chooses."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple
from zlib import crc32

import pytest
import redis.asyncio

from engines import Missing, Server
from engines import redis as redis_engine
from holdfast.clock import ManualClock
from holdfast.errors import BadSetting, Unavailable
from holdfast.streaming.pool.contract import (
    PASSED_OVER_MAX,
    Admit,
    Admitted,
    CancelElsewhere,
    Confirm,
    Locate,
    Move,
    NodeBeat,
    Pool,
    PoolAnswer,
    PoolRequest,
    PoolSizes,
    PoolView,
    QueueBounds,
    Release,
    pool_state,
)
from holdfast.streaming.pool.memory import MemoryPool
from holdfast.streaming.pool.redis import RedisPool

SIZES = PoolSizes(3, {"own": 1})
BOUNDS = QueueBounds(waiting_max=6, waiting_per_tenant=5, waiting_per_user=4)
LEASED = Admitted(True)
PREFIXES = itertools.count()


class Rig(NamedTuple):
    """A pool with node ``a``, the test's clock, and the wake-ups of its listeners."""

    pool: Pool
    clock: ManualClock
    granted: list[str]
    cancelled: list[str]

    async def admit(self, reply_id: str, user: str = "u", **other: object) -> PoolAnswer:
        fields = {"tenant": "t", "user_limit": 0, **other}
        node = str(fields.pop("node", "a"))
        request = PoolRequest(reply_id, user=user, **fields)  # type: ignore[arg-type]
        return (await self.pool.call(node, [Admit(request)]))[0]

    async def fill(self, count: int = 3) -> list[str]:
        """Leases for others: ``filler0`` and so on."""
        ids = [f"filler{n}" for n in range(count)]
        for each in ids:
            assert await self.admit(each, user="filler", tenant="filler") == LEASED
        return ids

    async def release(self, *reply_ids: str, node: str = "a") -> list[PoolAnswer]:
        return list(await self.pool.call(node, [Release(each) for each in reply_ids]))

    async def confirm(self, reply_id: str, node: str = "a") -> PoolAnswer:
        return (await self.pool.call(node, [Confirm(reply_id)]))[0]

    async def beat(self, node: str = "a", **fields: object) -> PoolView:
        return await self.pool.beat(node, NodeBeat(0, 0, 0, 0)._replace(**fields))

    async def pass_time(self, seconds: float, *nodes: str) -> None:
        """In steps of a second, with a heartbeat of each of the nodes."""
        while seconds > 0:
            self.clock.advance(min(1.0, seconds))
            seconds -= 1.0
            for node in nodes:
                await self.beat(node)


OpenRig = Callable[[], AbstractAsyncContextManager[Rig]]


@asynccontextmanager
async def opened(pool: Pool, clock: ManualClock) -> AsyncIterator[Rig]:
    rig = Rig(pool, clock, [], [])
    pool.listen("a", rig.granted.append, rig.cancelled.append)
    await rig.beat()
    await rig.pass_time(3, "a")  # a pool that is new waits for its nodes
    try:
        yield rig
    finally:
        await pool.close()


@pytest.fixture(params=["memory", "redis"])
def rigs(request: pytest.FixtureRequest) -> OpenRig:
    """Opens an empty pool of one kind."""
    clock = ManualClock()
    if request.param == "memory":
        return lambda: opened(MemoryPool(SIZES, BOUNDS, clock), clock)
    url = request.getfixturevalue("redis_server").url
    return lambda: opened(redis_pool(url, clock), clock)


def redis_pool(url: str, clock: ManualClock) -> RedisPool:
    prefix = f"contract{next(PREFIXES)}:"
    return RedisPool(url, SIZES, BOUNDS, prefix=prefix, clock_ms=lambda: round(clock.now() * 1000))


@pytest.mark.covers("002 layer 2: 3 connections per user, 10,000 in all")
@pytest.mark.covers("002 UserConnectionLimitError leads to the queue")
async def test_request_runs_while_there_is_room_and_then_waits(rigs: OpenRig) -> None:
    async with rigs() as rig:
        await rig.fill()
        assert await rig.admit("r1") == Admitted(False, 1)
        assert await rig.admit("r2") == Admitted(False, 2)
        view = await rig.beat(positions_of=["r1", "r2", "unknown", "filler0"])
        assert (view.active, view.waiting) == ({"default": 3}, {"default": 2})
        assert view.positions == {"r1": 1, "r2": 2}


@pytest.mark.covers("002 requests are rejected even if capacity frees up soon")
async def test_release_grants_the_next_and_confirm_makes_it_a_lease(rigs: OpenRig) -> None:
    async with rigs() as rig:
        await rig.fill()
        await rig.admit("r1")
        assert await rig.confirm("r1") is False
        assert await rig.release("filler0", "filler0", "unknown") == [True, False, False]
        assert (await rig.beat()).granted == ["r1"]
        assert await rig.confirm("r1", node="b") is False
        assert [await rig.confirm("r1"), await rig.confirm("r1")] == [True, True]
        assert (await rig.beat()).granted == []


@pytest.mark.covers("002 Redis Client")
async def test_grant_wakes_its_node(rigs: OpenRig) -> None:
    async with rigs() as rig:
        await rig.fill()
        await rig.admit("r1")
        async with asyncio.timeout(5):
            while not rig.granted:  # a subscription may begin late: ask again
                await rig.release("filler0")
                await asyncio.sleep(0.01)
                if not rig.granted:
                    await rig.release("r1")
                    await rig.admit("filler0")
                    await rig.admit("r1")
        assert rig.granted == ["r1"]


@pytest.mark.covers("002 higher limits: rejected")
async def test_user_limit_counts_over_all_pools_and_the_newest_holds(rigs: OpenRig) -> None:
    async with rigs() as rig:
        assert await rig.admit("r1", user_limit=1, pool="own") == LEASED
        assert await rig.admit("r2", user_limit=1) == Admitted(False, 1)
        assert await rig.admit("r3", user_limit=3) == Admitted(False, 2)
        assert (await rig.beat()).granted == ["r2", "r3"]


async def test_full_pool_of_a_provider_delays_nobody_else(rigs: OpenRig) -> None:
    async with rigs() as rig:
        assert await rig.admit("r1", pool="own") == LEASED
        assert await rig.admit("r2", pool="own") == Admitted(False, 1)
        assert await rig.admit("r3") == LEASED
        assert await rig.admit("r4", user="v") == LEASED
        await rig.release("r1")
        assert (await rig.beat()).granted == ["r2"]


async def test_queue_refuses_by_user_tenant_and_length(rigs: OpenRig) -> None:
    async with rigs() as rig:
        await rig.fill()
        for n in range(4):
            await rig.admit(f"u{n}")
        assert await rig.admit("u4") == Admitted(False, full="user")
        assert await rig.admit("u4", waiting_max=2) == Admitted(False, full="user")
        await rig.admit("v0", user="v")
        assert await rig.admit("v1", user="v") == Admitted(False, full="tenant")
        await rig.admit("w0", user="w", tenant="another")
        assert await rig.admit("x0", user="x", tenant="x") == Admitted(False, full="queue")
        uncapped = await rig.admit("u5", capped=False)
        assert isinstance(uncapped, Admitted) and uncapped.full is None and uncapped.position
        assert await rig.admit("u6", waiting_max=9) == Admitted(False, full="tenant")


async def test_admission_may_be_repeated(rigs: OpenRig) -> None:
    async with rigs() as rig:
        await rig.fill(2)
        assert [await rig.admit("r1"), await rig.admit("r1")] == [LEASED, LEASED]
        assert [await rig.admit("r2"), await rig.admit("r2")] == [Admitted(False, 1)] * 2
        assert (await rig.beat()).waiting == {"default": 1}


@pytest.mark.covers("002 layer 3: distributed queue failover")
@pytest.mark.covers("002 the handler queues the job to a Redis Stream")
@pytest.mark.covers("002 existing infrastructure is used")
@pytest.mark.covers("002 a queue in memory: rejected")
async def test_turns_go_around_tenants_and_then_users(rigs: OpenRig) -> None:
    async with rigs() as rig:
        await rig.fill()
        for reply_id, tenant, user in (
            ("x1", "x", "u"), ("x2", "x", "u"), ("x3", "x", "v"), ("y1", "y", "u")
        ):  # fmt: skip
            await rig.admit(reply_id, tenant=tenant, user=user)
        order = []
        last = "filler0"
        for _ in range(4):
            await rig.release(last)
            (last,) = (await rig.beat()).granted
            assert await rig.confirm(last)
            order.append(last)
        assert order == ["x1", "y1", "x3", "x2"]


async def test_unconfirmed_grant_returns_to_the_head_of_its_list(rigs: OpenRig) -> None:
    async with rigs() as rig:
        await rig.fill()
        for reply_id in ("r1", "r2"):
            await rig.admit(reply_id)
        await rig.admit("other", user="v")
        await rig.release("filler0")
        assert (await rig.beat()).granted == ["r1"]
        rig.clock.advance(1.999)
        await rig.beat("b")
        assert (await rig.beat()).granted == ["r1"]
        rig.clock.advance(0.001)
        assert await rig.confirm("r1") is False, "too late"
        await rig.beat("b")
        assert (await rig.beat()).granted == ["other"], "the user went to the tail of the ring"
        assert await rig.confirm("other")
        await rig.release("filler1")
        assert (await rig.beat()).granted == ["r1"], "it kept its place in its list"


async def test_user_of_a_late_grant_goes_to_the_tail_of_its_ring(rigs: OpenRig) -> None:
    async with rigs() as rig:
        await rig.fill()
        for user in ("u", "w"):
            for n in range(2):
                await rig.admit(f"{user}{n}", user=user)
        await rig.release("filler0", "filler1")
        assert (await rig.beat()).granted == ["u0", "w0"]
        assert await rig.confirm("w0")
        rig.clock.advance(2)
        assert (await rig.beat()).granted == ["w1"]


async def test_node_that_let_a_grant_expire_gets_none_until_its_heartbeat(rigs: OpenRig) -> None:
    async with rigs() as rig:
        await rig.fill()
        await rig.admit("r1")
        await rig.admit("b1", user="v", node="b")
        await rig.release("filler0")
        rig.clock.advance(2.0)
        assert (await rig.beat("b")).granted == ["b1"]
        assert await rig.confirm("b1", node="b")
        await rig.release("filler1", node="a")
        assert (await rig.pool.call("b", [Locate("r1")])) == ["a"]
        assert (await rig.beat("b")).waiting == {"default": 1}
        assert (await rig.beat("a")).granted == ["r1"]


async def test_node_without_a_fresh_heartbeat_gets_no_grants(rigs: OpenRig) -> None:
    async with rigs() as rig:
        await rig.fill()
        await rig.admit("b1", node="b")
        rig.clock.advance(2.501)
        await rig.release("filler0")
        assert (await rig.beat("a")).active == {"default": 2}
        assert (await rig.beat("b")).granted == ["b1"]


async def test_what_is_passed_over_keeps_its_place_and_delays_16_a_call(rigs: OpenRig) -> None:
    async with rigs() as rig:
        await rig.fill()
        beyond = PASSED_OVER_MAX + 1
        for n in range(beyond):
            await rig.admit(f"b{n:02}", node="b", capped=False)
        await rig.admit("a1", capped=False)
        rig.clock.advance(2.6)
        await rig.beat("a")
        await rig.release("filler0")
        assert (await rig.beat("a")).granted == ["a1"], "the second call passed over the rest"
        assert await rig.confirm("a1")
        await rig.admit("a2", capped=False)
        granted = [(await rig.beat("b")).granted]
        for lease in ("filler1", "filler2", "a1"):
            await rig.release(lease)
            granted.append((await rig.beat("b")).granted)
        assert granted == [[], ["b00"], ["b00", "b01"], ["b00", "b01", "b02"]]


async def test_dead_node_loses_its_ids_after_ten_seconds(rigs: OpenRig) -> None:
    async with rigs() as rig:
        for n in range(3):
            assert await rig.admit(f"b{n}", node="b") == LEASED
        await rig.admit("b3", node="b")
        await rig.admit("a1", user="v")
        await rig.pass_time(10, "a")
        view = await rig.beat("a")
        assert (list(view.nodes), view.granted) == (["a", "b"], [])
        rig.clock.advance(0.001)
        view = await rig.beat("a")
        assert (list(view.nodes), view.granted, view.waiting) == (["a"], ["a1"], {})
        assert await rig.pool.call("a", [Locate("b0")]) == [""]


async def test_after_silence_nobody_is_dead_for_ten_seconds(rigs: OpenRig) -> None:
    async with rigs() as rig:
        await rig.admit("b1", node="b")
        rig.clock.advance(20)
        assert list((await rig.beat("a")).nodes) == ["a", "b"]
        await rig.pass_time(9, "a")
        assert list((await rig.beat("a")).nodes) == ["a", "b"]
        await rig.pass_time(2, "a")
        assert list((await rig.beat("a")).nodes) == ["a"]


async def test_heartbeat_says_whether_the_pool_has_the_same_ids(rigs: OpenRig) -> None:
    async with rigs() as rig:
        await rig.fill()
        await rig.admit("r1")
        leases = sum(crc32(f"filler{n}".encode()) for n in range(3))
        true = NodeBeat(3, leases, 1, crc32(b"r1"))
        assert (await rig.pool.beat("a", true)).same
        assert not (await rig.pool.beat("a", true._replace(leases_sum=leases + 1))).same
        assert not (await rig.pool.beat("a", true._replace(waiting=0))).same
        await rig.release("filler2")
        true = NodeBeat(2, leases - crc32(b"filler2"), 1, crc32(b"r1"))
        view = await rig.pool.beat("a", true)
        assert view.same and view.granted == ["r1"], "a grant counts as waiting"
        assert (await rig.pool.beat("b", NodeBeat(0, 0, 0, 0))).same


async def test_announcement_replaces_what_the_pool_has(rigs: OpenRig) -> None:
    async with rigs() as rig:
        await rig.fill()
        for reply_id in ("r1", "r2"):
            await rig.admit(reply_id)
        kept, lost = PoolRequest("filler0", "filler", "filler", 0), PoolRequest("x", "t", "u", 0)
        demoted = PoolRequest("filler1", "filler", "filler", 0)
        promoted, new = PoolRequest("r2", "t", "u", 0), PoolRequest("r3", "t", "v", 0)
        view = await rig.pool.announce("a", [kept, promoted, lost], [demoted, new])
        assert view.same and view.granted == ["filler1"]
        assert (view.active, view.waiting) == ({"default": 4}, {"default": 1})
        assert await rig.pool.call("a", [Locate("r1"), Locate("filler2")]) == ["", ""]
        assert await rig.confirm("x") is True
        await rig.release("x", "filler0")
        assert (await rig.beat()).granted == ["filler1", "r3"], "active is below the total"


async def test_announced_ids_of_another_node_stay_there(rigs: OpenRig) -> None:
    async with rigs() as rig:
        await rig.admit("r1")
        request = PoolRequest("r1", "t", "u", 0)
        for lists in (([request], []), ([], [request])):
            await rig.pool.announce("b", *lists)
            assert await rig.pool.call("a", [Locate("r1")]) == ["a"]
        assert (await rig.pool.beat("a", NodeBeat(1, crc32(b"r1"), 0, 0))).same
        assert await rig.admit("r1", node="b") == LEASED
        assert await rig.pool.call("a", [Locate("r1"), Release("r1")]) == ["b", False]


async def test_move_waits_at_the_head_for_another_pool(rigs: OpenRig) -> None:
    async with rigs() as rig:
        assert await rig.admit("own", pool="own") == LEASED
        assert await rig.admit("r1") == LEASED
        await rig.admit("r2", pool="own")
        assert await rig.pool.call("a", [Move("r1", "default")]) == [LEASED]
        moved = await rig.pool.call("a", [Move("r1", "own"), Move("unknown", "own")])
        assert moved == [Admitted(False, 1), Admitted(False)]
        await rig.release("own")
        assert (await rig.beat()).granted == ["r1"]
        assert await rig.pool.call("a", [Confirm("r1"), Move("r1", "default")]) == [True, LEASED]
        assert (await rig.beat()).granted == ["r2"], "moving released the old lease"


async def test_cancel_reaches_the_node_until_it_released_the_reply(rigs: OpenRig) -> None:
    async with rigs() as rig:
        await rig.admit("r1")
        cancel = CancelElsewhere("r1", "a")
        asked = await rig.pool.call("b", [cancel, CancelElsewhere("r1", "b"), Locate("r1")])
        assert asked == [True, False, "a"]
        assert [list((await rig.beat()).cancels) for _ in range(2)] == [["r1"], ["r1"]]
        async with asyncio.timeout(5):
            while not rig.cancelled:
                await rig.pool.call("b", [cancel])
                await asyncio.sleep(0.01)
        await rig.release("r1")
        assert list((await rig.beat()).cancels) == []
        assert await rig.pool.call("b", [cancel]) == [False]
        assert set(rig.cancelled) == {"r1"} and not rig.granted


async def test_readers_elsewhere_count_for_three_seconds(rigs: OpenRig) -> None:
    async with rigs() as rig:
        await rig.beat("b", reading={"r1": "a", "r2": "nobody"})
        rig.clock.advance(2)
        await rig.beat("b", reading={"r2": "a"})
        assert list((await rig.beat("a")).read_elsewhere) == ["r1", "r2"]
        rig.clock.advance(1.5)
        assert list((await rig.beat("a")).read_elsewhere) == ["r2"]
        assert list((await rig.beat("b")).read_elsewhere) == []


async def test_node_that_leaves_frees_its_ids_at_once(rigs: OpenRig) -> None:
    async with rigs() as rig:
        await rig.fill()
        await rig.admit("b1", node="b")
        await rig.beat("b")
        await rig.pool.leave("a")
        view = await rig.beat("b")
        assert (view.granted, list(view.nodes)) == (["b1"], ["b"])
        assert view.active == {"default": 1}


async def test_rate_of_grants_is_known_from_five_in_thirty_seconds_on(rigs: OpenRig) -> None:
    async with rigs() as rig:
        last = (await rig.fill())[0]
        rates = []
        for n in range(5):
            await rig.admit(f"r{n}")
            await rig.release(last)
            last = f"r{n}"
            rates.append((await rig.beat()).grants_per_second)
            await rig.confirm(last)
        assert rates[:4] == [0.0] * 4 and 5 / 30 <= rates[4] <= 5 / 25
        await rig.pass_time(30, "a")
        assert (await rig.beat()).grants_per_second == 0.0


@pytest.mark.parametrize("step_seconds", [3600.0, -3600.0])
async def test_step_of_the_clock_frees_nothing_and_stops_nothing(
    rigs: OpenRig, step_seconds: float
) -> None:
    async with rigs() as rig:
        await rig.fill(2)
        await rig.admit("b1", node="b")
        await rig.admit("a1", user="v")
        await rig.beat("b")
        rig.clock.advance(step_seconds)
        for _ in range(3):
            await rig.pass_time(1, "a", "b")
        view = await rig.beat("a")
        assert (list(view.nodes), view.active) == (["a", "b"], {"default": 3})
        await rig.release("filler0")
        assert (await rig.beat("a")).granted == ["a1"]
        await rig.pass_time(2, "b")
        assert await rig.confirm("a1") is False, "grants expire as before"
        await rig.pass_time(11, "a")
        assert list((await rig.beat("a")).nodes) == ["a"], "nodes die as before"


def test_state_of_a_pool_by_how_full_it_is() -> None:
    states = [pool_state(active, 100) for active in (0, 69, 70, 89, 90, 99, 100, 180)]
    assert states == [
        "healthy", "healthy", "degraded", "degraded", "critical", "critical",
        "exhausted", "exhausted",
    ]  # fmt: skip


class TestRedis:
    """What only Redis can show."""

    async def test_new_pool_grants_nothing_for_three_seconds(self, redis_server: Server) -> None:
        clock = ManualClock()
        pool = redis_pool(redis_server.url, clock)
        rig = Rig(pool, clock, [], [])
        assert await rig.admit("r1") == Admitted(False, 1)
        first = await rig.beat()
        await rig.pass_time(2.999, "a")
        assert (await rig.beat()).granted == []
        rig.clock.advance(0.001)
        assert (await rig.beat()).granted == ["r1"]
        client = redis.asyncio.Redis.from_url(redis_server.url)
        await client.flushall()
        await client.aclose()
        view = await rig.beat(waiting=1)
        assert view.pool_id != first.pool_id and not view.same and not view.granted
        await pool.close()

    @pytest.mark.covers("002 the handler subscribes to `queue:results:{request_id}`")
    @pytest.mark.covers("002 the handler unsubscribes on `SIGNAL:DONE`")
    async def test_channel_carries_the_documents_address(self, redis_server: Server) -> None:
        clock = ManualClock()
        pool = redis_pool(redis_server.url, clock)
        client = redis.asyncio.Redis.from_url(redis_server.url)
        async with client.pubsub() as subscription, opened(pool, clock) as rig:
            await subscription.subscribe(f"{pool._prefix}wake:a")
            assert await subscription.get_message(timeout=5)
            await rig.fill()
            await rig.admit("r1")
            await rig.release("filler0")
            await pool.call("b", [CancelElsewhere("r1", "a")])
            messages = [await subscription.get_message(timeout=5) for _ in range(2)]
            assert [message and message["data"] for message in messages] == [
                b"queue:results:r1 SIGNAL:DONE", b"queue:results:r1 SIGNAL:CANCEL"
            ]  # fmt: skip
        await client.aclose()

    async def test_defect_of_a_listener_does_not_end_the_wake_ups(
        self, redis_server: Server
    ) -> None:
        clock, heard = ManualClock(), list[str]()
        pool = redis_pool(redis_server.url, clock)

        def on_cancel(reply_id: str) -> None:
            heard.append(reply_id)
            raise RuntimeError("a defect")

        async with opened(pool, clock) as rig:
            await rig.fill()
            pool.listen("a", rig.granted.append, on_cancel)
            async with asyncio.timeout(5):
                while len(heard) < 2:
                    await pool.call("b", [CancelElsewhere("filler0", "a")])
                    await asyncio.sleep(0.01)

    async def test_every_key_has_the_prefix_and_none_is_left(self, redis_server: Server) -> None:
        clock = ManualClock()
        pool = redis_pool(redis_server.url, clock)
        client = redis.asyncio.Redis.from_url(redis_server.url)
        await client.flushall()
        async with opened(pool, clock) as rig:
            await rig.fill()
            for n in range(3):
                await rig.admit(f"r{n}", user="someone@example.org", node="b")
            await rig.beat("a", reading={"r1": "b"})
            await pool.call("a", [CancelElsewhere("r1", "b")])
            keys = await client.keys("*")
            assert keys and all(key.startswith(pool._prefix.encode()) for key in keys)
            assert not any(b"example" in key for key in keys)
            for node in ("a", "b"):
                await pool.leave(node)
            assert await client.keys("*") == [f"{pool._prefix}pool:state".encode()]
        await client.aclose()

    async def test_redis_that_evicts_is_refused(self) -> None:
        server = redis_engine.start(**{"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"})
        try:
            with pytest.raises(BadSetting, match=r"cluster\.redis: .*noeviction"):
                await RedisPool(server.url, SIZES, BOUNDS).check()
        finally:
            server.stop()

    async def test_eviction_that_is_found_later_makes_it_unavailable(self) -> None:
        server = redis_engine.start()
        try:
            pool = RedisPool(server.url, SIZES, BOUNDS)
            await pool.check()
            await pool.beat("a", NodeBeat(0, 0, 0, 0))
            redis_engine.say(server, "CONFIG", "SET", "maxmemory", "100mb")
            redis_engine.say(server, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
            pool._check_again_at = 0.0
            with pytest.raises(Unavailable):
                await pool.beat("a", NodeBeat(0, 0, 0, 0))
            with pytest.raises(Unavailable):
                await pool.beat("a", NodeBeat(0, 0, 0, 0))
            await pool.close()
        finally:
            server.stop()

    async def test_redis_cluster_is_refused(self) -> None:
        try:
            server = redis_engine.cluster()
        except Missing as error:
            pytest.skip(str(error))
        try:
            with pytest.raises(BadSetting, match=r"cluster\.redis: this is Redis Cluster"):
                await RedisPool(server.url, SIZES, BOUNDS).check()
        finally:
            server.stop()

    async def test_primary_is_found_through_sentinel(self) -> None:
        primary = redis_engine.start()
        try:
            sentinel = redis_engine.sentinel(primary, "replies", 1)
            try:
                url = f"redis+sentinel://127.0.0.1:{sentinel.port}/replies/0"
                clock = ManualClock()
                async with opened(redis_pool(url, clock), clock) as rig:
                    await rig.fill()
                    async with asyncio.timeout(5):
                        while not rig.cancelled:  # the subscription may begin late
                            await rig.pool.call("b", [CancelElsewhere("filler0", "a")])
                            await asyncio.sleep(0.01)
            finally:
                sentinel.stop()
        finally:
            primary.stop()

    async def test_unreachable_redis_is_unavailable_and_startup_goes_on(self) -> None:
        pool = RedisPool("redis://127.0.0.1:1/0", SIZES, BOUNDS)
        await pool.check()
        with pytest.raises(Unavailable):
            await pool.call("a", [Locate("r1")])
        assert pool.trouble is not None and pool.trouble[0] == "unreachable"
        await pool.close()
