"""Builds the replies of a node: pool, log, providers, accounts; and runs them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from holdfast import telemetry
from holdfast.clock import Clock, Ids
from holdfast.errors import HoldfastError, extra
from holdfast.limits.composition import LimitsParts
from holdfast.limits.http import refusal
from holdfast.message import User
from holdfast.node.engines import Engines
from holdfast.node.supervisor import background_task
from holdfast.settings import Settings
from holdfast.streaming.admission import Admission, ReplyRequest
from holdfast.streaming.body_bytes import BodyBytes
from holdfast.streaming.parts import StreamingDeps, StreamingParts
from holdfast.streaming.pool.contract import Pool, PoolSizes, QueueBounds
from holdfast.streaming.pool.leases import NodeLeases
from holdfast.streaming.pool.memory import MemoryPool
from holdfast.streaming.producer import Producer
from holdfast.streaming.providers.routing import open_routing
from holdfast.streaming.reply import Owner, Payer
from holdfast.streaming.reply_log.writer import LogWriter
from holdfast.streaming.usage import ReplyAccounts

GAUGES_SECONDS = 1.0


class NodeStreaming:
    """The replies of a node; built first, then run."""

    def __init__(
        self, settings: Settings, node_id: str, engines: Engines, limits: LimitsParts, clock: Clock
    ) -> None:
        streaming = settings.streaming
        self._waiting_max = streaming.queue_failover.waiting_max
        self._is_on = "streaming" in settings.server.roles
        self._limits, self._per_user = limits, streaming.pool.per_user
        self._pool, self._leases = _open_pool(settings, node_id, limits, clock)
        self._routing = open_routing(streaming, os.environ, clock, random.Random())
        self._writer = LogWriter(engines.replies)
        self._accounts = ReplyAccounts(limits.entry_points, engines.usage, clock, Ids(clock))
        self._usage = engines.usage
        self.body_bytes = BodyBytes(streaming.queue_failover)
        admission = Admission(
            streaming, self._routing, self._leases, self._check_rates, self._active_limit
        )
        producer = Producer(
            streaming, self._routing, self._leases, self._writer, self._accounts, clock
        )
        deps = StreamingDeps(node_id, streaming, self._leases, engines.replies, self._writer, clock)
        self.parts = StreamingParts(deps, admission, producer)

    async def _check_rates(self, request: ReplyRequest) -> None:
        payer = request.payer
        if request.is_assistant:  # of a request by HTTP the API has asked already
            user = User(payer.tenant, payer.user)
            refused = refusal(await self._limits.entry_points.decide("reply", user))
            if refused is not None:
                telemetry.reply_refused("rate")
                raise refused
        await self._accounts.check(payer)

    def _active_limit(self, payer: Payer) -> int:
        points = self._limits.entry_points
        return points.active_limit(payer.tenant, self._per_user, is_key=payer.is_key)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Make replies while the block runs. Call ``parts.drain`` before it ends.

        A node without the role is not in the pool.
        """
        if not self._is_on:
            yield
            return
        async with AsyncExitStack() as stack:
            await self._pool.check()
            stack.push_async_callback(self._pool.close)
            stack.push_async_callback(self._routing.close)
            stack.push_async_callback(self._flush_usage)
            await stack.enter_async_context(background_task("reply_usage", self._accounts.run))
            await stack.enter_async_context(background_task("reply_log", self._writer.run))
            await stack.enter_async_context(background_task("reply_gauges", self._keep_gauges))
            await stack.enter_async_context(self._leases.running())
            await stack.enter_async_context(self.parts.running())
            yield

    async def forget_user(self, user: User) -> None:
        """Erase the user's replies; usage rows keep their counts without the name."""
        await self.parts.forget_owner(Owner(user.tenant, "user", user.user_id))
        await self._usage.forget_user(user.tenant, user.user_id)

    async def _flush_usage(self) -> None:
        """Count what has ended. A failing replies.db does not keep a node from
        stopping.
        """
        try:
            await self._accounts.flush()
        except HoldfastError as error:
            telemetry.log.error("streaming.usage_lost", error=str(error))

    async def _keep_gauges(self) -> None:
        while True:
            status = self._leases.status()
            telemetry.reply_queue_limit(self._waiting_max)
            telemetry.pool_state(status.active, status.depth, status.state)
            telemetry.dependency_up("replies", self._up)
            await asyncio.sleep(GAUGES_SECONDS)

    @property
    def _up(self) -> bool:
        """Whether the pool and the log answer."""
        return self._leases.shared_up and self._writer.trouble is None

    def dependencies(self) -> Mapping[str, str]:
        """For display only: a node makes replies without pool and log, too."""
        return {"replies": "up" if self._up else "down"}

    def trouble(self) -> Mapping[str, str | None]:
        """Why the log of replies and the usage rows in ``replies.db`` fail, if they
        do.
        """
        return {"replies": self._writer.trouble, "usage": self._accounts.trouble}

    def status(self) -> Mapping[str, Any]:
        """Pools, depth of the queue, and providers."""
        pool = self._leases.status()
        return {
            "pools": {
                name: {
                    "active": pool.active.get(name, 0),
                    "waiting": pool.depth.get(name, 0),
                    "state": state,
                }
                for name, state in pool.state.items()
            },
            "nodes": list(pool.nodes),
            "shared_pool": "up" if pool.shared_up else "down",
            "providers": [provider._asdict() for provider in self._routing.status()],
            "body_bytes": self.body_bytes.total,
            "uncounted_runs": self._accounts.lost,
        }


def _open_pool(
    settings: Settings, node_id: str, limits: LimitsParts, clock: Clock
) -> tuple[Pool, NodeLeases]:
    """In memory for a node that is alone, else in the Redis that nodes share.

    A node that starts without that Redis divides by the nodes that the limiter kept.
    """
    streaming, queue = settings.streaming, settings.streaming.queue_failover
    own = {p.pool: p.concurrency_max for p in streaming.providers if p.concurrency_max}
    sizes = PoolSizes(streaming.pool.total, own)
    bounds = QueueBounds(queue.waiting_max, queue.waiting_per_tenant, queue.waiting_per_user)
    url = settings.cluster.redis or streaming.replies_url
    if url in ("", "sqlite:"):
        pool = MemoryPool(sizes, bounds, clock)
        return pool, NodeLeases(node_id, pool, sizes, clock)
    with extra("redis"):
        from holdfast.streaming.pool.redis import RedisPool
    shared = RedisPool(url, sizes, bounds)

    def alone(nodes: int) -> Pool:
        return MemoryPool(sizes.share(nodes), bounds.share(nodes), clock)

    def nodes() -> int:
        return limits.limiter.nodes

    return shared, NodeLeases(node_id, shared, sizes, clock, fallback=alone, nodes_last_seen=nodes)
