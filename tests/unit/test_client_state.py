"""The file that outlives the client."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

import apsw
import pytest

from holdfast.client.events import Keep
from holdfast.client.outbox import OutboxEntry
from holdfast.client.state import FileState, SavedState
from holdfast.errors import HoldfastError, InternalError, StateCorrupted, StateDirectory
from holdfast.wire.frames import CursorClaim

pytestmark = pytest.mark.real_time


def entry(number: int, chat_id: str = "c") -> OutboxEntry:
    return OutboxEntry(f"k{number}", chat_id, f"text {number}", "text/plain")


class Notes:
    def __init__(self) -> None:
        self.entries: list[OutboxEntry] = []
        self.cursors: list[Keep] = []
        self.errors: list[HoldfastError] = []

    def __call__(
        self, entries: Iterable[OutboxEntry], cursors: Iterable[Keep], error: HoldfastError | None
    ) -> None:
        self.entries += entries
        self.cursors += cursors
        self.errors += [error] if error is not None else []


async def reopened(path: Path) -> SavedState:
    state = FileState(path)
    saved = state.open(Notes())
    await state.close()
    return saved


async def test_saved_state_is_loaded_after_a_restart_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "client.db"

    notes = Notes()
    state = FileState(path)
    assert state.open(notes) == SavedState()
    for number in range(20):
        state.put(entry(number))
    state.remove(entry(3))
    state.keep(Keep("c", CursorClaim(1, 7)))
    state.keep(Keep("d", CursorClaim(2, 1)))
    state.keep(Keep("d", None))
    state.identify("device_id", "dev")
    await state.close()
    assert notes.entries == [entry(number) for number in range(20)]
    assert notes.errors == []
    saved = await reopened(path)
    assert list(saved.outbox) == [entry(number) for number in range(20) if number != 3]
    assert saved.cursors == {"c": CursorClaim(1, 7)}
    assert saved.identity == {"device_id": "dev"}
    assert path.stat().st_mode & 0o777 == 0o600


async def test_entry_is_on_disk_before_on_written(tmp_path: Path) -> None:
    path = tmp_path / "client.db"

    seen: list[bool] = []

    def written(entries: Iterable[OutboxEntry], *_: object) -> None:
        copy = tmp_path / "copy.db"
        copy.write_bytes(path.read_bytes())
        copy.with_name("copy.db-wal").write_bytes(path.with_name("client.db-wal").read_bytes())
        found = (
            apsw.Connection(str(copy)).execute("SELECT client_message_id FROM outbox").fetchall()
        )
        seen.append([(entry.client_message_id,) for entry in entries] == found)

    state = FileState(path)
    state.open(written)
    state.put(entry(1))
    await state.close()
    assert seen == [True]


async def test_a_put_is_synced_to_the_disk_and_a_cursor_need_not_be(tmp_path: Path) -> None:
    levels: list[str] = []
    state = FileState(tmp_path / "client.db")
    state.open(lambda *_: levels.append(state._db.pragma("synchronous")))
    state.put(entry(1))
    await state.drain()
    state.keep(Keep("c", CursorClaim(1, 1)))
    await state.drain()
    await state.close()
    assert levels == [2, 1]


async def test_a_file_in_use_is_refused_with_what_to_do(tmp_path: Path) -> None:
    first = FileState(tmp_path / "client.db")
    first.open(Notes())
    first.put(entry(1))
    await first.drain()
    with pytest.raises(StateDirectory, match="in use by another process"):
        FileState(tmp_path / "client.db").open(Notes())
    await first.close()


async def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    path.write_bytes(b"no database at all, but long enough to be taken for one" * 100)
    with pytest.raises(StateCorrupted, match=r"client\.db"):
        await reopened(path)


async def test_file_of_the_first_version_keeps_its_cursors_and_gains_proofs(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    database = apsw.Connection(str(path))
    database.execute("""
        CREATE TABLE outbox (
          number INTEGER PRIMARY KEY, client_message_id TEXT NOT NULL,
          chat_id TEXT NOT NULL, content TEXT NOT NULL, content_type TEXT NOT NULL,
          UNIQUE (chat_id, client_message_id)) STRICT;
        CREATE TABLE cursors (
          chat_id TEXT PRIMARY KEY, epoch INTEGER NOT NULL, sequence INTEGER NOT NULL
        ) STRICT, WITHOUT ROWID;
        CREATE TABLE identity (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
        INSERT INTO cursors VALUES ('c', 2, 7);
        PRAGMA user_version = 1;
        """)
    database.close()

    state, notes = FileState(path), Notes()
    assert state.open(notes).cursors == {"c": CursorClaim(2, 7, None)}
    state.keep(Keep("c", CursorClaim(2, 8, "00ff")))
    await state.close()
    assert notes.errors == []
    assert (await reopened(path)).cursors == {"c": CursorClaim(2, 8, "00ff")}


async def test_a_file_of_a_newer_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    await reopened(path)
    database = apsw.Connection(str(path))
    database.pragma("user_version", 99)
    database.close()
    with pytest.raises(StateCorrupted, match="newer"):
        await reopened(path)


async def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateDirectory, match="cannot use"):
        await reopened(tmp_path / "file" / "client.db")


async def test_failing_disk_is_reported_to_every_caller(tmp_path: Path) -> None:
    notes = Notes()
    state = FileState(tmp_path / "client.db")
    state.open(notes)
    state._db.execute("PRAGMA max_page_count = 5")
    state.put(OutboxEntry("k", "c", "x" * 100_000, "text/plain"))
    await state.close()
    assert [type(error) for error in notes.errors] == [StateDirectory]


async def test_entry_refused_by_the_database_is_reported_and_the_rest_is_kept(
    tmp_path: Path,
) -> None:
    notes = Notes()
    state = FileState(tmp_path / "client.db")
    state.open(notes)
    state.put(OutboxEntry("k", "c", "a lone \ud800", "text/plain"))
    await state.drain()
    assert [entry.client_message_id for entry in notes.entries] == ["k"]
    state.put(entry(1))
    await state.close()
    assert [type(error) for error in notes.errors] == [InternalError]
    assert list((await reopened(tmp_path / "client.db")).outbox) == [entry(1)]


async def test_a_file_that_was_cut_off_opens_as_new_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite takes an empty file for a new one, and so it may be: a crash can leave it
    so before anything was in it.
    """
    path = tmp_path / "client.db"
    assert await reopened(path) == await reopened(path) == SavedState() and caplog.messages == []
    os.truncate(path, 0)
    assert await reopened(path) == SavedState()
    [line] = caplog.messages
    assert str(path) in line and "unsent messages" in line
    assert await reopened(path) == SavedState() and len(caplog.messages) == 1


async def test_changes_refused_by_the_disk_are_kept_with_the_next_write(tmp_path: Path) -> None:
    notes = Notes()
    state = FileState(tmp_path / "client.db", retry_seconds=60)
    state.open(notes)
    state.put(entry(1))
    await state.drain()
    state._db.execute("PRAGMA query_only = ON")
    state.remove(entry(1))
    state.identify("device_id", "dev")
    state.keep(Keep("c", CursorClaim(1, 7)))
    state.keep(Keep("d", CursorClaim(1, 1)))
    await state.drain()
    assert {type(error) for error in notes.errors} == {StateDirectory}
    state._db.execute("PRAGMA query_only = OFF")
    state.keep(Keep("d", CursorClaim(1, 2)))
    await state.drain()
    assert notes.cursors[-2:] == [Keep("c", CursorClaim(1, 7)), Keep("d", CursorClaim(1, 2))]
    await state.close()
    assert await reopened(tmp_path / "client.db") == SavedState(
        (), {"c": CursorClaim(1, 7), "d": CursorClaim(1, 2)}, {"device_id": "dev"}
    )


async def test_a_failing_disk_is_tried_again_though_nothing_else_comes(tmp_path: Path) -> None:
    kept = asyncio.Event()
    errors: list[HoldfastError] = []

    def written(_: object, cursors: Iterable[Keep], error: HoldfastError | None) -> None:
        if error is None:
            assert list(cursors) == [Keep("c", CursorClaim(1, 7))]
            kept.set()
            return
        errors.append(error)
        if len(errors) == 3:
            state._db.execute("PRAGMA query_only = OFF")

    state = FileState(tmp_path / "client.db", retry_seconds=0.01)
    state.open(written)
    state._db.execute("PRAGMA query_only = ON")
    state.keep(Keep("c", CursorClaim(1, 7)))
    await asyncio.wait_for(kept.wait(), 5)
    await state.close()


async def test_a_disk_that_fails_for_good_does_not_keep_the_state_from_closing(
    tmp_path: Path,
) -> None:
    notes = Notes()
    state = FileState(tmp_path / "client.db")
    state.open(notes)
    state._db.execute("PRAGMA query_only = ON")
    state.keep(Keep("c", CursorClaim(1, 7)))
    await asyncio.wait_for(state.close(), 5)
    assert notes.errors


async def test_a_message_put_again_under_the_key_of_one_just_removed_is_on_disk(
    tmp_path: Path,
) -> None:
    state = FileState(tmp_path / "client.db")
    state.open(Notes())
    state.put(entry(1))
    await state.drain()
    state.identify("device_id", "dev")  # its commit runs, so that what follows makes one
    state.remove(entry(1))
    state.put(entry(1))
    await state.close()
    assert list((await reopened(tmp_path / "client.db")).outbox) == [entry(1)]
