"""The store of many nodes on a primary and its standby: kills, a promotion, and an old
primary that comes back.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest
from log_capture import logging_to
from store_rigs import acked, create, send
from work_rigs import until

from engines import Server, postgres
from engines.fixtures import had
from holdfast.access.revocations.contract import Revocation
from holdfast.access.revocations.postgres import PostgresRevocations
from holdfast.clock import SystemClock
from holdfast.drivers.postgres_database import PostgresSettings
from holdfast.drivers.postgres_schema import cluster_database
from holdfast.errors import HoldfastError, Unavailable
from holdfast.eventlog.contract import LogLost
from holdfast.eventlog.postgres import PostgresEventLog
from holdfast.message import Acked
from holdfast.store.postgres import PostgresStore, PostgresStoreSettings


@pytest.fixture
def pair() -> Iterator[tuple[Server, Server]]:
    """A primary and its standby."""
    primary = had("postgres", postgres.start)
    replica = postgres.standby(primary)
    yield primary, replica
    for server in (primary, replica):
        server.stop()


def settings_of(*servers: Server) -> PostgresStoreSettings:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return PostgresStoreSettings(f"postgresql://postgres@{hosts}/postgres")


async def send_until_acked(store: Any, key: str) -> Acked:
    """As a client does: again with the same key, until it is known to be stored."""
    outcome: Any = None

    async def is_acked() -> bool:
        nonlocal outcome
        try:
            outcome = await send(store, key)
        except HoldfastError as error:
            assert error.retryable
            return False
        return isinstance(outcome, Acked)

    await until(is_acked)
    assert isinstance(outcome, Acked)
    return outcome


async def has_replayed(primary: Server, replica: Server) -> None:
    """Return when the standby has all that the primary has committed."""
    one, two = await asyncpg.connect(primary.url), await asyncpg.connect(replica.url)
    end = await one.fetchval("SELECT pg_current_wal_lsn()::text")
    await until(lambda: two.fetchval(f"SELECT pg_last_wal_replay_lsn() >= '{end}'::pg_lsn"))
    await one.close()
    await two.close()


async def promote(replica: Server) -> None:
    connection = await asyncpg.connect(replica.url)
    assert await connection.fetchval("SELECT pg_promote()")
    await connection.close()


async def test_promotion_raises_all_epochs_and_the_old_primary_is_not_used(
    pair: tuple[Server, Server],
) -> None:
    primary, replica = pair
    with pytest.raises(Unavailable, match="standby"):
        async with PostgresStore(settings_of(replica)):
            raise AssertionError("it is open")
    lines = io.StringIO()
    with logging_to(lines):
        store_settings = settings_of(replica, primary)
        async with PostgresStore(store_settings) as store:
            await create(store)
            acked(await send(store, "a"))
            log = PostgresEventLog(store)
            position = await log.end()
            shared = PostgresSettings(store_settings.url)
            database = cluster_database(shared, store.check_connection)
            revocations = await PostgresRevocations.open(database, SystemClock())

            postgres.kill(primary)
            with pytest.raises(HoldfastError):
                await send(store, "b")
            primary = postgres.again(primary)
            assert (await send_until_acked(store, "b")).message.sequence == 2
            assert (await store.heads(["chat_a"]))["chat_a"].epoch == 1, "a crash loses nothing"
            assert len((await log.read(position, 10))[0]) == 1

            await has_replayed(primary, replica)
            postgres.kill(primary)
            await promote(replica)
            assert (await send_until_acked(store, "c")).message.sequence == 3
            epoch = (await store.heads(["chat_a"]))["chat_a"].epoch
            assert epoch > 1_000_000_000
            with pytest.raises(LogLost):
                await log.read(position, 10)
            await revocations.add(Revocation("ban", "acme", "alice", "", 0, "now", None))

            primary = postgres.again(primary)
            postgres.kill(replica)
            for _ in range(5):
                with pytest.raises(HoldfastError):
                    await send(store, "d")
                with pytest.raises(Unavailable):
                    await store.heads(["chat_a"])
                with pytest.raises(Unavailable):
                    await revocations.version()
            await database.close()
    old = await asyncpg.connect(primary.url)
    assert await old.fetchval("SELECT count(*) FROM holdfast_chats.message") == 2
    await old.close()
    primary.stop()
    assert lines.getvalue().count("store.old_primary_refused") == 1, "of many connections"
    events = {json.loads(line)["event"] for line in lines.getvalue().splitlines()}
    assert {"store.old_primary_refused", "store.server_changed"} <= events
