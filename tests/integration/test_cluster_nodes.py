"""Three nodes on one PostgreSQL: people on different nodes talk while things die."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
from cluster_rig import cluster_rig, conversation
from long_tier import times
from result_counts import tally

from proof.results import Row

SEED = 13
ALONE = {"work.url": "sqlite:"}


async def test_two_people_on_different_nodes_talk_in_one_order(tmp_path: Path) -> None:
    async with asyncio.timeout(100), cluster_rig(tmp_path, nodes=2, settings=ALONE) as rig:
        chat_id = await rig.chat("ann", "bob")
        async with rig.person("ann", 0).online() as ann, rig.person("bob", 1).online() as bob:
            sends = [one.say(chat_id, f"{n}") for n in range(20) for one in (ann, bob)]
            assert sorted(await asyncio.gather(*sends)) == list(range(1, 41))
            await asyncio.gather(ann.has(chat_id, 40), bob.has(chat_id, 40))
            assert ann.texts(chat_id) == bob.texts(chat_id)


@pytest.mark.torture
async def test_nodes_behind_nginx_are_killed_and_nobody_loses_anything(tmp_path: Path) -> None:
    """Whose node dies reconnects to another by itself; the others notice nothing."""
    count, began, rng = times(200), time.perf_counter(), random.Random(SEED)
    people = {"ann": None, "bob": None, "cal": None}
    async with (
        asyncio.timeout(60 + 10 * count),
        cluster_rig(tmp_path, with_nginx=True, settings=ALONE) as rig,
        conversation(rig, people, SEED) as talk,
    ):
        for _ in range(count):
            node = rng.choice(rig.nodes)
            with talk.fault("kill -9 of a node", "process"):
                await node.kill()
                await node.start()
            await asyncio.sleep(rng.uniform(0.0, 0.3))
    sends = sum(map(len, talk.acked_at.values()))
    tally(
        Row(
            "kill -9 of a node of three",
            "three nodes on one PostgreSQL behind NGINX, three people who talk",
            count,
            0,
            "all checkers green",
            str(SEED),
            seconds=time.perf_counter() - began,
            figures={"sends": sends},
        )
    )
