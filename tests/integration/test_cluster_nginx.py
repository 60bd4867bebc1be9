"""The NGINX before a cluster is reloaded and killed while people talk, and one of the
nodes behind it refuses everything.
"""

from __future__ import annotations

import asyncio
import random
import signal
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from cluster_conversation import conversation
from cluster_rig import cluster_rig, trusting
from long_tier import times
from work_rigs import until

from engines import free_port, nginx
from engines.fixtures import had

SEED = 1319
NODES = 3
PEOPLE = {f"p{n}": None for n in range(6)}
"""Through NGINX."""
REQUESTS = 30
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@pytest.mark.long
@pytest.mark.torture
async def test_reload_loses_no_socket_and_a_kill_no_message(tmp_path: Path) -> None:
    count, rng = times(40), random.Random(SEED)
    async with (
        asyncio.timeout(60 + 10 * count),
        cluster_rig(tmp_path, nodes=NODES, with_nginx=True) as rig,
        conversation(rig, PEOPLE, SEED, pause_seconds=0.1) as talk,
    ):
        for number in range(count):
            assert rig.proxy is not None
            if number % 2:
                with talk.fault("kill -9 of NGINX", "connection", "process"):
                    nginx.kill(rig.proxy)
                    rig.proxy = await asyncio.to_thread(nginx.again, rig.proxy)
                    await talk.all_acked()
            else:
                opened, log = rig.record.connections.copy(), rig.proxy.log
                old = log.read_text().count("gracefully shutting down")
                rig.proxy.process.send_signal(signal.SIGHUP)
                await until(
                    lambda log=log, old=old: log.read_text().count("gracefully shutting down") > old
                )
                await talk.all_acked()
                await asyncio.sleep(rng.uniform(0.0, 0.5))
                assert rig.record.connections == opened, "a socket was lost"
    promises = "no socket lost at a reload"
    talk.count("NGINX reloaded or killed", count, SEED, promises=promises)


@asynccontextmanager
async def refusing(asked: Counter[bytes]) -> AsyncIterator[int]:
    """A node that refuses every request; its port. ``asked``: how often, by method."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked[head.split(b" ")[0]] += 1
        writer.write(REFUSAL)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", free_port())
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_node_that_refuses_everything_costs_its_share_at_most(tmp_path: Path) -> None:
    """What can be asked of another node is; a POST that was sent is not."""
    asked = Counter[bytes]()
    async with (
        asyncio.timeout(100),
        cluster_rig(tmp_path, nodes=NODES - 1) as rig,
        refusing(asked) as port,
        AsyncExitStack() as stack,
    ):
        ports = [port, *(node.program.port for node in rig.nodes)]
        proxy = had("nginx", lambda: nginx.start(ports, free_port()))
        stack.callback(proxy.stop)
        stack.enter_context(trusting(proxy.folder / "cert.pem"))
        rig.url = proxy.url
        chat_id = await rig.chat("ann", "bob", node=0)
        path = f"/v1/chats/{chat_id}/messages"
        for number in range(REQUESTS // NODES):
            async with rig.person("ann", device=f"device{number}").online():
                pass
        assert asked[b"GET"], "handshakes reached it, too"
        headers = {"Authorization": f"Bearer {rig.token('ann')}"}
        known = ssl.create_default_context(cafile=str(proxy.folder / "cert.pem"))
        connector = aiohttp.TCPConnector(ssl=known)
        statuses = Counter[tuple[str, int]]()
        async with aiohttp.ClientSession(rig.url, headers=headers, connector=connector) as session:
            for number in range(REQUESTS):
                async with session.get(path) as answer:
                    statuses["GET", answer.status] += 1
                key = {"Idempotency-Key": f"key-{number}"}
                async with session.post(path, json={"content": "hi"}, headers=key) as answer:
                    statuses["POST", answer.status] += 1
        assert statuses["GET", 200] == REQUESTS
        refused = statuses["POST", 503]
        assert 0 < refused <= REQUESTS / NODES + 1
        assert statuses["POST", 201] + refused == REQUESTS, statuses
