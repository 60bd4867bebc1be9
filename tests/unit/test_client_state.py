"""The file that outlives the client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import apsw
import pytest

from holdfast.client.outbox import Entry
from holdfast.client.state import FileState, Saved
from holdfast.errors import HoldfastError, StateCorrupted, StateDirectory
from holdfast.message import Cursor


def entry(number: int, chat_id: str = "c") -> Entry:
    return Entry(f"k{number}", chat_id, f"text {number}", "text/plain")


class Notes:
    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.cursors: list[tuple[str, Cursor]] = []
        self.errors: list[HoldfastError] = []

    def __call__(
        self, entries: Iterable[Entry], cursors: Iterable[tuple[str, Cursor]], error: HoldfastError | None
    ) -> None:
        self.entries += entries
        self.cursors += cursors
        self.errors += [error] if error is not None else []


def reopened(path: Path) -> Saved:
    async def main() -> Saved:
        state = FileState(path)
        saved = state.open(Notes())
        await state.close()
        return saved

    return asyncio.run(main())


def test_what_was_kept_is_there_after_a_restart_in_the_order_of_the_calls(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "client.db"

    async def main() -> Notes:
        notes = Notes()
        state = FileState(path)
        assert state.open(notes) == Saved()
        for number in range(20):
            state.put(entry(number))
        state.remove(entry(3))
        state.keep("c", Cursor(1, 7))
        state.keep("d", Cursor(2, 1))
        state.keep("d", None)
        state.identify("device_id", "dev")
        await state.close()
        return notes

    notes = asyncio.run(main())
    assert notes.entries == [entry(number) for number in range(20)]
    assert notes.errors == []
    saved = reopened(path)
    assert list(saved.outbox) == [entry(number) for number in range(20) if number != 3]
    assert saved.cursors == {"c": Cursor(1, 7)}
    assert saved.identity == {"device_id": "dev"}
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_entry_is_on_disk_before_it_is_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "client.db"

    async def main() -> None:
        seen: list[bool] = []

        def written(entries: Iterable[Entry], *_: object) -> None:
            copy = tmp_path / "copy.db"
            copy.write_bytes(path.read_bytes())
            copy.with_name("copy.db-wal").write_bytes(path.with_name("client.db-wal").read_bytes())
            found = apsw.Connection(str(copy)).execute("SELECT client_message_id FROM outbox").fetchall()
            seen.append([(entry.client_message_id,) for entry in entries] == found)

        state = FileState(path)
        state.open(written)
        state.put(entry(1))
        await state.close()
        assert seen == [True]

    asyncio.run(main())


def test_a_put_is_synced_to_the_disk_and_a_cursor_need_not_be(tmp_path: Path) -> None:
    async def main() -> list[str]:
        levels: list[str] = []
        state = FileState(tmp_path / "client.db")
        state.open(lambda *_: levels.append(state._db.pragma("synchronous")))
        state.put(entry(1))
        await state.drain()
        state.keep("c", Cursor(1, 1))
        await state.drain()
        await state.close()
        return levels

    assert asyncio.run(main()) == [2, 1]


def test_a_file_in_use_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async def main() -> None:
        first = FileState(tmp_path / "client.db")
        first.open(Notes())
        first.put(entry(1))
        await first.drain()
        with pytest.raises(StateDirectory, match="in use by another process"):
            FileState(tmp_path / "client.db").open(Notes())
        await first.close()

    asyncio.run(main())


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    path.write_bytes(b"no database at all, but long enough to be taken for one" * 100)
    with pytest.raises(StateCorrupted, match=r"client\.db"):
        reopened(path)


def test_a_file_of_a_newer_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    reopened(path)
    database = apsw.Connection(str(path))
    database.pragma("user_version", 99)
    database.close()
    with pytest.raises(StateCorrupted, match="newer"):
        reopened(path)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateDirectory, match="cannot use"):
        reopened(tmp_path / "file" / "client.db")


def test_a_failing_disk_is_told_to_whoever_waits(tmp_path: Path) -> None:
    async def main() -> Notes:
        notes = Notes()
        state = FileState(tmp_path / "client.db")
        state.open(notes)
        state._db.execute("PRAGMA max_page_count = 5")
        state.put(Entry("k", "c", "x" * 100_000, "text/plain"))
        await state.close()
        return notes

    notes = asyncio.run(main())
    assert [type(error) for error in notes.errors] == [StateDirectory]
