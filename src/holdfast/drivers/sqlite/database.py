"""Opens a database file, migrates its schema, and runs transactions on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import apsw

from holdfast import telemetry
from holdfast.bounds import GIB, at_most, positive
from holdfast.drivers.files import sync
from holdfast.drivers.sqlite.errors import KEEPS_HANDLE, TAKEN, Doing, translate
from holdfast.drivers.sqlite.wal import require_whole_log
from holdfast.errors import HoldfastError, StateCorrupted, Unavailable

SETTLE_BYTES = 64 * 1024
"""Bytes of a log rewritten at once; SQLite's own files take no more than that."""


@dataclass(frozen=True, slots=True)
class SqliteSettings:
    """How the file is used."""

    synchronous: Literal["FULL", "NORMAL"] = "FULL"
    """FULL: a commit is on stable storage. NORMAL loses acknowledged messages at a
    power cut, to prove that it does.
    """
    readers: int = 2
    """Threads that read, at most 64; they never wait for the writer."""
    writes_waiting_max: int = 256
    """Writes that wait for the one writer. The next: SERVER_BUSY."""
    reads_waiting_max: int = 1_000
    """Reads that wait for a reader. The next: SERVICE_UNAVAILABLE."""
    read_deadline_seconds: float = 2.0
    """A longer read is interrupted: SERVICE_UNAVAILABLE, or a page with has_more.
    """
    busy_timeout_seconds: float = 1.0
    """How long to wait, at most 60, while another program holds the file; then
    SERVICE_UNAVAILABLE. No program of ours holds it.
    """
    checkpoint_pages: int = 4_000
    """Pages of the write-ahead log before it is folded in; at most 1,000,000.
    """
    cache_bytes: int = 64 * 1024 * 1024
    """The writer's page cache."""

    def __post_init__(self) -> None:
        if self.synchronous not in ("FULL", "NORMAL"):
            raise ValueError("synchronous must be FULL or NORMAL")
        positive(self, "readers", "writes_waiting_max", "reads_waiting_max", "checkpoint_pages")
        positive(self, "read_deadline_seconds", "busy_timeout_seconds", "cache_bytes")
        # A reader is a thread with a connection. SQLite reads the others as 32 bits and
        # takes a larger value for 0.
        at_most(
            self,
            readers=64,
            checkpoint_pages=1_000_000,
            busy_timeout_seconds=60,
            cache_bytes=1024 * GIB,
        )


def connect(
    path: Path, settings: SqliteSettings, vfs: str | None = None, *, write: bool
) -> apsw.Connection:
    """Open an existing file or, with ``write``, a new one. Raises apsw errors."""
    if write:
        settle_log(path, vfs)
    flags = (
        apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        if write
        else apsw.SQLITE_OPEN_READWRITE
    )
    connection = apsw.Connection(str(path), flags=flags, vfs=vfs)
    try:
        connection.set_busy_timeout(int(settings.busy_timeout_seconds * 1000))
        connection.pragma("synchronous", settings.synchronous)
        connection.pragma("cache_size", -(settings.cache_bytes // 1024))
        connection.pragma("temp_store", "MEMORY")
        if write:
            if connection.pragma("journal_mode", "WAL") != "wal":
                raise apsw.CantOpenError(
                    "its file system does not support shared memory, which WAL needs"
                )
            connection.pragma("secure_delete", True)  # overwrites redacted text
            connection.pragma("wal_autocheckpoint", settings.checkpoint_pages)
            connection.pragma("journal_size_limit", 4 * settings.checkpoint_pages * 4096)
        else:
            connection.pragma("query_only", True)
    except BaseException:
        give_up(connection)
        raise
    return connection


def settle_log(path: Path, vfs: str | None) -> None:
    """Make the file's write-ahead log durable before anything is built upon it.

    After a failed sync the kernel marks pages clean that never reached the disk: a new
    connection would take them for committed, and they and all later commits would be
    lost at a power cut. So every byte is written again. Raises apsw errors.
    """
    log = path.with_name(path.name + "-wal")
    if not log.exists():
        return
    file = apsw.VFSFile(vfs or "", str(log), [apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_READWRITE, 0])
    try:
        size = file.xFileSize()
        for offset in range(0, size, SETTLE_BYTES):
            file.xWrite(file.xRead(min(SETTLE_BYTES, size - offset), offset), offset)
        file.xSync(apsw.SQLITE_SYNC_FULL)
    finally:
        file.xClose()


def give_up(connection: apsw.Connection) -> None:
    """Close a connection and ignore errors: closing writes too, and may fail."""
    try:
        file = connection.filename
    except apsw.ConnectionClosedError:
        return
    try:
        connection.close(True)
    except apsw.Error as error:
        telemetry.log.warning("drivers.database_close_failed", file=file, error=str(error))


def open_and_migrate(
    path: Path, settings: SqliteSettings, migrations: Sequence[str], vfs: str | None = None
) -> apsw.Connection:
    """The writer's connection, with the schema migrated to the current version.

    ``migrations`` lead from an empty file to the current schema; the n-th makes version
    n. Raises OperatorErrors.
    """
    is_new = not path.exists()
    try:
        connection = connect(path, settings, vfs, write=True)
    except apsw.Error as error:
        raise translate(error, str(path), Doing.OPENING) from error
    try:
        if settings.synchronous == "FULL":
            require_whole_log(connection, path, vfs)
        _migrate(connection, path, migrations)
        if is_new:
            sync(path.parent)
    except BaseException as error:
        give_up(connection)
        if isinstance(error, apsw.Error):
            raise translate(error, str(path), Doing.OPENING) from error
        raise
    return connection


def version_of(connection: apsw.Connection, path: Path, newest: int) -> int:
    """The schema version of a file; 0 if it is empty.

    StateCorrupted if the file is not ours or newer than this program.
    """
    tables = connection.execute(
        "SELECT count(*), sum(name = 'schema_version') FROM sqlite_schema"
    ).get
    if not tables[0]:
        return 0
    if not tables[1]:
        raise StateCorrupted(
            f"{path} is not a Holdfast database; choose another state directory", file=str(path)
        )
    version = int(connection.execute("SELECT max(version) FROM schema_version").get)
    if version > newest:
        raise StateCorrupted(
            f"{path} has schema version {version}, this program knows up to {newest}: it was"
            " written by a newer Holdfast; run that one, or restore a backup made before the"
            " upgrade",
            file=str(path),
        )
    return version


def _migrate(connection: apsw.Connection, path: Path, migrations: Sequence[str]) -> None:
    present = version_of(connection, path, len(migrations))
    for version, script in list(enumerate(migrations, 1))[present:]:
        with connection:
            if version == 1:
                connection.execute("CREATE TABLE schema_version (version INTEGER NOT NULL) STRICT")
            connection.execute(script)
            connection.execute("INSERT INTO schema_version VALUES (?)", (version,))


_File = tuple[int, int] | None


def _file_of(path: Path) -> _File:
    """The file that a path names now, as (device, inode); None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Handle:
    """One thread's connection, opened on demand, closed after an error in doubt.

    An open file that was unlinked or moved still takes writes, and they vanish with the
    process. So every write first checks that the file and its log are still the ones
    under their paths, and no other file is ever opened there.
    """

    def __init__(
        self,
        path: Path,
        settings: SqliteSettings,
        vfs: str | None,
        *,
        write: bool,
        on_taken: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_taken`` is called when another program's write keeps one out."""
        self._on_taken = on_taken
        self.path = path
        self._settings = settings
        self._vfs = vfs
        self._write = write
        self._connection: apsw.Connection | None = None
        self._file = _file_of(path)
        self._log = path.with_name(path.name + "-wal")
        self._log_file: _File = None

    def adopt(self, connection: apsw.Connection) -> None:
        """Use an open connection."""
        self._connection = connection
        self._file = _file_of(self.path)

    def connection(self) -> apsw.Connection:
        """The open connection. Unavailable if the file cannot be opened now."""
        if self._connection is None:
            if self._file is not None:
                self._require(self.path, self._file)
            try:
                self._connection = connect(self.path, self._settings, self._vfs, write=self._write)
            except apsw.Error as error:
                raise translate(error, str(self.path), Doing.WORKING) from error
        return self._connection

    def failed(self, error: apsw.Error, doing: Doing = Doing.WORKING) -> HoldfastError:
        """The error to raise for ``error``; closes a connection it leaves in doubt."""
        if self._write and isinstance(error, TAKEN):
            self._on_taken()
        if doing is Doing.COMMITTING or not isinstance(error, KEEPS_HANDLE):
            telemetry.store_reopened(f"{type(error).__name__}: {error}")
            self.close()
        return translate(error, str(self.path), doing)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        self._log_file = None
        if connection is not None:
            give_up(connection)

    @contextmanager
    def transaction(self) -> Iterator[apsw.Connection]:
        """A write transaction; on return it is on stable storage.

        An exception in the block rolls it back. apsw's ConstraintError passes through
        for the caller to interpret.
        """
        connection = self.connection()
        try:
            connection.execute("BEGIN IMMEDIATE")
            self._require_in_place()
            yield connection
        except apsw.ConstraintError:
            self._roll_back(connection)
            raise
        except apsw.Error as error:
            self._roll_back(connection)
            raise self.failed(error) from error
        except BaseException:
            self._roll_back(connection)
            raise
        telemetry.mark(f"{self.path.stem}.commit.before")
        try:
            connection.execute("COMMIT")
        except apsw.Error as error:
            raise self.failed(error, Doing.COMMITTING) from error
        telemetry.mark(f"{self.path.stem}.commit.after")

    @contextmanager
    def snapshot(self) -> Iterator[apsw.Connection]:
        """A read transaction: all reads in the block see one state."""
        connection = self.connection()
        try:
            connection.execute("BEGIN")
            yield connection
        except apsw.Error as error:
            raise self.failed(error) from error
        finally:
            self._roll_back(connection)

    def empty_log(self) -> bool:
        """Checkpoint and truncate the log; False if a reader needs it. Never waits."""
        connection = self.connection()
        connection.set_busy_timeout(0)
        try:
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        except apsw.BusyError:
            return False
        except apsw.Error as error:
            raise self.failed(error) from error
        finally:
            if self._connection is connection:
                connection.set_busy_timeout(int(self._settings.busy_timeout_seconds * 1000))
        return True

    def _require_in_place(self) -> None:
        """Unavailable if the file or its log was moved. Call it inside a transaction,
        when the log is open."""
        self._require(self.path, self._file)
        if self._log_file is None:
            self._log_file = _file_of(self._log)
        self._require(self._log, self._log_file)

    def _require(self, path: Path, expected: _File) -> None:
        if _file_of(path) != expected:
            telemetry.store_moved(str(path))
            raise Unavailable(
                "the server's files are not where they were; its operator must put them back"
            )

    def _roll_back(self, connection: apsw.Connection) -> None:
        """Roll back; drop a connection that cannot (it was closed, for example)."""
        if self._connection is not connection:
            return
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except apsw.Error as error:
            telemetry.store_reopened(f"{type(error).__name__}: {error}")
            self.close()


def unavailable_while_closing() -> Unavailable:
    return Unavailable("the store is closing", retry_after_seconds=1.0)
