"""What every log of replies promises: memory and each adapter alike."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import apsw
import pytest
import redis.asyncio

from holdfast.clock import ManualClock
from holdfast.errors import Unavailable
from holdfast.streaming.reply import (
    EntryId,
    Owner,
    ReplyBegin,
    ReplyDelta,
    ReplyDone,
    ReplyEntry,
    ReplyError,
    ReplyKind,
    ReplyUsage,
)
from holdfast.streaming.reply_log.contract import (
    BEGUN_SECONDS,
    ENDED_SECONDS,
    Appended,
    KeyClaim,
    LogAppend,
    LogEnded,
    LogPage,
    ReplyLog,
)
from holdfast.streaming.reply_log.memory import MemoryReplyLog
from holdfast.streaming.reply_log.redis import RedisReplyLog
from holdfast.streaming.reply_log.sqlite import (
    REPLIES,
    RepliesFile,
    SqliteReplyLog,
    SqliteUsage,
)
from holdfast.streaming.reply_log.writer import LogWriter, NotResumableCause
from holdfast.streaming.usage_store.buffer import UsageBuffer
from holdfast.streaming.usage_store.contract import RunUsage, UsageKey, UsageQuery

ANN, BOB = Owner("acme", "user", "ann"), Owner("acme", "user", "bob")
FOLLOW_SECONDS = 0.2
"""A page at least this often; a second in use."""
PassTime = Callable[[float], Awaitable[None]]
Scenario = Callable[[ReplyLog, PassTime], Awaitable[None]]


@asynccontextmanager
async def opened(
    adapter: str, request: pytest.FixtureRequest, folder: Path
) -> AsyncIterator[tuple[ReplyLog, PassTime]]:
    """A log without entries, and how time passes for what it has."""
    clock = ManualClock(1_700_000_000.0)

    async def advance(seconds: float) -> None:
        clock.advance(seconds)

    if adapter == "memory":
        yield MemoryReplyLog(clock, FOLLOW_SECONDS), advance
        return
    if adapter == "redis":
        async with redis_log(request.getfixturevalue("redis_server").url) as both:
            yield both
        return
    file = await RepliesFile.open(folder / REPLIES.name, clock)
    yield SqliteReplyLog(file, FOLLOW_SECONDS), advance
    await file.close()


@asynccontextmanager
async def redis_log(url: str) -> AsyncIterator[tuple[ReplyLog, PassTime]]:
    """Time passes by shortening what each key has left to live."""
    client = redis.asyncio.Redis.from_url(url)
    await client.flushall()

    async def shorten(seconds: float) -> None:
        async for key in client.scan_iter():
            left_ms = await client.pttl(key)
            assert left_ms > 0, f"{key} never expires"
            await client.pexpire(key, int(left_ms - seconds * 1000))

    log = RedisReplyLog(url, follow_seconds=FOLLOW_SECONDS)
    try:
        yield log, shorten
    finally:
        await log.close()
        await client.aclose()


def on_every_log(scenario: Scenario) -> Any:
    @pytest.mark.parametrize("adapter", ["memory", "sqlite", "redis"])
    @wraps(scenario)
    async def test(adapter: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        async with opened(adapter, request, tmp_path) as (log, pass_time):
            await scenario(log, pass_time)

    del test.__wrapped__  # type: ignore[attr-defined]
    return test


def begin(owner: Owner = ANN, kind: ReplyKind = "native") -> ReplyBegin:
    return ReplyBegin(*owner, kind, "native", "m", "node-1", 1.5, '{"n":1}')


def delta(token: str) -> ReplyDelta:
    return ReplyDelta(
        b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,'
        b'"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}' % token.encode()
    )


def deltas(*tokens: str) -> list[ReplyEntry]:
    return [delta(token) for token in tokens]


async def append(
    log: ReplyLog, epoch: int, n: int, *entries: ReplyEntry, reply_id: str = "r1"
) -> Appended:
    (answer,) = await log.append([LogAppend(reply_id, EntryId(epoch, n), entries)])
    return answer


async def whole(log: ReplyLog, reply_id: str = "r1") -> list[ReplyEntry]:
    """All entries of the last epoch, dense."""
    page = await log.read(reply_id, None, 100_000)
    assert page is not None
    assert [entry_id.n for entry_id, _ in page.entries] == list(range(len(page.entries)))
    assert page.entries[-1][0] == page.last
    return [entry for _, entry in page.entries]


@on_every_log
async def test_log_has_the_entries_that_were_appended(log: ReplyLog, _: PassTime) -> None:
    epoch = await log.begin("r1", begin())
    written = [
        *deltas("a", "b"),
        ReplyDelta(b"\x00\xff not JSON"),
        *deltas("c"),
        ReplyUsage(3, 4, True, b'{"usage":1}'),
        ReplyDone(),
    ]
    answer = await append(log, epoch, 1, *written[:3])
    assert answer.last == EntryId(epoch, 3)
    assert answer.bytes_stored > 0
    assert (await append(log, epoch, 4, *written[3:])).last == EntryId(epoch, 6)
    assert await whole(log) == [begin(), *written]


@on_every_log
async def test_repeated_append_writes_nothing_and_says_where_the_log_ends(
    log: ReplyLog, _: PassTime
) -> None:
    epoch = await log.begin("r1", begin())
    await append(log, epoch, 1, *deltas("a", "b"))
    assert await append(log, epoch, 1, *deltas("a", "b")) == Appended(EntryId(epoch, 2))
    assert await append(log, epoch, 2, *deltas("b", "c")) == Appended(EntryId(epoch, 2))
    assert (await append(log, epoch, 3, *deltas("c"))).last == EntryId(epoch, 3)
    assert await whole(log) == [begin(), *deltas("a", "b", "c")]


@on_every_log
async def test_append_behind_a_hole_writes_nothing(log: ReplyLog, _: PassTime) -> None:
    epoch = await log.begin("r1", begin())
    assert await append(log, epoch, 2, *deltas("b")) == Appended(EntryId(epoch, 0))
    assert await whole(log) == [begin()]


@on_every_log
async def test_append_of_another_epoch_writes_nothing(log: ReplyLog, _: PassTime) -> None:
    older = await log.begin("r1", begin())
    await append(log, older, 1, *deltas("a"))
    newer = await log.begin("r1", begin())
    assert await append(log, older, 2, *deltas("b")) == Appended(EntryId(newer, 0))
    assert await append(log, newer + 1, 1, *deltas("b")) == Appended(EntryId(newer, 0))
    assert await whole(log) == [begin()]


@on_every_log
async def test_append_without_a_log_makes_none(log: ReplyLog, _: PassTime) -> None:
    assert await append(log, 5, 1, *deltas("a")) == Appended(None)
    assert await log.read("r1", None, 10) is None


@on_every_log
async def test_log_with_its_end_takes_no_more(log: ReplyLog, _: PassTime) -> None:
    epoch = await log.begin("r1", begin())
    await append(log, epoch, 1, ReplyError("cancelled", "by its owner", 499))
    assert await append(log, epoch, 2, ReplyDone()) == Appended(EntryId(epoch, 1))
    with pytest.raises(LogEnded):
        await log.begin("r1", begin())
    assert await whole(log) == [begin(), ReplyError("cancelled", "by its owner", 499)]


@on_every_log
async def test_one_call_appends_to_many_logs_each_alone(log: ReplyLog, _: PassTime) -> None:
    epochs = [await log.begin(f"r{n}", begin()) for n in range(3)]
    answers = await log.append(
        [
            LogAppend("r0", EntryId(epochs[0], 1), deltas("a")),
            LogAppend("none", EntryId(1, 1), deltas("a")),
            LogAppend("r1", EntryId(epochs[1], 2), deltas("hole")),
            LogAppend("r2", EntryId(epochs[2], 1), [*deltas("b"), ReplyDone()]),
        ]
    )
    assert [answer.last for answer in answers] == [
        EntryId(epochs[0], 1), None, EntryId(epochs[1], 0), EntryId(epochs[2], 2)
    ]  # fmt: skip
    assert await whole(log, "r0") == [begin(), *deltas("a")]
    assert await whole(log, "r1") == [begin()]
    assert await whole(log, "r2") == [begin(), *deltas("b"), ReplyDone()]


@on_every_log
async def test_epochs_rise_and_are_the_time_in_milliseconds(log: ReplyLog, _: PassTime) -> None:
    epochs = [await log.begin("r1", begin()) for _ in range(5)]
    assert epochs == sorted(set(epochs))
    assert epochs[0] > 1_600_000_000_000
    other = await log.begin("r2", begin())
    assert abs(other - epochs[0]) < 60_000


@on_every_log
async def test_page_continues_after_an_entry_and_names_the_last(log: ReplyLog, _: PassTime) -> None:
    epoch = await log.begin("r1", begin())
    tokens = deltas(*(f"t{n}" for n in range(9)))
    await append(log, epoch, 1, *tokens)
    page = await log.read("r1", EntryId(epoch, 4), 3)
    assert page is not None
    expected = [(EntryId(epoch, n), tokens[n - 1]) for n in (5, 6, 7)]
    assert (list(page.entries), page.last) == (expected, EntryId(epoch, 9))
    end = await log.read("r1", EntryId(epoch, 9), 3)
    assert end == LogPage([], EntryId(epoch, 9))


@on_every_log
async def test_page_after_an_older_epoch_has_the_newer_one_too(log: ReplyLog, _: PassTime) -> None:
    older = await log.begin("r1", begin())
    await append(log, older, 1, *deltas("a", "b"))
    newer = await log.begin("r1", begin())
    await append(log, newer, 1, *deltas("c", "d"))
    page = await log.read("r1", EntryId(older, 1), 100)
    assert page is not None
    assert list(page.entries) == [
        (EntryId(older, 2), delta("b")),
        (EntryId(newer, 0), begin()),
        (EntryId(newer, 1), delta("c")),
        (EntryId(newer, 2), delta("d")),
    ]
    assert await whole(log) == [begin(), *deltas("c", "d")]


@on_every_log
async def test_unfinished_log_is_kept_30_minutes(log: ReplyLog, pass_time: PassTime) -> None:
    epoch = await log.begin("r1", begin())
    await pass_time(BEGUN_SECONDS - 10)
    await append(log, epoch, 1, *deltas("a"))
    assert await whole(log) == [begin(), *deltas("a")]
    await pass_time(11)
    assert await log.read("r1", None, 10) is None
    assert await append(log, epoch, 2, *deltas("b")) == Appended(None)
    assert await log.begin("r1", begin()) > epoch


@on_every_log
async def test_log_is_kept_10_minutes_after_its_end(log: ReplyLog, pass_time: PassTime) -> None:
    epoch = await log.begin("r1", begin())
    await pass_time(60)
    await append(log, epoch, 1, ReplyDone())
    await pass_time(ENDED_SECONDS - 10)
    assert await whole(log) == [begin(), ReplyDone()]
    await pass_time(11)
    assert await log.read("r1", None, 10) is None
    await log.begin("r1", begin())


@on_every_log
async def test_deleted_log_is_gone_with_its_claim(log: ReplyLog, _: PassTime) -> None:
    claim = KeyClaim(ANN, "k", b"hash", "r1", "node-1")
    await log.claim(claim)
    await log.begin("r1", begin())
    await log.begin("r2", begin())
    await log.delete(["r1", "none"])
    assert await log.read("r1", None, 10) is None
    assert await whole(log, "r2") == [begin()]
    other = claim._replace(reply_id="r3")
    assert await log.claim(other) == other


@on_every_log
async def test_claim_is_put_only_if_there_is_none(log: ReplyLog, _: PassTime) -> None:
    first = KeyClaim(ANN, "k", b"\x00\xff", "r1", "node-1")
    second = KeyClaim(ANN, "k", b"other", "r2", "node-2")
    assert await log.claim(first) == first
    assert await log.claim(second) == first
    assert await log.claim(first) == first
    for elsewhere in (second._replace(key="k2"), second._replace(owner=BOB)):
        assert await log.claim(elsewhere) == elsewhere
    key_owner = second._replace(owner=Owner("acme", "key", "ann"))
    assert await log.claim(key_owner) == key_owner


@on_every_log
async def test_claim_is_freed_only_by_its_own_reply(log: ReplyLog, _: PassTime) -> None:
    first = KeyClaim(ANN, "k", b"hash", "r1", "node-1")
    second = KeyClaim(ANN, "k", b"hash", "r2", "node-2")
    await log.claim(first)
    await log.free(second)
    assert await log.claim(second) == first
    await log.free(first)
    assert await log.claim(second) == second
    await log.free(first)
    assert await log.claim(first) == second


@on_every_log
async def test_claim_expires_with_its_log(log: ReplyLog, pass_time: PassTime) -> None:
    first = KeyClaim(ANN, "k", b"hash", "r1", "node-1")
    second = first._replace(reply_id="r2")
    await log.claim(first)
    await pass_time(BEGUN_SECONDS - 10)
    epoch = await log.begin("r1", begin())  # it waited in the queue
    await pass_time(60)
    assert await log.claim(second) == first
    await append(log, epoch, 1, ReplyDone())
    await pass_time(ENDED_SECONDS - 10)
    assert await log.claim(second) == first
    await pass_time(11)
    assert await log.claim(second) == second


@on_every_log
async def test_claim_without_a_log_expires_after_30_minutes(
    log: ReplyLog, pass_time: PassTime
) -> None:
    first = KeyClaim(ANN, "k", b"hash", "r1", "node-1")
    await log.claim(first)
    await pass_time(BEGUN_SECONDS + 1)
    second = first._replace(reply_id="r2")
    assert await log.claim(second) == second


@on_every_log
async def test_erasure_deletes_logs_and_claims_of_one_owner(log: ReplyLog, _: PassTime) -> None:
    for n in range(3):
        await log.begin(f"ann{n}", begin(ANN))
    await log.begin("bob", begin(BOB))
    await log.begin("key", begin(Owner("acme", "key", "ann")))
    claims = [KeyClaim(owner, "k", b"h", "r", "n") for owner in (ANN, BOB)]
    for claim in claims:
        await log.claim(claim)
    assert await log.forget_owner(ANN) == 3
    assert await log.read("ann1", None, 10) is None
    assert await whole(log, "bob") == [begin(BOB)]
    assert await log.read("key", None, 10) is not None
    again = [claim._replace(reply_id="r2") for claim in claims]
    assert [await log.claim(claim) for claim in again] == [again[0], claims[1]]
    assert await log.forget_owner(ANN) == 0


async def followed(log: ReplyLog, after: EntryId | None, into: list[Any]) -> None:
    async for page in log.follow("r1", after):
        into += page.entries
        if page.entries and isinstance(page.entries[-1][1], (ReplyDone, ReplyError)):
            return


@on_every_log
async def test_followers_get_every_entry_once_as_the_log_grows(log: ReplyLog, _: PassTime) -> None:
    epoch = await log.begin("r1", begin())
    await append(log, epoch, 1, *deltas("t1", "t2"))
    starts = [None, EntryId(epoch, 1), EntryId(epoch, 2), None]
    seen: list[list[Any]] = [[] for _ in starts]
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for start, into in zip(starts, seen, strict=True):
            group.create_task(followed(log, start, into))
        for n in range(3, 40):
            await append(log, epoch, n, *deltas(f"t{n}"))
            await asyncio.sleep(0.001 * (n % 3))
        await append(log, epoch, 40, ReplyDone())
    everything = [(EntryId(epoch, 0), begin())]
    everything += [(EntryId(epoch, n), delta(f"t{n}")) for n in range(1, 40)]  # type: ignore[misc]
    everything += [(EntryId(epoch, 40), ReplyDone())]  # type: ignore[list-item]
    assert seen == [everything[start.n + 1 if start else 0 :] for start in starts]


@on_every_log
async def test_follower_goes_on_into_a_new_epoch(log: ReplyLog, _: PassTime) -> None:
    older = await log.begin("r1", begin())
    seen: list[Any] = []
    following = asyncio.create_task(followed(log, None, seen))
    await append(log, older, 1, *deltas("a"))
    newer = await log.begin("r1", begin())
    await append(log, newer, 1, *deltas("b"), ReplyDone())
    await asyncio.wait_for(following, 10)
    ids = [entry_id for entry_id, _ in seen]
    assert ids[-3:] == [EntryId(newer, 0), EntryId(newer, 1), EntryId(newer, 2)]
    assert ids == sorted(set(ids))


@on_every_log
async def test_follower_of_a_quiet_log_gets_empty_pages(log: ReplyLog, _: PassTime) -> None:
    epoch = await log.begin("r1", begin())
    pages = log.follow("r1", EntryId(epoch, 0))
    loop = asyncio.get_running_loop()
    assert (await anext(pages)).entries == []
    began_at = loop.time()
    assert (await anext(pages)).entries == []
    assert FOLLOW_SECONDS / 3 < loop.time() - began_at < 2.0
    await pages.aclose()  # type: ignore[attr-defined]


@on_every_log
async def test_follower_ahead_of_the_log_waits_for_it(log: ReplyLog, _: PassTime) -> None:
    """A failover lost what the reader has; the producer writes it again."""
    epoch = await log.begin("r1", begin())
    await append(log, epoch, 1, *deltas("a"))
    pages = log.follow("r1", EntryId(epoch, 3))
    loop = asyncio.get_running_loop()
    assert (await anext(pages)).entries in ([], ())
    began_at = loop.time()
    assert (await anext(pages)).entries in ([], ())
    assert loop.time() - began_at > FOLLOW_SECONDS / 3, "it does not spin"
    following = asyncio.ensure_future(anext(pages))
    await append(log, epoch, 2, *deltas("b", "c", "d"))
    async with asyncio.timeout(5):
        entries = list((await following).entries)
        while not entries:
            entries = list((await anext(pages)).entries)
    assert entries == [(EntryId(epoch, 4), delta("d"))]
    await pages.aclose()  # type: ignore[attr-defined]


@on_every_log
async def test_following_ends_when_there_is_no_log(log: ReplyLog, _: PassTime) -> None:
    assert [page async for page in log.follow("none", None)] == []
    epoch = await log.begin("r1", begin())
    pages = log.follow("r1", EntryId(epoch, 0))
    await anext(pages)
    await log.delete(["r1"])
    async with asyncio.timeout(5):
        assert [page async for page in pages] == []


# --- SQLite alone: what the next process finds ---


async def test_next_process_ends_unfinished_replies_except_of_assistants(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000.0)
    file = await RepliesFile.open(tmp_path / REPLIES.name, clock)
    log = SqliteReplyLog(file)
    epoch = await log.begin("r1", begin())
    await append(log, epoch, 1, *deltas("a", "b"))
    done = await log.begin("done", begin())
    await append(log, done, 1, *deltas("a"), ReplyDone(), reply_id="done")
    failed = await log.begin("failed", begin())
    await append(log, failed, 1, ReplyError("cancelled", ""), reply_id="failed")
    await log.begin("bot", begin(kind="assistant"))
    claims = [KeyClaim(ANN, each, b"h", each, "n") for each in ("r1", "done", "failed", "waiting")]
    for claim in claims:
        await log.claim(claim)
    await file.close()

    clock.advance(3)
    file = await RepliesFile.open(tmp_path / REPLIES.name, clock)
    log = SqliteReplyLog(file)
    *text, end = await whole(log)
    assert text == [begin(), *deltas("a", "b")]
    assert isinstance(end, ReplyError)
    assert end.code == "server_restarted"
    assert await whole(log, "done") == [begin(), *deltas("a"), ReplyDone()]
    assert await whole(log, "failed") == [begin(), ReplyError("cancelled", "")]
    assert await whole(log, "bot") == [begin(kind="assistant")]
    assert await log.begin("bot", begin(kind="assistant")) > epoch
    again = [claim._replace(reply_id="new") for claim in claims]
    in_force = [await log.claim(claim) for claim in again]
    assert in_force == [again[0], claims[1], again[2], again[3]]
    await file.close()


async def test_expired_logs_leave_the_file(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000.0)
    path = tmp_path / REPLIES.name
    file = await RepliesFile.open(path, clock)
    log = SqliteReplyLog(file)
    for n in range(50):
        await log.begin(f"r{n}", begin())
    clock.advance(BEGUN_SECONDS + 1)
    await file._delete_expired()
    await file.close()
    db = apsw.Connection(str(path))
    for table in ("log", "entry", "claim"):
        assert db.execute(f"SELECT count(*) FROM {table}").get == 0
    db.close()


async def test_jump_of_the_wall_clock_expires_nothing(tmp_path: Path) -> None:
    class Jumping(ManualClock):
        hour = 0.0

        def now(self) -> float:
            return super().now() + self.hour

    clock = Jumping(1_700_000_000.0)
    file = await RepliesFile.open(tmp_path / REPLIES.name, clock)
    log = SqliteReplyLog(file)
    epoch = await log.begin("r1", begin())
    for clock.hour in (3600.0, -3600.0):
        assert await whole(log) == [begin()]
        assert await log.begin("r1", begin()) > epoch
    await file.close()


async def test_thousands_of_replies_begin_at_once(tmp_path: Path) -> None:
    file = await RepliesFile.open(tmp_path / REPLIES.name, ManualClock(1_700_000_000.0))
    log = SqliteReplyLog(file)
    epochs = await asyncio.gather(*(log.begin(f"r{n}", begin()) for n in range(2_000)))
    assert len(epochs) == 2_000
    await file.close()


class FullDiskReply:
    """A reply in memory, as the writer sees it."""

    def __init__(self) -> None:
        self.reply_id, self.epoch = "r1", 0
        self.entries: list[ReplyEntry] = [begin()]
        self.reports: list[str] = []

    def on_superseded(self) -> None: ...

    def on_not_resumable(self, cause: NotResumableCause) -> None:
        self.reports.append(cause)


def fill(disk: Path) -> Path:
    """Take all the room there is."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


async def test_full_disk_makes_replies_not_resumable_and_usage_waits(small_disk: Path) -> None:
    """The reply goes on; what was made meanwhile is stored when there is room again."""
    file = await RepliesFile.open(small_disk / REPLIES.name, ManualClock(1_700_000_000.0))
    log, usage = SqliteReplyLog(file), SqliteUsage(file)
    writer, buffer = LogWriter(log), UsageBuffer(usage, list)
    reply = FullDiskReply()
    reply.epoch = await writer.begin(reply)
    running = asyncio.create_task(writer.run())
    ballast = fill(small_disk)
    reply.entries += [*(ReplyDelta(os.urandom(50_000)) for _ in range(10)), ReplyDone()]
    assert await writer.end(reply) is False
    assert reply.reports == ["late"]
    key = UsageKey("2026-11-17", "acme", "ann", "m", "p" * 100_000)
    buffer.count(RunUsage("run", key, 2, 1, False))
    with pytest.raises(Unavailable):
        await buffer.flush()
    ballast.unlink()
    await buffer.flush()
    rows = await usage.rows(UsageQuery("2026-11-17", "2026-11-17"))
    assert [(row.replies, row.prompt_tokens) for row in rows] == [(1, 2)]
    seen: list[Any] = []
    await asyncio.wait_for(followed(log, None, seen), 10)
    assert [entry for _, entry in seen] == reply.entries
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await file.close()
