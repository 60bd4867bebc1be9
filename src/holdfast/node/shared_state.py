"""Opens the small state beside the chats: who may come in, webhook endpoints, dead
letters. In files of the state directory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from holdfast.access.contract import CredentialStore
from holdfast.access.revocations.contract import Revocations
from holdfast.access.secrets import FileCredentials, SharedCredentials, open_secrets
from holdfast.access.settings import AccessSettings
from holdfast.clock import Clock, timestamp
from holdfast.fanout.dead_letters import DeadLetters, RecentDeadLetters
from holdfast.node.revocations_file import open_revocations
from holdfast.settings import Settings
from holdfast.store.contract import Records
from holdfast.webhooks.contract import WebhookEndpoints
from holdfast.webhooks.sqlite import WEBHOOKS, SqliteEndpoints


class SharedState(NamedTuple):
    """What the nodes of a cluster share beside chats, jobs and rules."""

    credentials: CredentialStore
    revocations: Revocations
    endpoints: WebhookEndpoints
    server: str
    """The permanent name of whose endpoints these are."""
    dead_letters: DeadLetters


@asynccontextmanager
async def open_shared_state(
    settings: Settings, state: Path, clock: Clock, records: Records
) -> AsyncIterator[SharedState]:
    """BadSetting, StateDirectory or StateCorrupted if a part of it cannot be used."""
    async with AsyncExitStack() as stack:
        credentials = _open_credentials(settings.access, state, clock)
        revocations = await open_revocations(state, clock, records)
        stack.push_async_callback(revocations.close)
        endpoints = await SqliteEndpoints.open(state / WEBHOOKS.name)
        stack.push_async_callback(endpoints.close)
        dead_letters = RecentDeadLetters(settings.fanout.dlq)
        yield SharedState(credentials, revocations, endpoints, endpoints.server, dead_letters)


def _open_credentials(settings: AccessSettings, state: Path, clock: Clock) -> CredentialStore:
    if settings.credentials_dir:
        return SharedCredentials(Path(settings.credentials_dir).expanduser())
    open_secrets(state, timestamp(clock.now()))
    secret_file = settings.tokens.secret_file
    return FileCredentials(state, Path(secret_file).expanduser() if secret_file else None)
