"""Limits in a whole node: default rules to edit, asked by every entry point."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
import redis.asyncio
import websockets
from credentials import admin_key_of

from engines import Server as Engine
from holdfast.access.principal import USER_SCOPES
from holdfast.limits.composition import NODES_NAME, LimitsSettings
from holdfast.limits.entry_rules import DEFAULT_RULES
from holdfast.limits.limiter.batch import BatchSettings
from holdfast.limits.limiter.settings import LimiterSettings
from holdfast.limits.snapshot_file import SavedNodes, load_nodes
from holdfast.message import User
from holdfast.node.lifecycle import running
from holdfast.node.node import Node
from holdfast.settings import ServerSettings, Settings
from proof.proxy import Proxy

OpenNode = Callable[[], AbstractAsyncContextManager[tuple[Node, httpx.AsyncClient]]]
PATIENT = LimiterSettings(batch=BatchSettings(deadline_seconds=30.0))
"""Redis may take its time, as on a busy machine."""
PATIENCE_SECONDS = 30.0


@pytest.fixture(params=["embedded", "engines"])
def with_node(request: pytest.FixtureRequest, tmp_path: Path) -> OpenNode:
    """Opens a node with embedded limits, or with PostgreSQL and Redis behind them."""
    limits = LimitsSettings()
    if request.param == "engines":
        database: Engine = request.getfixturevalue("postgres_server")
        limits = LimitsSettings(
            request.getfixturevalue("redis_server").url, database.url, limiter=PATIENT
        )

    @asynccontextmanager
    async def opened() -> AsyncIterator[tuple[Node, httpx.AsyncClient]]:
        if not limits.is_embedded:
            await forget(limits)
        settings = Settings(
            server=ServerSettings(port=0, state_dir=str(tmp_path / "state")), limits=limits
        )
        async with running(settings) as node, httpx.AsyncClient(base_url=node.url) as client:
            client.headers["Authorization"] = f"Bearer {admin_key_of(node)}"
            yield node, client

    return opened


async def forget(limits: LimitsSettings) -> None:
    """Empty engines: counters remember the newest version they were counted by, and
    versions start again here.
    """
    await _empty(limits.counters_url)
    await _drop_tables(limits.rules_url)


async def _empty(url: str) -> None:
    """Nodes of other tests are counted for a while, too."""
    client = redis.asyncio.Redis.from_url(url)
    await client.flushall()
    await client.aclose()


async def _drop_tables(url: str) -> None:
    connection = await asyncpg.connect(url)
    names = ("rules", "rule_changes", "rule_keys", "rules_head", "limits_schema")
    await connection.execute(
        "DROP TABLE IF EXISTS " + ", ".join(f"holdfast_{name}" for name in names)
    )
    await connection.close()


async def set_limit(client: httpx.AsyncClient, node: Node, resource: str, limit: int) -> None:
    """Edit a default rule and wait until this node has it."""
    body = {
        "tenantID": "*",
        "resource": resource,
        "limit": limit,
        "burstSize": limit,
        "expectedVersion": 1,
    }
    answer = await client.put("/admin/rules", json={**body, "window": "1h", "reason": "test"})
    assert answer.status_code == 200, answer.text

    def arrived() -> bool:
        rule = node.limits.limiter.rules.lookup("default", resource)
        return rule is not None and rule.limit == limit

    await until(arrived, "the rule to arrive")


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"in vain waited for {what}"
        await asyncio.sleep(0.005)


def as_user(node: Node, user_id: str) -> dict[str, str]:
    return {
        "Authorization": f"Bearer {node.tokens.mint(User('default', user_id), 600, USER_SCOPES)}"
    }


async def refused(node: Node, ask: Callable[[], Awaitable[Any]], tries: int) -> int:
    """How many are admitted before the first refusal, one per round trip to Redis."""
    for number in range(tries):
        if await ask():
            return number
        await until(lambda: node.limits.limiter._remote.batcher.idle, "the counters")
    raise AssertionError(f"nobody was refused in {tries} tries")


async def test_default_rules_are_listed(with_node: OpenNode) -> None:
    async with with_node() as (_, client):
        page = (await client.get("/admin/rules")).json()
        assert {rule["resource"] for rule in page["rules"]} == {
            rule.resource for rule in DEFAULT_RULES
        }
        status = (await client.get("/admin/status")).json()["limits"]
        assert (status["counters"], status["stale"], status["nodes"]) == ("up", False, 1)
        health = (await client.get("/health/admin")).json()
        assert (health["status"], health["rate_limiting"]) == ("healthy", "healthy")


async def test_rest_requests_are_limited(with_node: OpenNode) -> None:
    async with with_node() as (node, client):
        await set_limit(client, node, "rest:user", 3)
        headers = as_user(node, "alice")

        async def ask() -> bool:
            return (await client.get("/v1/chats", headers=headers)).status_code == 429

        assert await refused(node, ask, 5) == 3
        answer = await client.get("/v1/chats", headers=headers)
        assert answer.headers["Retry-After"]
        assert '"*/rest:user"' in answer.headers["RateLimit"]
        others = await client.get("/v1/chats", headers=as_user(node, "bob"))
        assert others.status_code == 200


async def test_handshakes_are_limited(with_node: OpenNode) -> None:
    async with with_node() as (node, client):
        await set_limit(client, node, "connect:user", 2)
        url, headers = node.url.replace("http", "ws") + "/v1/ws", as_user(node, "alice")

        async def connect() -> bool:
            try:
                async with websockets.connect(
                    url, additional_headers=headers, subprotocols=["holdfast.v1"]
                ):  # type: ignore[list-item]
                    return False
            except websockets.InvalidStatus as answer:
                refusals.append(answer.response)
                return True

        refusals: list[websockets.Response] = []
        assert await refused(node, connect, 6) in (2, 3)
        [answer] = refusals
        assert answer.status_code == 429 and int(answer.headers["Retry-After"]) > 0
        assert answer.headers["RateLimit-Policy"] == '"*/connect:user";q=2;w=3600'
        assert answer.headers["RateLimit"].startswith('"*/connect:user";r=0;t=')
        await set_limit(client, node, "rest:user", 1)
        for _ in range(50):
            rest = await client.get("/v1/chats", headers=headers)
            if rest.status_code == 429:
                break
        assert (
            answer.headers["Content-Type"]
            == rest.headers["Content-Type"]
            == "application/problem+json"
        )
        ours, theirs = json.loads(answer.body or b""), rest.json()
        assert ours["violated-policies"] == ["*/connect:user"]
        assert {**ours, "error": 0, "detail": 0, "violated-policies": 0} == {
            **theirs, "error": 0, "detail": 0, "violated-policies": 0,
        }, "one shape at every entry point"  # fmt: skip
        assert ours["error"].keys() == theirs["error"].keys()


async def test_sends_are_limited_and_a_refused_one_is_not_stored(
    with_node: OpenNode,
) -> None:
    async with with_node() as (node, client):
        alice = as_user(node, "alice")
        made = await client.post("/v1/chats", json={"name": "x"}, headers=alice)
        chat = made.json()["chat"]["chat_id"]
        await set_limit(client, node, "send:user", 2)
        sent = 0

        async def send() -> bool:
            nonlocal sent
            sent += 1
            answer = await client.post(
                f"/v1/chats/{chat}/messages",
                json={"content": "hi"},
                headers={**alice, "Idempotency-Key": f"k{sent}"},
            )
            if answer.status_code == 429:
                assert answer.json()["error"]["code"] == "RATE_LIMITED"
                assert answer.json()["error"]["details"]["rule"] == "*/send:user"
                assert answer.json()["violated-policies"] == ["*/send:user"]
                assert '"*/send:user";q=2' in answer.headers["RateLimit-Policy"]
                assert (
                    f'"*/send:user";r=0;t={answer.headers["Retry-After"]}'
                    in answer.headers["RateLimit"]
                )
            return answer.status_code == 429

        stored = await refused(node, send, 6)
        assert stored in (2, 3), (
            "exact where the counters are in the process, one round trip late where they are not"
        )
        page = (await client.get(f"/v1/chats/{chat}/messages", headers=alice)).json()
        assert len(page["messages"]) == stored


async def test_primary_available_after_startup_gets_its_tables_and_rules(
    tmp_path: Path, postgres_server: Engine
) -> None:
    async with Proxy("127.0.0.1", postgres_server.port) as wire:
        wire.set(down=True)
        url = f"postgresql://postgres@127.0.0.1:{wire.port}/postgres"
        limits = LimitsSettings(rules_url=url)
        await _drop_tables(postgres_server.url)
        settings = Settings(
            server=ServerSettings(port=0, state_dir=str(tmp_path / "state")), limits=limits
        )
        async with running(settings) as node:
            assert {rule.stamp for rule in node.limits.limiter.rules.live()} == {(0, 0)}, (
                "it limits"
            )
            wire.set(down=False)

            def arrived() -> bool:
                rules = node.limits.limiter.rules.live()
                return len(rules) == len(DEFAULT_RULES) and all(rule.version == 1 for rule in rules)

            await until(arrived, "the default rules to arrive")


async def test_node_starts_and_limits_without_any_engine(tmp_path: Path) -> None:
    limits = LimitsSettings("redis://127.0.0.1:1/0", "postgresql://nobody@127.0.0.1:1/none")
    settings = Settings(
        server=ServerSettings(port=0, state_dir=str(tmp_path / "state")), limits=limits
    )
    async with running(settings) as node, httpx.AsyncClient(base_url=node.url) as client:
        assert (await client.get("/v1/chats", headers=as_user(node, "alice"))).status_code == 200
        client.headers["Authorization"] = f"Bearer {admin_key_of(node)}"
        health = await client.get("/health/admin")
        assert (health.status_code, health.json()["postgres_primary"]) == (503, "unreachable")
        answer = await client.post("/admin/rules", json={"tenantID": "a", "resource": "b"})
        assert answer.status_code in (422, 503)


async def test_unnamed_nodes_are_counted_separately(redis_server: Engine, tmp_path: Path) -> None:
    limits = LimitsSettings(redis_server.url)
    await _empty(redis_server.url)
    one, two = (
        Settings(server=ServerSettings(port=0, state_dir=str(tmp_path / name)), limits=limits)
        for name in ("one", "two")
    )
    async with running(one) as first, running(two) as second:
        assert first.node_id != second.node_id
        limiters = (first.limits.limiter, second.limits.limiter)
        await until(
            lambda: all(each.nodes == 2 for each in limiters),
            "each other: both take the whole limit",
        )
    async with running(
        Settings(server=ServerSettings(port=0, state_dir=str(tmp_path / "one"), node_id="web-1"))
    ) as named:
        assert named.node_id == "web-1"


@pytest.mark.covers("004 nodes that start while Redis is down")
async def test_nodes_started_without_redis_admit_one_limit_together(
    redis_server: Engine, tmp_path: Path
) -> None:
    """Each knows from its disk how many they are."""
    async with (
        Proxy("127.0.0.1", redis_server.port) as wire,
        AsyncExitStack() as first,
        AsyncExitStack() as again,
    ):
        limits = LimitsSettings(f"redis://127.0.0.1:{wire.port}/5")
        states = [
            Settings(server=ServerSettings(port=0, state_dir=str(tmp_path / name)), limits=limits)
            for name in ("a", "b")
        ]
        nodes = [await first.enter_async_context(running(settings)) for settings in states]
        names = tuple(sorted(node.node_id for node in nodes))
        async with asyncio.timeout(10):
            while {load_nodes(tmp_path / name / NODES_NAME) for name in "ab"} != {  # noqa: ASYNC110
                SavedNodes(2, names)
            }:
                await asyncio.sleep(0.05)
        assert [node.limits.limiter.nodes for node in nodes] == [2, 2]
        await first.aclose()
        wire.set(down=True)
        nodes = [await again.enter_async_context(running(settings)) for settings in states]
        assert [node.limits.limiter.nodes for node in nodes] == [2, 2]
        rule = next(rule for rule in DEFAULT_RULES if rule.resource == "connect:user")
        checks = [
            node.limits.limiter.check("acme", rule.resource, "ann")
            for node in nodes
            for _ in range(rule.capacity)
        ]
        decisions = await asyncio.gather(*checks)
        assert {decision.decided_by for decision in decisions} == {"local_share"}
        assert rule.capacity <= sum(decision.allowed for decision in decisions) <= rule.capacity + 5
