"""Damage in a write-ahead log is distinguished from the rest of a power cut."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from store_rigs import PAGE, acked, create, send

from holdfast.drivers.sqlite.database import open_and_migrate
from holdfast.drivers.sqlite.wal import FRAME_HEADER_BYTES, HEADER_BYTES
from holdfast.errors import NotFound, StateCorrupted
from holdfast.store.sqlite import SqliteSettings, SqliteStore

FRAME = FRAME_HEADER_BYTES + 4096


def crashed(directory: Path, sends: int = 6) -> Path:
    """The files of a store whose process was killed: everything is in the log."""
    place = directory / "crashed"
    place.mkdir()

    def copy() -> None:
        for file in directory.glob("chats.db*"):
            shutil.copy(file, place / file.name)
        (place / "chats.db-shm").unlink()

    async def serve() -> None:
        async with SqliteStore(directory / "chats.db") as store:
            await create(store)
            for n in range(sends):
                acked(await send(store, f"k{n}"))
            copy()

    asyncio.run(serve())
    return place


def count(place: Path, settings: SqliteSettings | None = None) -> int:
    async def look() -> int:
        async with SqliteStore(place / "chats.db", settings) as store:
            with suppress(NotFound):
                return len((await store.read_after("chat_a", 0, *PAGE)).messages)
            return 0

    return asyncio.run(look())


def frames(place: Path) -> int:
    return ((place / "chats.db-wal").stat().st_size - HEADER_BYTES) // FRAME


def spoil(place: Path, frame: int, offset: int = 100) -> None:
    with (place / "chats.db-wal").open("r+b") as log:
        log.seek(HEADER_BYTES + frame * FRAME + offset)
        log.write(os.urandom(32))


def test_a_log_that_is_whole_is_read_to_its_end(tmp_path: Path) -> None:
    assert count(crashed(tmp_path)) == 6


@pytest.mark.parametrize(
    "where", [lambda n: 0, lambda n: n // 2, lambda n: n - 8], ids=["first", "middle", "late"]
)
@pytest.mark.parametrize(
    "offset", [0, 8, 100], ids=["the frame's page number", "its salts", "its content"]
)
def test_damage_before_the_last_transaction_is_refused_and_says_where_to_cut(
    where: Callable[[int], int], offset: int, tmp_path: Path
) -> None:
    place = crashed(tmp_path)
    spoil(place, where(frames(place)), offset)
    with pytest.raises(
        StateCorrupted, match=r"chats.db-wal is damaged.*holdfast restore.*truncate -s \d+"
    ) as caught:
        count(place)
    with pytest.raises(StateCorrupted):
        count(place)  # and nothing was changed by having looked
    cut = re.search(r"truncate -s (\d+)", caught.value.message)
    assert cut is not None
    os.truncate(place / "chats.db-wal", int(cut[1]))
    assert count(place) < 6


def test_a_torn_last_transaction_is_what_a_power_cut_leaves_and_is_dropped(tmp_path: Path) -> None:
    place = crashed(tmp_path)
    spoil(place, frames(place) - 1)
    assert count(place) == 5


def test_what_a_crash_left_behind_is_not_taken_for_damage_by_a_later_one(tmp_path: Path) -> None:
    """Two torn transactions in a row, with the rest of the first behind the second."""
    place = crashed(tmp_path)
    spoil(place, frames(place) - 2)
    assert count(place) == 5
    assert count(place) == 5


def test_without_full_syncs_many_transactions_may_be_torn_and_none_is_called_damage(
    tmp_path: Path,
) -> None:
    place = crashed(tmp_path)
    spoil(place, frames(place) - 8)
    assert count(place, SqliteSettings(synchronous="NORMAL")) < 6


def test_the_name_of_a_new_database_is_durable_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Synced contents are of no use if a power cut removes the file's name."""
    synced: list[Path] = []
    sync = os.fsync

    def seen(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    path = tmp_path / "new.db"
    open_and_migrate(path, SqliteSettings(), ["CREATE TABLE t (x)"]).close()
    assert synced == [tmp_path]
    open_and_migrate(path, SqliteSettings(), ["CREATE TABLE t (x)"]).close()
    assert synced == [tmp_path], "it is there already"
