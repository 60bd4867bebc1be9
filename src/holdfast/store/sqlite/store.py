"""The verbs of the contract: each runs on the writer's thread or on a reader's.

All writes go through ``_write``, which calls the commit listeners before the caller
gets its answer. After content was deleted, ``_wipe`` also removes it from SQLite's
write-ahead log.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import apsw
import msgspec

from holdfast import telemetry
from holdfast.clock import Clock, SystemClock
from holdfast.drivers.sqlite.threads import WorkerThreads
from holdfast.errors import Deferred, HoldfastError, Refused, ServerBusy, Unavailable
from holdfast.message import (
    Ban,
    Chat,
    Cursor,
    Draft,
    LogEntry,
    Member,
    Mute,
    Outcome,
    Page,
    PageToken,
    User,
    Watermark,
)
from holdfast.store.commands import Command, CommandContext, CommandResult
from holdfast.store.contract import (
    MEMBERSHIPS_MAX,
    ONE_LANE,
    ActivePage,
    AuditPage,
    ChatPage,
    DamagedPage,
    HaltedChats,
    Inspection,
    TextPage,
)
from holdfast.store.plan import ChatSettings
from holdfast.store.sqlite import append, change, reads
from holdfast.store.sqlite.append import WriteResult
from holdfast.store.sqlite.database import Handle, SqliteSettings, SqliteTuning, open_and_migrate

T = TypeVar("T")

HEADS_AT_ONCE = 1_000
"""``heads`` of more chats is split, so that no reader is occupied for long."""
READS_PER_READER = 4
"""Reads at once that keep one reader's thread busy."""


class SqliteStore:
    """See ``ChatStore`` and ``Records`` of ``holdfast.store.contract``, and the event
    log's ``CommitSource``.

    ``async with`` opens the file (an OperatorError says why it cannot be used) and
    closes it when all accepted writes are done. Only one process at a time: hold the
    state directory's lock.
    """

    def __init__(
        self,
        path: Path,
        settings: SqliteSettings | None = None,
        limits: ChatSettings | None = None,
        clock: Clock | None = None,
        vfs: str | None = None,
        tuning: SqliteTuning | None = None,
    ) -> None:
        self._path = path
        self._settings = settings or SqliteSettings()
        reads_at_once = READS_PER_READER * self._settings.readers
        self.grouping = msgspec.structs.replace(ONE_LANE, reads_at_once=reads_at_once)
        self._limits = limits or ChatSettings()
        self._clock = clock or SystemClock()
        self._vfs = vfs
        self._tuning = tuning or SqliteTuning()
        self._listeners: list[Callable[[Sequence[LogEntry]], None]] = []
        self._unsure = False
        """The outcome of the last write is unknown to the writer's thread."""
        self._traces = False
        """The write-ahead log holds deleted content; or may, if a crash left it."""
        self._wiping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._traces = self._path.with_name(self._path.name + "-wal").exists()
        connection = await asyncio.to_thread(
            open_and_migrate, self._path, self._settings, self._vfs, self._tuning.migrations
        )
        writer = self._handle(write=True)
        writer.adopt(connection)
        readers = [self._handle(write=False) for _ in range(self._settings.readers)]
        self._writer = WorkerThreads(
            "store-writer", [writer], self._settings.writes_waiting_max, _busy
        )
        self._readers = WorkerThreads(
            "store-reader", readers, self._settings.reads_waiting_max, _too_many_reads
        )
        self._wipe_soon()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._wiping is not None:
            self._wiping.cancel()  # closing the file empties the log too
        await self._readers.close()
        await self._writer.close()

    def on_commit(self, listener: Callable[[Sequence[LogEntry]], None]) -> None:
        self._listeners.append(listener)

    def lane(self, chat_id: str) -> int:
        return 0

    def append(self, group: Sequence[Draft]) -> Awaitable[list[Outcome]]:
        return self._write(partial(append.append, group=group))

    async def change(self, command: Command) -> CommandResult:
        return await self._write(partial(change.change, command=command, limits=self._limits))

    async def mark(self, watermarks: Sequence[Watermark]) -> None:
        await self._writer.do(partial(change.mark, watermarks=watermarks, limits=self._limits))

    async def record(
        self, act: CommandContext, action: str, target: str, details: str = ""
    ) -> None:
        await self._writer.do(
            partial(change.record, act=act, action=action, target=target, details=details)
        )

    async def begin(self, act: CommandContext, node: str, seconds: float) -> str | None:
        return await self._write(partial(change.begin, act=act, node=node, seconds=seconds))

    async def keep(self, act: CommandContext, answer: str | None) -> None:
        await self._write(partial(change.keep, act=act, answer=answer))

    async def forget_answers(self, before: str, limit: int) -> int:
        return await self._write(partial(change.forget_answers, before=before, limit=limit))

    async def forget_answers_of(self, user: User) -> None:
        await self._write(partial(change.forget_answers_of, user=user))

    async def forget_send_keys(self, before: str, limit: int) -> int:
        return await self._write(partial(change.forget_send_keys, before=before, limit=limit))

    async def forget_devices(self, user: User) -> None:
        await self._write(partial(change.forget_devices, user=user))

    async def touch(self) -> None:
        await self._write(change.touch)

    async def texts_of(self, user: User, after: PageToken | None = None) -> TextPage:
        return await self._read(reads.texts_of, user, after)

    async def active_since(self, at: str, after: PageToken | None = None) -> ActivePage:
        return await self._read(reads.active_since, at, after)

    async def damaged(self, after: PageToken | None = None) -> DamagedPage:
        return await self._read(reads.damaged, after)

    async def halt_damaged(self, chat_ids: Sequence[str]) -> None:
        await self._write(partial(change.halt_damaged, chat_ids=chat_ids))

    async def read_after(
        self, chat_id: str, after: int, limit: int, bytes_max: int, reader: User | None = None
    ) -> Page:
        return await self._read(reads.read_after, chat_id, after, (limit, bytes_max), reader)

    async def read_before(
        self, chat_id: str, before: int, limit: int, bytes_max: int, reader: User | None = None
    ) -> Page:
        return await self._read(reads.read_before, chat_id, before, (limit, bytes_max), reader)

    async def heads(self, chat_ids: Iterable[str]) -> Mapping[str, Cursor]:
        wanted = list(chat_ids)
        found: dict[str, Cursor] = {}
        for start in range(0, len(wanted), HEADS_AT_ONCE):
            found.update(await self._read(reads.heads, wanted[start : start + HEADS_AT_ONCE]))
        return found

    async def memberships(
        self, users: Sequence[User], chats_max: int = MEMBERSHIPS_MAX
    ) -> Mapping[User, Mapping[str, Cursor]]:
        return await self._read(reads.memberships, users, chats_max)

    async def memberships_in(
        self, asked: Sequence[tuple[User, str]]
    ) -> Mapping[tuple[User, str], Cursor]:
        return await self._read(reads.memberships_in, asked)

    async def chats_of(
        self,
        user: User,
        limit: int,
        after: PageToken | None = None,
        only: Collection[str] | None = None,
    ) -> ChatPage:
        return await self._read(reads.chats_of, user, limit, after, only)

    async def chat(self, chat_id: str, reader: User | None = None) -> Chat:
        return await self._read(reads.chat, chat_id, reader)

    async def members(self, chat_id: str) -> Sequence[Member]:
        return await self._read(reads.members, chat_id)

    async def bans(self, chat_id: str) -> Sequence[Ban]:
        return await self._read(reads.bans, chat_id)

    async def mutes(self, chat_id: str) -> Sequence[Mute]:
        return await self._read(reads.mutes, chat_id)

    async def watermarks(self, chat_id: str) -> Sequence[Watermark]:
        return await self._read(reads.watermarks, chat_id)

    async def inspect(self, chat_id: str) -> Inspection:
        return await self._read(reads.inspect, chat_id)

    async def halted(self, limit: int) -> HaltedChats:
        return await self._read(reads.halted, limit)

    async def audit(self, after: PageToken | None, limit: int) -> AuditPage:
        return await self._read(reads.audit, after, limit)

    async def log_end(self) -> int:
        return await self._read(reads.log_end)

    async def log_after(self, after: int, limit: int) -> Sequence[LogEntry]:
        return await self._read(reads.log_after, after, limit)

    def write(self, work: Callable[[Handle], WriteResult[T]]) -> Awaitable[T]:
        """A write of another part that has a table in this file."""
        return self._write(work)

    async def read(self, work: Callable[[apsw.Connection], T]) -> T:
        """A read of such a part; all its statements see one state."""

        def do(handle: Handle) -> T:
            deadline = self._deadline(self._settings.read_deadline_seconds)
            with deadline.over(handle) as connection:
                return work(connection)

        return await self._readers.do(do)

    def _write(self, work: Callable[[Handle], WriteResult[T]]) -> Awaitable[T]:
        """Run a write on the writer's thread. Listeners are called before the caller
        gets its answer, and also if the caller is gone.

        The caller's task is scheduled first. So the next group is on its way before
        this one is delivered, and a connection's acks and messages of both leave in one
        write.
        """
        commits: list[Sequence[LogEntry]] = []

        def done(handle: Handle) -> T:
            try:
                written = work(handle)
            except (Refused, Deferred):
                raise
            except BaseException:
                self._unsure = True
                commits.append([])
                raise
            if self._unsure or written.forgets:
                commits.append([])
                self._traces = True
            self._unsure = False
            if written.entries:
                commits.append(written.entries)
            return written.answer

        return self._writer.do(done, lambda: self._notify(commits))

    async def _read(self, read: Callable[..., T], *args: object) -> T:
        deadline = self._deadline(self._settings.read_deadline_seconds)
        return await self._readers.do(lambda handle: read(handle, deadline, *args))

    def _deadline(self, seconds: float) -> reads.Deadline:
        return reads.Deadline(self._clock.monotonic, seconds, self._tuning.operations_between_looks)

    def _handle(self, *, write: bool) -> Handle:
        settings = (
            self._settings
            if write
            else dataclasses.replace(self._settings, cache_bytes=8 * 1024 * 1024)
        )
        conflict = telemetry.transaction_conflict
        return Handle(self._path, settings, self._vfs, write=write, on_taken=conflict)

    def _notify(self, commits: Sequence[Sequence[LogEntry]]) -> None:
        self._wipe_soon()
        for entries in commits:
            for listener in self._listeners:
                listener(entries)

    def _wipe_soon(self) -> None:
        if self._traces and self._wiping is None:
            self._wiping = asyncio.create_task(self._wipe())

    async def _wipe(self) -> None:
        """Empty the write-ahead log until no deleted content is left in it: its older
        pages still hold that content.
        """
        while self._traces:
            try:
                await self._writer.do(self._empty_log)
            except HoldfastError as error:
                telemetry.log.warning("store.wipe_failed", error=str(error))
            if self._traces:
                await asyncio.sleep(self._tuning.wipe_again_seconds)
        self._wiping = None

    def _empty_log(self, handle: Handle) -> None:
        self._traces = not handle.empty_log()


def _busy() -> HoldfastError:
    return ServerBusy("too many writes are waiting; try again", retry_after_seconds=1.0)


def _too_many_reads() -> HoldfastError:
    return Unavailable("too many reads are waiting; try again", retry_after_seconds=1.0)
