"""PostgreSQL behind a real PgBouncer: in session mode everything works, in transaction
mode it is refused at open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from work_rigs import postgres_work, until

from engines import Server
from holdfast.errors import BadSetting
from holdfast.limits.composition import LimitsSettings, open_limits
from holdfast.limits.rules import Rule
from holdfast.store.postgres import PostgresStoreSettings, server
from holdfast.store.postgres.server import ChatsServer
from holdfast.work.handlers import Context, Handlers
from holdfast.work.inspection import Query
from holdfast.work.job import JobDraft
from holdfast.work.outbox import enqueue
from holdfast.work.postgres import PostgresWork
from holdfast.work.worker import Worker, WorkerSettings

Pooler = Callable[..., Server]
REFUSED = "pooler in transaction mode.* connect to PostgreSQL itself, or set pool_mode = session"


@pytest.mark.parametrize(
    "settings",
    [
        {"pool_mode": "transaction"},
        {"pool_mode": "statement"},
        {"pool_mode": "transaction", "server_round_robin": "1"},
        {"pool_mode": "transaction", "default_pool_size": "1"},
    ],
    ids=["transaction", "statement", "round robin", "one server connection"],
)
async def test_pooler_in_transaction_mode_is_refused_with_advice(
    pooler: Pooler, tmp_path: Path, settings: dict[str, str]
) -> None:
    url = pooler(**settings).url
    await _several_server_connections(url)
    with pytest.raises(BadSetting, match=REFUSED):
        await PostgresWork.open(url)
    lazily = await PostgresWork.open(url, at_once=False)
    with pytest.raises(BadSetting, match=REFUSED):
        await lazily.find(Query())
    await lazily.close()
    with pytest.raises(BadSetting, match=REFUSED):
        async with open_limits(LimitsSettings(rules_url=url), tmp_path):
            pass


async def test_pooler_that_loses_notifications_is_refused_although_sessions_seem_kept(
    pooler: Pooler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every pooler shows other processes. An idle one seems to work: it asks the
    server process that listens to notify.
    """

    async def see_nothing(*_: Any, **__: Any) -> None:
        pass

    monkeypatch.setattr(server, "refuse_shared_sessions", see_nothing)
    monkeypatch.setattr(server, "check_server", lambda *_: None)
    url = pooler("transaction", server_round_robin="1").url
    await _several_server_connections(url)
    with pytest.raises(BadSetting, match="a notification of PostgreSQL does not arrive"):
        await ChatsServer(PostgresStoreSettings(url)).prepare()


async def test_replica_behind_a_pooler_in_transaction_mode_is_refused(
    postgres_server: Server, pooler: Pooler, tmp_path: Path
) -> None:
    settings = LimitsSettings(rules_url=postgres_server.url, replica_url=pooler("transaction").url)
    with pytest.raises(BadSetting, match=REFUSED):
        async with open_limits(settings, tmp_path):
            pass


async def test_jobs_run_behind_a_pooler_in_session_mode(
    postgres_server: Server, pooler: Pooler
) -> None:
    async with postgres_work(postgres_server.url) as direct:
        store = await PostgresWork.open(pooler("session").url)
        handlers, seen, woken = Handlers(), list[int](), asyncio.Event()

        @handlers.handle(dict, type="order", stream=lambda _: "s")
        async def handle(ctx: Context, payload: dict[str, Any]) -> None:
            async with ctx.transaction() as connection:
                idle = await connection.fetchval("SHOW idle_in_transaction_session_timeout")
                assert idle == "20s", "settings that the pooler refuses at startup are set after it"
            seen.append(ctx.job.seq)
            woken.set()

        # It polls only after a minute: NOTIFY wakes it before.
        settings = WorkerSettings(poll_min_seconds=60, poll_max_seconds=60)
        async with Worker(store, handlers, settings=settings).running():
            for _ in range(3):
                woken.clear()
                await until(lambda: _is_asleep(direct.store))
                await direct.store.enqueue([JobDraft("order", b"{}", "s")])
                async with asyncio.timeout(20):
                    await woken.wait()
        assert len(seen) == 3
        await store.close()


async def test_rules_are_followed_behind_a_pooler_in_session_mode(
    pooler: Pooler, tmp_path: Path
) -> None:
    settings, rule = (
        LimitsSettings(rules_url=pooler("session").url),
        Rule("acme", "/x", "fixed_window", 2, 60.0),
    )
    async with (
        open_limits(settings, tmp_path / "a") as one,
        open_limits(settings, tmp_path / "b", starts_with=[rule]),
    ):
        await until(lambda: rule.name in {live.name for live in one.feed.rules.live()})


async def test_producer_may_use_a_pooler_in_transaction_mode(
    postgres_server: Server, pooler: Pooler
) -> None:
    """Its locks end with its transaction."""

    async with postgres_work(postgres_server.url) as o:
        connection = await asyncpg.connect(pooler("transaction").url, statement_cache_size=0)
        async with connection.transaction():
            await enqueue(connection, JobDraft("order", b"{}", "s"))
        assert len(await o.store.find(Query())) == 1
        await connection.close()


async def _several_server_connections(url: str) -> None:
    """So that a pooler has some to choose from."""
    async with AsyncExitStack() as stack:
        connections = [await asyncpg.connect(url, statement_cache_size=0) for _ in range(3)]
        for connection in connections:
            stack.callback(connection.terminate)
        await asyncio.gather(
            *(connection.execute("SELECT pg_sleep(0.05)") for connection in connections)
        )


async def _is_asleep(store: Any) -> bool:
    async with store._pools.calls.acquire() as connection:
        return bool(
            await connection.fetchval("SELECT bool_and(sleeping) FROM holdfast_work.instance")
        )
