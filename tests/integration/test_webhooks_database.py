"""Webhooks of a cluster whose PostgreSQL hangs while an endpoint is called: a failure of
ours is not the endpoint's, and a chat waits for it no longer than it lasts.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from functools import partial

from aiohttp import web
from cluster_database import another_node, first_node
from webhook_rig import SECRET, Log, entry, receiving, until
from work_rigs import postgres_work

from engines import Server, postgres
from holdfast.clock import SystemClock
from holdfast.resilience import BreakerSettings
from holdfast.webhooks.contract import WebhookEndpoint
from holdfast.webhooks.delivery import (
    DeliveryNotice,
    WebhookSender,
    WebhookSettings,
    draft_of,
    with_webhooks,
)
from holdfast.webhooks.postgres import PostgresEndpoints
from holdfast.work.contract import WorkStore
from holdfast.work.handlers import Handlers
from holdfast.work.inspection import Query
from holdfast.work.job import Policies, Reason
from holdfast.work.worker import Worker, WorkerSettings

DATABASE_SECONDS_MAX = 1.0
"""How long a delivery waits for PostgreSQL."""
RETRY_SECONDS_MAX = 5.0
"""What the database of a cluster asks for while it does not answer."""
OPENED_AT_ONCE = BreakerSettings(failure_threshold=1, open_duration_seconds=60)


async def test_delivery_is_retried_soon_after_postgres_did_not_answer(
    postgres_server: Server,
) -> None:
    handlers, has_failed, clock = Handlers(), asyncio.Event(), SystemClock()
    quick = WorkerSettings(poll_max_seconds=0.02, breaker=OPENED_AT_ONCE)
    with ExitStack() as hanging:

        def answer(calls: int) -> web.Response:
            if calls == 1:
                hanging.enter_context(postgres.stopped(postgres_server))
            return web.Response(status=204)

        async with (
            receiving() as receiver,
            postgres_work(postgres_server.url) as o,
            first_node(postgres_server.url) as patient,
            another_node(postgres_server.url, DATABASE_SECONDS_MAX) as database,
            PostgresEndpoints.opened(patient) as added,
            PostgresEndpoints.opened(database) as endpoints,
            WebhookSender.opened(
                endpoints, Log([entry(1)]).find, clock, WebhookSettings(private_allowed=True)
            ) as sender,
        ):
            receiver.answer = answer
            sender.register(handlers)
            await added.add(WebhookEndpoint("ep_1", "acme", receiver.url, SECRET, "", "2026-01-01"))
            await o.store.enqueue([draft_of(DeliveryNotice("ep_1", "acme", "", "c1", 1, "msg_1"))])
            policies = with_webhooks(Policies())
            async with Worker(
                o.store,
                handlers,
                settings=quick,
                policies=policies,
                hook=lambda _: has_failed.set(),
            ).running():
                await has_failed.wait()
                hanging.close()
                went_on_at = time.time()
                await until(partial(_has_failed, o.store))
                [job] = await o.store.find(Query())
                assert (job.reason, job.strikes) == (Reason.DEPENDENCY_FAILURE, 0), job.error
                assert job.due_at is not None
                assert job.due_at - went_on_at < RETRY_SECONDS_MAX + 1
                await o.pass_time(RETRY_SECONDS_MAX)
                await until(lambda: len(receiver.calls) == 2)
                assert await o.store.open_breakers() == []
        assert len({sent["webhook-id"] for sent, _ in receiver.calls}) == 1


async def _has_failed(jobs: WorkStore) -> bool:
    return all(job.attempt for job in await jobs.find(Query()))
