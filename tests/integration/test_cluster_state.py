"""The small state of a cluster while a node cannot reach its database: what is in force
stays, and changes of other nodes are caught up with.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from cluster_database import another_node, first_node, new_database
from structlog.testing import capture_logs
from work_rigs import until

from engines import Server
from holdfast.access.keys import KeyRing
from holdfast.access.postgres import PostgresCredentials
from holdfast.access.revocations.contract import Revocation
from holdfast.access.revocations.in_force import RevocationsInForce
from holdfast.access.revocations.postgres import PostgresRevocations
from holdfast.clock import SystemClock
from holdfast.drivers.postgres_database import Database, PostgresSettings
from holdfast.drivers.postgres_schema import cluster_database
from holdfast.errors import OutcomeUnknown, Unavailable
from holdfast.message import User
from holdfast.store.postgres import PostgresStore, PostgresStoreSettings
from holdfast.webhooks.contract import WebhookEndpoint
from holdfast.webhooks.postgres import PostgresEndpoints
from proof.proxy import Proxy

AT = "2026-01-01T00:00:00.000Z"
TOKEN_KEYS = [b"k" * 32]
ENDPOINT = WebhookEndpoint("ep_1", "acme", "https://a.example", "whsec_x", "", AT)
ALICE = User("acme", "alice")


@asynccontextmanager
async def through(proxy: Proxy) -> AsyncIterator[Database]:
    """A node's connections through a proxy; it is soon out of patience."""
    url = f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres"
    async with another_node(url, timeout_seconds=0.5) as database:
        yield database


async def started(database: Database, folder: Path) -> PostgresCredentials:
    file = folder / "token-keys"
    await asyncio.to_thread(file.write_bytes, TOKEN_KEYS[0])
    await asyncio.to_thread(file.chmod, 0o600)
    return await PostgresCredentials.open(database, file, folder, AT)


async def test_node_that_was_cut_off_catches_up_with_the_others(
    postgres_server: Server, tmp_path: Path
) -> None:
    async with (
        first_node(postgres_server.url) as near,
        Proxy("127.0.0.1", postgres_server.port) as proxy,
        through(proxy) as far,
        PostgresEndpoints.opened(near) as endpoints,
    ):
        keys = await KeyRing.load(await started(near, tmp_path))
        key, secret = await keys.issue("tenant", "backend", AT, tenant="acme")
        clock = SystemClock()
        revocations = RevocationsInForce(await PostgresRevocations.open(near, clock), clock)
        await revocations.refresh()

        ring = await KeyRing.load(PostgresCredentials(far, TOKEN_KEYS, follow_seconds=0.1))
        in_force = RevocationsInForce(PostgresRevocations(far, clock), clock)
        async with PostgresEndpoints.opened(far, follow_seconds=0.1) as seen:
            following = [
                asyncio.create_task(ring.follow()),
                asyncio.create_task(in_force.follow()),
            ]
            unread = {"access.keys_unread", "access.revocations_unread"}
            with capture_logs() as logged:
                proxy.set(blackhole=True)
                before = seen.version
                await keys.revoke(key.key_id)
                await revocations.add(Revocation("mute", *ALICE, "", 0, AT, None))
                await endpoints.add(ENDPOINT)
                await until(lambda: unread <= {line["event"] for line in logged})
            with pytest.raises(Unavailable):
                await seen.all()
            assert ring.find(secret) == key and not in_force.is_muted(ALICE)
            assert seen.version == before
            proxy.set(blackhole=False)
            await until(lambda: not ring.has(key.key_id) and in_force.is_muted(ALICE))
            await seen.changed(before)
            assert list(await seen.all()) == [ENDPOINT]
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)


async def test_change_whose_commit_is_not_confirmed_is_unknown_and_found_later(
    postgres_server: Server, tmp_path: Path
) -> None:
    async with (
        first_node(postgres_server.url) as near,
        Proxy("127.0.0.1", postgres_server.port) as proxy,
        through(proxy) as far,
    ):
        await started(near, tmp_path)
        clock = SystemClock()
        await PostgresRevocations.open(near, clock)
        ring = await KeyRing.load(PostgresCredentials(far, TOKEN_KEYS, follow_seconds=0.1))
        in_force = RevocationsInForce(PostgresRevocations(far, clock), clock)
        await in_force.refresh()
        swallow_commit_answers(far, proxy)
        with pytest.raises(OutcomeUnknown):
            await ring.issue("tenant", "backend", AT, tenant="acme")
        proxy.set(blackhole=False)
        with pytest.raises(OutcomeUnknown):
            await in_force.add(Revocation("mute", *ALICE, "", 0, AT, None))
        proxy.set(blackhole=False)
        assert len(ring.list()) == 1 and not in_force.is_muted(ALICE)
        await in_force.refresh()
        assert in_force.is_muted(ALICE)
        following = asyncio.create_task(ring.follow())
        await until(lambda: len(ring.list()) == 2)
        following.cancel()


def swallow_commit_answers(database: Database, proxy: Proxy) -> None:
    """From the moment COMMIT goes out nothing comes back."""
    committing = database.committing

    @asynccontextmanager
    async def deaf(what: str) -> AsyncIterator[Any]:
        async with committing(what) as connection:
            yield connection
            proxy.set(blackhole=True, one_way="down")

    database.committing = deaf  # type: ignore[method-assign]


async def test_connection_that_broke_inside_the_driver_is_not_lent_again(
    postgres_server: Server,
) -> None:
    """A server that dies in the middle of a response can leave it so."""
    async with first_node(postgres_server.url) as database:
        with pytest.raises(Unavailable):
            async with database.connection("be read") as broken:
                backend = broken.get_server_pid()
                raise asyncpg.InternalClientError("cannot switch to state 12")
        async with database.connection("be read") as db:
            assert db.get_server_pid() != backend


async def test_connection_to_another_server_than_that_of_the_chats_is_not_used(
    postgres_server: Server,
) -> None:
    url = await new_database(postgres_server, "other_server")
    async with PostgresStore(PostgresStoreSettings(url)) as store:
        database = cluster_database(
            PostgresSettings(url, connections_max=1), store.check_connection
        )
        try:
            async with database.connection("be read") as db:
                await db.execute("UPDATE holdfast_chats.cluster SET timeline = timeline - 1")
            async with database.connection("be read") as db:
                db.terminate()  # it was checked before
            with pytest.raises(Unavailable, match="not the primary that the chats are on"):
                async with database.connection("be read"):
                    pytest.fail("it was lent")
        finally:
            await database.close()
