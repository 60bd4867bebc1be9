"""What a node knows of its logs, and what arrives for its followers: both bounded."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.streaming.entry_codec import Decoder
from holdfast.streaming.reply import EntryId, ReplyDelta, ReplyDone, ReplyEntry
from holdfast.streaming.reply_log.contract import LogAppend
from holdfast.streaming.reply_log.open_logs import OpenLogs
from holdfast.streaming.reply_log.stream_follow import INBOX_ENTRIES_MAX, StreamInbox


def delta(token: str) -> ReplyDelta:
    return ReplyDelta(
        b'{"id":"chatcmpl-1","choices":[{"delta":{"content":"%s"}}]}' % token.encode()
    )


def append(reply_id: str, n: int, *entries: ReplyEntry) -> LogAppend:
    return LogAppend(reply_id, EntryId(7, n), entries)


def test_log_that_is_not_known_any_more_stores_its_next_chunk_whole() -> None:
    logs = OpenLogs(logs_max=2)
    stored: dict[str, list[bytes]] = {name: [] for name in "abc"}
    for n in range(1, 4):
        for name in "abc":
            encoded = logs.encode(append(name, n, delta(f"token {n}")))
            stored[name] += encoded.stored
            logs.on_taken(encoded)
    assert len(logs._logs) == 2
    for each in stored.values():
        assert [one[:1] for one in each] == [b"w", b"w", b"w"]
        decoder = Decoder()
        read = [decoder.decode(EntryId(7, n), one) for n, one in enumerate(each, 1)]
        assert read == [delta(f"token {n}") for n in range(1, 4)]


def test_append_that_was_not_taken_changes_nothing() -> None:
    logs = OpenLogs()
    logs.begin("a", 7, entries_before=3)
    first = logs.encode(append("a", 1, delta("x"), delta("y")))
    assert logs.encode(append("a", 1, delta("x"), delta("y"))) == first
    assert first.following.entries_before == 3
    assert logs.on_taken(first).bytes_stored == sum(map(len, first.stored))
    assert [one[:1] for one in logs.encode(append("a", 3, delta("z"))).stored] == [b"d"]


def test_ended_log_is_forgotten() -> None:
    logs = OpenLogs()
    logs.begin("a", 7, entries_before=0)
    logs.on_taken(logs.encode(append("a", 1, ReplyDone())))
    assert not logs._logs


def test_new_epoch_begins_without_templates() -> None:
    logs = OpenLogs()
    logs.begin("a", 7, entries_before=0)
    logs.on_taken(logs.encode(append("a", 1, delta("x"))))
    logs.begin("a", 8, entries_before=2)
    (stored,) = logs.encode(LogAppend("a", EntryId(8, 1), [delta("y")])).stored
    assert stored[:1] == b"w"


def raw(*numbers: int, epoch: int = 7) -> list[tuple[EntryId, bytes]]:
    return [(EntryId(epoch, n), b"") for n in numbers]


async def test_inbox_gives_what_continues_and_drops_what_was_read() -> None:
    inbox = StreamInbox(behind=False)
    inbox.put(raw(3, 4))
    inbox.put(raw(5))
    assert await inbox.take(EntryId(7, 3)) == raw(4, 5)
    inbox.put(raw(6))
    inbox.put(raw(0, 1, epoch=8))
    assert await inbox.take(EntryId(7, 5)) == [*raw(6), *raw(0, 1, epoch=8)]
    inbox.put(raw(0, epoch=9))
    assert await inbox.take(EntryId(8, 1)) == raw(0, epoch=9)


async def test_inbox_with_a_hole_sends_the_follower_to_the_log() -> None:
    inbox = StreamInbox(behind=False)
    inbox.put(raw(8, 9))
    assert await inbox.take(EntryId(7, 5)) == ()
    inbox.put(raw(2, epoch=8))
    assert await inbox.take(EntryId(7, 9)) == ()
    assert await StreamInbox(behind=True).take(EntryId(7, 1)) == ()


async def test_inbox_that_nobody_empties_is_bounded() -> None:
    inbox = StreamInbox(behind=False)
    for n in range(3 * INBOX_ENTRIES_MAX):
        inbox.put(raw(n))
        assert len(inbox._entries) <= INBOX_ENTRIES_MAX
    assert await inbox.take(EntryId(7, 0)) == ()


async def test_inbox_without_news_lets_its_follower_go_on_after_two_ticks() -> None:
    inbox = StreamInbox(behind=False)
    inbox.on_tick()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await inbox.take(EntryId(7, 0))
    inbox.on_tick()
    assert await inbox.take(EntryId(7, 0)) == ()
