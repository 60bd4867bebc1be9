"""Copies of the file: taken while the server runs, put back while it does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import apsw

from holdfast.errors import StateCorrupted, StateDirectory
from holdfast.sqlite.errors import Doing, translate
from holdfast.store.sqlite.database import SQL, SqliteSettings, open_and_migrate, version_of

PAGES_AT_ONCE = 256


def copy_database(source: Path, target: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """A consistent copy of a live SQLite file: one snapshot, which neither waits for the writer nor delays it.

    The copy appears under its name only when it is complete and on stable storage. StateDirectory if ``target``
    exists or cannot be written.
    """
    if target.exists():
        raise StateDirectory(f"{target} exists; choose another name for the backup")
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        _copy(source, partial, progress)
        partial.rename(target)
        _sync(target.parent)
    except apsw.Error as error:
        raise translate(error, str(target), Doing.OPENING) from error
    except OSError as error:
        raise StateDirectory(f"{target} cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def _copy(source: Path, target: Path, progress: Callable[[int, int], None] | None) -> None:
    origin = apsw.Connection(str(source), flags=apsw.SQLITE_OPEN_READONLY)
    copy = apsw.Connection(str(target))
    try:
        origin.execute("BEGIN")
        origin.execute("SELECT count(*) FROM sqlite_schema").fetchall()  # the snapshot begins with the first read
        with copy.backup("main", origin, "main") as backup:
            while not backup.done:
                backup.step(PAGES_AT_ONCE)
                if progress is not None:
                    progress(backup.page_count - backup.remaining, backup.page_count)
        copy.pragma("journal_mode", "DELETE")  # one file, complete in itself
    finally:
        copy.close(True)
        origin.close(True)
    _sync(target)


def restore_chats(backup: Path, target: Path, *, at: str, actor: str, overwrite: bool = False) -> int:
    """Put a backup of chats.db in place and raise all epochs; returns how many chats it holds.

    The server must not run. The backup is verified first (StateCorrupted names the damage); an existing file is
    replaced only with ``overwrite`` (StateDirectory otherwise), and only once the new one is complete.
    """
    if target.exists() and not overwrite:
        raise StateDirectory(f"{target} exists; move it away, or say that it is to be overwritten")
    verify(backup)
    fresh = target.with_name(target.name + ".restored")
    fresh.unlink(missing_ok=True)
    copy_database(backup, fresh)
    connection = open_and_migrate(fresh, SqliteSettings())
    try:
        with connection:
            connection.execute(SQL["raise_all_epochs"])
            record = {"at": at, "actor": actor, "action": "store.restore", "target": backup.name}
            connection.execute(SQL["put_audit"], {**record, "reason": "", "details": ""})
        chats = int(connection.execute("SELECT count(*) FROM chats").get)
        connection.pragma("journal_mode", "DELETE")
    except apsw.Error as error:
        raise translate(error, str(fresh), Doing.OPENING) from error
    finally:
        connection.close(True)
    for leftover in ("-wal", "-shm"):
        target.with_name(target.name + leftover).unlink(missing_ok=True)
    fresh.rename(target)
    _sync(target.parent)
    return chats


def verify(path: Path) -> int:
    """Check a whole file: its pages, its indexes and that it is ours. Returns its schema version."""
    if not path.is_file():
        raise StateDirectory(f"there is no file {path}")
    try:
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            problems = [row[0] for row in connection.execute("PRAGMA integrity_check(10)")]
            version = version_of(connection, path)
        finally:
            connection.close(True)
    except apsw.Error as error:
        raise translate(error, str(path), Doing.OPENING) from error
    if problems != ["ok"]:
        raise StateCorrupted(f"{path} is damaged: {problems[0]}; use another backup")
    if version == 0:
        raise StateCorrupted(f"{path} is empty; use another backup")
    return version


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
