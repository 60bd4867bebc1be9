"""Makes a new admin key for a stopped server, when no admin key works any more.

It takes the lock of the state directory, so it never runs beside a server. All tokens
and other keys stay valid. Anybody who can run it can read ``secrets.json`` already, so
it gives nobody more rights than they have.
"""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from holdfast.access.contract import ApiKey
from holdfast.access.keys import KeyRing
from holdfast.access.principal import KeyScope
from holdfast.access.secrets import FileCredentials, keep_admin_key, read_secrets
from holdfast.clock import SystemClock, timestamp
from holdfast.message import User
from holdfast.node.state_dir import held
from holdfast.store.commands import CommandContext
from holdfast.store.sqlite import SqliteStore
from holdfast.store.sqlite.database import CHATS


def create_admin_key(
    state: Path, label: str, scopes: Sequence[str] | None = None, reason: str = ""
) -> tuple[ApiKey, str]:
    """Make an admin key, record it in the audit log, and return it with its secret.

    A key with every scope becomes the state directory's own if that one was revoked.
    StateDirectory if a server runs on the directory or never did; InvalidMessage for a
    bad label or scope.
    """
    read_secrets(state)
    with held(state) as directory:
        return asyncio.run(
            _create(directory, label, cast(Sequence[KeyScope] | None, scopes), reason)
        )


async def _create(
    state: Path, label: str, scopes: Sequence[KeyScope] | None, reason: str
) -> tuple[ApiKey, str]:
    ring = await KeyRing.load(FileCredentials(state))
    key, secret = await ring.issue(
        "admin",
        label,
        timestamp(SystemClock().now()),
        scopes=scopes,
        bounded=False,
        record=lambda key: _record(state / CHATS.name, key, reason),
    )
    if scopes is None:
        keep_admin_key(state, ring.list(), secret)
    return key, secret


async def _record(file: Path, key: ApiKey, reason: str) -> None:
    act = CommandContext(
        User("", getpass.getuser()), key.created_at, "", operator=True, reason=reason
    )
    details = msgspec.json.encode(
        {"kind": key.kind, "scopes": key.scopes, "server": "stopped"}
    ).decode()
    async with SqliteStore(file) as store:
        await store.record(act, "key_issued", key.key_id, details)
