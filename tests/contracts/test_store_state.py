"""The state directory: private, and used by one process at a time."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.drivers.files import state_dir_in
from holdfast.errors import StateDirectory
from holdfast.node.state_dir import held, holder
from holdfast.store.sqlite import SqliteStore


def test_the_directory_is_made_private_and_held_by_one(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "state"
    with held(directory):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert holder(directory) == os.getpid()
        with (
            pytest.raises(StateDirectory, match=f"in use by process {os.getpid()}; stop it"),
            held(directory),
        ):
            pass
    assert holder(directory) is None
    with held(directory):
        pass


def test_what_is_made_in_a_directory_that_others_may_read_is_private_all_the_same(
    tmp_path: Path,
) -> None:
    def modes() -> set[int]:
        return {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.glob("chats.db*")}

    async def serve() -> None:
        async with SqliteStore(tmp_path / "chats.db"):
            assert modes() == {0o600}

    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        with held(tmp_path):
            asyncio.run(serve())
        assert os.umask(0o022) == 0o022, "as it was"
    finally:
        os.umask(before)


def test_files_are_made_as_before_when_no_directory_is_held_whichever_ended_last(
    tmp_path: Path,
) -> None:
    before = os.umask(0o022)
    try:
        first, second = held(tmp_path / "first"), held(tmp_path / "second")
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert os.umask(0o077) == 0o077, "the other one is held"
        second.__exit__(None, None, None)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_the_lock_names_another_process_and_dies_with_it(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\nfrom holdfast.node.state_dir import held\nwith"
        " held(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
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
    with (
        pytest.raises(StateDirectory, match="choose another --state-dir"),
        held(tmp_path / "file" / "below"),
    ):
        pass
    with (
        pytest.raises(StateDirectory, match=r"cannot be (made|written)"),
        held(Path("/proc/nowhere")),
    ):
        pass


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707, 0o1777, 0o720])
def test_a_directory_that_others_can_write_to_is_refused_with_what_to_run(
    tmp_path: Path, mode: int
) -> None:
    directory = tmp_path / "with spaces"
    directory.mkdir()
    (directory / "chats.db").write_text("")
    directory.chmod(mode)
    assert state_dir_in(directory) == directory
    with pytest.raises(StateDirectory, match="others can write") as refused, held(directory):
        pass
    assert [path.name for path in directory.iterdir()] == ["chats.db"], "nothing was changed"
    command = refused.value.message.split("`")[1]
    subprocess.run(command, shell=True, check=True)
    with held(directory):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_an_empty_one_that_others_can_write_to_gets_a_private_directory_of_its_own(
    tmp_path: Path,
) -> None:
    """Like a volume just mounted; a file system may have its own folder in it."""
    (tmp_path / "lost+found").mkdir()
    tmp_path.chmod(0o777)
    inside = tmp_path / "state"
    for _ in range(2):
        assert state_dir_in(tmp_path) == inside
        with held(state_dir_in(tmp_path)):
            assert stat.S_IMODE(inside.stat().st_mode) == 0o700
    inside.chmod(0o770)
    with pytest.raises(StateDirectory, match="chmod 700"), held(inside):
        pass
    tmp_path.chmod(0o700)
    assert state_dir_in(tmp_path) == tmp_path, "one of our own is used as it is"


def test_one_that_somebody_else_put_there_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    (tmp_path / "state").symlink_to(theirs)
    with pytest.raises(StateDirectory, match="made by somebody else"), held(tmp_path / "state"):
        pass
    assert list(theirs.iterdir()) == []
