"""Opens the small state beside the chats: who may come in, webhook endpoints, dead
letters, silences of alerts. In files of the state directory, or in the database of a
cluster.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from holdfast.access.contract import CredentialStore
from holdfast.access.revocations.contract import Revocations
from holdfast.access.secrets import FileCredentials, SharedCredentials, open_secrets
from holdfast.access.settings import AccessSettings
from holdfast.clock import Clock, timestamp
from holdfast.errors import extra
from holdfast.fanout.dead_letters import DeadLetters
from holdfast.fanout.dead_letters.sqlite import SqliteDeadLetters
from holdfast.node.database_connections import SHARED_STATE
from holdfast.node.revocations_file import open_revocations
from holdfast.settings import Settings
from holdfast.store.contract import Records
from holdfast.store.sqlite import SqliteStore
from holdfast.webhooks.contract import WebhookEndpoints
from holdfast.webhooks.silences import SharedSilences
from holdfast.webhooks.sqlite import WEBHOOKS, SqliteEndpoints


class SharedState(NamedTuple):
    """What the nodes of a cluster share beside chats, jobs and rules."""

    credentials: CredentialStore
    revocations: Revocations
    endpoints: WebhookEndpoints
    server: str
    """The permanent name of whose endpoints these are."""
    dead_letters: DeadLetters
    silences: SharedSilences | None
    """Those of a cluster; a single node keeps its own."""


def open_shared_state(
    settings: Settings, state: Path, clock: Clock, records: Records
) -> AbstractAsyncContextManager[SharedState]:
    """BadSetting, StateDirectory or StateCorrupted if a part of it cannot be used;
    Unavailable if the database of the cluster does not answer.
    """
    if settings.cluster.postgres:
        return _in_database(settings, state, clock, records)
    return _in_files(settings, state, clock, records)


@asynccontextmanager
async def _in_files(
    settings: Settings, state: Path, clock: Clock, records: Records
) -> AsyncIterator[SharedState]:
    async with AsyncExitStack() as stack:
        credentials = _open_credentials(settings.access, state, clock)
        revocations = await open_revocations(state, clock, records)
        stack.push_async_callback(revocations.close)
        endpoints = await SqliteEndpoints.open(state / WEBHOOKS.name)
        stack.push_async_callback(endpoints.close)
        assert isinstance(records, SqliteStore), "the dead letters are in its file"
        dead_letters = await SqliteDeadLetters.open(records, settings.fanout.dlq)
        server = endpoints.server
        yield SharedState(credentials, revocations, endpoints, server, dead_letters, None)


@asynccontextmanager
async def _in_database(
    settings: Settings, state: Path, clock: Clock, records: Records
) -> AsyncIterator[SharedState]:
    with extra("postgres"):
        from holdfast.access.postgres import PostgresCredentials
        from holdfast.access.revocations.postgres import PostgresRevocations
        from holdfast.drivers.postgres_database import PostgresSettings
        from holdfast.drivers.postgres_schema import cluster_database
        from holdfast.fanout.dead_letters.postgres import PostgresDeadLetters
        from holdfast.store.postgres import PostgresStore
        from holdfast.webhooks.postgres import PostgresEndpoints
        from holdfast.webhooks.silences.postgres import PostgresSilences
    assert isinstance(records, PostgresStore), "the chats are in the same database"
    database = cluster_database(
        PostgresSettings(settings.cluster.postgres, connections_max=SHARED_STATE),
        records.check_connection,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(database.close)
        file, at = _secret_file(settings.access), timestamp(clock.now())
        credentials = await PostgresCredentials.open(database, file, state, at)
        revocations = await PostgresRevocations.open(database, clock)
        endpoints = await stack.enter_async_context(PostgresEndpoints.opened(database))
        dead_letters = await PostgresDeadLetters.open(database, settings.fanout.dlq)
        silences = await PostgresSilences.open(database)
        server = endpoints.server
        yield SharedState(credentials, revocations, endpoints, server, dead_letters, silences)


def _open_credentials(settings: AccessSettings, state: Path, clock: Clock) -> CredentialStore:
    if settings.credentials_dir:
        return SharedCredentials(Path(settings.credentials_dir).expanduser())
    open_secrets(state, timestamp(clock.now()))
    return FileCredentials(state, _secret_file(settings) if settings.tokens.secret_file else None)


def _secret_file(settings: AccessSettings) -> Path:
    return Path(settings.tokens.secret_file).expanduser()
