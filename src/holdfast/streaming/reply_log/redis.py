"""The log of replies of many nodes, in Redis: a Stream for each reply.

replies:log:<reply>      the entries, each with its id and one field
replies:claim:<digest>   a claim of an Idempotency-Key
replies:claimed:<reply>  the name of the reply's claim, so that both expire together
replies:wake:<random>    wakes this node's reader (``stream_follow``)
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
from redis.asyncio.connection import AbstractConnection

from holdfast import telemetry
from holdfast.drivers.redis import connection_pool, trouble_of
from holdfast.drivers.redis_scripts import Script, ScriptRunner
from holdfast.errors import HoldfastError, Unavailable
from holdfast.streaming.entry_codec import Decoder, UnreadableEntry, encode_entry
from holdfast.streaming.reply import EntryId, Owner, ReplyBegin, ReplyEntry
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
from holdfast.streaming.reply_log.open_logs import OpenLogs
from holdfast.streaming.reply_log.stream_follow import (
    RawEntry,
    StreamFollower,
    StreamInbox,
    entry_id,
    raw_entries,
)

PREFIX = b"replies:"
LOGS, CLAIMS, CLAIMED = PREFIX + b"log:", PREFIX + b"claim:", PREFIX + b"claimed:"
PAGE_ENTRIES = 1000
SCANNED_AT_ONCE = 500
"""Keys that one step of an erasure looks at: Redis serves nobody else meanwhile."""
ANSWER_SECONDS = 2.0

_PACKAGE = "holdfast.streaming.reply_log"
_BEGIN, _APPEND = Script(_PACKAGE, "expire", "begin"), Script(_PACKAGE, "expire", "append")
_READ = Script(_PACKAGE, "read")
_DELETE, _FORGET, _WAKE = (Script(_PACKAGE, name) for name in ("delete", "forget", "wake"))
_CLAIM, _FREE = Script(_PACKAGE, "claim"), Script(_PACKAGE, "free")
_claims = msgspec.msgpack.Decoder(list[str])


class RedisReplyLog:
    """See ``contract.ReplyLog``. Followers get empty pages while Redis is down."""

    shared = True
    flush_seconds = 0.025

    def __init__(
        self,
        url: str,
        answer_seconds: float = ANSWER_SECONDS,
        follow_seconds: float = FOLLOW_SECONDS,
    ) -> None:
        """A Redis that is silent for ``answer_seconds`` is taken for lost."""
        self._url = url
        self._throttled = telemetry.ThrottledLog(lines=1)
        self._answer_seconds, self._follow_seconds = answer_seconds, follow_seconds
        self._scripts = ScriptRunner(
            url, "the log of replies", self._on_trouble, socket_timeout_seconds=answer_seconds
        )
        connections = connection_pool(
            url, protocol=2, socket_connect_timeout=1.0, socket_timeout=answer_seconds
        )
        make: Callable[[], AbstractConnection] = connections.make_connection
        wake_key = PREFIX + b"wake:" + secrets.token_hex(8).encode()
        self._follower = StreamFollower(
            make, wake_key, lambda: self._run(_WAKE, [wake_key]), self._on_trouble, follow_seconds
        )
        self._open_logs = OpenLogs()

    @classmethod
    async def open(cls, url: str, answer_seconds: float = ANSWER_SECONDS) -> RedisReplyLog:
        """BadSetting if Redis answers but is unfit; it may be unavailable."""
        log = cls(url, answer_seconds)
        await log._scripts.require_fit("streaming.replies_url", log._answer_seconds)
        return log

    async def begin(self, reply_id: str, begin: ReplyBegin) -> int:
        found = await self._run(_BEGIN, [_log(reply_id)], encode_entry(begin), int(BEGUN_SECONDS))
        if found is None:
            raise LogEnded(reply_id)
        epoch, entries_before = int(found[0]), found[1]
        self._open_logs.begin(reply_id, epoch, entries_before)
        return epoch

    async def append(self, appends: Sequence[LogAppend]) -> Sequence[Appended]:
        encoded = [self._open_logs.encode(append) for append in appends]
        arguments: list[Any] = [int(ENDED_SECONDS)]
        for _, (epoch, n), stored, log in encoded:
            arguments += (epoch, n, len(stored), log.entries_before, *stored)
        keys = [_log(append.reply_id) for append in encoded]
        answers = await self._run(_APPEND, keys, *arguments)
        return [
            self._open_logs.on_taken(append)
            if answer == 1
            else Appended(entry_id(answer) if answer else None)
            for append, answer in zip(encoded, answers, strict=True)
        ]

    async def read(self, reply_id: str, after: EntryId | None, entries_max: int) -> LogPage | None:
        return await self._read(Decoder(), reply_id, after, entries_max)

    async def follow(self, reply_id: str, after: EntryId | None) -> AsyncGenerator[LogPage, None]:
        decoder = Decoder()
        at = after or EntryId(0, -1)
        while True:
            try:
                page = await self._read(decoder, reply_id, after, PAGE_ENTRIES)
                break
            except HoldfastError:
                yield LogPage((), at)
                await asyncio.sleep(self._follow_seconds)
        if page is None:
            return
        at = page.entries[-1][0] if page.entries else at
        async with self._follower.inbox(_log(reply_id), at) as inbox:
            while page is not None:
                yield page
                at = page.entries[-1][0] if page.entries else at
                page = await self._next_page(decoder, reply_id, at, page.last, inbox)

    async def delete(self, reply_ids: Sequence[str]) -> None:
        await self._run(_DELETE, [_log(each) for each in reply_ids])

    async def claim(self, claim: KeyClaim) -> KeyClaim:
        # Redis decodes no bytes, so the hash is hexadecimal.
        value = (*claim.owner, claim.key, claim.body_hash.hex(), claim.reply_id, claim.node)
        stored = msgspec.msgpack.encode(value)
        found = await self._run(_CLAIM, _claim_keys(claim), stored, int(BEGUN_SECONDS))
        body_hash, reply_id, node = _claims.decode(found)[4:]
        return KeyClaim(claim.owner, claim.key, bytes.fromhex(body_hash), reply_id, node)

    async def free(self, claim: KeyClaim) -> None:
        await self._run(_FREE, _claim_keys(claim), claim.reply_id)

    async def forget_owner(self, owner: Owner) -> int:
        cursor, deleted = b"0", 0
        while True:
            arguments = (cursor, SCANNED_AT_ONCE, LOGS, CLAIMS, CLAIMED, *owner)
            cursor, count = await self._run(_FORGET, [], *arguments)
            deleted += int(count)
            if cursor == b"0":
                return deleted

    async def close(self) -> None:
        await self._follower.close()
        await self._scripts.aclose()

    async def _next_page(
        self, decoder: Decoder, reply_id: str, at: EntryId, last: EntryId, inbox: StreamInbox
    ) -> LogPage | None:
        """What follows ``at``: as it arrives, or read from the log where it may be
        missing or gone. Empty while Redis is unavailable.
        """
        try:
            if at >= last:
                arrived = await inbox.take(at)
                if arrived:
                    return LogPage(await self._decode(decoder, reply_id, arrived), arrived[-1][0])
            return await self._read(decoder, reply_id, at, PAGE_ENTRIES)
        except HoldfastError:
            await inbox.take(at)
            return LogPage((), at)

    async def _read(
        self, decoder: Decoder, reply_id: str, after: EntryId | None, entries_max: int
    ) -> LogPage | None:
        since = "" if after is None else str(after)
        found = await self._run(_READ, [_log(reply_id)], since, entries_max)
        if found is None:
            return None
        last, entries = found
        return LogPage(await self._decode(decoder, reply_id, raw_entries(entries)), entry_id(last))

    async def _decode(
        self, decoder: Decoder, reply_id: str, stored: Sequence[RawEntry]
    ) -> list[tuple[EntryId, ReplyEntry]]:
        entries = []
        try:
            for each, value in stored:
                template_n = decoder.missing(each, value)
                if template_n is not None:
                    template = EntryId(each.epoch, template_n)
                    decoder.decode(template, await self._entry(reply_id, template))
                entries.append((each, decoder.decode(each, value)))
        except UnreadableEntry as error:
            raise Unavailable("the log of this reply cannot be read") from error
        return entries

    async def _entry(self, reply_id: str, wanted: EntryId) -> bytes:
        before = f"{wanted.epoch}-{wanted.n - 1}"
        found = await self._run(_READ, [_log(reply_id)], before, 1)
        return raw_entries(found[1])[0][1] if found and found[1] else b""

    async def _run(self, script: Script, keys: list[bytes], *arguments: Any) -> Any:
        return await self._scripts.run(script, keys, arguments, _as_it_is)

    def _on_trouble(self, error: Exception | str) -> None:
        reason, detail = trouble_of(error, self._url)
        telemetry.redis_failed("replies", reason)
        self._throttled.info("streaming.replies_unavailable", reason=reason, detail=detail)


def _as_it_is(answer: Any) -> Any:
    return answer


def _log(reply_id: str) -> bytes:
    return LOGS + reply_id.encode()


def _claim_keys(claim: KeyClaim) -> list[bytes]:
    """A key has any length and any characters, so its name in Redis is a digest."""
    name = msgspec.msgpack.encode((*claim.owner, claim.key))
    digest = hashlib.blake2b(name, digest_size=16).hexdigest()
    return [CLAIMS + digest.encode(), CLAIMED + claim.reply_id.encode()]
