"""The wall clocks of a cluster's nodes are hours apart and jump: leases, the order of
messages and of lists, and which connection of a device is the newer one do not depend
on them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cluster_conversation import Conversation, conversation
from cluster_hooked_chat import WITH_WEBHOOKS, HookedChat
from cluster_rig import QUICK, ClusterRig, cluster_rig
from long_tier import times
from postgres_pair import ask
from webhook_rig import receiving

from engines.faketime import WallClock
from engines.fixtures import had
from holdfast.client import Client
from holdfast.errors import Forbidden

SEED = 1329
HOUR = 3600
OFFSETS = (-HOUR, 0, HOUR)
"""One for each node, in any order; a node that is behind takes no new token."""
WALKER = "wim"
STAMPS_GO_BACK = """
SELECT count(*) FROM (
    SELECT created_at < lag(created_at) OVER (PARTITION BY chat ORDER BY sequence) AS goes_back
      FROM holdfast_chats.message) AS m WHERE m.goes_back
"""
LAST_STAMP = "SELECT max(created_at) FROM holdfast_chats.message"


@asynccontextmanager
async def connected(rig: ClusterRig, node: int, device: str) -> AsyncIterator[Client]:
    url, token = rig.nodes[node].url, rig.token(WALKER)
    async with Client(url, token, device_id=device, settings=QUICK) as client:
        await client.connected()
        yield client


async def moved_device_has_its_last_connection(
    rig: ClusterRig, chat_id: str, ahead: int, right: int
) -> None:
    """From a node whose clock is ahead to one whose clock is right."""
    async with connected(rig, ahead, "tablet") as before, connected(rig, right, "tablet") as after:
        with pytest.raises(Forbidden):  # the same device: the older one is closed
            while True:
                await before.send(chat_id, "still here")
        await after.send(chat_id, "moved")


async def list_is_in_order_of_activity(
    rig: ClusterRig, chats: Sequence[str], first: Client, second: Client, node: int
) -> None:
    """Two chats get a message each; the list begins with the later one."""
    await first.send(chats[0], "earlier")
    await second.send(chats[1], "later")
    listed = await rig.ask(WALKER, "GET", "/v1/chats?limit=2", node=node)
    assert [each["chat"]["chat_id"] for each in listed["chats"]] == [chats[1], chats[0]]


class Walker:
    """Somebody who is at every node, and notices if one of the clocks matters."""

    def __init__(self, rig: ClusterRig, clients: Sequence[Client], chats: Sequence[str]) -> None:
        self._rig, self._clients, self._chats = rig, clients, chats

    @classmethod
    @asynccontextmanager
    async def walking(cls, rig: ClusterRig) -> AsyncIterator[Walker]:
        async with AsyncExitStack() as stack:
            chats = [await rig.chat(WALKER) for _ in range(2)]
            clients = [
                await stack.enter_async_context(connected(rig, node, f"at{node}"))
                for node in range(len(rig.nodes))
            ]
            yield cls(rig, clients, chats)

    async def look(self, offsets: Sequence[int]) -> None:
        behind, right, ahead = (offsets.index(each) for each in OFFSETS)
        for first, second in ((ahead, behind), (behind, ahead)):
            await list_is_in_order_of_activity(
                self._rig, self._chats, self._clients[first], self._clients[second], right
            )
        await moved_device_has_its_last_connection(self._rig, self._chats[0], ahead, right)


async def jump_and_look(
    clocks: Sequence[WallClock],
    talk: Conversation,
    walker: Walker,
    hooked: HookedChat,
    rng: random.Random,
) -> None:
    offsets = rng.sample(OFFSETS, len(clocks))
    for clock, offset in zip(clocks, offsets, strict=True):
        clock.set(offset)
    await talk.all_acked()
    await hooked.say(offsets.index(HOUR))
    await walker.look(offsets)


@pytest.mark.long
@pytest.mark.torture
async def test_clocks_of_nodes_that_are_hours_apart_change_nothing(tmp_path: Path) -> None:
    count, rng = times(20), random.Random(SEED)
    folders = [tmp_path / f"clock{n}" for n in range(len(OFFSETS))]
    for folder in folders:
        folder.mkdir()
    clocks = [had("faketime", lambda folder=folder: WallClock(folder)) for folder in folders]
    async with (
        asyncio.timeout(100 + 10 * count),
        cluster_rig(
            tmp_path, settings=WITH_WEBHOOKS, environments=[each.environment for each in clocks]
        ) as rig,
        receiving() as receiver,
        conversation(rig, {f"p{n}": n for n in range(3)}, SEED, pause_seconds=0.1) as talk,
        Walker.walking(rig) as walker,
    ):
        hooked = await HookedChat.made(rig, receiver)
        opened = rig.record.connections.copy()
        for _ in range(count):
            await jump_and_look(clocks, talk, walker, hooked, rng)
        await hooked.is_whole()
        assert rig.record.connections == opened, "nobody was disconnected"
        assert await ask(rig.postgres, STAMPS_GO_BACK) == 0
        stamped = await ask(rig.postgres, LAST_STAMP)
        assert abs(stamped - datetime.now(UTC)) < timedelta(seconds=60)
    promises = "leases, order, lists and displaced devices as if the clocks were right"
    talk.count("clocks of nodes hours apart", count, SEED, promises=promises)
