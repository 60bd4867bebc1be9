"""Nodes of a cluster cut off from PostgreSQL, from Redis or from their clients: in one
direction or in both, for a while or on and off. What is cut off fails in time, the
others go on, and everything is caught up with soon after.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from cluster_conversation import Conversation, conversation
from cluster_links import PEERS, WAYS, Link, Links, Peer, Way, own_network
from cluster_rig import ClusterRig, cluster_rig
from long_tier import times

from engines import Missing
from holdfast.verify.history import FaultPlane, Ok

SEED = 1307
NODES = 4
AT_ONCE = 2
"""So many nodes are cut off at a time; the others are not."""
SHORT_SECONDS, LONG_SECONDS = (0.3, 2.0), (5.5, 7.0)
"""A long cut outlasts every deadline."""
FLAP_SECONDS = (0.05, 0.4)
CAUGHT_UP_SECONDS_MAX = 10.0
PLANES: dict[Peer, tuple[FaultPlane, ...]] = {
    "postgres": ("durability", "history", "fanout"),
    "redis": (),  # messages are delivered as before
    "clients": ("connection", "process"),
}


@asynccontextmanager
async def best_links() -> AsyncIterator[Links]:
    """Network namespaces if this machine allows them, else proxies."""
    async with AsyncExitStack() as stack:
        links: Links = "proxies"
        try:
            links = stack.enter_context(own_network())
        except Missing as error:
            print(f"by proxies: {error}")
        yield links


class Partition(NamedTuple):
    """How a node is cut off from a peer."""

    peer: Peer
    way: Way
    is_flapping: bool
    seconds: float

    async def run(self, link: Link, rng: random.Random) -> None:
        until = time.monotonic() + self.seconds
        try:
            while (left := until - time.monotonic()) > 0:
                link.cut(self.way)
                await asyncio.sleep(
                    min(left, rng.uniform(*FLAP_SECONDS)) if self.is_flapping else left
                )
                if self.is_flapping:
                    link.heal()
                    await asyncio.sleep(rng.uniform(*FLAP_SECONDS))
        finally:
            link.heal()


def partitions(count: int, rng: random.Random) -> list[Partition]:
    """Of every peer as often; every fifth is long and steady."""
    made = []
    for number in range(count):
        is_long = number % 5 == 0
        seconds = rng.uniform(*(LONG_SECONDS if is_long else SHORT_SECONDS))
        is_flapping = not is_long and rng.random() < 0.5
        peer = PEERS[number % len(PEERS)]
        made.append(Partition(peer, rng.choice(WAYS), is_flapping, seconds))
    return made


async def cut_off(
    rig: ClusterRig, talk: Conversation, node: int, how: Partition, rng: random.Random
) -> float:
    """Cut a node off; how long after the end its person has everything."""
    user = f"p{node}"
    [person] = [each for each in talk.people if each.user.user_id == user]
    with talk.fault(f"cut off: {how}", *PLANES[how.peer], users=[user]):
        await how.run(rig.nodes[node].place.links[how.peer], rng)
        healed = time.monotonic()
        head = max(acked.sequence for _, _, acked in rig.record.history().acks())
        await talk.acked_since(healed, [user])
        await person.has(talk.chat_id, head)
    return time.monotonic() - healed


@pytest.mark.long
@pytest.mark.torture
async def test_nodes_that_are_cut_off_answer_in_time_and_catch_up(tmp_path: Path) -> None:
    count, rng = times(100), random.Random(SEED)
    planned = partitions(count, rng)
    caught_up: list[float] = []
    async with (
        asyncio.timeout(60 + 12 * count),
        best_links() as links,
        cluster_rig(tmp_path, nodes=NODES, links=links) as rig,
        conversation(rig, {f"p{n}": n for n in range(NODES)}, SEED, pause_seconds=0.1) as talk,
    ):
        for start in range(0, count, AT_ONCE):
            chosen = zip(rng.sample(range(NODES), AT_ONCE), planned[start:], strict=False)
            caught_up += await asyncio.gather(
                *(cut_off(rig, talk, node, how, rng) for node, how in chosen)
            )
    assert max(caught_up) <= CAUGHT_UP_SECONDS_MAX, caught_up
    failed = sum(not isinstance(each.end, Ok) for each in rig.record.history().operations)
    assert failed, "it was cut off"
    by = "proxies" if links == "proxies" else "network namespaces"
    figures = {"by": by, "caught up after": f"{max(caught_up):.2f} s", "not acked": str(failed)}
    promises = "caught up within 10 s"
    talk.count("partitions of a node of four", count, SEED, promises=promises, **figures)
