"""Detects damage in a write-ahead log.

SQLite silently takes the first frame with a bad checksum for the end of the log. After
a crash that is right; after damage it loses every later transaction.

The two cases differ: with ``synchronous=FULL`` each transaction is synced before the
next begins, so a power cut can tear only the last one. If there is a commit frame
behind the apparent end, and a frame of this log behind that commit, the commit was
synced once and became unreadable only because something before it is damaged.
"""

from __future__ import annotations

import struct
from pathlib import Path

import apsw

from holdfast.errors import StateCorrupted

HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24


def require_whole_log(connection: apsw.Connection, path: Path, vfs: str | None) -> None:
    """StateCorrupted if the log of a newly opened file is damaged. Raises apsw errors.

    Removes a torn transaction, so that its remains are not found after the next crash.
    """
    log = path.with_name(path.name + "-wal")
    if not log.exists():
        return
    # the first read recovers the log
    connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    readable, _ = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
    file = apsw.VFSFile(vfs or "", str(log), [apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_READWRITE, 0])
    try:
        commits, follows = _behind(file, max(readable, 0))
    finally:
        file.xClose()
    if follows:
        # else closing would remove the log
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        size = (
            HEADER_BYTES + readable * (FRAME_HEADER_BYTES + _page_bytes(connection))
            if readable > 0
            else 0
        )
        raise StateCorrupted(
            f"{log} is damaged behind byte {size}, and at least one commit behind it cannot be"
            " read: run `holdfast restore` with a backup, or, to go on without what is behind it,"
            f" `truncate -s {size} {log}`",
            file=str(log),
        )
    if commits:
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)


def _behind(file: apsw.VFSFile, readable: int) -> tuple[bool, bool]:
    """Whether a commit follows the readable frames, and whether a frame follows it."""
    size = file.xFileSize()
    if size < HEADER_BYTES:
        return False, False
    _, _, page_bytes, _, *salts = struct.unpack(">6I", file.xRead(24, 0))
    frame_bytes = FRAME_HEADER_BYTES + page_bytes
    commits = False
    for start in range(HEADER_BYTES + readable * frame_bytes, size - frame_bytes + 1, frame_bytes):
        _, committed, *own = struct.unpack(">4I", file.xRead(16, start))
        if own == salts:
            if commits:
                return True, True
            commits = committed != 0
    return commits, False


def _page_bytes(connection: apsw.Connection) -> int:
    return int(connection.execute("PRAGMA page_size").get)
