"""Three nodes on one PostgreSQL: people on different nodes talk while things die."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
from cluster_conversation import conversation
from cluster_rig import cluster_rig
from long_tier import times

from engines import postgres

SEED = 13
ALONE: dict[str, str] = {}
PEOPLE = dict.fromkeys(("ann", "bob", "cal"))
"""Through NGINX."""
PAUSE_SECONDS_MAX = 1.0
"""Of people whose node lives."""


async def test_two_people_on_different_nodes_talk_in_one_order(tmp_path: Path) -> None:
    async with asyncio.timeout(100), cluster_rig(tmp_path, nodes=2, settings=ALONE) as rig:
        chat_id = await rig.chat("ann", "bob")
        async with rig.person("ann", 0).online() as ann, rig.person("bob", 1).online() as bob:
            sends = [one.say(chat_id, f"{n}") for n in range(20) for one in (ann, bob)]
            assert sorted(await asyncio.gather(*sends)) == list(range(1, 41))
            await asyncio.gather(ann.has(chat_id, 40), bob.has(chat_id, 40))
            assert ann.texts(chat_id) == bob.texts(chat_id)


@pytest.mark.covers("000 gateway crash")
@pytest.mark.long
@pytest.mark.torture
async def test_nodes_behind_nginx_are_killed_and_nobody_loses_anything(tmp_path: Path) -> None:
    """Whose node dies reconnects to another by itself; the others notice nothing."""
    count, rng = times(200), random.Random(SEED)
    at_node = {f"s{n}": n for n in range(3)}
    pauses: list[float] = []
    async with (
        asyncio.timeout(60 + 10 * count),
        cluster_rig(tmp_path, with_nginx=True, settings=ALONE) as rig,
        conversation(rig, {**PEOPLE, **at_node}, SEED) as talk,
    ):
        for _ in range(count):
            number, began = rng.randrange(len(rig.nodes)), time.monotonic()
            with talk.fault("kill -9 of a node", "process"):
                await rig.nodes[number].kill()
                await rig.nodes[number].start()
                await talk.all_acked()
            survivors = [user for user, node in at_node.items() if node != number]
            pauses += [talk.longest_pause(user, began) for user in survivors]
            await asyncio.sleep(rng.uniform(0.0, 0.3))
    assert max(pauses) <= PAUSE_SECONDS_MAX, (pauses, talk.slow_answers(PAUSE_SECONDS_MAX))
    figures = {"people at other nodes paused": f"{max(pauses):.2f} s"}
    promises = "people at other nodes pause at most 1 s"
    talk.count("kill -9 of a node of three", count, SEED, promises=promises, **figures)


SERVING_SECONDS_MAX = 2.0
"""From when PostgreSQL accepts connections until sends are answered again."""


@pytest.mark.long
@pytest.mark.torture
async def test_postgres_is_killed_and_sends_go_on_when_it_is_back(tmp_path: Path) -> None:
    """There are people enough at each node to open its breaker."""
    count, rng = times(50), random.Random(SEED)
    where = {f"p{n}": n % 3 for n in range(24)}
    at_node = [[user for user, node in where.items() if node == n] for n in range(3)]
    served: list[float] = []
    async with (
        asyncio.timeout(60 + 20 * count),
        cluster_rig(tmp_path, settings=ALONE) as rig,
        conversation(rig, where, SEED) as talk,
    ):
        for _ in range(count):
            with talk.fault("kill -9 of PostgreSQL", "durability", "history", "fanout"):
                postgres.kill(rig.postgres)
                await asyncio.sleep(rng.uniform(0.0, 2.0))
                rig.postgres = await asyncio.to_thread(postgres.again, rig.postgres)
                accepts_at = time.monotonic()
                await talk.acked_since(accepts_at)
            served += [talk.first_ack(users, accepts_at) - accepts_at for users in at_node]
            await asyncio.sleep(rng.uniform(0.0, 0.3))
    assert max(served) <= SERVING_SECONDS_MAX, served
    figures = {"every node serves after": f"{max(served):.2f} s"}
    talk.count("kill -9 of PostgreSQL", count, SEED, **figures)
