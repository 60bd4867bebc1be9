"""Opens the file of revocations, ``access.db``; refuses to start if it was lost.

Without the file nobody would be cut off. Every revocation is in the audit log before it
takes effect. So if the log has one and there is no file, the file was lost: the start
fails until an operator restores it or gives it up. Servers from before revocations have
neither.
"""

from __future__ import annotations

import asyncio
import getpass
from pathlib import Path
from typing import get_args

from holdfast.access.revocations.contract import RevocationKind
from holdfast.access.revocations.sqlite import ACCESS, SqliteRevocations
from holdfast.access.secrets import read_secrets
from holdfast.clock import Clock, SystemClock, timestamp
from holdfast.errors import InvalidMessage, StateCorrupted
from holdfast.message import PageToken, User
from holdfast.node.state_dir import held
from holdfast.store.commands import CommandContext
from holdfast.store.contract import Records
from holdfast.store.sqlite import SqliteStore
from holdfast.store.sqlite.database import CHATS

_ACTS = frozenset(f"{kind}.revoke" for kind in get_args(RevocationKind)) | {"user.ban", "user.mute"}
_PAGE = 1_000


async def open_revocations(state: Path, clock: Clock, records: Records) -> SqliteRevocations:
    """The stored revocations. StateCorrupted if their file was lost or is empty."""
    file = state / ACCESS.name
    if _is_lost(file) and await _has_revoked(records):
        raise StateCorrupted(
            f"{file} is gone or empty, and with it who is cut off: put it back (a backup has a"
            " copy), or, to let everybody in again, run `holdfast revoke reset`",
            file=str(file),
        )
    return await SqliteRevocations.open(file, clock)


def reset_revocations(state: Path, reason: str) -> None:
    """Give up the lost revocations of a stopped server; in the audit log first.

    StateDirectory if a server runs on the directory or never did; InvalidMessage if the
    file is there.
    """
    read_secrets(state)
    with held(state) as directory:
        if not _is_lost(directory / ACCESS.name):
            raise InvalidMessage(
                f"{directory / ACCESS.name} is there: lift single revocations with `holdfast revoke"
                " undo`; nothing was changed"
            )
        asyncio.run(_reset(directory, reason))


async def _reset(state: Path, reason: str) -> None:
    clock = SystemClock()
    act = CommandContext(
        User("", getpass.getuser()), timestamp(clock.now()), "", operator=True, reason=reason
    )
    async with SqliteStore(state / CHATS.name) as store:
        await store.record(act, "revocations.reset", ACCESS.name)
    await (await SqliteRevocations.open(state / ACCESS.name, clock)).close()


def _is_lost(file: Path) -> bool:
    return not file.exists() or not file.stat().st_size


async def _has_revoked(records: Records) -> bool:
    after: PageToken | None = None
    while True:
        page = await records.audit(after, _PAGE)
        if any(record.action in _ACTS for record in page.records):
            return True
        if (after := page.next) is None:
            return False
