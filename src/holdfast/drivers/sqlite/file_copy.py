"""One file of a backup: copied out of a live database, described, and made durable."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import apsw
from msgspec import Struct

from holdfast.drivers.files import sync
from holdfast.drivers.sqlite.database import version_of
from holdfast.drivers.sqlite.errors import Doing, translate
from holdfast.errors import DiskFull, StateCorrupted, StateDirectory

PAGES_AT_ONCE = 256
BYTES_AT_ONCE = 1024 * 1024

CopyProgress = Callable[[str, int, int], None]
"""Told what is being done, how many bytes of it are, and how many there are in all."""


class Restored(Struct, frozen=True):
    """A restore as its parts see it. ``epoch_min``: no epoch that was ever given out is as high."""

    at: str
    epoch_min: int
    actor: str
    reason: str
    backup: str
    taken_at: str = ""


def _as_it_is(connection: apsw.Connection, restored: Restored) -> None:
    """For a part that means the same after a restore."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """One SQLite file of a state directory, as backups see it.

    ``counts`` are told in the manifest: a name and a statement that answers with one number. ``renew`` changes a
    restored file, in the transaction it is given, so that what was seen before the restore cannot be mistaken for it.
    ``kept``: where there is one, a restore leaves it as it is: who was cut off since the backup must stay so.
    """

    name: str
    migrations: Sequence[str]
    counts: Mapping[str, str] = field(default_factory=dict)
    renew: Callable[[apsw.Connection, Restored], None] = _as_it_is
    kept: bool = False


class CopiedFile(Struct, frozen=True):
    """A file of a backup. ``schema_version`` is 0 for a file that is no database."""

    name: str
    size_bytes: int
    sha256: str
    schema_version: int = 0
    counts: dict[str, int] = {}


def quiet(what: str, done: int, in_all: int) -> None:
    """Progress that nobody wants to know."""


def copy_database(source: Path, target: Path, progress: CopyProgress = quiet) -> None:
    """A consistent copy of a live file: one snapshot, which neither waits for the writer nor delays it.

    On return the copy is one file, complete in itself, mode 0600 and on stable storage. Raises OperatorErrors.
    """
    try:
        origin = apsw.Connection(str(source), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            _copy(origin, target, progress)
        finally:
            origin.close(True)
    except apsw.Error as error:
        raise translate(error, str(target), Doing.OPENING) from error
    sync(target)


def _copy(origin: apsw.Connection, target: Path, progress: CopyProgress) -> None:
    copy = apsw.Connection(str(target))
    try:
        target.chmod(0o600)
        origin.execute("BEGIN")
        page_bytes = origin.execute("PRAGMA page_size").get
        origin.execute("SELECT count(*) FROM sqlite_schema").fetchall()  # the snapshot begins with the first read
        with copy.backup("main", origin, "main") as backup:
            while not backup.done:
                backup.step(PAGES_AT_ONCE)
                done = backup.page_count - backup.remaining
                progress(f"copying {target.name}", done * page_bytes, backup.page_count * page_bytes)
        copy.pragma("journal_mode", "DELETE")
    finally:
        copy.close(True)


def copy_file(source: Path, target: Path, progress: CopyProgress = quiet) -> None:
    """A copy of a file that nobody writes; mode 0600 and on stable storage on return. Raises OSError."""
    size = source.stat().st_size
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as out, source.open("rb") as given:
        while block := given.read(BYTES_AT_ONCE):
            out.write(block)
            progress(f"copying {target.name}", out.tell(), size)
        out.flush()
        os.fsync(out.fileno())


def describe(path: Path, part: StateFile | None, progress: CopyProgress = quiet) -> CopiedFile:
    """What a file holds, having checked all of it: every page, every index, and that it is ours and not newer.

    ``part`` None: it is no database. Raises StateCorrupted for a file that cannot be trusted.
    """
    found = CopiedFile(path.name, path.stat().st_size, _digest(path, progress))
    if part is None:
        return found
    try:
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            problems = [row[0] for row in connection.execute("PRAGMA integrity_check(10)")]
            version = version_of(connection, path, len(part.migrations))
            if problems != ["ok"]:
                raise StateCorrupted(f"{path} is damaged: {problems[0]}; use another backup", file=str(path))
            if version == 0:
                raise StateCorrupted(f"{path} is empty; use another backup", file=str(path))
            counts = {name: int(connection.execute(count).get) for name, count in part.counts.items()}
        finally:
            connection.close(True)
    except apsw.Error as error:
        raise StateCorrupted(f"{path} is damaged: {error}; use another backup", file=str(path)) from error
    return CopiedFile(found.name, found.size_bytes, found.sha256, version, counts)


def _digest(path: Path, progress: CopyProgress) -> str:
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BYTES_AT_ONCE):
            digest.update(block)
            progress(f"checking {path.name}", file.tell(), size)
    return digest.hexdigest()


def cannot(doing: str, error: OSError) -> StateDirectory:
    """What to tell an operator of an error of the file system."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{doing}: {error.strerror}; make room (old backups may go), and do it again")
    return StateDirectory(f"{doing}: {error.strerror or error}; make room or give write access, and do it again")
