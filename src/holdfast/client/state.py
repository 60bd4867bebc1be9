"""The state that outlives the process: unsent messages, cursors, identity.

It is one SQLite file, or memory. An entry is on stable storage (``synchronous=FULL``)
before ``on_written`` is called with it, in the order of the calls. Cursors and removals
survive the end of the process at once, and a power cut from the next put on; losing one
only repeats work that is deduplicated. One thread does all writes and commits
everything that waits as a group; the caller's event loop never waits for the disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import apsw

from holdfast.client.events import Keep
from holdfast.client.outbox import OutboxEntry
from holdfast.errors import HoldfastError, InternalError, StateCorrupted, StateDirectory, StateInUse
from holdfast.wire.frames import CursorClaim

SCHEMA_VERSION = 2

_logger = logging.getLogger("holdfast.client")

_SCHEMA = """
CREATE TABLE outbox (
  number            INTEGER PRIMARY KEY,
  client_message_id TEXT NOT NULL,
  chat_id           TEXT NOT NULL,
  content           TEXT NOT NULL,
  content_type      TEXT NOT NULL,
  UNIQUE (chat_id, client_message_id)
) STRICT;
CREATE TABLE cursors (
  chat_id  TEXT PRIMARY KEY,
  epoch    INTEGER NOT NULL,
  sequence INTEGER NOT NULL,
  proof    TEXT
) STRICT, WITHOUT ROWID;
CREATE TABLE identity (
  name  TEXT PRIMARY KEY,
  value TEXT NOT NULL
) STRICT, WITHOUT ROWID;
"""

_MIGRATIONS = {1: "ALTER TABLE cursors ADD COLUMN proof TEXT"}
"""The statements that bring a file of this version to the next one."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state as opened. ``identity``: ``user_id`` and ``device_id``, once known."""

    outbox: tuple[OutboxEntry, ...] = ()
    cursors: Mapping[str, CursorClaim] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Batch:
    """Changes for the next commit.

    ``outbox``: entries to put and keys to remove, in order.
    """

    outbox: list[OutboxEntry | tuple[str, str]] = field(default_factory=list)
    cursors: dict[str, Keep] = field(default_factory=dict)
    identity: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.outbox or self.cursors or self.identity)

    @property
    def puts(self) -> list[OutboxEntry]:
        return [change for change in self.outbox if isinstance(change, OutboxEntry)]

    def before(self, newer: _Batch) -> _Batch:
        """Both batches as one, without this one's puts: their callers got an error."""
        removals = [change for change in self.outbox if not isinstance(change, OutboxEntry)]
        return _Batch(
            [*removals, *newer.outbox],
            {**self.cursors, **newer.cursors},
            {**self.identity, **newer.identity},
        )


class OnWritten(Protocol):
    """Called on the event loop after each commit; ``error``: why it failed."""

    def __call__(
        self, entries: Iterable[OutboxEntry], cursors: Iterable[Keep], error: HoldfastError | None
    ) -> None: ...


class ClientState(Protocol):
    """Durable state of a client.

    Calls return at once; ``on_written`` reports each commit.
    """

    def open(self, on_written: OnWritten) -> SavedState: ...

    def put(self, entry: OutboxEntry) -> None: ...

    def remove(self, entry: OutboxEntry) -> None: ...

    def keep(self, keep: Keep) -> None: ...

    def identify(self, name: str, value: str) -> None: ...

    async def drain(self) -> None:
        """Return when everything passed before is kept, and ``on_written`` called."""
        ...

    async def close(self) -> None:
        """Drain, then release the file."""
        ...


class MemoryState:
    """Kept in memory only; ``on_written`` is called in the loop's next turn."""

    def open(self, on_written: OnWritten) -> SavedState:
        self._loop = asyncio.get_running_loop()
        self._on_written = on_written
        return SavedState()

    def put(self, entry: OutboxEntry) -> None:
        self._loop.call_soon(self._on_written, [entry], [], None)

    def remove(self, entry: OutboxEntry) -> None:
        pass

    def keep(self, keep: Keep) -> None:
        self._loop.call_soon(self._on_written, [], [keep], None)

    def identify(self, name: str, value: str) -> None:
        pass

    async def drain(self) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        pass


class FileState:
    """A SQLite file, held by one process at a time.

    If the disk fails, a put is refused; other changes are retried with the next write,
    after ``retry_seconds``, and once more on close.
    """

    def __init__(self, path: Path, retry_seconds: float = 1.0) -> None:
        self._path = path
        self._retry_seconds = retry_seconds
        self._retry: asyncio.TimerHandle | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="holdfast-client-state")
        self._batch = _Batch()
        self._writing: asyncio.Future[None] | None = None

    def open(self, on_written: OnWritten) -> SavedState:
        self._loop = asyncio.get_running_loop()
        self._on_written = on_written
        with _translated(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and self._path.stat().st_size == 0:  # to SQLite it looks new
                _logger.warning(
                    "%s is empty: if it was not before, the unsent messages in it are lost",
                    self._path,
                )
            self._path.touch(mode=0o600)
            self._db = apsw.Connection(str(self._path))
            try:
                return self._load()
            except BaseException:
                self._db.close()
                raise

    def put(self, entry: OutboxEntry) -> None:
        self._batch.outbox.append(entry)
        self._write()

    def remove(self, entry: OutboxEntry) -> None:
        self._batch.outbox.append(entry.key)
        self._write()

    def keep(self, keep: Keep) -> None:
        self._batch.cursors[keep.chat_id] = keep
        self._write()

    def identify(self, name: str, value: str) -> None:
        self._batch.identity[name] = value
        self._write()

    async def drain(self) -> None:
        self._write()
        while self._writing is not None:
            await asyncio.wait([self._writing])

    async def close(self) -> None:
        await self.drain()
        if self._retry is not None:
            self._retry.cancel()
        await self._loop.run_in_executor(self._thread, self._db.close)
        self._thread.shutdown(wait=False)

    def _load(self) -> SavedState:
        db = self._db
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        version = db.pragma("user_version")
        if version > SCHEMA_VERSION:
            raise StateCorrupted(
                f"{self._path} was written by a newer Holdfast; use that, or another file"
            )
        with db:
            if version == 0:
                db.execute(_SCHEMA)
            for older in range(max(version, 1), SCHEMA_VERSION if version else 0):
                db.execute(_MIGRATIONS[older])
            if version < SCHEMA_VERSION:
                db.pragma("user_version", SCHEMA_VERSION)
        entries = db.execute(
            "SELECT client_message_id, chat_id, content, content_type FROM outbox ORDER BY number"
        )
        cursors = db.execute("SELECT chat_id, epoch, sequence, proof FROM cursors")
        identity = db.execute("SELECT name, value FROM identity")
        return SavedState(
            tuple(OutboxEntry(*row) for row in entries),
            {chat_id: CursorClaim(*cursor) for chat_id, *cursor in cursors},
            dict(identity),
        )

    def _write(self) -> None:
        """Start a commit unless one is running, which starts the next at its end."""
        if self._writing is None and self._batch:
            batch, self._batch = self._batch, _Batch()
            self._writing = self._loop.run_in_executor(self._thread, self._commit, batch)
            self._writing.add_done_callback(lambda done: self._committed(batch, done))

    def _committed(self, batch: _Batch, done: asyncio.Future[None]) -> None:
        self._writing = None
        error = done.exception()
        assert error is None or isinstance(error, HoldfastError)
        newer = bool(self._batch)
        if isinstance(error, StateDirectory):  # any other error would repeat itself
            self._batch = batch.before(self._batch)
            self._try_later()
        self._on_written(batch.puts, batch.cursors.values(), error)
        if newer:
            self._write()

    def _try_later(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._retry = self._loop.call_later(self._retry_seconds, self._write)

    def _commit(self, batch: _Batch) -> None:
        with _translated(self._path):
            # A power cut can lose only an unsent message for good; the rest is
            # repeated.
            self._db.pragma("synchronous", "FULL" if batch.puts else "NORMAL")
            with self._db:
                for change in batch.outbox:
                    if isinstance(change, OutboxEntry):
                        self._db.execute(
                            "INSERT OR IGNORE INTO outbox (client_message_id, chat_id, content,"
                            " content_type) VALUES (?, ?, ?, ?)",
                            (
                                change.client_message_id,
                                change.chat_id,
                                change.content,
                                change.content_type,
                            ),
                        )
                    else:
                        self._db.execute(
                            "DELETE FROM outbox WHERE chat_id = ? AND client_message_id = ?", change
                        )
                for keep in batch.cursors.values():
                    if keep.cursor is None:
                        self._db.execute("DELETE FROM cursors WHERE chat_id = ?", (keep.chat_id,))
                    else:
                        self._db.execute(
                            "INSERT OR REPLACE INTO cursors VALUES (?, ?, ?, ?)",
                            (keep.chat_id, *keep.cursor),
                        )
                for name, value in batch.identity.items():
                    self._db.execute("INSERT OR REPLACE INTO identity VALUES (?, ?)", (name, value))


class _translated:
    """Translates errors of SQLite and the file system into ours, with advice."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        match error:
            case apsw.BusyError() | apsw.LockedError():
                raise StateInUse(
                    f"{self._path} is in use by another process; stop it, or give this one another"
                    " state file"
                ) from error
            case apsw.NotADBError() | apsw.CorruptError():
                raise StateCorrupted(
                    f"{self._path} is damaged ({error}); move it aside to start without it: its"
                    " unsent messages are lost"
                ) from error
            case apsw.Error() | OSError():
                raise StateDirectory(
                    f"cannot use {self._path}: {error}; is it writable, and the disk not full?"
                ) from error
            case Exception() if not isinstance(error, HoldfastError):
                raise InternalError(
                    f"cannot write to {self._path}: {type(error).__name__}: {error}"
                ) from error
            case _:
                return


def state_at(path: Path | None) -> ClientState:
    return MemoryState() if path is None else FileState(path)
