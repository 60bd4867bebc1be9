"""The state directory and copies of it: one process at a time, backups while serving, restores that are honest."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from chats import PAGE, acked, create, draft, fill, send

from holdfast.errors import StateCorrupted, StateDirectory
from holdfast.store.sqlite import SqliteStore
from holdfast.store.sqlite.backup import copy_database, restore_chats, verify
from holdfast.store.state import held, holder

AT = "2026-01-01T00:00:00.000Z"


def test_the_directory_is_made_private_and_held_by_one(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "state"
    with held(directory):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert holder(directory) == os.getpid()
        with pytest.raises(StateDirectory, match=f"in use by process {os.getpid()}; stop it"), held(directory):
            pass
    assert holder(directory) is None
    with held(directory):
        pass


def test_the_lock_names_another_process_and_dies_with_it(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\nfrom holdfast.store.state import held\n"
        "with held(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    with pytest.raises(StateDirectory, match=f"process {other.pid}"), held(tmp_path):
        pass
    other.kill()
    other.communicate()
    with held(tmp_path):
        pass


def test_what_is_no_directory_or_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateDirectory, match="not a directory"), held(tmp_path / "file"):
        pass
    with pytest.raises(StateDirectory, match="choose another --state-dir"), held(tmp_path / "file" / "below"):
        pass
    with pytest.raises(StateDirectory, match=r"cannot be (made|written)"), held(Path("/proc/nowhere")):
        pass


def test_a_backup_is_taken_while_serving_and_a_restore_raises_all_epochs(tmp_path: Path) -> None:
    target = tmp_path / "backup.db"

    async def serve() -> int:
        async with SqliteStore(tmp_path / "chats.db") as store:
            await create(store, "bob")
            await create(store, chat_id="chat_b")
            await store.append([draft(f"big-{n}", "x" * 4_000) for n in range(2_000)])
            steps: list[tuple[int, int]] = []
            copying = asyncio.create_task(store.backup(target, lambda done, total: steps.append((done, total))))
            during = 0
            while not copying.done():
                acked(await send(store, f"during-{during}"))
                during += 1
            await copying
            assert len(steps) > 3 and steps == sorted(steps) and steps[-1][0] == steps[-1][1]
            with pytest.raises(StateDirectory, match="exists"):
                await store.backup(target)
            return during

    during = asyncio.run(serve())
    assert verify(target) >= 1
    assert {p.name for p in tmp_path.iterdir()} == {"chats.db", "backup.db"}

    state = tmp_path / "restored"
    state.mkdir()
    assert restore_chats(target, state / "chats.db", at=AT, actor="op") == 2

    async def look() -> None:
        async with SqliteStore(state / "chats.db") as store:
            inspection = await store.inspect("chat_a")
            assert inspection.chat.epoch == 2 and (await store.chat("chat_b")).epoch == 2
            assert 2_000 <= inspection.count <= 2_000 + during, "one moment of the store"
            assert inspection.counter == inspection.highest == inspection.count and not inspection.gaps
            assert [r.action for r in await store.audit(0, 10)] == ["store.restore"]
            assert acked(await send(store, "new")).sequence == inspection.count + 1

    asyncio.run(look())


def test_a_restore_replaces_nothing_unasked_and_nothing_with_a_damaged_backup(tmp_path: Path) -> None:
    async def make(name: str, many: int) -> None:
        async with SqliteStore(tmp_path / name) as store:
            await create(store)
            await fill(store, many)

    async def count(name: str) -> int:
        async with SqliteStore(tmp_path / name) as store:
            return len((await store.read_after("chat_a", 0, *PAGE)).messages)

    asyncio.run(make("old.db", 2))
    asyncio.run(make("chats.db", 5))
    copy_database(tmp_path / "old.db", tmp_path / "backup.db")
    with pytest.raises(StateDirectory, match="overwritten"):
        restore_chats(tmp_path / "backup.db", tmp_path / "chats.db", at=AT, actor="op")
    damaged = tmp_path / "damaged.db"
    content = bytearray((tmp_path / "backup.db").read_bytes())
    content[4096:8192] = os.urandom(4096)
    damaged.write_bytes(content)
    with pytest.raises(StateCorrupted, match="damaged"):
        restore_chats(damaged, tmp_path / "chats.db", at=AT, actor="op", overwrite=True)
    (tmp_path / "empty.db").write_bytes(b"")
    with pytest.raises(StateCorrupted, match="empty"):
        restore_chats(tmp_path / "empty.db", tmp_path / "chats.db", at=AT, actor="op", overwrite=True)
    with pytest.raises(StateDirectory, match="no file"):
        restore_chats(tmp_path / "missing.db", tmp_path / "chats.db", at=AT, actor="op", overwrite=True)
    assert asyncio.run(count("chats.db")) == 5
    restore_chats(tmp_path / "backup.db", tmp_path / "chats.db", at=AT, actor="op", overwrite=True)
    assert asyncio.run(count("chats.db")) == 2
