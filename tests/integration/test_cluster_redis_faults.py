"""A cluster whose Redis is flushed, stopped, full, killed, or put back as it was: people
talk as before, and soon everybody is seen where they are.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import get_args

import pytest
from cluster_conversation import Conversation, conversation
from cluster_presence import until_presence
from cluster_rig import ClusterRig, cluster_rig
from long_tier import times
from redis_faults import FaultyRedis, RedisFault

SEED = 1317
RIGS = 2
"""Side by side: most of the time they wait."""
NODES = 3
FAULTS: Sequence[RedisFault] = get_args(RedisFault)
LASTING_SECONDS = (0.1, 2.0)
RESTORED_SECONDS_MAX = 15.0
"""Until presence is right at every node, once Redis answers."""
PAUSE_SECONDS_MAX = 1.0
"""Between two acks of a person, whatever happens to Redis."""


class Visitor:
    """Somebody who comes and goes, at any node."""

    user = "mia"

    def __init__(self, rig: ClusterRig, rng: random.Random) -> None:
        self._rig, self._rng = rig, rng
        self._stay = AsyncExitStack()
        self._visits = 0
        self.status = "offline"

    async def move(self) -> None:
        if self.status == "online":
            await self._stay.aclose()
            self.status = "offline"
        else:
            self._visits += 1
            node = self._rng.randrange(NODES)
            person = self._rig.person(self.user, node, f"visit{self._visits}")
            await self._stay.enter_async_context(person.online())
            self.status = "online"

    @asynccontextmanager
    async def around(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self._stay.aclose()


async def fail_once(
    rig: ClusterRig,
    talk: Conversation,
    server: FaultyRedis,
    visitor: Visitor,
    fault: RedisFault,
    rng: random.Random,
) -> float:
    """How long after the fault presence is right at every node."""
    if fault == "old RDB":
        await server.save()
        await visitor.move()
    await server.begin(fault)
    moving = asyncio.create_task(visitor.move())
    await asyncio.sleep(rng.uniform(*LASTING_SECONDS))
    await server.end(fault)
    ended = time.monotonic()
    await moving
    right = {**dict.fromkeys(talk.acked_at, "online"), Visitor.user: visitor.status}
    async with asyncio.timeout(2 * RESTORED_SECONDS_MAX):
        for node in range(NODES):
            await until_presence(rig, talk.chat_id, f"p{node}", node, right)
    return time.monotonic() - ended


async def run(folder: Path, faults: Sequence[RedisFault], seed: int) -> tuple[Conversation, float]:
    """The people of one cluster, and the longest time until presence was right."""
    rng, server = random.Random(seed), FaultyRedis(folder)
    try:
        async with (
            cluster_rig(folder, nodes=NODES, shared=server.server) as rig,
            conversation(
                rig,
                {f"p{n}": n for n in range(NODES)},
                seed,
                listeners=[Visitor.user],
                pause_seconds=0.1,
            ) as talk,
        ):
            visitor = Visitor(rig, rng)
            async with visitor.around():
                began = time.monotonic()
                took = [await fail_once(rig, talk, server, visitor, fault, rng) for fault in faults]
            pauses = [talk.longest_pause(user, began) for user in talk.acked_at]
            slow = talk.slow_answers(PAUSE_SECONDS_MAX)
            assert max(pauses) <= PAUSE_SECONDS_MAX, (pauses, slow)
            return talk, max(took)
    finally:
        server.server.stop()


@pytest.mark.long
@pytest.mark.torture
async def test_faults_of_redis_stop_no_message_and_presence_is_soon_right(tmp_path: Path) -> None:
    count, rng = times(100), random.Random(SEED)
    faults = [FAULTS[n % len(FAULTS)] for n in range(count)]
    rng.shuffle(faults)
    for rig in range(RIGS):
        (tmp_path / f"{rig}").mkdir()
    async with asyncio.timeout(60 + 20 * count):
        ran = await asyncio.gather(
            *(run(tmp_path / f"{rig}", faults[rig::RIGS], SEED + rig) for rig in range(RIGS))
        )
    took = max(seconds for _, seconds in ran)
    assert took <= RESTORED_SECONDS_MAX, took
    figures = {"presence right after": f"{took:.1f} s"}
    promises = "sends pause at most 1 s, presence right within 15 s"
    ran[0][0].count("Redis of a cluster fails", count, SEED, promises=promises, **figures)
