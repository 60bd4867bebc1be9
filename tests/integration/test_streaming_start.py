"""A node that starts while the Redis of its replies is down: ready, alone, and with the
others again as soon as Redis is there.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import aiohttp
from reply_reader import ReplyClient, numbered_words
from scripted_node import STREAMING
from work_rigs import until

from engines import free_port, redis
from engines.fixtures import had
from holdfast.access.principal import USER_SCOPES
from holdfast.message import User
from holdfast.node.lifecycle import running
from holdfast.settings import ClusterSettings, ServerSettings, Settings

WORDS = numbered_words(5)
NORMAL_SECONDS_MAX = 5.0


async def test_node_starts_without_its_redis_and_joins_when_it_is_there(tmp_path: Path) -> None:
    port = free_port()
    settings = replace(
        Settings(),
        server=ServerSettings(port=0, state_dir=str(tmp_path)),
        streaming=STREAMING,
        cluster=ClusterSettings(redis=f"redis://127.0.0.1:{port}/0"),
    )
    async with running(settings) as node, aiohttp.ClientSession(node.url) as session:
        token = node.tokens.mint(User("default", "alice"), 3600, USER_SCOPES)
        client = ReplyClient(session, token)
        async with session.get("/health/ready") as ready:
            assert ready.status == 200
        assert node.streaming.status()["shared_pool"] == "down"
        assert (await client.chat(WORDS, "quick")).succeeded
        refused = await client.start(WORDS, "quick")
        assert refused.status == 503, "nobody could resume it at another node"
        server = had("redis", lambda: redis.start(port))
        try:
            async with asyncio.timeout(NORMAL_SECONDS_MAX):
                await until(lambda: node.streaming.status()["shared_pool"] == "up")
                assert (await client.start(WORDS, "quick")).status == 201
        finally:
            server.stop()
