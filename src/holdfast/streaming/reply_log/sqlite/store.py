"""The log of replies of one node, in ``replies.db``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

import apsw

from holdfast.errors import Unavailable
from holdfast.streaming.entry_codec import Decoder, UnreadableEntry, encode_entry
from holdfast.streaming.reply import EntryId, Owner, ReplyBegin, ReplyDone, ReplyEntry
from holdfast.streaming.reply_log.contract import (
    BEGUN_SECONDS,
    ENDED_SECONDS,
    FOLLOW_SECONDS,
    Appended,
    KeyClaim,
    LogAppend,
    LogEnded,
    LogPage,
)
from holdfast.streaming.reply_log.local_follow import LocalFollowers
from holdfast.streaming.reply_log.open_logs import EncodedAppend, OpenLogs
from holdfast.streaming.reply_log.sqlite.file import (
    DONE,
    FAILED,
    SQL,
    RepliesFile,
    delete_logs,
)


class _LogRow(NamedTuple):
    log_id: int
    epoch: int
    last_n: int
    ended: int

    @property
    def last(self) -> EntryId:
        return EntryId(self.epoch, self.last_n)


class SqliteReplyLog:
    """See ``contract.ReplyLog``. Whoever opened the file closes it."""

    shared = False
    flush_seconds = 1.0

    def __init__(self, file: RepliesFile, follow_seconds: float = FOLLOW_SECONDS) -> None:
        self._file = file
        self._open_logs = OpenLogs()
        self._followers = LocalFollowers(follow_seconds)

    async def begin(self, reply_id: str, begin: ReplyBegin) -> int:
        now = self._file.now()

        def work(db: apsw.Connection) -> int | None:
            found = _find(db, reply_id, now)
            if found is not None and found.ended:
                return None
            if found is None:
                delete_logs(db, _log_ids(db, reply_id))  # it has expired
                epoch = int(now * 1000)
                owner = (begin.owner_tenant, begin.owner_kind, begin.owner_name)
                values = (reply_id, *owner, begin.kind, epoch, now + BEGUN_SECONDS)
                log_id = db.execute(SQL["begin"], values).get
            else:
                log_id, epoch = found.log_id, max(int(now * 1000), found.epoch + 1)
                db.execute(SQL["begin_again"], (log_id, epoch, now + BEGUN_SECONDS))
            db.execute(SQL["add_entry"], (log_id, epoch, 0, encode_entry(begin)))
            db.execute(SQL["expire_claims"], (reply_id, now + BEGUN_SECONDS))
            return epoch

        epoch = await self._file.transact(work)
        self._followers.on_growth(reply_id)
        if epoch is None:
            raise LogEnded(reply_id)
        return epoch

    async def append(self, appends: Sequence[LogAppend]) -> Sequence[Appended]:
        now = self._file.now()
        encoded = [self._open_logs.encode(append) for append in appends]
        ends = [DONE if isinstance(each.entries[-1], ReplyDone) else FAILED for each in appends]

        def work(db: apsw.Connection) -> list[tuple[bool, EntryId | None]]:
            return [_append(db, each, end, now) for each, end in zip(encoded, ends, strict=True)]

        answers = await self._file.transact(work)
        for append in appends:
            self._followers.on_growth(append.reply_id)
        return [
            self._open_logs.on_taken(each) if taken else Appended(last)
            for each, (taken, last) in zip(encoded, answers, strict=True)
        ]

    async def read(self, reply_id: str, after: EntryId | None, entries_max: int) -> LogPage | None:
        now = self._file.now()

        def work(db: apsw.Connection) -> LogPage | None:
            found = _find(db, reply_id, now)
            if found is None:
                return None
            return LogPage(_read(db, found, after, entries_max), found.last)

        return await self._file.transact(work)

    def follow(self, reply_id: str, after: EntryId | None) -> AsyncGenerator[LogPage, None]:
        return self._followers.follow(self.read, reply_id, after)

    async def delete(self, reply_ids: Sequence[str]) -> None:
        def work(db: apsw.Connection) -> None:
            for reply_id in reply_ids:
                delete_logs(db, _log_ids(db, reply_id))

        await self._file.transact(work)
        for reply_id in reply_ids:
            self._followers.on_growth(reply_id)

    async def claim(self, claim: KeyClaim) -> KeyClaim:
        now = self._file.now()

        def work(db: apsw.Connection) -> KeyClaim:
            found = (claim.body_hash, claim.reply_id, claim.node)
            expiry = (now + BEGUN_SECONDS, now)
            db.execute(SQL["claim"], (*claim.owner, claim.key, *found, *expiry))
            in_force: Any = db.execute(SQL["claim_of"], (*claim.owner, claim.key)).fetchone()
            return KeyClaim(claim.owner, claim.key, *in_force)

        return await self._file.transact(work)

    async def free(self, claim: KeyClaim) -> None:
        def work(db: apsw.Connection) -> None:
            db.execute(SQL["free"], (*claim.owner, claim.key, claim.reply_id))

        await self._file.transact(work)

    async def forget_owner(self, owner: Owner) -> int:
        def work(db: apsw.Connection) -> int:
            log_ids = [int(row[0]) for row in db.execute(SQL["logs_of"], owner)]
            delete_logs(db, log_ids)
            db.execute(SQL["forget_claims"], owner)
            return len(log_ids)

        return await self._file.transact(work)

    async def close(self) -> None:
        pass


def _find(db: apsw.Connection, reply_id: str, now: float) -> _LogRow | None:
    row: Any = db.execute(SQL["log"], (reply_id, now)).fetchone()
    return _LogRow(*row) if row else None


def _log_ids(db: apsw.Connection, reply_id: str) -> list[int]:
    return [int(row[0]) for row in db.execute(SQL["log_id"], (reply_id,))]


def _append(
    db: apsw.Connection, append: EncodedAppend, end: int, now: float
) -> tuple[bool, EntryId | None]:
    """Whether the entries were added, and the log's last entry now."""
    found = _find(db, append.reply_id, now)
    if found is None:
        return False, None
    epoch, n = append.first
    if found.ended or found.last != EntryId(epoch, n - 1):
        return False, found.last
    rows = [(found.log_id, epoch, at, stored) for at, stored in enumerate(append.stored, n)]
    db.executemany(SQL["add_entry"], rows)
    last_n = append.last.n
    if append.has_end:
        db.execute(SQL["finish"], (found.log_id, last_n, end, now + ENDED_SECONDS))
        db.execute(SQL["expire_claims"], (append.reply_id, now + ENDED_SECONDS))
    else:
        db.execute(SQL["grow"], (found.log_id, last_n))
    return True, append.last


def _read(
    db: apsw.Connection, found: _LogRow, after: EntryId | None, entries_max: int
) -> list[tuple[EntryId, ReplyEntry]]:
    decoder = Decoder()
    entries: list[tuple[EntryId, ReplyEntry]] = []
    values = (found.log_id, *(after or (found.epoch, -1)), entries_max)
    try:
        rows: list[Any] = db.execute(SQL["entries"], values).fetchall()
        for epoch, n, stored in rows:
            entry_id = EntryId(epoch, n)
            template_n = decoder.missing(entry_id, stored)
            if template_n is not None:
                template = db.execute(SQL["entry"], (found.log_id, epoch, template_n)).get
                decoder.decode(EntryId(epoch, template_n), template or b"")
            entries.append((entry_id, decoder.decode(entry_id, stored)))
    except UnreadableEntry as error:
        raise Unavailable("the log of this reply cannot be read") from error
    return entries
