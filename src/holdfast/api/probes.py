"""Endpoints for machines: liveness, readiness, status, metrics."""

from __future__ import annotations

import asyncio

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Answer, Call
from holdfast.api.schemas import Health
from holdfast.telemetry import REGISTRY
from holdfast.wire.frames import Error, ErrorBody

METRICS_TYPE = CONTENT_TYPE_LATEST


async def get_live(deps: ApiDeps, call: Call) -> Answer:
    """The process and its event loop run; no dependency is asked."""
    return Answer(Health("live"))


async def get_ready(deps: ApiDeps, call: Call) -> Answer:
    """From what the node knows by its own probes; no dependency is asked."""
    readiness = deps.readiness()
    detail = readiness.dependencies if "status:read" in call.principal.scopes else None
    if readiness.ready:
        return Answer(Health("ready", detail))
    return Answer(Health("not_ready", detail), 503, {"Retry-After": "1"})


async def get_operator_status(deps: ApiDeps, call: Call) -> Answer:
    return Answer(await call.in_time(deps.status()))


async def get_cluster(deps: ApiDeps, call: Call) -> Answer:
    return Answer(await call.in_time(deps.cluster()))


async def get_metrics(deps: ApiDeps, call: Call) -> Answer:
    """On a thread, because it takes 10 ms and more."""
    return Answer(await asyncio.to_thread(generate_latest, REGISTRY), media_type=METRICS_TYPE)


async def upgrade_needed(deps: ApiDeps, call: Call) -> Answer:
    """A plain HTTP request for the WebSocket's path."""
    detail = Error(
        "INVALID_MESSAGE", "this address speaks WebSocket (holdfast.v1): ask for an upgrade", False
    )
    return Answer(ErrorBody(detail), 426, {"Upgrade": "websocket"})
