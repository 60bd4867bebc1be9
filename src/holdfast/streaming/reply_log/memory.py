"""A log of replies in memory: for tests, and for several nodes of one process."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from operator import itemgetter

from holdfast.clock import Clock
from holdfast.streaming.reply import (
    EntryId,
    Owner,
    ReplyBegin,
    ReplyDelta,
    ReplyDone,
    ReplyEntry,
    ReplyError,
    ReplyUsage,
)
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


class _Log:
    """The entries of a reply, of all its epochs."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.entries: list[tuple[EntryId, ReplyEntry]] = []
        self.expires_at = 0.0

    @property
    def last(self) -> EntryId:
        return self.entries[-1][0]

    def has_end(self) -> bool:
        return bool(self.entries) and isinstance(self.entries[-1][1], (ReplyDone, ReplyError))


class MemoryReplyLog:
    """See ``contract.ReplyLog``. Expired logs go when the next one begins."""

    shared = True
    flush_seconds = 0.025

    def __init__(self, clock: Clock, follow_seconds: float = FOLLOW_SECONDS) -> None:
        self._clock = clock
        self._logs: dict[str, _Log] = {}
        self._claims: dict[tuple[Owner, str], tuple[KeyClaim, float]] = {}
        self._followers = LocalFollowers(follow_seconds)

    async def begin(self, reply_id: str, begin: ReplyBegin) -> int:
        self._drop_expired()
        log = self._logs.get(reply_id) or _Log(begin.owner)
        if log.has_end():
            raise LogEnded(reply_id)
        above = log.last.epoch + 1 if log.entries else 0
        epoch = max(int(self._clock.now() * 1000), above)
        self._logs[reply_id] = log
        log.entries.append((EntryId(epoch, 0), begin))
        self._expire(reply_id, log, BEGUN_SECONDS)
        self._followers.on_growth(reply_id)
        return epoch

    async def append(self, appends: Sequence[LogAppend]) -> Sequence[Appended]:
        return [self._append(each) for each in appends]

    async def read(self, reply_id: str, after: EntryId | None, entries_max: int) -> LogPage | None:
        log = self._log(reply_id)
        if log is None:
            return None
        if after is None:
            after = EntryId(log.last.epoch, -1)
        at = bisect_right(log.entries, after, key=itemgetter(0))
        return LogPage(log.entries[at : at + entries_max], log.last)

    def follow(self, reply_id: str, after: EntryId | None) -> AsyncGenerator[LogPage, None]:
        return self._followers.follow(self.read, reply_id, after)

    async def delete(self, reply_ids: Sequence[str]) -> None:
        for reply_id in reply_ids:
            self._logs.pop(reply_id, None)
            self._followers.on_growth(reply_id)
            for where in [
                w for w, (claim, _) in self._claims.items() if claim.reply_id == reply_id
            ]:
                del self._claims[where]

    async def claim(self, claim: KeyClaim) -> KeyClaim:
        now = self._clock.monotonic()
        found, expires_at = self._claims.get((claim.owner, claim.key), (claim, 0.0))
        if expires_at > now:
            return found
        self._claims[claim.owner, claim.key] = claim, now + BEGUN_SECONDS
        return claim

    async def free(self, claim: KeyClaim) -> None:
        found = self._claims.get((claim.owner, claim.key))
        if found is not None and found[0].reply_id == claim.reply_id:
            del self._claims[claim.owner, claim.key]

    async def forget_owner(self, owner: Owner) -> int:
        logs = [reply_id for reply_id, log in self._logs.items() if log.owner == owner]
        await self.delete(logs)
        for each in [each for each in self._claims if each[0] == owner]:
            del self._claims[each]
        return len(logs)

    async def close(self) -> None:
        pass

    def _append(self, append: LogAppend) -> Appended:
        log = self._log(append.reply_id)
        if log is None:
            return Appended(None)
        epoch, n = append.first
        if log.last != EntryId(epoch, n - 1) or log.has_end():
            return Appended(log.last)
        log.entries += [(EntryId(epoch, at), e) for at, e in enumerate(append.entries, n)]
        self._followers.on_growth(append.reply_id)
        if log.has_end():
            self._expire(append.reply_id, log, ENDED_SECONDS)
        return Appended(log.last, sum(map(_bytes, append.entries)))

    def _log(self, reply_id: str) -> _Log | None:
        log = self._logs.get(reply_id)
        return log if log is not None and log.expires_at > self._clock.monotonic() else None

    def _expire(self, reply_id: str, log: _Log, seconds: float) -> None:
        """Let the log and its claims live so long from now."""
        log.expires_at = expires_at = self._clock.monotonic() + seconds
        for where, (claim, _) in list(self._claims.items()):
            if claim.reply_id == reply_id:
                self._claims[where] = claim, expires_at

    def _drop_expired(self) -> None:
        now = self._clock.monotonic()
        for reply_id in [each for each, log in self._logs.items() if log.expires_at <= now]:
            del self._logs[reply_id]
        for where in [where for where, (_, until) in self._claims.items() if until <= now]:
            del self._claims[where]


def _bytes(entry: ReplyEntry) -> int:
    return len(entry.chunk) if isinstance(entry, (ReplyDelta, ReplyUsage)) else 1
