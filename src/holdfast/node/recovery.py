"""Repairs of a stopped server: a new admin key, and a start without lost revocations.

Each takes the lock of the state directory, so it never runs beside a server, and is in
the audit log before it takes effect. Anybody who can run it can read ``secrets.json``
already, so it gives nobody more rights than they have.
"""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

import msgspec

from holdfast.access.contract import ApiKey, CredentialStore
from holdfast.access.keys import KeyRing
from holdfast.access.principal import KeyScope
from holdfast.access.revocations.sqlite import ACCESS
from holdfast.access.secrets import FileCredentials, keep_admin_key, read_secrets
from holdfast.clock import Ids, SystemClock, timestamp
from holdfast.errors import InvalidMessage
from holdfast.message import User
from holdfast.node.engines import open_records
from holdfast.node.revocations_file import create_revocations, is_lost
from holdfast.node.shared_state import open_shared_state
from holdfast.node.state_dir import held
from holdfast.settings import Settings
from holdfast.store.commands import CommandContext
from holdfast.store.contract import Records


def create_admin_key(
    state: Path,
    label: str,
    scopes: Sequence[str] | None = None,
    reason: str = "",
    cluster: Settings | None = None,
) -> tuple[ApiKey, str]:
    """Make an admin key when none works any more; return it with its secret.

    All tokens and other keys stay valid. A key with every scope becomes the state
    directory's own if that one was revoked. ``cluster``: the settings of a node whose
    keys are in the database of its cluster; the other nodes may run. StateDirectory if
    a server runs on the directory or never did; InvalidMessage for a bad label or
    scope.
    """
    if cluster is None:
        read_secrets(state)
    with held(state) as directory:
        return asyncio.run(
            _create(directory, cluster, label, cast(Sequence[KeyScope] | None, scopes), reason)
        )


async def _create(
    state: Path,
    cluster: Settings | None,
    label: str,
    scopes: Sequence[KeyScope] | None,
    reason: str,
) -> tuple[ApiKey, str]:
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        records = await stack.enter_async_context(open_records(state, clock, cluster))
        credentials: CredentialStore = FileCredentials(state)
        if cluster is not None:
            shared = await stack.enter_async_context(
                open_shared_state(cluster, state, clock, records)
            )
            credentials = shared.credentials
        ring = await KeyRing.load(credentials)
        key, secret = await ring.issue(
            "admin",
            label,
            timestamp(clock.now()),
            scopes=scopes,
            bounded=False,
            record=lambda key: _record_key(records, key, reason),
        )
        if scopes is None:
            keep_admin_key(state, ring.list(), secret)
        return key, secret


async def _record_key(records: Records, key: ApiKey, reason: str) -> None:
    details = msgspec.json.encode(
        {"kind": key.kind, "scopes": key.scopes, "server": "stopped"}
    ).decode()
    await records.record(_operator_act(key.created_at, reason), "key_issued", key.key_id, details)


def reset_revocations(state: Path, reason: str) -> None:
    """Give up the lost revocations of a stopped server.

    StateDirectory if a server runs on the directory or never did; InvalidMessage if the
    file is there.
    """
    read_secrets(state)
    with held(state) as directory:
        if not is_lost(directory / ACCESS.name):
            raise InvalidMessage(
                f"{directory / ACCESS.name} is there: lift single revocations with `holdfast revoke"
                " undo`; nothing was changed"
            )
        asyncio.run(_reset(directory, reason))


async def _reset(state: Path, reason: str) -> None:
    clock = SystemClock()
    act = _operator_act(timestamp(clock.now()), reason)
    async with open_records(state, clock) as records:
        await records.record(act, "revocations.reset", ACCESS.name)
    await create_revocations(state, clock)


def _operator_act(at: str, reason: str) -> CommandContext:
    act_id = Ids(SystemClock()).new("aud_")
    return CommandContext(User("", getpass.getuser()), at, act_id, operator=True, reason=reason)
