"""The file ``replies.db``: one thread writes and reads it.

After a power cut the last seconds may be missing (WAL, synchronous NORMAL): a reply
lives in its node's memory, and the file is only what survives the process.

At open, what the last process left is ended: its unfinished replies get the end
``server_restarted``, the claims of replies that are not done are freed, and its
unfinished runs count with what was noted last. An assistant's reply stays open: its job
runs again and begins a new epoch.

The wall clock may jump. So this process takes the time from the wall clock once, and
counts on from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import apsw

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.drivers.sqlite.database import Handle, SqliteSettings, open_and_migrate
from holdfast.drivers.sqlite.file_copy import Restored, StateFile
from holdfast.drivers.sqlite.threads import WorkerThreads
from holdfast.drivers.statements import migrations, statements
from holdfast.errors import HoldfastError, Unavailable
from holdfast.streaming.entry_codec import encode_entry
from holdfast.streaming.reply import ReplyError
from holdfast.streaming.reply_log.contract import ENDED_SECONDS
from holdfast.streaming.usage_store.contract import COUNTED_SECONDS

T = TypeVar("T")
PACKAGE = "holdfast.streaming.reply_log.sqlite"
SQL = statements(PACKAGE)


def _forget_replies(db: apsw.Connection, restored: Restored) -> None:
    """Clients may have read more of a reply than a backup has of it."""
    for table in ("entry", "log", "claim"):
        db.execute(f"DELETE FROM {table}")


REPLIES = StateFile(
    name="replies.db",
    migrations=migrations(PACKAGE),
    counts={"replies": "SELECT count(*) FROM log", "usage": "SELECT count(*) FROM usage"},
    renew=_forget_replies,
)
"""The file in a state directory and in its backups."""

SETTINGS = SqliteSettings(
    synchronous="NORMAL", readers=1, cache_bytes=16 << 20, writes_waiting_max=20_000
)
"""As many writes may wait as replies may begin or end at once: pool and queue."""
DONE, FAILED = 1, 2
"""``log.ended`` of a reply that has its end."""
DELETE_SECONDS = 60.0
"""How often expired logs are deleted."""
DELETED_AT_ONCE = 20
"""Logs deleted in one transaction: other writes wait for it."""
RESTARTED = ReplyError("server_restarted", "the server was restarted while it made this reply")


class RepliesFile:
    """The open file. ``close`` it after everything that uses it."""

    def __init__(self, threads: WorkerThreads, clock: Clock) -> None:
        self._threads = threads
        self._clock = clock
        self._offset = clock.now() - clock.monotonic()
        self._deleting: asyncio.TimerHandle | None = None
        self._is_open = True

    @classmethod
    async def open(
        cls, path: Path, clock: Clock, settings: SqliteSettings | None = None
    ) -> RepliesFile:
        """OperatorErrors say why the file cannot be used."""
        settings = settings or SETTINGS
        connection = await asyncio.to_thread(open_and_migrate, path, settings, REPLIES.migrations)
        handle = Handle(path, settings, None, write=True)
        handle.adopt(connection)
        threads = WorkerThreads("replies-writer", [handle], settings.writes_waiting_max, _busy)
        file = cls(threads, clock)
        try:
            await file.transact(file._end_what_was_left)
            await file._delete_expired()
        except BaseException:
            await threads.close()
            raise
        file._delete_later()
        return file

    def now(self) -> float:
        """Wall-clock seconds at the start, and what has passed since."""
        return self._offset + self._clock.monotonic()

    async def transact(self, work: Callable[[apsw.Connection], T]) -> T:
        return await self._threads.transact(work)

    async def close(self) -> None:
        self._is_open = False
        if self._deleting is not None:
            self._deleting.cancel()
        await self._threads.close()

    def _end_what_was_left(self, db: apsw.Connection) -> None:
        now = self.now()
        unfinished: list[Any] = db.execute(SQL["unfinished"]).fetchall()
        for log_id, epoch, last_n in unfinished:
            end = (log_id, epoch, last_n + 1, encode_entry(RESTARTED))
            db.execute(SQL["add_entry"], end)
            db.execute(SQL["finish"], (log_id, last_n + 1, FAILED, now + ENDED_SECONDS))
        db.execute(SQL["free_claims_of_the_dead"])
        for run in db.execute(SQL["left_runs"]).fetchall():
            count_run(db, run, now)

    def _delete_later(self) -> None:
        if self._is_open:
            loop = asyncio.get_running_loop()
            self._deleting = loop.call_later(DELETE_SECONDS, self._delete_now)

    def _delete_now(self) -> None:
        deleting = asyncio.ensure_future(self._delete_expired())
        deleting.add_done_callback(lambda _: self._delete_later())

    async def _delete_expired(self) -> None:
        """Delete expired logs, claims and counted runs, in several transactions."""
        try:
            while await self.transact(self._delete_some) == DELETED_AT_ONCE:
                pass
        except HoldfastError as error:
            telemetry.log.warning("streaming.replies_not_deleted", error=error.message)

    def _delete_some(self, db: apsw.Connection) -> int:
        now = self.now()
        expired = [int(row[0]) for row in db.execute(SQL["expired_logs"], (now, DELETED_AT_ONCE))]
        delete_logs(db, expired)
        db.execute(SQL["delete_expired_claims"], (now,))
        db.execute(SQL["forget_counted"], (now - COUNTED_SECONDS,))
        return len(expired)


def delete_logs(db: apsw.Connection, log_ids: list[int]) -> None:
    """Delete logs, their entries and their claims."""
    for log_id in log_ids:
        for statement in ("delete_entries", "delete_claims", "delete_log"):
            db.execute(SQL[statement], (log_id,))


def count_run(db: apsw.Connection, run: tuple[object, ...], now: float) -> None:
    """Add a run (its id, the five values of its key, its counts) to its row, once."""
    db.execute(SQL["mark_counted"], (*run, now))
    if db.changes():
        db.execute(SQL["add_usage"], (*run[1:6], 1, *run[6:]))


def _busy() -> Unavailable:
    return Unavailable("too many writes wait for the replies' file", retry_after_seconds=1.0)
