"""Three nodes on one PostgreSQL: people on different nodes talk while things die."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path

import pytest
from cluster_rig import Conversation, cluster_rig, conversation
from long_tier import IS_LONG, times
from result_counts import tally

from engines import postgres
from proof.results import Row

SEED = 13
ALONE: dict[str, str] = {}
PEOPLE = dict.fromkeys(("ann", "bob", "cal"))
"""Through NGINX."""


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
    async with (
        asyncio.timeout(60 + 10 * count),
        cluster_rig(tmp_path, with_nginx=True, settings=ALONE) as rig,
        conversation(rig, PEOPLE, SEED) as talk,
    ):
        for _ in range(count):
            node = rng.choice(rig.nodes)
            with talk.fault("kill -9 of a node", "process"):
                await node.kill()
                await node.start()
            await asyncio.sleep(rng.uniform(0.0, 0.3))
    count_run("kill -9 of a node of three", talk, count, began)


def count_run(name: str, talk: Conversation, count: int, began: float, **figures: str) -> None:
    how = "three nodes on one PostgreSQL and one Redis, people who talk"
    sends = sum(map(len, talk.acked_at.values()))
    seconds = time.perf_counter() - began
    figures = {"sends": f"{sends:,}", **figures}
    tally(
        Row(name, how, count, 0, "all checkers green", str(SEED), seconds=seconds, figures=figures)
    )


PAUSE_SECONDS_MAX = 1.0
"""Of people at other nodes."""
STOPPED_SECONDS = 30.0 if IS_LONG else 6.0
SERVING_SECONDS_MAX = 2.0
"""From when PostgreSQL accepts connections until sends are answered again."""


@pytest.mark.torture
async def test_postgres_is_killed_and_sends_go_on_when_it_is_back(tmp_path: Path) -> None:
    """There are people enough at each node to open its breaker."""
    count, began, rng = times(50), time.perf_counter(), random.Random(SEED)
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
    count_run("kill -9 of PostgreSQL", talk, count, began, **figures)


@pytest.mark.torture
async def test_node_that_is_stopped_for_long_holds_nothing_and_goes_on(tmp_path: Path) -> None:
    """The others' sends go on meanwhile, in the same chat: a frozen node holds no lock."""
    count, began, rng = times(50), time.perf_counter(), random.Random(SEED)
    pauses: list[float] = []
    async with (
        asyncio.timeout(60 + 40 * count),
        cluster_rig(tmp_path, settings=ALONE) as rig,
        conversation(rig, {"ann": 0, "bob": 1, "cal": 2}, SEED) as talk,
    ):
        for _ in range(count):
            number = rng.randrange(len(rig.nodes))
            stopped = list(talk.acked_at)[number]
            with talk.fault("SIGSTOP of a node", "connection", "process", user=stopped):
                began_at, process = time.monotonic(), rig.nodes[number].process
                process.send(signal.SIGSTOP)
                await asyncio.sleep(STOPPED_SECONDS)
                others = talk.acked_at.keys() - {stopped}
                pauses += [talk.longest_pause(user, began_at) for user in others]
                process.send(signal.SIGCONT)
                await talk.acked_since(time.monotonic())
    assert max(pauses) <= PAUSE_SECONDS_MAX, max(pauses)
    count_run(
        "SIGSTOP of a node of three",
        talk,
        count,
        began,
        **{"others paused": f"{max(pauses):.2f} s"},
    )
