"""A backup put back in place of a stopped node's chats."""

from __future__ import annotations

import getpass
from pathlib import Path

from holdfast.clock import SystemClock, timestamp
from holdfast.store.sqlite.backup import restore_chats
from holdfast.store.state import CHATS_NAME, held


def restore_backup(state_dir: Path, backup: Path, overwrite: bool) -> int:
    """Put a backup in place of a stopped server's chats, under new epochs; how many chats it holds.

    StateDirectory if a server runs on the directory, or if there are chats and ``overwrite`` is not said.
    """
    with held(state_dir) as directory:
        at = timestamp(SystemClock().now())
        return restore_chats(backup, directory / CHATS_NAME, at=at, actor=getpass.getuser(), overwrite=overwrite)
