"""Nodes of a cluster that are stopped for longer than any lease, and go on: the others
serve meanwhile, and what a stopped node held before is no longer its own. And their
PostgreSQL: nobody serves meanwhile, everybody says so, and all go on with it.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path

import pytest
from cluster_conversation import Conversation, conversation
from cluster_hooked_chat import WITH_WEBHOOKS, HookedChat
from cluster_rig import ClusterRig, cluster_rig
from long_tier import IS_LONG, times
from webhook_rig import receiving

from engines import postgres

SEED = 1301
NODES = 7
AT_ONCE = 5
"""So many are stopped at a time; the others are not."""
STOPPED_SECONDS = 30.0 if IS_LONG else 6.0
"""A lease lasts 5 s."""
PAUSE_SECONDS_MAX = 1.0
"""Of people at other nodes."""


async def stop_some(
    rig: ClusterRig, talk: Conversation, hooked: HookedChat, count: int, rng: random.Random
) -> float:
    """Stop so many nodes at once; the longest pause of a person at another node."""
    numbers = rng.sample(range(NODES), count)
    stopped = [f"p{number}" for number in numbers]
    others = [number for number in range(NODES) if number not in numbers]
    await hooked.say(numbers[0])
    with talk.fault("SIGSTOP of a node", "connection", "process", users=stopped):
        began = time.monotonic()
        for number in numbers:
            rig.nodes[number].process.send(signal.SIGSTOP)
        while time.monotonic() - began < STOPPED_SECONDS:
            await hooked.say(rng.choice(others))
            await asyncio.sleep(STOPPED_SECONDS / 4)
        pause = max(talk.longest_pause(f"p{number}", began) for number in others)
        for number in numbers:
            rig.nodes[number].process.send(signal.SIGCONT)
        await talk.all_acked()
    await hooked.say(numbers[0])
    return pause


@pytest.mark.long
@pytest.mark.torture
async def test_nodes_that_are_stopped_for_long_hold_nothing_and_go_on(tmp_path: Path) -> None:
    """Everybody talks in the same chat: a lock of a stopped node would be felt."""
    count, rng = times(50), random.Random(SEED)
    async with (
        asyncio.timeout(120 + 10 * count),
        cluster_rig(tmp_path, nodes=NODES, settings=WITH_WEBHOOKS) as rig,
        receiving() as receiver,
    ):
        hooked = await HookedChat.made(rig, receiver)
        everybody = {f"p{n}": n for n in range(NODES)}
        async with conversation(rig, everybody, SEED, pause_seconds=0.2) as talk:
            pauses = [
                await stop_some(rig, talk, hooked, AT_ONCE, rng) for _ in range(count // AT_ONCE)
            ]
        await hooked.is_whole()
    assert max(pauses) <= PAUSE_SECONDS_MAX, (pauses, talk.slow_answers(PAUSE_SECONDS_MAX))
    figures = {"stopped for": f"{STOPPED_SECONDS:.0f} s", "others paused": f"{max(pauses):.2f} s"}
    promises = "others pause at most 1 s, nothing under an old fence"
    talk.count("SIGSTOP of a node", count, SEED, promises=promises, **figures)


POSTGRES_NODES = 3
POSTGRES_STOPPED_SECONDS = 12.0 if IS_LONG else 6.0
SERVING_SECONDS_MAX = 2.0
"""From when PostgreSQL goes on until each node has answered a send."""


@pytest.mark.long
@pytest.mark.torture
async def test_postgres_that_is_stopped_for_long_goes_on_and_so_does_everybody(
    tmp_path: Path,
) -> None:
    """Connections stay open and nothing is answered. Every lease ends meanwhile; there
    are people enough at each node to open its breaker.
    """
    count, rng = times(20), random.Random(SEED)
    where = {f"p{n}": n % POSTGRES_NODES for n in range(8 * POSTGRES_NODES)}
    at_node = [[user for user in where if where[user] == n] for n in range(POSTGRES_NODES)]
    served: list[float] = []
    async with (
        asyncio.timeout(120 + 30 * count),
        cluster_rig(tmp_path, nodes=POSTGRES_NODES, settings=WITH_WEBHOOKS) as rig,
        receiving() as receiver,
    ):
        hooked = await HookedChat.made(rig, receiver)
        async with conversation(rig, where, SEED, pause_seconds=0.2) as talk:
            for number in range(count):
                await hooked.say(number % POSTGRES_NODES)
                with talk.fault("SIGSTOP of PostgreSQL", "durability", "history", "fanout"):
                    with postgres.stopped(rig.postgres):
                        await asyncio.sleep(POSTGRES_STOPPED_SECONDS)
                    goes_on_at = time.monotonic()
                    await talk.acked_since(goes_on_at)
                served += [talk.first_ack(users, goes_on_at) - goes_on_at for users in at_node]
                await asyncio.sleep(rng.uniform(0.0, 0.3))
        await hooked.is_whole()
    assert max(served) <= SERVING_SECONDS_MAX, served
    figures = {
        "stopped for": f"{POSTGRES_STOPPED_SECONDS:.0f} s",
        "every node serves after": f"{max(served):.2f} s",
    }
    promises = "serving within 2 s, nothing under an old fence"
    talk.count("SIGSTOP of PostgreSQL", count, SEED, promises=promises, **figures)
