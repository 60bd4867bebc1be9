"""What every event log promises its readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest
from store_rigs import ANN, PostgresRig, acked, act, create, draft, operator, send

from holdfast.errors import UnreadableEvent
from holdfast.eventlog.contract import START, LogLost, Position
from holdfast.eventlog.memory import MemoryEventLog
from holdfast.eventlog.postgres import PostgresEventLog
from holdfast.eventlog.sqlite import TAIL_ENTRIES_MAX, SqliteEventLog
from holdfast.message import ChatCreated, EpochRaised, LogEntry, Message
from holdfast.store.commands import RaiseEpoch, RecoverChat, Redact
from holdfast.store.memory import MemoryStore
from holdfast.store.sqlite import SqliteStore

Scenario = Callable[[Any, Any], Awaitable[None]]
TEXT = Message("msg_6", "chat_a", 6, "text", "ann", None, "hi", "text/plain", "now")


@asynccontextmanager
async def opened(adapter: str, path: Path) -> AsyncIterator[tuple[Any, Any]]:
    """A store and its log; ``small`` keeps next to nothing in memory, so that reading
    goes to the table.
    """
    if adapter == "memory":
        store, log = MemoryStore(), MemoryEventLog()
        store.on_commit(log.committed)
        yield store, log
        return
    if adapter.startswith("postgresql:"):
        async with PostgresRig(adapter).open() as shared:
            yield shared, PostgresEventLog(shared)
        return
    async with SqliteStore(path / "chats.db") as durable:
        yield durable, SqliteEventLog(durable, 2 if adapter == "small" else TAIL_ENTRIES_MAX)


LOGS = ("memory", "sqlite", "small", "postgres")


@pytest.fixture(params=LOGS)
def adapter(request: pytest.FixtureRequest) -> str:
    """Its name; of PostgreSQL the address."""
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_server").url)
    return str(request.param)


def on_every_log(scenario: Scenario) -> Callable[[str, Path], Awaitable[None]]:
    async def test(adapter: str, tmp_path: Path) -> None:
        async with opened(adapter, tmp_path) as (store, log):
            await scenario(store, log)

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


def at(offset: int) -> Position:
    return Position((offset,))


async def read_all(log: Any, after: Position = START, limit: int = 3) -> list[LogEntry]:
    entries: list[LogEntry] = []
    page, position = await log.read(after, limit)
    while page:
        entries.extend(page)
        for entry in page:
            after = after.moved(entry.shard, entry.offset)
        assert position == after, "a position is behind what was read"
        page, position = await log.read(position, limit)
    return entries


def texts(entries: Sequence[LogEntry]) -> list[str]:
    return [e.what.content for e in entries if isinstance(e.what, Message)]


@pytest.mark.covers("001 event: `event_type`, `event_id`, `event_time`, `partition_key`, `payload`")
@on_every_log
async def test_offsets_rise_in_commit_order_and_nothing_is_missing(store: Any, log: Any) -> None:
    for chat in "ab":
        await create(store, chat_id=f"chat_{chat}")
    for n in range(5):
        await store.append([draft(f"{n}{chat}", chat_id=f"chat_{chat}") for chat in "aab"[n % 2 :]])
    entries = await read_all(log)
    for shard in {e.shard for e in entries}:
        offsets = [e.offset for e in entries if e.shard == shard]
        assert offsets == sorted(set(offsets))
    for chat_id in ("chat_a", "chat_b"):
        assert {e.shard for e in entries if e.chat_id == chat_id} == {store.lane(chat_id)}
        created, *messages = [e.what for e in entries if e.chat_id == chat_id]
        assert created == ChatCreated(("ann",)), "creation comes first and has no sequence"
        assert [m.sequence for m in messages] == list(range(1, len(messages) + 1))
    end = await log.end()
    assert all(end.includes(e) for e in entries)
    assert (await log.read(end, 10))[0] == []
    assert {e.tenant for e in entries} == {"default"}


@on_every_log
async def test_empty_log_ends_at_the_start_and_reads_nothing(store: Any, log: Any) -> None:
    end = await log.end()
    assert not end.is_beyond(START) and not START.is_beyond(end)
    entries, position = await log.read(START, 10)
    assert (list(entries), position) == ([], START)
    assert await log.lag(START) == 0


@on_every_log
async def test_reading_goes_on_after_any_position_and_stops_at_its_limit(
    store: Any, log: Any
) -> None:
    await create(store)
    for n in range(7):
        await send(store, f"k{n}")
    everything = await read_all(log, limit=100)
    for start in range(8):
        after = START.moved(everything[start].shard, everything[start].offset)
        page, _ = await log.read(after, 2)
        assert list(page) == everything[start + 1 : start + 3]
        assert await log.lag(after) == len(everything) - start - 1
    assert await log.lag(after.moved(everything[-1].shard, everything[-1].offset + 5)) == 0, (
        "after a restore"
    )


@on_every_log
async def test_raised_epoch_is_an_entry_of_the_new_epoch(store: Any, log: Any) -> None:
    await create(store, "bob")
    await send(store, "k")
    await store.change(RaiseEpoch(operator(), "chat_a", 1))
    await send(store, "l")
    await store.change(RecoverChat(operator(), "chat_a"))
    entries = await read_all(log)
    created, first, raised, second, recovered = entries
    assert (created.epoch, created.what) == (1, ChatCreated(("ann", "bob")))
    assert texts([first, second]) == ["hello", "hello"]
    assert (raised.epoch, raised.what) == (2, EpochRaised(1))
    assert (recovered.epoch, recovered.what) == (3, EpochRaised(2))
    assert {e.chat_id for e in entries} == {"chat_a"}


@pytest.mark.parametrize("adapter", ["memory", "sqlite", "small"])
@on_every_log
async def test_position_beyond_the_end_is_lost(store: Any, log: Any) -> None:
    await create(store)
    end = await log.end()
    for lost in (end.moved(0, end.offset(0) + 1), at(1_000)):
        with pytest.raises(LogLost):
            await log.read(lost, 10)
    assert (await log.read(end, 10))[0] == [], "the end itself is not lost"


@on_every_log
async def test_waiting_returns_when_something_is_committed_and_at_once_if_it_already_is(
    store: Any, log: Any
) -> None:
    await create(store)
    waiting = asyncio.create_task(log.wait(await log.end()))
    await asyncio.sleep(0)
    assert not waiting.done()
    await send(store, "k")
    await asyncio.wait_for(waiting, 5)
    await asyncio.wait_for(log.wait(START), 5)
    cancelled = asyncio.create_task(log.wait(await log.end()))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert (await asyncio.gather(cancelled, return_exceptions=True))[
        0
    ].__class__ is asyncio.CancelledError


@pytest.mark.parametrize("adapter", ["sqlite", "small"])
async def test_a_log_opened_again_has_everything(adapter: str, tmp_path: Path) -> None:
    async with opened(adapter, tmp_path) as (store, log):
        await create(store)
        for n in range(5):
            acked(await send(store, f"k{n}"))
        before = await read_all(log)
    last = before[-1].offset
    async with opened(adapter, tmp_path) as (store, log):
        assert await log.end() == at(last)
        assert await read_all(log) == before
        await asyncio.wait_for(log.wait(START), 5)
        acked(await send(store, "new"))
        assert [e.offset for e in await read_all(log, at(last))] == [last + 1]


@pytest.mark.parametrize("adapter", ["sqlite", "small"])
async def test_what_was_redacted_is_not_read_from_memory(adapter: str, tmp_path: Path) -> None:
    async with opened(adapter, tmp_path) as (store, log):
        await create(store)
        for n in range(3):
            acked(await send(store, f"k{n}", f"secret {n}"))
        await store.change(Redact(act(ANN), "chat_a", 2))
        assert texts(await read_all(log)) == ["secret 0", "", "secret 2"]
        acked(await send(store, "k4", "more"))
        assert texts(await read_all(log, at(3))) == ["secret 2", "more"]


async def test_the_tail_stays_within_its_bounds_and_the_usual_reader_touches_no_disk(
    tmp_path: Path,
) -> None:
    async with SqliteStore(tmp_path / "chats.db") as store:
        log = SqliteEventLog(store, entries_max=100, content_bytes_max=2_000)
        await create(store)
        position = START
        for n in range(20):
            await store.append([draft(f"{n}-{i}", "x" * 90) for i in range(10)])
            assert len(log._tail) <= 100 and log._tail_bytes <= 2_000
            log._source = None  # type: ignore[assignment]  # whoever keeps up must not need it
            entries, position = await log.read(position, 100)
            log._source = store
            assert len(texts(entries)) == 10


@pytest.mark.covers("000 3.1 poison pill: send to DLQ, continue")
@pytest.mark.parametrize("damage", ["content = CAST(x'68ff69' AS TEXT)", "kind = 'nonsense'"])
async def test_an_entry_that_makes_no_sense_is_named_and_those_around_it_are_read(
    damage: str, tmp_path: Path
) -> None:
    async with SqliteStore(tmp_path / "chats.db") as store:
        await create(store)
        for n in range(4):
            acked(await send(store, f"k{n}", f"text {n}"))
        end = await store.log_end()
    damaged = apsw.Connection(str(tmp_path / "chats.db"))
    damaged.pragma("ignore_check_constraints", True)
    damaged.execute(f"UPDATE messages SET {damage} WHERE client_message_id = 'k2'")
    damaged.close()
    async with SqliteStore(tmp_path / "chats.db") as store:
        log = SqliteEventLog(store)
        assert texts((await log.read(at(end - 4), 10))[0]) == ["text 0", "text 1"]
        with pytest.raises(UnreadableEvent) as caught:
            await log.read(at(end - 2), 10)
        assert (caught.value.shard, caught.value.offset) == (
            0,
            end - 1,
        ) and b"k2" in caught.value.data
        assert texts((await log.read(at(end - 1), 10))[0]) == ["text 3"]


class SlowSource:
    """A store whose answer to where the log ends was read before it is given."""

    def __init__(self) -> None:
        self.end = 5
        self.gate = asyncio.Event()
        self.listener: Callable[[list[LogEntry]], None]

    def on_commit(self, listener: Any) -> None:
        self.listener = listener

    async def log_end(self) -> int:
        end = self.end
        await self.gate.wait()
        return end

    async def log_after(self, after: int, limit: int) -> list[LogEntry]:
        return []


@pytest.mark.parametrize("announced", [True, False])
async def test_an_end_that_was_read_before_a_commit_hides_it_from_nobody(announced: bool) -> None:
    """Announced or of unknown outcome: else a reader would wait for the next commit."""
    source = SlowSource()
    log = SqliteEventLog(source)
    asking = asyncio.create_task(log.end())
    await asyncio.sleep(0)
    source.end = 6
    source.listener([LogEntry(0, 6, "default", "chat_a", 1, TEXT)] if announced else [])
    source.gate.set()
    assert await asking == at(6)
    await asyncio.wait_for(log.wait(at(5)), 5)


def test_positions_compare_shard_by_shard() -> None:
    here = Position((4, 7))
    assert here.moved(0, 5) == Position((5, 7))
    assert here.moved(3, 1) == Position((4, 7, 0, 1))
    assert (here.offset(1), here.offset(9)) == (7, 0)
    assert here.includes(LogEntry(1, 7, "default", "chat_a", 1, TEXT))
    assert not here.includes(LogEntry(0, 7, "default", "chat_a", 1, TEXT))
    assert Position((1, 8)).is_beyond(here) and not Position((4, 7)).is_beyond(here)
    assert not START.is_beyond(START)
