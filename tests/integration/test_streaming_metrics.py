"""What operators see of a real node's replies: gauges, counters and the status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from scripted_node import STREAMING, ScriptedNode, scripted_node
from work_rigs import until

from holdfast.streaming.pool.contract import PoolSettings
from holdfast.streaming.providers.script import ScriptSettings
from holdfast.streaming.settings import (
    ModelSettings,
    ProviderSettings,
    QueueFailoverSettings,
    ReplyClocks,
)
from holdfast.telemetry.metrics import REGISTRY

FULL = replace(
    STREAMING,
    clocks=ReplyClocks(),  # on a busy machine tokens may be late
    pool=PoolSettings(total=10, per_user=7),
    queue_failover=QueueFailoverSettings(waiting_max=20, waiting_per_user=3, timeout_seconds=300),
    providers=(ProviderSettings("endless", "scripted", script=ScriptSettings(tokens=1_000_000)),),
    models=(ModelSettings("endless", ("endless:endless",)),),
)


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"holdfast_reply_{name}", labels) or 0.0


def pool(node: ScriptedNode) -> Mapping[str, Any]:
    found: Mapping[str, Any] = node.node.streaming.status()["pools"]["default"]
    return found


@pytest.mark.covers("002 the queue's length is tracked")
async def test_metrics_and_status_say_what_runs_waits_is_refused_and_ends(
    tmp_path: Path,
) -> None:
    def count() -> list[float]:
        return [
            metric("admissions_total", layer="pool"),
            metric("admissions_total", layer="queue"),
            metric("refusals_total", cause="user"),
            metric("queue_timeouts_total"),
            metric("cancels_total", cause="owner"),
            metric("ends_total", surface="responses", end="cancelled"),
            metric("ends_total", surface="responses", end="queue_timeout"),
        ]

    async with scripted_node(tmp_path, FULL) as node:
        before = count()
        headers = {"Authorization": f"Bearer {node.token}"}
        async with aiohttp.ClientSession(node.node.url, headers=headers) as session:

            async def post(**headers: str) -> tuple[int, str]:
                body = {"model": "endless", "input": "hi", "background": not headers}
                async with session.post("/v1/responses", json=body, headers=headers) as answer:
                    return answer.status, str((await answer.json()).get("id"))

            running = [await post() for _ in range(7)]
            assert (await post(Prefer="wait=0"))[0] == 503
            waiting = [await post() for _ in range(3)]
            assert {status for status, _ in (*running, *waiting)} == {200}
            assert (await post())[0] == 429
            await until(lambda: metric("queue_depth", pool="default") == 3)
            assert metric("active", pool="default") == 7
            assert metric("queue_limit") == 20
            assert metric("pool_state", pool="default", state="degraded") == 1
            assert metric("pool_state", pool="default", state="healthy") == 0
            assert pool(node) == {"active": 7, "waiting": 3, "state": "degraded"}
            for _, reply_id in (*waiting, *running):
                await (await session.post(f"/v1/responses/{reply_id}/cancel")).read()
            await until(lambda: metric("active", pool="default") == 0)
            assert metric("queue_depth", pool="default") == 0
            changes = [after - was for after, was in zip(count(), before, strict=True)]
            assert changes == [7, 4, 1, 1, 10, 10, 1]
