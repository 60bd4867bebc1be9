"""Dead letters of fanout in a cluster of real nodes: replayed at one, they take effect at
all.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import asyncpg
from cluster_rig import cluster_rig

from holdfast.client import Message

NO_HEARTBEAT = {"gateway.timeouts.heartbeat_interval_seconds": 600}
"""A heartbeat would compare with the store, too."""


async def test_replay_at_one_node_lets_the_sessions_of_another_compare(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(100),
        cluster_rig(tmp_path, nodes=2, with_redis=False, settings=NO_HEARTBEAT) as rig,
        rig.person("bob", node=1).online() as bob,
    ):
        chat_id = await rig.chat("ann", "bob")
        async with rig.person("ann", node=0).online() as ann:
            await ann.say(chat_id, "seen")
        await bob.sees(Message, content="seen")
        number = await _lose_one(rig.postgres.url, chat_id)
        body = {"numbers": [number], "reason": "it can be read now"}
        replay = partial(rig.operator(0).post, "/admin/dead-letters/replay", body=body)
        await asyncio.to_thread(replay)
        await bob.sees(Message, chat_id=chat_id, content="not seen")


async def _lose_one(url: str, chat_id: str) -> int:
    """Store a message behind what every node has read of the log, and its dead letter,
    whose number is returned.
    """
    database = await asyncpg.connect(url)
    try:
        async with database.transaction():
            await database.execute(
                "INSERT INTO holdfast_chats.message (chat, sequence, position, created_at, shard,"
                " kind, sender_id, message_id, content, content_type)"
                " SELECT chat, sequence + 1, -1, created_at, shard, kind, sender_id, 'msg_lost',"
                " 'not seen', content_type FROM holdfast_chats.message WHERE content = 'seen'"
            )
            await database.execute(
                "UPDATE holdfast_chats.chat SET counter = counter + 1 WHERE chat_id = $1", chat_id
            )
            return int(
                await database.fetchval(
                    "INSERT INTO holdfast_cluster.dead_letter"
                    " (shard, log_offset, reason, message, data, at, tenant, chat_id)"
                    " SELECT shard, -1, 'undecodable', 'no JSON', 'x', '2026-01-01T00:00:00Z',"
                    " 'acme', $1 FROM holdfast_chats.message WHERE content = 'seen'"
                    " RETURNING number",
                    chat_id,
                )
            )
    finally:
        await database.close()
