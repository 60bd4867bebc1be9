"""What only a store on a disk has to promise: its schema, its threads, its deadlines,
and honesty in disk trouble.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.json import decode, encode
from program import eventually
from store_rigs import ANN, BOB, PAGE, acked, create, draft, fill, operator, send

from holdfast import telemetry
from holdfast.clock import ManualClock
from holdfast.drivers.sqlite.errors import Doing, translate
from holdfast.errors import (
    HoldfastError,
    InternalError,
    OutcomeUnknown,
    ServerBusy,
    StateCorrupted,
    StateDirectory,
    Unavailable,
)
from holdfast.eventlog.sqlite import SqliteEventLog
from holdfast.message import Acked, LogEntry
from holdfast.store.commands import Redact
from holdfast.store.contract import UNREAD_LOOKED_AT
from holdfast.store.sqlite import SqliteSettings, SqliteStore, SqliteTuning
from holdfast.store.sqlite import database as chats_file
from proof.powercut import FaultyDisk

APSW_ERRORS = sorted(
    (e for e in vars(apsw).values() if isinstance(e, type) and issubclass(e, apsw.Error)),
    key=lambda e: e.__name__,
)
MISUSE = {
    "BindingsError",
    "ConnectionClosedError",
    "ConnectionNotClosedError",
    "ConstraintError",
    "CursorClosedError",
    "EmptyError",
    "Error",
    "ExecTraceAbort",
    "ExecutionCompleteError",
    "ExtensionLoadingError",
    "ForkingViolationError",
    "IncompleteExecutionError",
    "InternalError",
    "InvalidContextError",
    "MismatchError",
    "MisuseError",
    "NoFTS5Error",
    "NotFoundError",
    "RangeError",
    "SQLError",
    "ThreadingViolationError",
    "TooBigError",
    "VFSFileClosedError",
    "VFSNotImplementedError",
}


def with_store(path: Path, scenario: Callable[[Any], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with SqliteStore(path / "chats.db", **options) as store:
            await scenario(store)

    asyncio.run(run())


@pytest.mark.parametrize("kind", APSW_ERRORS, ids=lambda e: e.__name__)
def test_every_error_of_sqlite_is_translated(kind: type[apsw.Error]) -> None:
    """A class that a new apsw brings must be put somewhere, by hand."""
    working = translate(kind("why"), "chats.db", Doing.WORKING)
    opening = translate(kind("why"), "chats.db", Doing.OPENING)
    committing = translate(kind("why"), "chats.db", Doing.COMMITTING)
    if kind.__name__ in MISUSE:
        assert {type(working), type(opening)} == {InternalError}
    else:
        assert type(working) is Unavailable
        assert isinstance(opening, StateDirectory | StateCorrupted)
        assert ";" in working.message and ";" in opening.message, "it says what to do"
    not_written = {"FullError", "BusyError", "LockedError", "ProtocolError"}
    assert type(committing) is (Unavailable if kind.__name__ in not_written else OutcomeUnknown)


def test_everything_is_there_when_the_file_is_opened_again(tmp_path: Path) -> None:
    async def first(store: SqliteStore) -> None:
        await create(store, "bob")
        await fill(store, 5)

    async def second(store: SqliteStore) -> None:
        assert (await store.inspect("chat_a")).counter == 5
        assert (await send(store, "fill-2")).deduplicated
        assert acked(await send(store, "new")).sequence == 6

    with_store(tmp_path, first)
    with_store(tmp_path, second)


def test_a_newer_schema_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async def nothing(store: SqliteStore) -> None: ...

    with_store(tmp_path, nothing)
    newest = len(chats_file.MIGRATIONS)
    connection = apsw.Connection(str(tmp_path / "chats.db"))
    connection.execute("INSERT INTO schema_version VALUES (?)", (newest + 1,))
    connection.close()
    with pytest.raises(
        StateCorrupted, match=f"version {newest + 1}.*up to {newest}.*newer Holdfast; run that one"
    ):
        with_store(tmp_path, nothing)


def test_an_older_schema_is_brought_forward_once(tmp_path: Path) -> None:
    async def first(store: SqliteStore) -> None:
        await create(store)
        await fill(store, 3)

    async def second(store: SqliteStore) -> None:
        assert (await store.inspect("chat_a")).counter == 3

    with_store(tmp_path, first)
    grown = [
        *chats_file.MIGRATIONS,
        "CREATE TABLE more (n INTEGER) STRICT; INSERT INTO more VALUES (1);",
    ]
    with_store(tmp_path, second, tuning=SqliteTuning(grown))
    with_store(tmp_path, second, tuning=SqliteTuning(grown))
    connection = apsw.Connection(str(tmp_path / "chats.db"))
    assert connection.execute("SELECT count(*) FROM more").get == 1
    assert connection.execute("SELECT max(version) FROM schema_version").get == len(grown)


def test_a_failed_migration_changes_nothing(tmp_path: Path) -> None:
    async def first(store: SqliteStore) -> None:
        await create(store)

    with_store(tmp_path, first)
    before = list(chats_file.MIGRATIONS)
    broken = [*before, "CREATE TABLE more (n); INSERT INTO no_such VALUES (1);"]
    with pytest.raises(HoldfastError):
        with_store(tmp_path, first, tuning=SqliteTuning(broken))
    connection = apsw.Connection(str(tmp_path / "chats.db"))
    assert connection.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'more'").get == 0
    assert connection.execute("SELECT max(version) FROM schema_version").get == len(before)


def test_a_file_that_is_not_ours_or_damaged_is_refused_at_open(tmp_path: Path) -> None:
    async def nothing(store: SqliteStore) -> None: ...

    (tmp_path / "chats.db").write_bytes(b"this is no database at all" * 200)
    with pytest.raises(StateCorrupted, match=r"damaged.*holdfast restore"):
        with_store(tmp_path, nothing)
    (tmp_path / "chats.db").unlink()
    connection = apsw.Connection(str(tmp_path / "chats.db"))
    connection.execute("CREATE TABLE somebody_elses (x)")
    connection.close()
    with pytest.raises(StateCorrupted, match="not a Holdfast database"):
        with_store(tmp_path, nothing)
    with pytest.raises(StateDirectory, match="cannot be opened"):
        with_store(tmp_path / "nowhere", nothing)


@pytest.mark.covers("001 the counter item is never deleted")
def test_counters_and_records_cannot_be_removed(tmp_path: Path) -> None:
    async def scenario(store: SqliteStore) -> None:
        await create(store)
        await fill(store, 3)
        await store.record(operator(reason="test"), "key.issue", "key_1")

    with_store(tmp_path, scenario)
    connection = apsw.Connection(str(tmp_path / "chats.db"))
    for statement, why in (
        ("DELETE FROM counters", "never deleted"),
        ("UPDATE counters SET sequence_counter = 2", "never goes back"),
        ("DELETE FROM audit", "never deleted"),
        ("UPDATE audit SET actor = 'nobody'", "never changed"),
    ):
        with pytest.raises(apsw.ConstraintError, match=why):
            connection.execute(statement)


def test_a_send_that_cannot_be_written_fails_alone(tmp_path: Path) -> None:
    async def scenario(store: SqliteStore) -> None:
        await create(store)
        connection = apsw.Connection(str(tmp_path / "chats.db"))
        connection.execute(
            "CREATE TRIGGER poison BEFORE INSERT ON messages WHEN NEW.content = 'poison' "
            "BEGIN SELECT RAISE(ABORT, 'poisoned'); END"
        )
        connection.close()
        heard: list[LogEntry] = []
        store.on_commit(heard.extend)
        outcomes = await store.append([draft("1"), draft("2", "poison"), draft("3"), draft("3")])
        assert [type(o) for o in outcomes] == [Acked, InternalError, Acked, Acked]
        assert [acked(outcomes[n]).sequence for n in (0, 2, 3)] == [1, 2, 2]
        assert [e.what.sequence for e in heard] == [1, 2]
        assert [e.offset for e in heard] == [2, 3]
        assert not (await store.chat("chat_a")).halted

    with_store(tmp_path, scenario)


def test_two_keys_with_one_hash_are_never_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index holds a hash of the key: a collision refuses the second send, and
    answers neither with the other.
    """
    monkeypatch.setattr(
        "holdfast.store.sqlite.append.send_key", lambda sender_id, client_message_id: 7
    )

    async def scenario(store: SqliteStore) -> None:
        await create(store)
        await create(store, chat_id="chat_b")
        assert acked(await send(store, "one", "same")).sequence == 1
        assert isinstance(await send(store, "two", "same"), InternalError)
        assert (await send(store, "one", "same")).deduplicated
        assert acked(await send(store, "two", "same", chat_id="chat_b")).sequence == 1
        assert not (await store.chat("chat_a")).halted

    with_store(tmp_path, scenario)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=20))
def test_any_text_survives_the_way_through_json(texts: list[str]) -> None:
    """Messages pass as JSON through SQLite: whatever it escapes must come back."""
    connection = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE t (n INTEGER PRIMARY KEY, x TEXT NOT NULL) STRICT")
    rows = encode(list(enumerate(texts))).decode()
    connection.execute("INSERT INTO t SELECT value ->> 0, value ->> 1 FROM json_each(?)", (rows,))
    assert [row[0] for row in connection.execute("SELECT x FROM t ORDER BY n")] == texts
    assert decode(connection.execute("SELECT json_group_array(x ORDER BY n) FROM t").get) == texts


class Gate:
    """Holds the writer just before its commit."""

    def __init__(self) -> None:
        self._arrived, self._open = threading.Event(), threading.Event()

    def shut(self) -> None:
        self._stop = telemetry.on_mark(self._reached)

    async def arrival(self) -> None:
        assert await asyncio.to_thread(self._arrived.wait, 10)

    def open(self) -> None:
        self._stop()
        self._open.set()

    def _reached(self, name: str) -> None:
        if name == "chats.commit.before":
            self._arrived.set()
            self._open.wait(10)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


@pytest.mark.covers("001 read-after-write")
def test_reads_neither_wait_for_a_commit_nor_see_it_before_it_is_done(
    tmp_path: Path, gate: Gate
) -> None:
    async def scenario(store: SqliteStore) -> None:
        await create(store)
        await fill(store, 2)
        gate.shut()
        sending = asyncio.create_task(send(store, "k"))
        await gate.arrival()
        page = await store.read_after("chat_a", 0, *PAGE)
        assert (len(page.messages), page.head) == (2, 2)
        assert not sending.done()
        gate.open()
        assert acked(await sending).sequence == 3
        assert (await store.read_after("chat_a", 0, *PAGE)).head == 3

    with_store(tmp_path, scenario)


def test_writes_beyond_the_queue_are_refused_and_those_within_are_done(
    tmp_path: Path, gate: Gate
) -> None:
    async def scenario(store: SqliteStore) -> None:
        await create(store)
        gate.shut()
        taken = [asyncio.create_task(send(store, f"k{n}")) for n in range(3)]
        await gate.arrival()
        with pytest.raises(ServerBusy):
            await send(store, "one too many")
        gate.open()
        assert [acked(o).sequence for o in await asyncio.gather(*taken)] == [1, 2, 3]
        acked(await send(store, "one too many"))

    with_store(tmp_path, scenario, settings=SqliteSettings(writes_waiting_max=3))


def test_cancelled_send_may_have_happened_and_listeners_are_notified(
    tmp_path: Path, gate: Gate
) -> None:
    async def scenario(store: SqliteStore) -> None:
        await create(store)
        heard: list[LogEntry] = []
        store.on_commit(heard.extend)
        gate.shut()
        sending = asyncio.create_task(send(store, "k"))
        await gate.arrival()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        gate.open()
        again = await send(store, "k")
        assert again.deduplicated
        assert [e.what for e in heard] == [acked(again)]

    with_store(tmp_path, scenario)


def test_a_listener_that_fails_does_not_take_the_answer_with_it(tmp_path: Path) -> None:
    async def scenario(store: SqliteStore) -> None:
        await create(store)
        store.on_commit(lambda entries: [][1])
        assert acked(await asyncio.wait_for(send(store, "k"), 5)).sequence == 1

    with_store(tmp_path, scenario)


def test_commit_is_framed_by_two_marks(tmp_path: Path) -> None:
    seen: list[str] = []

    async def scenario(store: SqliteStore) -> None:
        await create(store)
        stop = telemetry.on_mark(seen.append)
        try:
            acked(await send(store, "k"))
        finally:
            stop()

    with_store(tmp_path, scenario)
    assert seen == ["chats.commit.before", "chats.commit.after"]


class Runaway(ManualClock):
    """Time that passes by one second with each look at it."""

    seconds = 0.0

    def monotonic(self) -> float:
        self.advance(self.seconds)
        return super().monotonic()


def test_a_page_that_meets_its_deadline_holds_what_was_read(tmp_path: Path) -> None:
    clock = Runaway()

    async def scenario(store: SqliteStore) -> None:
        await create(store)
        await fill(store, 400)
        clock.seconds = 0.1
        page = await store.read_after("chat_a", 0, 400, 1 << 30)
        assert 0 < len(page.messages) < 400 and page.has_more
        assert page.through == page.messages[-1].sequence == len(page.messages)
        back = await store.read_before("chat_a", 401, 400, 1 << 30)
        assert 0 < len(back.messages) < 400 and back.has_more and back.messages[-1].sequence == 400
        clock.seconds = 1.5
        with pytest.raises(Unavailable):
            await store.read_after("chat_a", 0, 400, 1 << 30)
        clock.seconds = 0.0
        assert len((await store.read_after("chat_a", 0, 400, 1 << 30)).messages) == 400, (
            "the reader is as good as before"
        )

    with_store(tmp_path, scenario, clock=clock, tuning=SqliteTuning(operations_between_looks=500))


SCANS_EVERYTHING = {"raise_all_epochs", "take_all_watermarks_along"}
"""Statements that are for all chats by their meaning."""


@pytest.mark.parametrize("name", sorted(set(chats_file.SQL) - SCANS_EVERYTHING))
def test_no_statement_scans_a_table(name: str, tmp_path: Path) -> None:
    """So no cost grows with chats, members elsewhere or stored messages: every table is
    reached by a key, or by an index of the few halted chats.
    """

    async def nothing(store: SqliteStore) -> None: ...

    with_store(tmp_path, nothing)
    connection = apsw.Connection(str(tmp_path / "chats.db"))
    statement = chats_file.SQL[name]
    plan = [row[3] for row in connection.execute("EXPLAIN QUERY PLAN " + statement, AnyBinding())]
    tables = {"messages", "chats", "counters", "members", "watermarks", "gaps", "answers", "audit"}
    aliases = tables | {"m", "c", "k", "w", "v", "o", "l"}
    scans = [
        step
        for step in plan
        if step.startswith("SCAN")
        and step.split()[1] in aliases
        and "VIRTUAL" not in step
        and "INDEX chats_halted" not in step
    ]
    assert not scans, plan


class AnyBinding(dict[str, Any]):
    """A value for every named parameter."""

    def __missing__(self, key: str) -> Any:
        return None


class Trouble:
    """A disk that fails in one way, for some operations, until it is healed."""

    def __init__(self, error: type[apsw.Error], operations: set[str]) -> None:
        self.error: type[apsw.Error] | None = None
        self.kind = error
        self.operations = operations
        self.opened = 0

    def __call__(self, operation: str, path: str) -> None:
        self.opened += operation == "open" and path.endswith("chats.db")
        if self.error is not None and operation in self.operations:
            raise self.error("injected")

    def begin(self) -> None:
        self.error = self.kind

    def heal(self) -> None:
        self.error = None


@pytest.mark.parametrize(
    ("error", "operations", "answer"),
    [
        (apsw.FullError, {"write"}, Unavailable),
        (apsw.IOError, {"write"}, OutcomeUnknown),
        (apsw.IOError, {"sync"}, OutcomeUnknown),
        (apsw.IOError, {"write", "sync", "truncate", "read", "open"}, HoldfastError),
        (apsw.ReadOnlyError, {"write"}, OutcomeUnknown),
    ],
    ids=["full", "write error", "sync error", "dead", "read-only"],
)
def test_disk_trouble_is_never_acknowledged_and_heals(
    error: type[apsw.Error], operations: set[str], answer: type[HoldfastError], tmp_path: Path
) -> None:
    trouble = Trouble(error, operations)
    disk = FaultyDisk(f"trouble-{os.getpid()}", random.Random(1), trouble=trouble)

    async def scenario(store: SqliteStore) -> None:
        await create(store)
        await fill(store, 5)
        reopened = telemetry.REGISTRY.get_sample_value("holdfast_store_reopened_total") or 0
        trouble.begin()
        for n in range(3):
            # Later ones may not even find the file usable: nothing is tried before its
            # log is settled.
            with pytest.raises(answer if n == 0 else HoldfastError) as caught:
                await send(store, f"bad-{n}")
            assert isinstance(caught.value, Unavailable | OutcomeUnknown) and caught.value.retryable
            assert ";" in caught.value.message
        assert (
            telemetry.REGISTRY.get_sample_value("holdfast_store_reopened_total") or 0
        ) > reopened
        trouble.heal()
        opened = trouble.opened
        for n in range(3):
            acked(await send(store, f"bad-{n}"))
        assert trouble.opened > opened, "never again on the same handle"
        page = await store.read_after("chat_a", 0, *PAGE)
        keys = [m.client_message_id for m in page.messages]
        assert sorted(keys) == sorted(
            {*(f"fill-{n}" for n in range(5)), *(f"bad-{n}" for n in range(3))}
        )
        inspection = await store.inspect("chat_a")
        assert inspection.counter == inspection.count == 8 and not inspection.gaps

    try:
        with_store(tmp_path, scenario, vfs=disk.name, settings=SqliteSettings(checkpoint_pages=8))
    finally:
        disk.unregister()


def test_a_touch_is_a_commit_that_changes_nothing_and_meets_what_a_commit_meets(
    tmp_path: Path,
) -> None:
    trouble = Trouble(apsw.FullError, {"write"})
    disk = FaultyDisk(f"touched-{os.getpid()}", random.Random(1), trouble=trouble)

    async def scenario(store: SqliteStore) -> None:
        before = _rows(tmp_path)
        await store.touch()
        assert _rows(tmp_path) == before
        trouble.begin()
        with pytest.raises(Unavailable, match="full"):
            await store.touch()
        trouble.heal()
        await store.touch()

    try:
        with_store(tmp_path, scenario, vfs=disk.name)
    finally:
        disk.unregister()


def _rows(directory: Path) -> list[Any]:
    connection = apsw.Connection(str(directory / "chats.db"))
    try:
        return connection.execute("SELECT * FROM keys_forgotten").fetchall()
    finally:
        connection.close()


def test_what_is_refused_on_a_full_disk_is_not_there_after_a_power_cut(tmp_path: Path) -> None:
    """Unavailable promises that nothing happened: also when the power goes before
    anything else is written.
    """
    for seed in range(20):
        trouble = Trouble(apsw.FullError, {"write"})
        disk = FaultyDisk(f"full-{seed}", random.Random(seed), trouble=trouble)
        place = tmp_path / str(seed)
        place.mkdir()

        async def before(
            store: SqliteStore, trouble: Trouble = trouble, disk: FaultyDisk = disk
        ) -> None:
            await create(store)
            await fill(store, 3)
            trouble.begin()
            with pytest.raises(Unavailable):
                await send(store, "refused")
            disk.is_dead = True

        async def after(store: SqliteStore) -> None:
            page = await store.read_after("chat_a", 0, *PAGE)
            assert [m.client_message_id for m in page.messages] == ["fill-0", "fill-1", "fill-2"]

        with_store(place, before, vfs=disk.name)
        disk.plug_in()
        disk.unregister()
        with_store(place, after)


def test_what_is_acknowledged_after_a_failed_sync_survives_a_power_cut(tmp_path: Path) -> None:
    """The kernel forgets what a failed sync did not write, but still shows it: nothing
    may be built upon it.
    """
    for seed in range(20):
        trouble = Trouble(apsw.IOError, {"sync", "truncate", "delete"})
        disk = FaultyDisk(f"sync-{seed}", random.Random(seed), trouble=trouble)
        place = tmp_path / str(seed)
        place.mkdir()

        async def before(
            store: SqliteStore,
            trouble: Trouble = trouble,
            disk: FaultyDisk = disk,
            with_reader: bool = seed % 2 == 0,
        ) -> None:
            await create(store)
            await fill(store, 3)
            if with_reader:
                await store.chat("chat_a")
            trouble.begin()
            with pytest.raises(OutcomeUnknown):
                await send(store, "unknown", "x" * 3_000)
            with pytest.raises(HoldfastError):
                await send(store, "still bad")
            trouble.heal()
            acked(await send(store, "acked"))
            disk.is_dead = True

        async def after(store: SqliteStore) -> None:
            keys = {
                m.client_message_id for m in (await store.read_after("chat_a", 0, *PAGE)).messages
            }
            assert keys >= {"fill-0", "fill-1", "fill-2", "acked"}
            inspection = await store.inspect("chat_a")
            assert inspection.counter == inspection.count and not inspection.gaps

        with_store(place, before, vfs=disk.name)
        disk.plug_in()
        disk.unregister()
        with_store(place, after)


def test_reads_on_a_dead_disk_are_unavailable_and_heal(tmp_path: Path) -> None:
    trouble = Trouble(apsw.IOError, {"read", "open"})
    disk = FaultyDisk(f"reads-{os.getpid()}", random.Random(1), trouble=trouble)

    async def scenario(store: SqliteStore) -> None:
        await create(store)
        await fill(store, 5)
        trouble.begin()
        with pytest.raises(Unavailable):
            await store.read_after("chat_a", 0, *PAGE)
        trouble.heal()
        assert len((await store.read_after("chat_a", 0, *PAGE)).messages) == 5

    try:
        with_store(tmp_path, scenario, vfs=disk.name, settings=SqliteSettings(readers=1))
    finally:
        disk.unregister()


def test_a_group_that_was_unknown_and_is_stored_after_all_stands_in_the_log(tmp_path: Path) -> None:
    """The commit was not announced and repeating it adds none: the log must look."""
    trouble = Trouble(apsw.IOError, {"sync", "truncate", "delete", "read"})
    disk = FaultyDisk(f"unknown-{os.getpid()}", random.Random(1), trouble=trouble)

    async def scenario(store: SqliteStore) -> None:
        log = SqliteEventLog(store)
        await create(store)
        first = acked(await send(store, "first"))
        before = await log.end()
        reader = asyncio.create_task(log.wait(before))
        trouble.begin()
        with pytest.raises(OutcomeUnknown):
            await send(store, "unknown")
        with pytest.raises(Unavailable):
            await store.log_end()
        trouble.heal()
        [repeated] = await store.append([draft("unknown")])
        assert isinstance(repeated, Acked) and repeated.deduplicated
        await asyncio.wait_for(reader, 10)
        assert await log.end() == before.moved(0, before.offset(0) + 1)
        acked(await send(store, "last"))
        keys = [entry.what.client_message_id for entry in (await log.read(before, 10))[0]]
        assert first.sequence == 1 and keys == ["unknown", "last"]

    try:
        with_store(tmp_path, scenario, vfs=disk.name, settings=SqliteSettings(readers=1))
    finally:
        disk.unregister()


def test_redacted_content_is_nowhere_in_the_file(tmp_path: Path) -> None:
    """Short ones lie in a page of the table, long ones in pages of their own."""
    secrets = {"short": "S3cret-" * 4, "long": "L0ng-s3cret-" * 300}

    async def first(store: SqliteStore) -> None:
        await create(store)
        for key, content in secrets.items():
            acked(await send(store, key, content))
        await fill(store, 50)

    async def second(store: SqliteStore) -> None:
        for sequence in (1, 2):
            await store.change(Redact(operator(), "chat_a", sequence))

    with_store(tmp_path, first)
    assert b"S3cret-" in (tmp_path / "chats.db").read_bytes()
    assert draft("", secrets["short"]).content_hash in (tmp_path / "chats.db").read_bytes()
    with_store(tmp_path, second)
    hashes = [draft("", content).content_hash for content in secrets.values()]
    for file in tmp_path.glob("chats.db*"):
        # a text that can be guessed is proved by its hash
        for trace in (b"S3cret-", b"L0ng-s3cret-", *hashes):
            assert trace not in file.read_bytes(), file


async def until_gone(directory: Path, trace: bytes) -> None:
    def gone() -> bool:
        return all(trace not in file.read_bytes() for file in directory.glob("chats.db*"))

    await asyncio.to_thread(eventually, gone, "a log without it")


def test_redacted_content_leaves_the_log_too_while_the_store_runs(tmp_path: Path) -> None:
    """Not before its readers allow it; what a crash leaves, the next start deletes."""
    crashed = tmp_path / "crashed"
    crashed.mkdir()

    async def scenario(store: SqliteStore) -> None:
        await create(store)
        acked(await send(store, "k", "S3cret"))
        with closing(apsw.Connection(str(tmp_path / "chats.db"))) as reader, reader:
            reader.execute("SELECT count(*) FROM messages").fetchall()
            await store.change(Redact(operator(), "chat_a", 1))
            await fill(store, 5)
            for name in ("chats.db", "chats.db-wal"):
                shutil.copy(tmp_path / name, crashed)
            assert b"S3cret" in (crashed / "chats.db-wal").read_bytes()
        await until_gone(tmp_path, b"S3cret")

    async def after_the_crash(store: SqliteStore) -> None:
        await until_gone(crashed, b"S3cret")
        assert (await store.read_after("chat_a", 0, *PAGE)).head == 6

    tuning = SqliteTuning(wipe_again_seconds=0.01)
    with_store(tmp_path, scenario, tuning=tuning)
    with_store(crashed, after_the_crash, tuning=tuning)


def test_a_really_full_disk_refuses_loses_nothing_and_goes_on_when_there_is_space(
    small_disk: Path,
) -> None:
    async def scenario(store: SqliteStore) -> None:
        await create(store)
        stored: list[str] = []
        with pytest.raises(Unavailable, match="full; its operator must free some space"):
            for n in range(10_000):
                acked(await send(store, f"k{n}", "x" * 4_000))
                stored.append(f"k{n}")
        (small_disk / "ballast").unlink()
        acked(await send(store, "after"))
        read: list[str | None] = []
        while len(read) < len(stored) + 1:
            read += [
                m.client_message_id
                for m in (await store.read_after("chat_a", len(read), *PAGE)).messages
            ]
        assert read == [*stored, "after"]

    (small_disk / "ballast").write_bytes(bytes(1024 * 1024))
    with_store(small_disk, scenario, settings=SqliteSettings(checkpoint_pages=20))


def test_a_really_read_only_disk_is_refused_at_open(small_disk: Path) -> None:
    async def nothing(store: SqliteStore) -> None: ...

    with_store(small_disk, nothing)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(StateDirectory, match=r"cannot be opened or written.*check"):
        with_store(small_disk, nothing)


def test_a_page_damaged_on_disk_is_an_answer_not_a_crash(tmp_path: Path) -> None:
    async def first(store: SqliteStore) -> None:
        await create(store)
        await create(store, chat_id="chat_b")
        await store.append([draft(f"k{n}", "x" * 3_000) for n in range(200)])

    async def second(store: SqliteStore) -> None:
        with pytest.raises(Unavailable, match=r"damaged.*restore a backup"):
            await store.read_after("chat_a", 0, 200, 1 << 30)
        assert (await store.chat("chat_b")).head == 0, "what is not damaged is served"

    with_store(tmp_path, first)
    size = (tmp_path / "chats.db").stat().st_size
    with (tmp_path / "chats.db").open("r+b") as file:
        file.seek(size // 2 // 4096 * 4096)
        file.write(os.urandom(4096 * 20))
    with_store(tmp_path, second)


def test_settings_are_checked_when_built() -> None:
    for wrong in (
        {"synchronous": "OFF"},
        {"readers": 0},
        {"writes_waiting_max": 0},
        {"read_deadline_seconds": 0},
    ):
        with pytest.raises(ValueError, match="must be"):
            SqliteSettings(**wrong)  # type: ignore[arg-type]


COSTS: dict[str, dict[str, Any]] = {
    "chats_of": {
        "tenant": "default",
        "user_id": "ann",
        "limit": 10,
        "edge_position": None,
        "edge_chat": None,
        "looked_at": UNREAD_LOOKED_AT,
        "only": None,
    },
    "memberships": {"users": '[["default","ann"]]', "chats_max": 100},
    "known": {
        "senders": '[["chat_mine_1", "ann"]]',
        "keys": '[["chat_mine_1", 12345, "ann", "k"]]',
    },
    "advance_counters": {"counters": "[[1, 9, 9], [2, 9, 9]]"},
    "messages_after": {
        "chat": 1,
        "after": 0,
        "limit": 64,
        "one": 1,
        "bytes_max": 1 << 20,
        "envelope": 256,
    },
    "heads": {"chat_ids": '["chat_mine_1", "chat_mine_2"]'},
    "memberships_in": {"asked": '[[["default", "ann"], "chat_mine_1"]]'},
    "log_after": {"after": 5, "limit": 10},
}
"""Statements of the hot paths, about a few chats."""


def test_costs_do_not_grow_with_what_others_store(tmp_path: Path) -> None:
    """Ten times the chats, members and messages elsewhere: each statement costs SQLite
    about the same work.
    """

    async def scenario(store: SqliteStore) -> None:
        for n in range(20):
            await create(store, chat_id=f"chat_mine_{n}")
        await store.append([draft(f"{n}", chat_id=f"chat_mine_{n % 20}") for n in range(100)])
        costs = []
        for step in range(2):
            for n in range(10 * 10**step):
                other = ANN._replace(user_id=f"other_{step}_{n}")
                await create(store, chat_id=f"chat_{step}_{n}", creator=other)
                await store.append(
                    [draft(f"{i}", sender=other, chat_id=f"chat_{step}_{n}") for i in range(20)]
                )
            costs.append({name: operations_of(tmp_path / "chats.db", name) for name in COSTS})
        for name, before in costs[0].items():
            assert costs[1][name] <= before * 1.2 + 5, f"{name}: {costs}"

    with_store(tmp_path, scenario)


def test_a_list_costs_the_same_however_much_of_its_chats_is_unread(tmp_path: Path) -> None:
    async def scenario(store: SqliteStore) -> None:
        await create(store, "bob", chat_id="chat_mine_1")
        costs = []
        for many in (UNREAD_LOOKED_AT * 2, UNREAD_LOOKED_AT * 20):
            await store.append(
                [draft(f"{many}-{n}", chat_id="chat_mine_1", sender=BOB) for n in range(many)]
            )
            costs.append(operations_of(tmp_path / "chats.db", "chats_of"))
        assert costs[1] <= costs[0] * 1.05 + 5

    with_store(tmp_path, scenario)


def operations_of(path: Path, name: str) -> int:
    """How many operations of SQLite's machine a statement takes; it is rolled back."""
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(5_000)
    counted = 0

    def count() -> bool:
        nonlocal counted
        counted += 1
        return False

    connection.execute("BEGIN IMMEDIATE")
    connection.set_progress_handler(count, 1)
    connection.execute(chats_file.SQL[name], COSTS[name]).fetchall()
    connection.set_progress_handler(None)
    connection.execute("ROLLBACK")
    connection.close()
    return counted
