"""Who waits how long: the pool alone, on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import mean

import pytest
from pool_rig import PoolServer

from holdfast.streaming.fair_queue import FairQueue
from holdfast.streaming.pool.contract import (
    Admit,
    Confirm,
    NodeBeat,
    PoolRequest,
    PoolSizes,
    QueueBounds,
    Release,
)
from holdfast.streaming.pool.leases import NodeLeases
from proof.virtual_loop import LoopClock

REPLY_SECONDS = 0.3
CAPACITY = 30
PER_USER = 3
NODES = ("a", "b", "c")


class Load:
    """Replies that take 0.3 s each, on three nodes of one pool."""

    def __init__(self, nodes: Sequence[NodeLeases]) -> None:
        self._nodes = nodes
        self._active: Counter[str] = Counter()
        self.most_active = 0
        self.waits: dict[str, list[float]] = defaultdict(list)

    async def run(self, requests: Iterable[PoolRequest]) -> None:
        async with asyncio.TaskGroup() as group:
            for n, request in enumerate(requests):
                group.create_task(self._reply(self._nodes[n % len(self._nodes)], request))

    async def _reply(self, leases: NodeLeases, request: PoolRequest) -> None:
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        place = leases.ask(request)
        await place.granted()  # QueueFull would end the test
        self.waits[request.user].append(loop.time() - asked_at)
        self._active[request.user] += 1
        self.most_active = max(self.most_active, self._active[request.user])
        await asyncio.sleep(REPLY_SECONDS)
        self._active[request.user] -= 1
        leases.release(request.reply_id)


@asynccontextmanager
async def load(bounds: QueueBounds) -> AsyncIterator[Load]:
    sizes = PoolSizes(CAPACITY)
    server = PoolServer(sizes, bounds, random.Random(1))
    async with AsyncExitStack() as stack:
        nodes = [NodeLeases(name, server.link(), sizes, LoopClock()) for name in NODES]
        for node in nodes:
            await stack.enter_async_context(node.running())
        await asyncio.sleep(3.1)  # a new pool waits for its nodes
        yield Load(nodes)


@pytest.mark.covers("002 load spikes are handled by queuing")
async def test_hundred_users_with_ten_requests_wait_alike() -> None:
    async with load(QueueBounds()) as replies:
        await replies.run(
            PoolRequest(f"r{user}.{n}", "t", f"u{user}", PER_USER)
            for user in range(100)
            for n in range(10)
        )
    means = [mean(waits) for waits in replies.waits.values()]
    assert len(means) == 100 and max(means) <= 2 * mean(means)
    assert replies.most_active == PER_USER
    ideal = 1000 / CAPACITY * REPLY_SECONDS
    assert max(map(max, replies.waits.values())) <= 1.1 * ideal, "capacity is never idle"


async def test_user_with_five_hundred_requests_delays_fifty_others_by_two_turns() -> None:
    async with load(QueueBounds(waiting_per_user=500)) as replies:
        await replies.run(
            [PoolRequest(f"r{n}", "t", "heavy", PER_USER) for n in range(500)]
            + [PoolRequest(f"o{n}", "t", f"u{n}", PER_USER) for n in range(50)]
        )
    waits = [wait for user, (wait, *_) in replies.waits.items() if user != "heavy"]
    assert len(waits) == 50 and max(waits) <= 2 * REPLY_SECONDS + 0.05
    assert replies.most_active == PER_USER


async def test_key_without_a_user_runs_five_hundred_at_once_without_refusal() -> None:
    async with load(QueueBounds()) as replies:
        await replies.run(
            PoolRequest(f"r{n}", "t", "key", 1_000, waiting_max=5_000) for n in range(500)
        )
    assert len(replies.waits["key"]) == 500 and replies.most_active == CAPACITY


def test_single_user_of_a_tenant_waits_two_turns_beside_five_thousand() -> None:
    queue = FairQueue(PoolSizes(1), QueueBounds(), rebuilds=False)
    crowd = [PoolRequest(f"c{n}", "crowd", f"u{n}", PER_USER) for n in range(5_001)]
    queue.call("a", [Admit(each) for each in crowd], 0)
    queue.call("a", [Admit(PoolRequest("single", "other", "single", PER_USER))], 0)
    running, turns = "c0", 0
    assert queue.beat("a", NodeBeat(0, 0, 0, 0), 0).waiting == {"default": 5_001}
    while running != "single":
        turns += 1
        assert turns <= 2
        queue.wakes.clear()
        queue.call("a", [Release(running)], 0)
        ((_, running, _),) = queue.wakes
        assert queue.call("a", [Confirm(running)], 0) == [True]


def test_user_whose_grants_expire_does_not_hold_up_its_tenant() -> None:
    """Its node sends heartbeats but confirms nothing, again and again."""
    queue = FairQueue(PoolSizes(1), QueueBounds(), rebuilds=False)
    queue.call("a", [Admit(PoolRequest("running", "t", "x", 1))], 0)
    queue.call("bad", [Admit(PoolRequest("b1", "t", "u", 1))], 0)
    queue.call("a", [Admit(PoolRequest(f"a{n}", "t", f"v{n}", 1)) for n in range(3)], 0)
    queue.call("a", [Release("running")], 0)
    done = []
    for now_ms in range(0, 12_000, 500):
        queue.beat("bad", NodeBeat(0, 0, 0, 0), now_ms)
        for reply_id in queue.beat("a", NodeBeat(0, 0, 0, 0), now_ms).granted:
            assert queue.call("a", [Confirm(reply_id), Release(reply_id)], now_ms) == [True, True]
            done.append(reply_id)
    assert done == ["a0", "a1", "a2"]
