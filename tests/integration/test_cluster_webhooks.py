"""Webhooks of a cluster: one node reads the log for all, another takes over from it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cluster_rig import TENANT, cluster_rig
from long_tier import IS_LONG
from webhook_rig import receiving, until

PRIVATE = {"work.webhooks.private_allowed": True}


async def test_message_of_any_node_is_delivered_once_and_none_is_lost_with_a_node(
    tmp_path: Path,
) -> None:
    async with (
        asyncio.timeout(100),
        cluster_rig(tmp_path, nodes=2, with_redis=False, settings=PRIVATE) as rig,
        receiving() as receiver,
    ):
        chat_id = await rig.chat("ann", "bob")
        body = {"url": receiver.url, "tenant": TENANT, "reason": "test"}
        await asyncio.to_thread(rig.operator(0).post, "/admin/webhooks", body=body)
        async with rig.person("ann", 0).online() as ann, rig.person("bob", 1).online() as bob:
            for number in range(10):
                await (ann, bob)[number % 2].say(chat_id, f"{number}")
            await until(lambda: len(receiver.calls) >= 10)
            listed = await asyncio.to_thread(rig.operator(1).get, "/admin/webhooks")
            assert [each["url"] for each in listed["endpoints"]] == [receiver.url]
        assert receiver.sequences() == list(range(1, 11)), "in order, each once"

        # a killed node's jobs wait until its worker counts as dead
        await (rig.nodes[0].kill() if IS_LONG else rig.nodes[0].stop())
        async with rig.person("bob", 1).online() as bob:
            for number in range(10):
                await bob.say(chat_id, f"again {number}")
        await until(lambda: set(receiver.sequences()) == set(range(1, 21)))
        assert receiver.sequences() == list(range(1, 21))
