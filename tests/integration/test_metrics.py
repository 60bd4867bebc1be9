"""The /metrics of a whole node: every metric of the path, even if a part is stopped."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from credentials import admin_key_of
from prometheus_client.parser import text_string_to_metric_families

from holdfast.cli.operations import alarms
from holdfast.errors import Unavailable
from holdfast.eventlog.sqlite import SqliteEventLog
from holdfast.gateway.settings import GatewaySettings
from holdfast.message import LogEntry
from holdfast.node.lifecycle import running
from holdfast.node.node import Node
from holdfast.resilience import BreakerSettings
from holdfast.settings import ServerSettings, Settings

# Tiers 1 to 3 of the message path, as a node shows them after one message.
SHOWN = [
    "durability_counter_corruption_total",
    "durability_duplicate_sequence_total",
    "durability_rollbacks_proven_total",
    "dependency_up",
    "gateway_slow_consumer_disconnects_total",
    "circuit_breaker_state",
    "durability_persist_latency_seconds_count",
    "durability_transaction_conflicts_total",
    "fanout_lag",
    "fanout_delivery_skipped_total",
    "fanout_delivery_lag_seconds_count",
    "sequence_gaps_total",
    "durability_idempotency_hits_total",
    "durability_outcomes_total",
    "sequence_allocation_latency_seconds_count",
    "sequence_allocation_errors_total",
    "hot_chats",
    "gateway_connection_timeouts_total",
    "registry_errors_total",
    "gateway_instances_healthy",
    "fanout_retries_total",
    "fanout_dlq_depth",
    "fanout_consumer_restarts_total",
    "gateway_connections_active",
    "gateway_connections_total",
    "durability_messages_persisted_total",
    "fanout_messages_delivered_total",
    "client_resync_forced_total",
    "gateway_outbound_buffer_bytes",
    "ingest_sends_waiting",
    "setting_changed",
    "store_reopened_total",
    "api_requests_total",
]


class Operator:
    """Reads a node's metrics over HTTP, and sends."""

    def __init__(self, node: Node, client: httpx.AsyncClient) -> None:
        self._client = client
        self._headers = {"Authorization": f"Bearer {admin_key_of(node)}"}
        self._sent = 0

    async def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        text = (await self._client.get("/metrics", headers=self._headers)).text
        families = text_string_to_metric_families(text)
        return {
            (sample.name.removeprefix("holdfast_"), frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = (
            await self._client.get("/admin/status", headers=self._headers)
        ).json()
        return found

    async def become_alice(self) -> str:
        body = {"kind": "tenant", "tenant": "default", "label": "backend", "reason": "test"}
        key = (await self._client.post("/admin/keys", json=body, headers=self._headers)).json()[
            "secret"
        ]
        self._alice = {"Authorization": f"Bearer {key}", "X-Act-As": "alice"}
        made = await self._client.post(
            "/v1/chats", json={"name": "lobby", "members": ["bob"]}, headers=self._alice
        )
        return str(made.json()["chat"]["chat_id"])

    async def send(self, chat_id: str) -> None:
        self._sent += 1
        headers = {**self._alice, "Idempotency-Key": f"k{self._sent}"}
        answer = await self._client.post(
            f"/v1/chats/{chat_id}/messages", json={"content": "hello"}, headers=headers
        )
        assert answer.status_code == 201, answer.text


def settings(tmp_path: Path) -> Settings:
    return Settings(server=ServerSettings(port=0, state_dir=str(tmp_path / "state")))


async def test_a_node_shows_every_metric_of_the_message_path(tmp_path: Path) -> None:
    async with running(settings(tmp_path)) as node, httpx.AsyncClient(base_url=node.url) as client:
        operator = Operator(node, client)
        await operator.send(await operator.become_alice())
        await until(operator, "fanout_delivery_skipped_total", lambda n: n >= 1, reason="offline")
        shown = await operator.metrics()
        names = {name for name, _ in shown}
        assert [name for name in SHOWN if name not in names] == []
        assert shown["setting_changed", frozenset({("path", "server.state_dir")})] == 1
        assert shown["dependency_up", frozenset({("dependency", "store")})] == 1


@pytest.mark.covers("000 Kafka consumer lag high: scale consumers, alert")
async def test_the_lag_grows_while_fanout_stands_still_and_sends_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unavailable(log: SqliteEventLog, after: int, limit: int) -> Sequence[LogEntry]:
        raise Unavailable("the log cannot be read")

    async with (
        running(settings(tmp_path), gauges_seconds=0.05) as node,
        httpx.AsyncClient(base_url=node.url) as client,
    ):
        operator = Operator(node, client)
        chat_id = await operator.become_alice()
        with monkeypatch.context() as outage:
            outage.setattr(SqliteEventLog, "read", unavailable)
            for _ in range(3):
                await operator.send(chat_id)
            await until(operator, "fanout_lag", lambda lag: lag >= 3)
            await until(operator, "dependency_up", lambda up: up == 0, dependency="eventlog")
        await until(operator, "fanout_lag", lambda lag: lag == 0)
        await until(operator, "dependency_up", lambda up: up == 1, dependency="eventlog")


async def test_a_store_that_is_gone_while_nobody_uses_it_is_shown_and_so_is_its_return(
    tmp_path: Path,
) -> None:
    breaker = BreakerSettings(open_duration_seconds=0.2)
    rests_briefly = replace(settings(tmp_path), gateway=GatewaySettings(circuit_breaker=breaker))
    chats, elsewhere = tmp_path / "state" / "chats.db", tmp_path / "elsewhere"

    async with (
        running(rests_briefly, gauges_seconds=0.05) as node,
        httpx.AsyncClient(base_url=node.url) as client,
    ):
        operator = Operator(node, client)
        shutil.move(chats, elsewhere)
        await until(operator, "dependency_up", lambda up: up == 0, dependency="store")
        assert (await client.get("/health/ready")).status_code == 503
        status = await operator.status()
        assert status["ready"] is False and status["dependencies"]["store"] in ("down", "open")
        assert "its operator must put them back" in status["trouble"]["store"]
        assert any("put them back" in alarm for alarm in alarms(status))
        shutil.move(elsewhere, chats)
        await until(operator, "dependency_up", lambda up: up == 1, dependency="store")
        async with asyncio.timeout(10):  # the breaker of reads may rest a moment longer
            while True:
                status = await operator.status()
                if status["ready"] and not alarms(status):
                    break
                await asyncio.sleep(0.02)
        assert not status["trouble"]


async def until(
    operator: Operator, name: str, holds: Callable[[float], bool], **labels: str
) -> None:
    async with asyncio.timeout(20):
        while (  # noqa: ASYNC110
            found := (await operator.metrics()).get((name, frozenset(labels.items())))
        ) is None or not holds(found):
            await asyncio.sleep(0.05)
