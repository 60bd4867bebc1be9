"""The NGINX before a cluster is reloaded and killed while people talk; one of the nodes
behind it refuses everything, or hangs; and nodes with different roles.
"""

from __future__ import annotations

import asyncio
import random
import signal
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from cluster_conversation import conversation
from cluster_rig import QUICK, ClusterPerson, ClusterRig, cluster_rig, trusting
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


def https_session(rig: ClusterRig, user: str) -> aiohttp.ClientSession:
    """Through NGINX, as this user."""
    assert rig.proxy is not None
    known = ssl.create_default_context(cafile=str(rig.proxy.folder / "cert.pem"))
    headers = {"Authorization": f"Bearer {rig.token(user)}"}
    connector = aiohttp.TCPConnector(ssl=known)
    return aiohttp.ClientSession(rig.url, headers=headers, connector=connector)


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
        rig.proxy = proxy = had("nginx", lambda: nginx.start(ports, free_port()))
        stack.callback(proxy.stop)
        stack.enter_context(trusting(proxy.folder / "cert.pem"))
        rig.url = proxy.url
        chat_id = await rig.chat("ann", "bob", node=0)
        path = f"/v1/chats/{chat_id}/messages"
        for number in range(REQUESTS // NODES):
            async with rig.person("ann", device=f"device{number}").online():
                pass
        assert asked[b"GET"], "handshakes reached it, too"
        statuses = Counter[tuple[str, int]]()
        async with https_session(rig, "ann") as session:
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


HANG_SECONDS_MAX = 15.0
"""NGINX gives a node up after 10 s."""
IMPATIENT = replace(QUICK, connect_timeout_seconds=2.0, reply_timeout_seconds=3.0)


async def test_node_that_hangs_costs_a_bounded_time_and_its_clients_go_elsewhere(
    tmp_path: Path,
) -> None:
    """A request that may be repeated is answered by another node; a POST gets 504, and
    is stored once however often it is repeated.
    """
    async with (
        asyncio.timeout(100),
        cluster_rig(tmp_path, nodes=NODES, with_nginx=True) as rig,
        AsyncExitStack() as stack,
    ):
        people = [ClusterPerson(rig, f"p{n}", rig.url, settings=IMPATIENT) for n in range(NODES)]
        chat_id = await rig.chat(*(person.user.user_id for person in people), node=0)
        for person in people:
            await stack.enter_async_context(person.online())
        stack.callback(rig.nodes[0].process.send, signal.SIGCONT)
        session = await stack.enter_async_context(https_session(rig, "p0"))
        path = f"/v1/chats/{chat_id}/messages"

        async def get(_: int) -> tuple[int, float]:
            began = time.monotonic()
            async with session.get(path) as answer:
                return answer.status, time.monotonic() - began

        async def post(number: int) -> tuple[int, float]:
            began, key = time.monotonic(), {"Idempotency-Key": f"key-{number}"}
            body = {"content": f"post {number}"}
            async with session.post(path, json=body, headers=key) as answer:
                return answer.status, time.monotonic() - began

        rig.nodes[0].process.send(signal.SIGSTOP)
        numbers = range(2 * NODES)
        said = asyncio.gather(*(person.say(chat_id, "still here") for person in people))
        posting = {asyncio.create_task(post(number)) for number in numbers}
        hanging = posting
        while len(hanging) > len(numbers) / NODES:  # the nodes take turns
            _, hanging = await asyncio.wait(hanging, return_when=asyncio.FIRST_COMPLETED)
        got = await asyncio.gather(*map(get, numbers))
        posted = await asyncio.gather(*posting)
        assert {status for status, _ in got} == {200}
        assert {status for status, _ in posted} == {201, 504}
        assert max(seconds for _, seconds in (*got, *posted)) <= HANG_SECONDS_MAX
        assert max(seconds for _, seconds in (*got, *posted)) >= 9, "some waited for the node"
        await said
        rig.nodes[0].process.send(signal.SIGCONT)
        for number in numbers:
            assert (await post(number))[0] in (200, 201), "200: it was stored before"
        sent = await rig.ask("p0", "GET", path, node=1)
        contents = Counter(message["content"] for message in sent["messages"])
        assert contents == {"still here": NODES, **{f"post {n}": 1 for n in numbers}}


async def test_each_request_goes_to_a_node_with_its_role(tmp_path: Path) -> None:
    roles = (["gateway", "ingest"], ["ingest", "admin", "work"], ["streaming"])
    each = [{"server.roles": list(has)} for has in roles]
    async with (
        asyncio.timeout(100),
        cluster_rig(tmp_path, nodes=NODES, with_redis=False, each=each) as rig,
        AsyncExitStack() as stack,
    ):
        front, back, replies = (node.program.port for node in rig.nodes)
        places = {
            "holdfast": [front, back],
            "holdfast_websockets": [front],
            "holdfast_replies": [replies],
        }
        rig.proxy = proxy = had("nginx", lambda: nginx.start(places, free_port()))
        stack.callback(proxy.stop)
        stack.enter_context(trusting(proxy.folder / "cert.pem"))
        rig.url = proxy.url
        session = await stack.enter_async_context(https_session(rig, "ann"))
        for number in range(NODES):
            async with session.post("/v1/chats", json={"name": "lobby"}) as answer:
                assert answer.status == 201, await answer.text()
                chat_id = (await answer.json())["chat"]["chat_id"]
            async with rig.person("ann", device=f"device{number}").online() as ann:
                await ann.say(chat_id, "hello")
            async with session.get("/v1/models") as answer:
                assert answer.status == 200, await answer.text()
            for path in ("/v1/replies", "/v1/responses", "/v1/chat/completions"):
                async with session.post(path, json={}) as answer:
                    assert answer.status == 400, await answer.text()
            for path in ("/v1/replies/rep_1", "/v1/responses/rep_1"):
                async with session.delete(path) as answer:
                    assert answer.status == 404, await answer.text()
