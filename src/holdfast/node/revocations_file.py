"""Opens the file of revocations, ``access.db``; refuses to start if it was lost.

Without the file nobody would be cut off. Every revocation is in the audit log before it
takes effect. So if the log has one and there is no file, the file was lost: the start
fails until an operator restores it or gives it up. Servers from before revocations have
neither.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from holdfast.access.revocations.contract import RevocationKind
from holdfast.access.revocations.sqlite import ACCESS, SqliteRevocations
from holdfast.clock import Clock
from holdfast.errors import StateCorrupted
from holdfast.message import PageToken
from holdfast.store.contract import Records

_ACTS = frozenset(f"{kind}.revoke" for kind in get_args(RevocationKind)) | {"user.ban", "user.mute"}
_PAGE = 1_000


async def open_revocations(state: Path, clock: Clock, records: Records) -> SqliteRevocations:
    """The stored revocations. StateCorrupted if their file was lost or is empty."""
    file = state / ACCESS.name
    if is_lost(file) and await _has_revoked(records):
        raise StateCorrupted(
            f"{file} is gone or empty, and with it who is cut off: put it back (a backup has a"
            " copy), or, to let everybody in again, run `holdfast revoke reset`",
            file=str(file),
        )
    return await SqliteRevocations.open(file, clock)


async def create_revocations(state: Path, clock: Clock) -> None:
    """Create the file, empty, for a server whose lost revocations are given up."""
    await (await SqliteRevocations.open(state / ACCESS.name, clock)).close()


def is_lost(file: Path) -> bool:
    return not file.exists() or not file.stat().st_size


async def _has_revoked(records: Records) -> bool:
    after: PageToken | None = None
    while True:
        page = await records.audit(after, _PAGE)
        if any(record.action in _ACTS for record in page.records):
            return True
        if (after := page.next) is None:
            return False
