"""A database that is moved, removed or replaced under the process that has it open:
nothing is acknowledged into it.

The open file lives on without its name, takes every write, and is gone with the
process.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from store_rigs import acked, create, fill, send

from holdfast.drivers.sqlite.database import Handle, SqliteSettings, open_and_migrate
from holdfast.errors import Unavailable
from holdfast.store.sqlite import SqliteStore

SCHEMA = ["CREATE TABLE t (n INTEGER)"]


def with_chats(path: Path, scenario: Callable[[SqliteStore, Path], Awaitable[None]]) -> None:
    async def run() -> None:
        async with SqliteStore(path / "chats.db", SqliteSettings(readers=1)) as store:
            await create(store)
            await fill(store, 3)
            await scenario(store, path / "chats.db")

    asyncio.run(run())


async def refused(store: SqliteStore) -> None:
    with pytest.raises(Unavailable, match="not where they were; its operator must put them back"):
        await send(store, "into the void")
    with pytest.raises(Unavailable, match="not where they were"):
        await create(store, chat_id="chat_b")


@pytest.mark.parametrize("suffix", ["", "-wal"])
def test_moved_file_takes_no_message_until_it_is_back(suffix: str, tmp_path: Path) -> None:
    async def scenario(store: SqliteStore, chats: Path) -> None:
        await store.heads(["chat_a"])
        shutil.move(f"{chats}{suffix}", tmp_path / "elsewhere")
        await refused(store)
        assert (await store.heads(["chat_a"]))["chat_a"].sequence == 3, "what is open can be read"
        shutil.move(tmp_path / "elsewhere", f"{chats}{suffix}")
        acked(await send(store, "after"))

    with_chats(tmp_path, scenario)


def test_another_file_under_its_name_is_not_taken_for_it(tmp_path: Path) -> None:
    async def scenario(store: SqliteStore, chats: Path) -> None:
        shutil.copy(chats, tmp_path / "copy")
        shutil.move(tmp_path / "copy", chats)
        await refused(store)

    with_chats(tmp_path, scenario)


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("other", [True, False])
def test_a_handle_is_not_opened_again_on_another_file_and_makes_none(
    write: bool, other: bool, tmp_path: Path
) -> None:
    path, settings = tmp_path / "some.db", SqliteSettings()
    open_and_migrate(path, settings, SCHEMA).close()
    handle = Handle(path, settings, None, write=write)
    handle.connection()
    handle.close()
    path.rename(tmp_path / "moved.db")
    if other:
        open_and_migrate(path, settings, SCHEMA).close()
    with pytest.raises(Unavailable, match="not where they were"):
        handle.connection()
    assert path.exists() is other
    path.unlink(missing_ok=True)
    (tmp_path / "moved.db").rename(path)
    handle.connection()
    handle.close()
