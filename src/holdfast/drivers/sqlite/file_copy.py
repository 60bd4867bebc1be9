"""One file of a backup: copied from a live database, checked, made durable."""

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
"""Called with the current step, its bytes done, and its bytes in all."""


class Restored(Struct, frozen=True):
    """A restore as its parts see it. ``epoch_min``: above every epoch ever in use;
    ``act_id``: of the record in the audit log.
    """

    at: str
    epoch_min: int
    actor: str
    reason: str
    backup: str
    taken_at: str = ""
    act_id: str = ""


def _as_it_is(connection: apsw.Connection, restored: Restored) -> None:
    """For a file that needs no change after a restore."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """One SQLite file of a state directory, as backups see it.

    ``counts`` go into the manifest: a name and a statement that returns one number.
    ``renew`` changes a restored file, in the given transaction, so that clients cannot
    mistake it for the file from before the restore. ``kept``: a restore keeps the
    existing file, because users revoked since the backup must stay revoked.
    """

    name: str
    migrations: Sequence[str]
    counts: Mapping[str, str] = field(default_factory=dict)
    renew: Callable[[apsw.Connection, Restored], None] = _as_it_is
    kept: bool = False


class CopiedFile(Struct, frozen=True):
    """A file of a backup. ``schema_version`` is 0 if it is not a database."""

    name: str
    size_bytes: int
    sha256: str
    schema_version: int = 0
    counts: dict[str, int] = {}


def quiet(what: str, done: int, in_all: int) -> None:
    """Ignores progress."""


def copy_database(source: Path, target: Path, progress: CopyProgress = quiet) -> None:
    """Copy one snapshot of a live file, without waiting for or delaying its writer.

    On return the copy is one file without a log, mode 0600, on stable storage. Raises
    OperatorErrors.
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
        # the snapshot begins with the first read
        origin.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        with copy.backup("main", origin, "main") as backup:
            while not backup.done:
                backup.step(PAGES_AT_ONCE)
                done = backup.page_count - backup.remaining
                progress(
                    f"copying {target.name}", done * page_bytes, backup.page_count * page_bytes
                )
        copy.pragma("journal_mode", "DELETE")
    finally:
        copy.close(True)


def copy_file(source: Path, target: Path, progress: CopyProgress = quiet) -> None:
    """Copy a file that nobody writes; on return it is durable, mode 0600.

    Raises OSError.
    """
    size = source.stat().st_size
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as out, source.open("rb") as given:
        while block := given.read(BYTES_AT_ONCE):
            out.write(block)
            progress(f"copying {target.name}", out.tell(), size)
        out.flush()
        os.fsync(out.fileno())


def describe(path: Path, part: StateFile | None, progress: CopyProgress = quiet) -> CopiedFile:
    """Check a file and describe it: every page and index, its owner and its version.

    ``part`` is None for a file that is not a database. StateCorrupted if a check fails.
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
                raise StateCorrupted(
                    f"{path} is damaged: {problems[0]}; use another backup", file=str(path)
                )
            if version == 0:
                raise StateCorrupted(f"{path} is empty; use another backup", file=str(path))
            counts = {
                name: int(connection.execute(count).get) for name, count in part.counts.items()
            }
        finally:
            connection.close(True)
    except apsw.Error as error:
        raise StateCorrupted(
            f"{path} is damaged: {error}; use another backup", file=str(path)
        ) from error
    return CopiedFile(found.name, found.size_bytes, found.sha256, version, counts)


def _digest(path: Path, progress: CopyProgress) -> str:
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BYTES_AT_ONCE):
            digest.update(block)
            progress(f"checking {path.name}", file.tell(), size)
    return digest.hexdigest()


def cannot(doing: str, error: OSError) -> StateDirectory:
    """The operator's error for an error of the file system."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"{doing}: {error.strerror}; make room (old backups may go), and do it again"
        )
    return StateDirectory(
        f"{doing}: {error.strerror or error}; make room or give write access, and do it again"
    )
