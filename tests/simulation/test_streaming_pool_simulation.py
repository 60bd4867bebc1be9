"""Three nodes and the pool between them, on virtual time, with every fault of a Redis.

Safety: no node that can talk is ever declared dead, and what runs stays within its
bound. Then all faults end. Liveness: within five seconds the pool has exactly what
runs, nobody waits beside free capacity, and in the end every reply has run.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from pool_rig import PoolLink, PoolServer

from holdfast.streaming.pool.contract import DEAD_SECONDS, PoolRequest, PoolSizes, QueueBounds
from holdfast.streaming.pool.leases import NodeLeases
from holdfast.streaming.pool.memory import MemoryPool
from proof import virtual_loop

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "1000")) // 125
SIZES = PoolSizes(12, {"own": 4})
BOUNDS = QueueBounds(1_000, 1_000, 1_000)
USERS, PER_USER = 9, 3
FAULTS_SECONDS = 40.0
SILENT_SECONDS = DEAD_SECONDS - 3.5
"""A node that was cut off for longer may be declared dead: its last heartbeat was up to
a second before, and its next may be two and a half after.
"""
HEALED_SECONDS = 5.0
FREED_SECONDS = 12.0
"""After the death of a node, or the last fault, its leases are free."""
MOVED = 0.2
"""The part of the replies that move to the pool of their own provider."""


class Node:
    """A node and what really runs there."""

    def __init__(self, name: str, story: Story) -> None:
        self.name = name
        self.link: PoolLink = story.server.link()
        self.running: dict[str, str] = {}
        """Reply id → user."""
        self.cut_at: float | None = None
        self.was_silent = False
        """Whether nothing of it got through for longer than a living node is silent."""
        self.replies: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()
        clock = virtual_loop.LoopClock()
        self.leases = NodeLeases(
            name,
            self.link,
            SIZES,
            clock,
            fallback=lambda nodes: MemoryPool(SIZES.share(nodes), BOUNDS.share(nodes), clock),
            nodes_last_seen=lambda: 3,
        )

    async def start(self) -> None:
        await self._stack.enter_async_context(self.leases.running())

    async def stop(self) -> None:
        self.was_silent = True
        await self._stack.aclose()

    async def kill(self) -> None:
        """Nothing of it gets through any more, its farewell neither."""
        self.link.is_cut = True
        for reply in self.replies:
            reply.cancel()
        await asyncio.gather(*self.replies, return_exceptions=True)
        self.running.clear()
        await self.stop()


class Story:
    """One run by a seed. ``is_harsh``: the pool may be unavailable to nodes."""

    def __init__(self, seed: int, is_harsh: bool) -> None:
        self.rng = random.Random(seed)
        self.server = PoolServer(SIZES, BOUNDS, self.rng)
        self.server.on_call = self.check
        self.is_harsh = is_harsh
        self.nodes: list[Node] = []
        self.known: set[str] = set()
        self.names = iter(f"node{n}" for n in range(100))
        self.wrong: list[str] = []
        """An error inside a call would be the node's to handle."""
        self.was_alone = False
        """Whether the pool was unavailable to a node for more than a second."""
        self.finished = 0
        self.asked = 0
        self.most_active = 0
        self.events = hashlib.sha256()

    async def run(self) -> None:
        for _ in range(3):
            await self.add_node()
        arrivals = asyncio.create_task(self.arrive())
        await self.faults()
        arrivals.cancel()
        healed_at = self.now()
        while self.differs():
            assert self.now() <= healed_at + HEALED_SECONDS, self.differs()
            await asyncio.sleep(0.01)
        while replies := [each for node in self.nodes for each in node.replies]:
            _, pending = await asyncio.wait(replies, timeout=60)
            assert not pending, "a reply never runs"
        assert not self.wrong, self.wrong[:3]
        await asyncio.sleep(healed_at + FREED_SECONDS - self.now())
        for node in self.nodes:
            await node.stop()
        assert not self.server.queue._entries

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    # What happens

    async def add_node(self) -> None:
        node = Node(next(self.names), self)
        self.nodes.append(node)
        await node.start()

    async def arrive(self) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(10))
            self.asked += 1
            node = self.rng.choice(self.nodes)
            user = self.rng.randrange(USERS)
            request = PoolRequest(
                f"r{self.asked}", f"t{user % 2}", f"u{user}", PER_USER, capped=False
            )
            reply = asyncio.create_task(self.reply(node, request))
            node.replies.add(reply)
            reply.add_done_callback(node.replies.discard)

    async def reply(self, node: Node, request: PoolRequest) -> None:
        reply_id = request.reply_id
        try:
            await node.leases.ask(request).granted()
            node.running[reply_id] = request.user
            await asyncio.sleep(self.rng.uniform(0.1, 2.0))
            if self.rng.random() < MOVED:
                del node.running[reply_id]
                await node.leases.move(reply_id, "own")
                node.running[reply_id] = request.user
                await asyncio.sleep(self.rng.uniform(0.1, 1.0))
            self.finished += 1
        finally:
            node.running.pop(reply_id, None)
            node.leases.release(reply_id)

    async def faults(self) -> None:
        mild = [self.flush, self.lose_answers, self.delay_wakes]
        harsh = [self.pause, self.refuse, self.cut, self.kill]
        ends_at = self.now() + FAULTS_SECONDS
        while self.now() < ends_at:
            await asyncio.sleep(self.rng.uniform(1, 6))
            fault: Callable[[], Awaitable[None]] = self.rng.choice(
                mild + harsh if self.is_harsh else mild
            )
            self.note(fault.__name__)
            await fault()

    async def flush(self) -> None:
        self.server.flush()
        self.known = set()

    async def lose_answers(self) -> None:
        self.server.answers_lost = 0.1
        await asyncio.sleep(self.rng.uniform(2, 8))
        self.server.answers_lost = 0.0

    async def delay_wakes(self) -> None:
        self.server.wake_delay_seconds = 5.0
        await asyncio.sleep(self.rng.uniform(2, 8))
        self.server.wake_delay_seconds = 0.0

    async def pause(self) -> None:
        self.server.pause()
        await asyncio.sleep(self.rng.uniform(3, 20))
        self.server.resume()

    async def refuse(self) -> None:
        self.server.is_down = True
        await asyncio.sleep(self.rng.uniform(0.5, 15))
        self.server.is_down = False

    async def cut(self) -> None:
        node = self.rng.choice(self.nodes)
        node.link.is_cut, node.cut_at = True, self.now()
        await asyncio.sleep(self.rng.uniform(1, 20))
        node.was_silent = self.now() - node.cut_at > SILENT_SECONDS
        node.link.is_cut, node.cut_at = False, None

    async def kill(self) -> None:
        node = self.nodes.pop(self.rng.randrange(len(self.nodes)))
        await node.kill()
        await self.add_node()

    # What must hold

    def check(self) -> None:
        """After each call of the pool."""
        queue = self.server.queue
        alive = set(queue._nodes)
        for node in self.nodes:
            if node.name in self.known - alive:
                silent = node.cut_at is not None and self.now() - node.cut_at > SILENT_SECONDS
                if not silent and not node.was_silent:
                    self.wrong.append(f"{node.name} lives, but was declared dead")
            elif node.name in alive and queue._nodes[node.name].beat_ms == queue._now_ms:
                node.was_silent = False
        self.known = alive
        users = Counter(user for node in self.nodes for user in node.running.values())
        active = sum(users.values())
        self.most_active = max(self.most_active, active)
        self.was_alone |= any(node.leases._local is not None for node in self.nodes)
        if active > SIZES.total * (2 if self.was_alone else 1):
            self.wrong.append(f"{active} are active")
        most = PER_USER + (len(self.nodes) if self.was_alone else 0)
        self.wrong += [f"{user} has {n} active" for user, n in users.items() if n > most]
        self.note(f"{active}")

    def differs(self) -> str:
        """How the pool differs from what runs; "" if it does not."""
        living = {node.name for node in self.nodes}
        entries = [e for e in self.server.queue._entries.values() if e.node.name in living]
        if not all(node.leases.shared_up for node in self.nodes):
            return "a node goes on alone"
        running = {each for node in self.nodes for each in node.running}
        leased = {each.reply_id for each in entries if each.state == "leased"}
        if running != leased:
            return f"{running ^ leased} are not the same"
        queue = self.server.queue
        for each in entries:
            if not each.is_active and each.user.is_below_limit and queue._has_room(each.pool):
                return f"{each.reply_id} waits beside free capacity"
        return ""

    def note(self, what: str) -> None:
        self.events.update(f"{self.now():.6f} {what}\n".encode())


def tell(seed: int, is_harsh: bool) -> Story:
    async def main() -> Story:
        story = Story(seed, is_harsh)
        await story.run()
        return story

    try:
        return virtual_loop.run(main(), seed)
    except BaseException as error:
        error.add_note(f"seed {seed}, is_harsh {is_harsh}")
        raise


@pytest.mark.parametrize("is_harsh", [False, True])
def test_pool_survives_every_fault_within_its_bounds(is_harsh: bool) -> None:
    stories = [tell(seed, is_harsh) for seed in range(SEEDS)]
    assert all(story.finished > 60 for story in stories)
    reached = max(story.most_active for story in stories)
    assert (reached > SIZES.total) is is_harsh, "the faults are strong enough to show"
    assert any(story.was_alone for story in stories) is is_harsh


def test_run_with_the_same_seed_is_the_same() -> None:
    first, second = tell(3, True), tell(3, True)
    assert first.events.hexdigest() == second.events.hexdigest()
