"""Presence, typing, receipts and displaced devices between nodes: by Redis, or by
PostgreSQL alone; while Redis fails, and after a node died.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from cluster_presence import presence, statuses, until_presence
from cluster_rig import ClusterRig, cluster_rig
from redis.asyncio import Redis
from work_rigs import until

from holdfast.errors import Forbidden
from holdfast.fanout.registry.contract import LIVE_SECONDS
from holdfast.fanout.registry.sweeper import SWEEP_SECONDS
from holdfast.wire.frames import Presence, Receipt, Typing

ALONE: dict[str, str] = {}
RESTORED_SECONDS_MAX = 15.0
"""Until presence is right again, once Redis answers."""


async def is_stale(rig: ClusterRig, chat_id: str) -> bool:
    await asyncio.sleep(0.1)  # within a user's rate of requests
    return (await presence(rig, chat_id, "ann", 0)).get("stale") is True


@pytest.mark.parametrize("with_redis", [True, False], ids=["redis", "postgres"])
async def test_people_on_two_nodes_see_each_other(tmp_path: Path, *, with_redis: bool) -> None:
    async with (
        asyncio.timeout(60),
        cluster_rig(tmp_path, nodes=2, with_redis=with_redis, settings=ALONE) as rig,
    ):
        chat_id = await rig.chat("ann", "bob")
        async with rig.person("ann", 0).online() as ann:
            async with rig.person("bob", 1).online() as bob:
                await ann.sees(Presence, user_id="bob", status="online")
                ann.client.typing(chat_id)
                await bob.sees(Typing, user_id="ann", active=True)
                sequence = await ann.say(chat_id, "hello")
                await ann.sees(Receipt, user_id="bob", delivered=sequence)
                for node in range(2):
                    view = await presence(rig, chat_id, "ann", node)
                    assert statuses(view) == {"ann": "online", "bob": "online"}
                    assert not view.get("stale")
            await ann.sees(Presence, user_id="bob", status="offline")

            async with rig.person("ann", 1).online() as elsewhere:
                with pytest.raises(Forbidden):  # the same device: the older one is closed
                    while True:
                        await ann.client.send(chat_id, "still here")
                await elsewhere.say(chat_id, "moved")
                view = await presence(rig, chat_id, "ann", 0)
                assert statuses(view) == {"ann": "online", "bob": "offline"}


async def test_without_redis_messages_go_on_and_presence_says_that_it_is_stale(
    tmp_path: Path,
) -> None:
    async with (
        asyncio.timeout(90),
        cluster_rig(tmp_path, nodes=2, links="proxies", settings=ALONE) as rig,
    ):
        chat_id = await rig.chat("ann", "bob")
        links = [node.proxy("redis") for node in rig.nodes]
        async with rig.person("ann", 0).online() as ann:
            for link in links:
                link.set(down=True)
            await until(lambda: is_stale(rig, chat_id))
            async with rig.person("bob", 1).online() as bob:
                await bob.say(chat_id, "can you read me?")
                await ann.has(chat_id, 1)
                assert statuses(await presence(rig, chat_id, "ann", 1)) == {"bob": "online"}
                for link in links:
                    link.set(down=False)
                both = {"ann": "online", "bob": "online"}
                took = await until_presence(rig, chat_id, "ann", 0, both)
                assert took <= RESTORED_SECONDS_MAX
                await ann.sees(Presence, user_id="bob", status="online")

                assert rig.redis is not None
                async with Redis.from_url(rig.redis.url) as client:
                    await client.flushall()
                took = await until_presence(rig, chat_id, "ann", 1, both)
                assert took <= RESTORED_SECONDS_MAX


@pytest.mark.long
async def test_people_of_a_killed_node_are_offline_twenty_seconds_later(tmp_path: Path) -> None:
    async with asyncio.timeout(90), cluster_rig(tmp_path, nodes=2, settings=ALONE) as rig:
        chat_id = await rig.chat("ann", "bob")
        async with rig.person("ann", 0).online() as ann, rig.person("bob", 1).online():
            await ann.sees(Presence, user_id="bob", status="online")
            killed_at = time.monotonic()
            await rig.nodes[1].kill()
            await ann.sees(Presence, user_id="bob", status="offline")
            assert time.monotonic() - killed_at <= LIVE_SECONDS + SWEEP_SECONDS + 1.0
            view = await presence(rig, chat_id, "ann", 0)
            assert statuses(view) == {"ann": "online", "bob": "offline"}
